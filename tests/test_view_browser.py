"""The page of `offbook view` in a real browser (`make test-browser`); skipped where there is none."""

from __future__ import annotations

import json
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from viewdata import HELD_OUT, add_step, make_rollout, make_run

from offbook.cli.quickstart import NEXT
from offbook.cli.view import _folders
from offbook.core.runfolder import RunFolder
from offbook.types import Event, Feedback, Hint, Target
from offbook.view.index import RunIndex
from offbook.view.server import Server
from offbook.view.single import write_single

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: make test-browser does it")
expect = sync_api.expect
pytestmark = pytest.mark.browser

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
QUIET = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
HOSTILE = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
RIDDLES = {"Engine against trainer": "comes of rounding", "Outcome withheld": "would have earned by solving"}
PHONE = {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("there is no Chromium on this machine: apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=CHROMIUM, args=[*QUIET, "--disable-sync", "--no-first-run"])
        yield made
        made.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    make_run(root, "rl", hinted=False)
    return make_run(root, "rl_hints", extra=HOSTILE).parent


@contextmanager
def serving(*runs: RunIndex) -> Iterator[Server]:
    made = Server([*runs], 0)
    thread = threading.Thread(target=made.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield made
    finally:
        made.shutdown()
        thread.join()
        made.server_close()


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with serving(*[RunIndex(name, folder / name) for name in ("rl_hints", "rl")]) as made:
        yield made


class Watched:
    """A page that remembers what it should not have done."""

    def __init__(self, browser: Any, start: str, **options: Any):
        self.context = browser.new_context(**options)
        self.page = self.context.new_page()
        self.page.set_default_timeout(20_000)
        self.errors: list[str] = []
        self.asked: list[str] = []
        self.page.on(
            "console", lambda said: self.errors.append(said.text) if said.type in ("error", "warning") else None
        )
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.start = start

    def open(self, address: str = "", ready: str = "h1") -> Any:
        self.page.goto(f"{self.start}#{address}")
        self.page.wait_for_selector(f"main[data-shown='#{address}'] {ready}")
        return self.page

    def sideways(self) -> bool:
        return self.page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth")

    def check(self) -> None:
        assert self.errors == []
        assert [url for url in self.asked if not url.startswith((self.start, "data:"))] == []
        assert self.page.title() != "owned"
        assert self.page.evaluate("document.querySelectorAll('main script, main img').length") == 0


@contextmanager
def watching(browser: Any, *shown: RunIndex | str, **options: Any) -> Iterator[Watched]:
    with serving(*[run for run in shown if isinstance(run, RunIndex)]) as server:
        start = shown[0] if isinstance(shown[0], str) else server.url
        made = Watched(browser, start, **options)
        yield made
        made.check()
        made.context.close()


@pytest.fixture
def watched(browser: Any, server: Server) -> Iterator[Watched]:
    with watching(browser, server.url, viewport={"width": 1200, "height": 900}, color_scheme="light") as made:
        yield made


EVERY_PAGE = [
    ("/run/0", ".panel svg"),
    ("/rollouts/0", ".row .task"),
    ("/rollout/0/step_00001/0", ".message.filled .strip"),
    ("/group/0/step_00001/step1%2Fotter-birch", ".member"),
    ("/tasks/0/otter-birch", ".task-item .diff"),
    ("/compare", ".panel svg"),
]


@pytest.mark.parametrize(("address", "ready"), EVERY_PAGE)
def test_every_page_opens_also_on_a_phone_and_in_the_dark(watched: Watched, address: str, ready: str) -> None:
    page = watched.open(address, ready)
    assert not watched.sideways()
    page.set_viewport_size(PHONE)
    page.emulate_media(color_scheme="dark")
    assert not watched.sideways()
    assert "\u2014" in page.title() or "offbook" in page.title()


def test_the_run_shows_its_curves_hints_and_flags(watched: Watched) -> None:
    page = watched.open("/run/0", ".panel svg")
    labels = page.locator("section#curves .panels > .panel strong").all_inner_texts()
    for label in ("Solved in training", "Reward", "Reward part: effort", "Invalid calls per 100", "Effort: tokens"):
        assert label in labels
    assert "Staleness" not in labels
    constant = "Constant, not drawn: Staleness 0.50; Messages hinted 4; Flagged rollouts 10.0%."
    assert page.locator("#curves > .constant").inner_text() == constant
    page.get_by_text("other numbers of metrics.jsonl").click()
    rest = page.locator("#curves .more .panel strong, #curves .more .constant").all_inner_texts()
    assert not any(re.search(r"[a-z]/[a-z]|_", label) for label in rest), "keys are no titles"
    assert page.locator("#result h2").inner_text() == "Measured on held-out tasks"
    assert page.locator(".result tbody td").all_inner_texts() == ["72.5%\n60.0 to 80.0", "3.2", "4.0", "180"]
    assert page.locator("#hints .rule-table a").all_inner_texts() == ["unknown tool"]
    assert page.locator("#monitors .rule-table a").all_inner_texts() == ["test edit"]
    chart = page.locator("#curves svg").first
    chart.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert page.locator("#curves .tip").first.inner_text().split() == ["step", "2", "rl_hints", "40.0%"]
    page.locator("#monitors .rule-table a").click()
    page.wait_for_selector(".row .chip.flag")
    assert page.locator(".count").inner_text() == "16 of 25 rollouts"


def test_the_list_filters_and_is_walked_by_keys(watched: Watched) -> None:
    page = watched.open("/rollouts/0", ".row .task")
    assert page.locator(".count").inner_text() == "25 rollouts"
    page.locator("select[name=result]").select_option("solved")
    assert page.locator(".count").inner_text() == "9 of 25 rollouts"
    page.locator("select[name=source]").select_option("step_00002")
    assert page.locator(".count").inner_text() == "2 of 25 rollouts"
    page.keyboard.press("Escape")
    page.locator(".rows").focus()
    page.keyboard.press("/")
    page.keyboard.type("heron")
    assert page.locator(".count").inner_text() == "1 of 25 rollouts"
    assert "text=heron" in page.url
    page.locator("input[type=search]").fill("no such thing")
    page.get_by_role("button", name="show all").click()
    expect(page.locator(".count")).to_have_text("25 rollouts")
    page.locator(".rows").focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_selector(".page-rollout .message.filled")
    assert page.url.endswith("#/rollout/0/step_00001/2")
    page.keyboard.press("k")
    page.wait_for_selector("main[data-shown='#/rollout/0/step_00001/1'] .message.filled")
    page.keyboard.press("g")
    page.wait_for_selector(".member")
    assert page.locator(".member-name").all_inner_texts()[0] == "rollout 3", "as the list and the rollout's page say"
    page.keyboard.press("3")
    page.wait_for_selector(".task-item")
    for key in ("ArrowDown", "j", "k", "Enter"):
        page.keyboard.press(key)
    page.wait_for_selector(".task-item:first-child[open] .inside")


def test_a_target_shows_what_both_sides_would_have_written(watched: Watched) -> None:
    page = watched.open("/rollouts/0?rule=any", ".row .chip.hinted")
    page.locator(".spacer .row").first.click()
    page.wait_for_selector(".strip")
    hint = page.locator(".hint + .message.target")
    assert hint.count() == 1
    panel = page.locator(".inspector")
    assert "token 3 of 7" in panel.inner_text()  # the one that the hint moved most
    sides = panel.locator(".side")
    assert sides.nth(0).locator("li").count() == 5
    assert "60%" in sides.nth(0).locator("li").first.inner_text()
    assert "90%" in sides.nth(1).locator("li").first.inner_text()
    assert "not in the first five" in sides.nth(1).inner_text()
    assert "available tools are read_file" in panel.locator(".said").inner_text()
    page.locator(".tok").nth(4).hover()
    assert "token 5 of 7" in panel.inner_text()
    page.keyboard.press("n")
    page.keyboard.press("ArrowLeft")
    assert "token 4 of 7" in panel.inner_text()
    page.keyboard.press("Home")
    assert "token 1 of 7" in panel.inner_text()
    assert HOSTILE in page.locator(".strip").inner_text().replace("\u00b7", " ").replace("\n", "")


def test_tool_output_is_folded_and_the_diff_is_there(watched: Watched) -> None:
    page = watched.open("/rollout/0/step_00001/0", ".message.filled .fold")
    fold = page.locator(".message.tool .fold").first
    assert fold.locator(".size").inner_text() == "40 lines"
    assert not fold.locator(".text").count()
    page.keyboard.press("e")
    assert HOSTILE in fold.locator(".text").inner_text()
    assert page.locator(".diff .added").all_text_contents() == [f"+    return value * 2{HOSTILE}\n"]
    assert page.locator(".reward tfoot td").all_inner_texts()[-1] == "\u22120.33"
    code = "prose('Call `a.b`:\\n```python\\nx = 1\\n```\\nas\\n    y = 2\\nand <b>').innerHTML"
    blocks = '<pre class="code">x = 1</pre>as\n<pre class="code">    y = 2</pre>and &lt;b&gt;'
    assert page.evaluate(code) == f"Call <code>a.b</code>:\n{blocks}"


def test_long_things_are_drawn_as_they_come_near(browser: Any, tmp_path: Path) -> None:
    path = make_run(tmp_path, "long", steps=1)
    rollout = make_rollout("long", "t", "g", solved=False)
    rollout.segments[0].messages *= 50
    RunFolder(path).write_rollouts(1, [rollout, *[make_rollout(str(n), "t", "h", solved=True) for n in range(600)]])
    with watching(browser, RunIndex("long", path), viewport={"width": 1000, "height": 600}) as watched:
        page = watched.open("/rollouts/0", ".row .task")
        assert page.locator(".count").inner_text() == "602 rollouts"
        assert page.locator(".spacer .row").count() < 60
        page.keyboard.press("End")
        expect(page.locator(".row.on .when")).to_have_text("eval final, 1")
        page = watched.open("/rollout/0/step_00001/0", ".message.filled")
        assert page.locator(".message").count() == 400
        assert 40 <= page.locator(".message.filled").count() <= 80
        page.evaluate("scrollTo(0, document.body.scrollHeight)")
        page.wait_for_selector("[data-index='360'].filled")
        assert page.locator(".message.filled").count() < 240
        watched.open("/rollout/0/step_00001/0/0.200", "[data-index='200'].filled")
        page.wait_for_timeout(300)
        assert 0 < page.locator("[data-index='200']").bounding_box()["y"] < 300


def test_runs_are_compared(watched: Watched) -> None:
    page = watched.open("/compare", ".panel svg")
    assert page.locator(".differences tbody th").all_inner_texts() == ["feedback.weight"]
    assert page.locator(".panel").first.locator("text.name").all_text_contents() == ["rl_hints", "rl"]
    page.get_by_label("rl", exact=True).uncheck()
    assert page.locator(".panel").first.locator("g .line").count() == 1
    page.locator("#run").select_option("1")
    expect(page.locator("h1")).to_have_text("rl")


def test_a_run_that_goes_on_is_seen_without_a_reload(browser: Any, tmp_path: Path) -> None:
    path = make_run(tmp_path, "going", steps=1, wanted=3)
    with open(path / "rollouts" / "step_00001.jsonl", "a") as file:
        file.write('{"id": "torn')
    with watching(browser, RunIndex("going", path)) as watched:
        page = watched.open("/run/0", ".panel svg")
        assert page.locator("#live").inner_text() == "live, step 1 of 3"
        assert page.locator(".unreadable strong").inner_text() == "1 rollout line"
        add_step(RunFolder(path), 2)
        expect(page.locator("#live")).to_have_text("live, step 2 of 3")
        expect(page.locator(".door b").first).to_have_text("13")


def test_the_single_file_opens_from_the_disk(browser: Any, folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    write_single(out, [RunIndex(name, folder / name) for name in ("rl_hints", "rl")], "mailed", max_bytes=1)
    watched = Watched(browser, out.as_uri())
    page = watched.open("/rollouts/0", ".row .task")
    assert page.locator(".count").inner_text() == "25 rollouts"
    assert page.locator(".aside").inner_text().startswith("1 rollout can be opened in this file")
    assert page.locator(".row.away").count() == page.locator(".spacer .row").count() - 1
    watched.open("/", "#example .strip")  # the first screen
    assert page.locator("h1").inner_text() == "mailed"
    page.get_by_role("link", name="the whole rollout").click()
    page.wait_for_selector(".page-rollout .strip")
    assert "token 3 of 7" in page.locator(".inspector").inner_text()
    watched.open("/rollout/1/eval-final/0", ".empty")
    assert "does not hold it" in page.locator(".empty").inner_text()
    watched.check()
    watched.context.close()


def test_the_report_of_a_quickstart(browser: Any, tmp_path: Path) -> None:
    root = tmp_path / "quickstart-0"
    for name in ("rl", "rl_hints"):
        make_run(root, name, hinted=name == "rl_hints", extra=HOSTILE)
    before = {"solved": 0.25, "invalid_per_100": 30.0, "turns": 4.0, "tokens": 1234.0, "rollouts": 1}
    before |= HELD_OUT
    before["reward/open_todos"] = -0.125
    before["reward/outcome_withheld"] = 0.5
    RunFolder(root).write_eval("before", before, [make_rollout("before/0", "otter-birch", "b", solved=False)])
    runs = [RunIndex(name, path) for name, path in _folders([root]).items()]
    out = tmp_path / "report.html"
    write_single(out, runs, "offbook quickstart", lambda runs: f"What came out. {HOSTILE}", next_steps=NEXT)
    watched = Watched(browser, (tmp_path / "report.html").as_uri(), viewport=PHONE)
    page = watched.open("/", ".panel svg")
    assert page.locator(".outcome").inner_text() == f"What came out. {HOSTILE}"
    assert page.locator("main .lead").first.inner_text() == (
        "The model pocket was trained for 4 steps on 2 tasks, and measured on "
        "48 held-out tasks of pocket. They differ in feedback.weight: 0 in rl, 5 in rl_hints."
    )
    rows = page.locator(".result tbody tr")
    assert rows.locator("th").all_inner_texts() == ["before", "rl", "rl_hints"]
    assert page.locator("#result h2").inner_text() == "Measured on held-out tasks"
    assert (
        rows.nth(0)
        .locator(".meter")
        .first.evaluate("(bar) => getComputedStyle(bar).backgroundImage")
        .startswith("linear-gradient(to right")
    )
    assert page.locator("#next code").all_inner_texts()[-1] == "offbook view runs/mine"
    assert rows.nth(0).locator(".figure").all_inner_texts() == ["25.0%", "30.0", "4.0", "1,234"]
    assert rows.nth(2).locator(".figure").all_inner_texts() == ["72.5%", "3.2", "4.0", "180"]
    changes = ["+47.5 pts", "\u221226.8", "\u00b10", "\u22121,054"]
    assert rows.nth(2).locator(".change").all_inner_texts() == changes
    page.get_by_text("Parts of the reward").click()
    assert page.locator(".parts tbody tr").all_inner_texts() == [
        "before\t\u22120.125\t0.500",
        "rl\t\u2014\t\u2014",
        "rl_hints\t\u2014\t\u2014",
    ]
    expect(page.get_by_text("Outcome withheld: What rollouts that a monitor found to be cheating")).to_be_visible()
    assert not set(RIDDLES) & set(page.locator(".panel strong").all_inner_texts())
    page.get_by_text("other numbers").click()
    for label, note in RIDDLES.items():
        expect(page.locator(".panel", has_text=label).get_by_text(note)).to_be_visible()
    example = page.locator("#example")
    example.locator(".strip").evaluate("(strip) => strip.scrollIntoView()")  # what is off the screen is not laid out
    assert "available tools are read_file" in example.locator(".hint").inner_text()
    assert "write_file" in example.locator(".strip").inner_text()
    assert "25 times less likely" in example.locator(".effect").inner_text()  # .6 x .84 / (.02 x .99)
    assert page.locator(".panel").first.locator("text.name").all_text_contents() == ["rl", "rl_hints"]
    of_rl, of_hints = ["25\nrollouts", "tasks"], ["25\nrollouts", "16\nhinted messages", "tasks"]
    assert page.locator("#closer .door").all_inner_texts() == [*of_rl, *of_hints, "1\nrollout", "tasks"]
    clipped = "[...document.querySelectorAll('main *')].filter((one) => !one.closest('.scroll, .unseen, .side code')"
    clipped += " && one.getBoundingClientRect().right > innerWidth + 1).map((one) => one.outerHTML.slice(0, 90))"
    assert page.evaluate(clipped) == []
    sandbox = page.locator(".result").locator("..")
    assert sandbox.evaluate("(sandbox) => sandbox.scrollWidth") <= sandbox.evaluate("(sandbox) => sandbox.clientWidth")
    watched.open("/rollout/rl_hints/step_00001/0/0.4", ".strip")  # an address that `offbook audit` gives
    expect(page.locator("#run option:checked")).to_have_text("rl_hints")
    watched.check()
    watched.context.close()


def test_what_went_wrong_is_said_first_and_what_is_unseen_is_shown(browser: Any, tmp_path: Path) -> None:
    path = make_run(tmp_path, "odd", steps=1)
    crashed = make_rollout("crashed", "t", "g", solved=False, extra="a\x1b[31m\u202eb")
    crashed.stop = "crash"
    crashed.events.append(Event(-1, "crash", "Traceback ...\n  File x\nSandboxError: the sandbox is gone\n"))
    unscored = Feedback(
        Target("crashed", 0, 4, "unknown_tool", "no such tool"), Hint("unknown_tool", "Look at the list.")
    )
    RunFolder(path).write_rollouts(1, [crashed])
    RunFolder(path).write_feedback(1, [unscored])
    with watching(browser, RunIndex("odd", path), viewport=PHONE) as watched:
        page = watched.open("/rollout/0/step_00001/0", ".message.filled")
        note = page.locator("details.unreadable summary")
        assert note.inner_text() == "It crashed: SandboxError: the sandbox is gone"
        assert note.bounding_box()["y"] < PHONE["height"]
        assert "a\u241b[31m[U+202E]b" in page.locator(".message.user").inner_text()
        target = page.locator(".message.target")
        assert "did not score" in target.inner_text()
        assert target.locator(".tool-name").inner_text() == "write_file"


def test_an_empty_run_and_a_wrong_address_say_so(browser: Any, tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "config.toml").write_text("")
    with watching(browser, RunIndex("new", tmp_path / "new")) as watched:
        for address, sentence in (
            ("/run/0", "No step is recorded yet"),
            ("/rollouts/0", "No rollout is stored yet"),
            ("/tasks/0", "No task was tried yet"),
            ("/compare", "One run is open"),
            ("/nowhere", "There is no such page"),
            ("/run/9", "There is no such page"),
        ):
            page = watched.open(address, ".empty")
            assert sentence in page.locator("main").inner_text()


def test_decisions_of_a_live_cycle(browser: Any, folder: Path, tmp_path: Path) -> None:
    """The first page of such a folder; what was compared is a table, and words from outside stay words."""
    live = tmp_path / "live"
    live.mkdir()
    (live / "config.toml").write_text((folder / "rl" / "config.toml").read_text())
    gate = {name: {"deployed": 0.5, "candidate": 0.25, "worse": name == "solved"} for name in ("solved", "flagged")}
    rows = [
        {"kind": "start", "why": "pocket is served", "deployed": 0, "version": 0, "at": 1.8e9, "numbers": {}},
        {"kind": "refuse", "why": HOSTILE, "deployed": 0, "version": 1, "at": 1.8e9, "numbers": {"gate": gate}},
    ]
    (live / "decisions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with watching(browser, RunIndex("live", live), viewport=PHONE) as watched:
        page = watched.open("/decisions/0", ".decision")
        expect(page.locator(".decision b")).to_have_text([" refused 1 ", " began 0 "])
        page.locator(".decision summary").first.click()
        expect(page.locator("table.numbers tbody tr")).to_have_count(2)
        expect(page.locator("tr.worse th")).to_have_text("solved")
        assert not watched.sideways()
