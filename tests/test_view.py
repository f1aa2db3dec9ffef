"""The static report, written from real run folders and read back as HTML."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from dataclasses import dataclass, field
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbook.runfolder import RunFolder
from offbook.types import Feedback, Flag, Hint, Message, OffbookError, Reward, Rollout, Segment, Target, ToolCall, Usage
from offbook.view.load import load_run, pick_rollouts, sentence
from offbook.view.markup import MINUS, TIMES, duration, number, tag
from offbook.view.report import write_report
from offbook.view.scales import nice_ticks, smooth, spread, thin
from offbook.view.signature import effect, headline

VOID = {"meta", "br"}
HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>\"' onload='x</title></style>"
CONFIG = """
out = "runs/{name}"
model = "pocket"
seed = 3
[tasks]
num_train = 120
num_heldout = 48
[train]
steps = 2
groups = 4
group_size = 8
[feedback]
weight = {weight}
"""
BEFORE = {"solved": 0.25, "invalid_per_100": 30.0, "turns": 5.0, "tokens": 1234.0, "rollouts": 96}


@dataclass
class Node:
    name: str
    attributes: dict[str, str | None] = field(default_factory=dict)
    children: list[Node | str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(child if isinstance(child, str) else child.text for child in self.children)

    @property
    def classes(self) -> list[str]:
        return (self.attributes.get("class") or "").split()

    def walk(self) -> list[Node]:
        return [self] + [node for child in self.children if isinstance(child, Node) for node in child.walk()]

    def all(self, name: str = "", class_: str = "") -> list[Node]:
        return [n for n in self.walk() if name in ("", n.name) and (not class_ or class_ in n.classes)]


class Tree(HTMLParser):
    """Every tag must be closed by its own end tag: what escapes its element shows up as a failure here."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Node("root")
        self.open = [self.root]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        node = Node(tag, dict(attrs))
        self.open[-1].children.append(node)
        if tag not in VOID:
            self.open.append(node)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop().name == tag

    def handle_data(self, data: str) -> None:
        self.open[-1].children.append(data)


def read(path: Path) -> Node:
    tree = Tree()
    tree.feed(path.read_text())
    assert tree.open == [tree.root]
    return tree.root


def message(role: Any, text: str, calls: tuple[ToolCall, ...] = (), status: Any = None) -> Message:
    return Message(role, text, 0, 0, 0, 0, calls=calls, status=status)


def call(name: str, **arguments: Any) -> Message:
    text = f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"
    return message("assistant", text, (ToolCall(name, arguments),))


def make_rollout(name: str, extra: str = "") -> Rollout:
    messages = [
        message("system", "You are a coding agent." + extra),
        message("user", "Write circle_area." + extra),
        call("open_file", path="shapes/calc.py" + extra),
        message("tool", "there is no tool open_file" + extra, status="unknown_tool"),
        message("tool", "\n".join(f"line {i}{extra}" for i in range(40)), status="ok"),
        message("assistant", "<tool_call>{broken" + extra, (ToolCall("", error="the call is not closed"),)),
    ]
    return Rollout(
        name,
        "shapes-00" + extra,
        "g0",
        ("read_file",),
        [Segment(messages=messages)],
        "turns",
        Usage(turns=2, calls=2, invalid_calls=1, sampled_tokens=57),
        diff=f"--- a/x.py\n+++ b/x.py\n@@ -1 +1 @@\n-old{extra}\n+new\n",
        reward=Reward({"outcome": 1.0, "effort" + extra: -0.5}, {"outcome": 1.0, "effort" + extra: 0.5}),
        flags=[Flag("test_edit", 4, "changed tests" + extra)],
    )


def make_feedback(name: str, rule: str = "unknown_tool", extra: str = "", peak: float = 2.0) -> Feedback:
    return Feedback(
        Target(name, 0, 2, rule, "open_file is not a tool here" + extra),
        Hint(rule, "Call only tools that are listed." + extra),
        ["<tool_call>", ' "open', "_file" + extra, "\n", ""],
        [math.log(p) for p in (0.99, 0.6, 0.5, 1.0, 1.0)],
        [math.log(p) for p in (0.99, 0.03, 0.01, 1.0, 1.0)],
        [0.0, peak, peak, 0.01, 0.0],
    )


def make_run(root: Path, name: str, hinted: bool = True, extra: str = "") -> Path:
    folder = RunFolder(root / name)
    folder.path.mkdir(parents=True)
    folder.config_file.write_text(CONFIG.format(name=name, weight=1.0 if hinted else 0.0))
    for step in (1, 2):
        row: dict[str, Any] = {"step": step, "solved": 0.25 * step, "invalid_per_100": 30.0 / step, "turns": 5.0}
        if hinted:
            row |= {"hint/kl": 0.4 / step, "targets/unknown_tool": 4, "targets/edited_tests": 3 - step}
        folder.append_metrics(row)
        folder.write_rollouts(step, [make_rollout(f"{name}-{step}", extra)])
        if hinted:
            folder.write_feedback(step, [make_feedback(f"{name}-{step}", extra=extra)])
    result = {"solved": 0.725, "solved_ci": [0.6, 0.8], "invalid_per_100": 3.2, "turns": 4.0, "tokens": 180.0}
    folder.write_eval("final", result | {"rollouts": 96}, [])
    return folder.path


def report(tmp_path: Path, runs: dict[str, Path], **changes: Any) -> Node:
    out = tmp_path / "report.html"
    arguments: dict[str, Any] = {"before": BEFORE, "title": "A title", "seconds": 372.0} | changes
    write_report(out, runs, **arguments)
    return read(out)


@pytest.fixture
def both(tmp_path: Path) -> dict[str, Path]:
    return {"rl": make_run(tmp_path, "rl", hinted=False), "rl_hints": make_run(tmp_path, "rl_hints")}


def test_the_page_asks_nothing_of_the_network(tmp_path: Path, both: dict[str, Path]) -> None:
    page = report(tmp_path, both)
    for node in page.walk():
        assert node.name not in {"link", "img", "iframe", "object", "embed", "base"}
        assert "src" not in node.attributes
        assert (node.attributes.get("href") or "#").startswith("#")
    text = (tmp_path / "report.html").read_text()
    assert not re.search(r"https?:|@import|url\(", text)
    [script] = page.all("script")
    digest = base64.b64encode(hashlib.sha256(script.text.encode()).digest()).decode()
    [policy] = [n.attributes["content"] for n in page.all("meta") if "http-equiv" in n.attributes]
    assert policy is not None
    assert "default-src 'none'" in policy
    assert f"'sha256-{digest}'" in policy


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    run = make_run(tmp_path, "rl_hints", extra=HOSTILE)
    RunFolder(run).append_metrics({"step": 3, "solved": 0.5, f"targets/{HOSTILE}": 2})
    page = report(tmp_path, {HOSTILE: run}, title=HOSTILE)
    assert len(page.all("script")) == 1
    assert not page.all("img")
    assert not [key for node in page.walk() for key in node.attributes if key.startswith("on")]
    assert page.all("title")[0].text == HOSTILE
    for part in ("conversation", "facts", "diff", "reward", "findings", "hint", "strip", "legend", "rule-table"):
        assert HOSTILE in page.all(class_=part)[0].text.replace("·", " ")
    names = [json.loads(svg.attributes["data-names"] or "") for svg in page.all("svg")]
    assert [HOSTILE] in names


def test_unseen_and_reordering_characters_are_made_visible() -> None:
    assert tag("p", "a\x1b[31m\u202eb\r\n\ud800") == "<p>a␛[31m[U+202E]b\n?</p>"


@given(st.text(), st.text())
def test_escaping_round_trips(text: str, value: str) -> None:
    tree = Tree()
    tree.feed(tag("p", text, title=value))
    [node] = tree.root.all("p")
    for given_text, shown in ((text, node.text), (value, node.attributes["title"] or "")):
        if given_text.isprintable():
            assert shown == given_text


def test_the_result_table(tmp_path: Path, both: dict[str, Path]) -> None:
    [table] = report(tmp_path, both).all("table", "result")
    rows = table.all("tbody")[0].all("tr")
    assert [row.all("th")[0].text for row in rows] == ["before", "rl", "rl_hints"]
    figures = [[figure.text for figure in row.all(class_="figure")] for row in rows]
    assert figures == [["25.0%", "30.0", "5.0", "1,234"], *[["72.5%", "3.2", "4.0", "180"]] * 2]
    changes = [change.text.replace(MINUS, "-") for change in rows[2].all(class_="change")]
    assert changes == ["+47.5 pts", "-26.8", "-1.0", "-1,054"]
    assert rows[2].all(class_="interval")[0].text == "60.0 to 80.0"


def test_what_was_done_and_what_differs(tmp_path: Path, both: dict[str, Path]) -> None:
    [header] = report(tmp_path, both).all("header")
    assert header.all(class_="lead")[0].text == (
        "The model pocket was trained for 2 steps of 32 rollouts on 120 tasks, and measured on 48 others (seed 3). "
        "It took 6 min 12 s."
    )
    rows = header.all("tbody")[0].all("tr")
    assert [[cell.text for cell in row.all("th") + row.all("td")] for row in rows] == [
        ["feedback.weight", "0.0", "1.0"]
    ]


def test_a_run_that_was_not_measured_is_not_said_to_be() -> None:
    config = {"model": "pocket", "tasks": {"num_train": 9, "num_heldout": 48}}
    assert sentence([config], [[]], measured=True).endswith("on 9 tasks, and measured on 48 others.")
    assert sentence([config], [[]], measured=False).endswith("on 9 tasks.")


def test_curves_only_where_there_are_numbers(tmp_path: Path, both: dict[str, Path]) -> None:
    RunFolder(both["rl"]).append_metrics({"step": 3, "solved": math.nan})
    page = report(tmp_path, both)
    labels = [figure.all("strong")[0].text for figure in page.all("figure")]
    assert labels == [
        "Solved in training",
        "Invalid calls per 100",
        "Turns per rollout",
        "Divergence from teacher",
        "Hints by rule",
    ]
    solved, *_, divergence, rules = page.all("figure")
    assert [name.text for name in solved.all("text", "name")] == ["rl", "rl_hints"]
    assert [name.text for name in divergence.all("text", "name")] == ["rl_hints"]
    assert solved.all(class_="skipped")[0].text.startswith("1 value")
    hover = json.loads(solved.all("svg")[0].attributes["data-hover"] or "")
    assert [stop[1:] for stop in hover] == [
        ["step 1", [[0, "25.0%"], [1, "25.0%"]]],
        ["step 2", [[0, "50.0%"], [1, "50.0%"]]],
    ]
    assert len(rules.all("path", "bar")) == 2
    [table] = page.all("table", "rule-table")
    assert [row.all("td")[0].text for row in table.all("tbody")[0].all("tr")] == ["8", "3"]


def test_the_target_is_marked_and_the_hint_stands_right_before_it(tmp_path: Path, both: dict[str, Path]) -> None:
    page = report(tmp_path, both)
    for conversation in page.all("ol", "conversation"):
        items = [child for child in conversation.children if isinstance(child, Node)]
        [target] = [i for i, item in enumerate(items) if "target" in item.classes]
        assert "hint" in items[target - 1].classes
        assert "Call only tools that are listed." in items[target - 1].text
        assert "only the teacher sees this" in items[target - 1].text
        assert items[target].all(class_="target-chip")
        assert "open_file is not a tool here" in items[target].text
        assert [item.all(class_="role")[0].text for item in items] == [
            "0system",
            "1user",
            "hint",
            "2assistant",
            "3tool",
            "4tool",
            "5assistant",
        ]
    ids = {node.attributes["id"] for node in page.walk() if "id" in node.attributes}
    assert {(node.attributes["href"] or "")[1:] for node in page.all("a")} <= ids


def test_tokens_show_both_probabilities(tmp_path: Path, both: dict[str, Path]) -> None:
    strip = report(tmp_path, both).all(class_="strip")[0]
    tokens = strip.all("span", "tok")
    assert [token.all(class_="glyph")[0].text for token in tokens] == ["<tool_call>", '·"open', "_file", "⏎", "◌"]
    assert tokens[1].attributes["title"] == '·"open   student 60.00%   teacher 3.00%   divergence 2.0000'
    assert tokens[1].attributes["style"] == "--d:1;--s:0.6;--t:0.03"
    assert [small.text for small in strip.all("small")] == ["60%→3%", "50%→1%"]


def test_messages_calls_diff_and_reward(tmp_path: Path, both: dict[str, Path]) -> None:
    control = {"rl": both["rl"]}
    page = report(tmp_path, control, before=None, seconds=None)
    rollout = page.all("details", "rollout")[0]
    assert [node.text for node in rollout.all("code", "tool-name")] == ["open_file"]
    assert rollout.all(class_="assistant")[1].all(class_="text")[0].text == "<tool_call>{broken"
    assert [fold.all(class_="size")[0].text for fold in rollout.all("details", "fold")] == ["40 lines"]
    assert rollout.all(class_="invalid")[0].text == "unknown tool"
    assert [line.text for line in rollout.all("span", "added")] == ["+new\n"]
    assert [line.text for line in rollout.all("span", "removed")] == ["-old\n"]
    cells = [[cell.text for cell in row.all("td")] for row in rollout.all("table", "reward")[0].all("tr")]
    assert cells[0] == ["1.00", f"{TIMES} 1", "1.00"]
    assert cells[1:] == [[f"{MINUS}0.50", f"{TIMES} 0.50", f"{MINUS}0.25"], ["", "", "0.75"]]
    assert "out of turns" in rollout.all(class_="facts")[0].text


def test_unreadable_lines_are_counted_in_sight(tmp_path: Path, both: dict[str, Path]) -> None:
    assert not report(tmp_path, both).all(class_="unreadable")
    folder = RunFolder(both["rl_hints"])
    folder.append_metrics({"solved": 1.0})
    for path in (folder.metrics_file, folder.path / "feedback" / "step_00001.jsonl"):
        with open(path, "a") as file:
            file.write('{"step": 9, "sol')
    folder.write_feedback(2, [make_feedback("a rollout that is not stored")])
    folder.config_file.write_text("not toml")
    [notice] = report(tmp_path, both).all(class_="unreadable")
    assert notice.all("strong")[0].text == (
        "2 metrics lines of rl_hints, 1 config file of rl_hints, 1 feedback line of rl_hints, "
        "1 orphaned target of rl_hints"
    )


def test_an_empty_run_has_a_report(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "new")
    folder.path.mkdir()
    folder.config_file.write_text("")
    folder.metrics_file.write_text("")
    page = report(tmp_path, {"new": folder.path}, before=None, seconds=None)
    text = page.all("main")[0].text
    for said in (
        "A model was trained for 0 steps.",
        "Not measured yet.",
        "No step is recorded",
        "No rollout is stored",
    ):
        assert said in text


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OffbookError, match="not a run folder"):
        write_report(tmp_path / "x.html", {"x": tmp_path}, before=None, title="x", seconds=None)


def test_an_unscored_target_is_shown_as_text(tmp_path: Path) -> None:
    path = make_run(tmp_path, "rl_hints")
    bare = Feedback(
        Target("rl_hints-1", 0, 2, "unknown_tool", "no such tool"), Hint("unknown_tool", "Look at the list.")
    )
    RunFolder(path).write_feedback(1, [bare])
    page = report(tmp_path, {"rl_hints": path}, max_rollouts=2)
    assert "did not score" in page.all(class_="target")[0].text
    assert page.all(class_="target")[0].all("code", "tool-name")[0].text == "open_file"


def test_picks_go_from_early_to_late_and_over_the_rules(tmp_path: Path) -> None:
    folder = RunFolder(make_run(tmp_path, "rl_hints"))
    for step in range(1, 13):
        names = [f"{step}-{rule}" for rule in ("a", "b", "c")]
        folder.write_rollouts(step, [make_rollout(name) for name in names])
        peaks = zip(names, ("a", "b", "c"), (3.0, 2.0, 1.0 + step), strict=True)
        folder.write_feedback(step, [make_feedback(name, rule, peak=peak) for name, rule, peak in peaks])
    picks = pick_rollouts([load_run("rl_hints", folder.path)], 4)
    assert [(pick.step, pick.feedback[0].target.rule) for pick in picks] == [(3, "c"), (4, "a"), (7, "b"), (12, "c")]


def test_a_long_rollout_stays_small_and_says_what_it_left_out(tmp_path: Path) -> None:
    folder = RunFolder(make_run(tmp_path, "rl_hints"))
    rollout = make_rollout("long")
    rollout.segments[0].messages += [message("tool", "<&" * 100_000, status="ok") for _ in range(200)]
    long = make_feedback("long")
    for name in ("pieces", "student", "teacher", "divergence"):
        setattr(long, name, getattr(long, name) * 1000)
    rollout.diff = "+x\n" * 5000
    folder.write_rollouts(1, [rollout])
    folder.write_feedback(1, [long])
    page = report(tmp_path, {"rl_hints": folder.path})
    assert (tmp_path / "report.html").stat().st_size < 1_000_000
    text = page.all("details", "rollout")[0].text
    assert re.search(r"\d+ messages not shown", text)
    assert re.search(r"[\d,]+ characters not shown", text)
    assert re.search(r"[\d,]+ tokens after", text)
    assert "4,700 lines not shown" in text


def test_figures() -> None:
    assert [number(value) for value in (0, 3, 0.0421, 0.9, 31.24, 1204.4, -2.5)] == [
        "0",
        "3",
        "0.042",
        "0.90",
        "31.2",
        "1,204",
        f"{MINUS}2.50",
    ]
    assert [duration(value) for value in (4.21, 372, 9000)] == ["4.2 s", "6 min 12 s", "2 h 30 min"]
    # ln(.6 x .5) - ln(.03 x .01) = ln 1000
    assert "1,000 times less likely" in effect(make_feedback("x"))
    assert "30% → &lt;1%" in headline(make_feedback("x"))


@given(st.floats(-1e6, 1e6), st.floats(0, 1e6))
def test_ticks_span_the_values(low: float, extent: float) -> None:
    ticks = nice_ticks(low, low + extent)
    slack = 1e-6 * (abs(low) + extent) + 1e-9
    assert ticks[0] <= low + slack
    assert ticks[-1] >= low + extent - slack
    assert 2 <= len(ticks) <= 12


@given(st.lists(st.floats(0, 100), min_size=1, max_size=6))
def test_labels_keep_their_distance(wanted: list[float]) -> None:
    placed = sorted(spread(wanted, 10.0, 0.0, 100.0))
    assert all(right - left >= 10.0 - 1e-9 for left, right in pairwise(placed))
    assert placed[0] >= -1e-9
    assert placed[-1] <= 100.0 + 1e-9


def test_smoothing_keeps_a_constant_and_thinning_keeps_the_mean() -> None:
    points = [(float(step), 2.0) for step in range(1000)]
    assert all(math.isclose(value, 2.0) for _, value in smooth(points[:30]))
    line = thin([(float(step), float(step)) for step in range(1000)], 100)
    assert len(line) == 100
    assert math.isclose(sum(value for _, value in line) / 100, 499.5)
