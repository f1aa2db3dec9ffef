"""What stands behind `offbook view`: the index over a growing run folder, the answers, the server, the single file."""

from __future__ import annotations

import base64
import hashlib
import http.client
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from viewdata import TASKS, add_step, make_feedback, make_rollout, make_run

from offbook.cli.quickstart import NEXT
from offbook.cli.view import _folders, view
from offbook.core.runfolder import RunFolder, dump_lines
from offbook.rl.tasks import record_tasks
from offbook.types import OffbookError, Task, ToolCall
from offbook.view import index
from offbook.view.answers import to_json
from offbook.view.index import RunIndex
from offbook.view.lines import Lines, parse_feedback, parse_metrics, parse_rollout
from offbook.view.server import SCRIPTS, Server, answer, assets
from offbook.view.single import write_single

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>\u202e</script>"


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "REFRESH_S", 0.0)


@pytest.fixture
def run(tmp_path: Path) -> RunIndex:
    return RunIndex("rl_hints", make_run(tmp_path, "rl_hints"))


def ask(run: RunIndex, what: str) -> dict[str, Any]:
    return json.loads(to_json(answer([run], f"api/run/0/{what}")))


def listed(run: RunIndex) -> list[dict[str, Any]]:
    found = ask(run, "rollouts")
    return [dict(zip(found["columns"], row, strict=True)) for row in found["rows"]]


def test_the_index_says_of_a_rollout_what_the_rollout_says(run: RunIndex) -> None:
    rows = listed(run)
    assert len(rows) == 4 * 6 + 1
    assert [row["source"] for row in rows][::6] == [
        "step_00001",
        "step_00002",
        "step_00003",
        "step_00004",
        "eval-final",
    ]
    for row in rows:
        whole = run.rollout(row["source"], row["number"])
        assert (row["id"], row["task"], row["group"]) == (whole.id, whole.task, whole.group)
        assert math.isclose(row["reward"], whole.reward.total, rel_tol=1e-5)
        assert row["solved"] == whole.solved
        assert row["sampled_tokens"] == whole.usage.sampled_tokens
        assert row["flags"] == [flag.kind for flag in whole.flags]
        hinted = not whole.solved and row["source"].startswith("step")
        assert row["rules"] == (["unknown_tool"] if hinted else [])
        assert row["peak"] == (2.0 if hinted else 0.0)


TEXTS = st.text(alphabet=st.sampled_from('"\\[]{},:é\n<stopegmn '), max_size=30)


@settings(max_examples=60, deadline=None)
@given(TEXTS, st.dictionaries(st.sampled_from(["stop", "segments", "a"]), TEXTS | st.lists(TEXTS, max_size=2)))
def test_the_short_reading_of_a_line_equals_the_whole_one(text: str, arguments: dict[str, Any]) -> None:
    rollout = make_rollout("a" + text, "t" + text, "g", solved=True, extra=text)
    rollout.segments[0].messages[2].calls = (ToolCall("x", {"stops": ["x"], **arguments}),)
    rollout.changed = {f"stop{text}": text, "segments": None}
    line = dump_lines([rollout])
    spaced = json.dumps(json.loads(line)).encode()  # the same record as another program may write it
    assert parse_rollout(line) == parse_rollout(spaced)
    assert parse_rollout(line)["id"] == rollout.id  # type: ignore[index]
    feedback = dump_lines([make_feedback("r" + text, text)])
    assert parse_feedback(feedback) == parse_feedback(json.dumps(json.loads(feedback)).encode())


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_record_of_the_wrong_shape_is_none_and_never_an_error(data: st.DataObject) -> None:
    rollout = json.loads(dump_lines([make_rollout("a", "t", "g", solved=True)]))
    where = data.draw(st.sampled_from([(key,) for key in rollout] + [("reward", "parts"), ("usage", "turns")]))
    inner = rollout
    for key in where[:-1]:
        inner = inner[key]
    inner[where[-1]] = data.draw(JSON)
    for record in (rollout, data.draw(JSON), {"target": data.draw(JSON), "divergence": data.draw(JSON)}):
        line = json.dumps(record).encode() + b"\n"
        parse_rollout(line)
        parse_feedback(line)
        parse_metrics(line)
    assert parse_rollout(b'{"id": 1, "task": 2, "group": 3}\n')
    assert parse_rollout(b'{"id": 1, "task": 2, "group": 3, "usage": {"turns": Infinity}}\n') is None
    assert parse_rollout(b"[" * 100_000) is None
    assert parse_metrics(b'{"step": 1%s}\n' % (b"0" * 400)) is None


def test_a_torn_line_is_counted_and_read_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    lines = [dump_lines([make_rollout(str(n), "t", "g", solved=True)]) for n in range(4)]
    path.write_bytes(lines[0] + lines[1][:500])
    found = Lines(path, parse_rollout)
    assert found.refresh()
    assert ([place.said["id"] for place in found.places], found.unreadable) == (["0"], 1)
    path.write_bytes(lines[0] + lines[1] + lines[2][:700] + lines[3])  # a crash, and another writer behind it
    assert found.refresh()
    assert ([place.said["id"] for place in found.places], found.unreadable) == (["0", "1"], 1)
    assert not found.refresh()


def test_a_run_that_goes_on_is_seen(run: RunIndex) -> None:
    before = answer([run], "api/runs")["runs"][0]
    assert (before["steps"], before["rollouts"], before["live"]) == (4, 25, False)
    assert answer([run], "api/runs")["runs"][0]["version"] == before["version"]
    add_step(RunFolder(run.root), 5)
    after = answer([run], "api/runs")["runs"][0]
    assert (after["steps"], after["rollouts"]) == (5, 31)
    assert after["version"] > before["version"]
    shutil.rmtree(run.root / "rollouts")
    assert answer([run], "api/runs")["runs"][0]["rollouts"] == 1


def test_many_may_look_while_a_run_writes(run: RunIndex) -> None:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # so that threads meet in the middle of things
    failed: list[BaseException] = []
    over = threading.Event()

    def look() -> None:
        try:
            while not over.is_set():
                assert (len(listed(run)) - 1) % 6 == 0  # a step is there as a whole or not at all
                answer([run], "api/runs")
                ask(run, "tasks")
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=look) for _ in range(4)]
    for thread in threads:
        thread.start()
    for step in range(5, 40):
        add_step(RunFolder(run.root), step)
    over.set()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(before)
    assert failed == []
    assert len(listed(run)) == 39 * 6 + 1


def test_where_rollouts_are_is_told_while_they_are_sampled(run: RunIndex) -> None:
    assert answer([run], "api/runs")["runs"][0]["now"] == {}
    (run.root / "slots").mkdir()
    (run.root / "slots" / "now.json").write_text('{"slots running": 3, "load": "none"}')
    run._looked = 0.0
    told = answer([run], "api/runs")["runs"][0]
    assert (told["now"], "now" in told["evals"]) == ({"slots running": 3}, False)


def test_a_run_is_live_from_its_first_rollout_on(tmp_path: Path) -> None:
    """Also where a step takes longer than all before: what is told of its rollouts counts as a change."""
    (tmp_path / "slots").mkdir()
    (tmp_path / "config.toml").write_text("[train]\nsteps = 4\n")
    assert answer([RunIndex("new", tmp_path)], "api/runs")["runs"][0]["live"] is False
    (tmp_path / "slots" / "now.json").write_text('{"slots running": 3}')
    assert answer([RunIndex("new", tmp_path)], "api/runs")["runs"][0]["live"] is True
    os.utime(tmp_path / "slots" / "now.json", (1.0, 1.0))
    assert answer([RunIndex("new", tmp_path)], "api/runs")["runs"][0]["live"] is False


def test_what_cannot_be_read_is_counted(run: RunIndex) -> None:
    assert answer([run], "api/runs")["runs"][0]["unreadable"] == {}
    for name in (
        "metrics.jsonl",
        "tasks.jsonl",
        "look.jsonl",
        "rollouts/step_00001.jsonl",
        "feedback/step_00001.jsonl",
    ):
        with open(run.root / name, "a") as file:
            file.write('{"step": 9, "sol\n[1]\nnull\n{}\n{"id": ')
    (run.root / "eval" / "final.json").write_text("{")
    found = answer([run], "api/runs")["runs"][0]["unreadable"]
    assert found == {
        "metrics line": 5,
        "task line": 5,
        "look line": 5,
        "rollout line": 5,
        "feedback line": 5,
        "settings or result file": 1,
    }


def test_links_that_lead_out_are_not_followed(tmp_path: Path) -> None:
    secret = make_run(tmp_path / "elsewhere", "secret")
    path = make_run(tmp_path, "rl_hints", steps=1)
    (path / "rollouts" / "step_00002.jsonl").symlink_to(secret / "rollouts" / "step_00002.jsonl")
    (path / "rollouts" / "step_00003.jsonl").symlink_to("../metrics.jsonl")  # inside, and no rollouts
    (path / "eval" / "before.json").symlink_to(secret / "eval" / "final.json")
    (path / "eval" / "loop.json").symlink_to("loop.json")
    os.mkfifo(path / "rollouts" / "step_00004.jsonl")
    shutil.rmtree(path / "feedback")
    (path / "feedback").symlink_to(secret / "feedback")
    run = RunIndex("x", path)
    found = answer([run], "api/runs")["runs"][0]
    assert found["unreadable"]["file outside the run folder"] == 4 + 4
    assert found["targets"] == 0
    assert found["rollouts"] == 7
    assert list(found["evals"]) == ["final"]
    with pytest.raises(OffbookError):
        answer([run], "api/run/0/rollout?source=step_00002&number=0")


def test_a_rollout_is_opened_with_its_targets_and_its_advantage(run: RunIndex) -> None:
    opened = ask(run, "rollout?source=step_00001&number=0")
    assert [one["role"] for one in opened["outline"]] == ["system", "user", *["assistant", "tool"] * 3]
    assert opened["hints"][0]["student_top"][2][0][0] == "write_file"
    assert opened["flag_list"][0] == {"kind": "test_edit", "segment": 0, "message": 6, "text": "changed a test"}
    assert opened["versions"] == [0, 0]
    assert opened["outline"][3]["lines"] == 40
    words = ask(run, "messages?source=step_00001&number=0&first=2&count=2")["messages"]
    assert words[0]["calls"] == [{"name": "read_file", "arguments": {"path": "otter/porch.py"}, "error": None}]
    assert words[1]["text"].count("\n") == 39
    members = ask(run, "group?source=step_00001&group=step1%2Fotter-birch")["members"]
    assert [member["advantage"] for member in members] == pytest.approx([-1 / 3, -1 / 3, 2 / 3])
    assert opened["advantage"] == pytest.approx(-1 / 3)
    assert [beat["target"] for beat in members[0]["beats"]] == [False, True, False]
    assert [beat["status"] for beat in members[0]["beats"]] == ["ok", "unknown_tool", "ok"]


def test_a_rollout_that_is_broken_inside_is_named_and_the_others_stay(run: RunIndex, tmp_path: Path) -> None:
    path = run.root / "rollouts" / "step_00001.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0].replace(b'"ids":[', b'"ids":["x",'), *lines[1:]]))
    assert len(listed(run)) == 25  # its head and its tail are fine, and more is not read for a list
    with pytest.raises(OffbookError, match="cannot be read"):
        ask(run, "rollout?source=step_00001&number=0")
    found = ask(run, "group?source=step_00001&group=step1%2Fotter-birch")
    assert ([member["number"] for member in found["members"]], found["unreadable"]) == ([1, 2], 1)
    (run.root / "tasks.jsonl").unlink()
    write_single(tmp_path / "page.html", [run], "t")
    text = (tmp_path / "page.html").read_text()
    assert "rollout?source=step_00001&number=1" in text
    assert "rollout?source=step_00001&number=0" not in text


def test_tasks_with_their_pass_rates(run: RunIndex) -> None:
    found = ask(run, "tasks")
    assert [(one["id"], one["solved"], one["rollouts"]) for one in found["tasks"]] == [
        (TASKS[1], 4, 12),
        (TASKS[0], 5, 13),
    ]
    assert ask(run, f"task?id={TASKS[0]}")["fail_to_pass"] == ["tests/test_porch.py::test_birch"]
    other = ask(run, f"task?id={TASKS[1]}")
    assert other == {
        "id": TASKS[1],
        "recorded": False,
        "instruction": "Make birch in otter/porch.py do what its docstring says.",
    }


def test_a_run_records_its_tasks(tmp_path: Path) -> None:
    (tmp_path / "task" / "solution").mkdir(parents=True)
    (tmp_path / "task" / "solution" / "gold.patch").write_text("+    return 1\n")
    none = tmp_path / "none"
    tests = tuple(f"tests/test_a.py::test_{n}" for n in range(400))
    task = Task("t", tmp_path / "task", "Do it.", none, none, (), tests[:1], tests, (), "repo", "hard")
    path = make_run(tmp_path, "run", steps=1)
    record_tasks(RunFolder(path), {"train": [task], "heldout": [replace(task, id="u", folder=none)]})
    run = RunIndex("run", path)
    assert {one["id"]: one["split"] for one in ask(run, "tasks")["tasks"]} == {
        "t": "train",
        "u": "heldout",
    } | dict.fromkeys(TASKS, "")
    found = ask(run, "task?id=t")
    assert (found["patch"], found["difficulty"], found["num_pass_to_pass"]) == ("+    return 1\n", "hard", 400)
    assert len(found["pass_to_pass"]) == 300
    assert ask(run, "task?id=u")["patch"] == ""


def test_numbers_that_are_none_do_not_break_the_page(run: RunIndex) -> None:
    RunFolder(run.root).append_metrics({"step": 5, "solved": math.nan, "reward": math.inf, "hint/kl": "much"})
    series = ask(run, "curves")["series"]
    assert (len(series["solved"]["points"]), series["solved"]["skipped"]) == (4, 1)
    assert series["hint/kl"]["skipped"] == 0
    assert b"NaN" not in to_json({"a": [math.nan, (math.inf, 1.0)]})
    assert json.loads(to_json({"a": "\ud800"})) == {"a": "?"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    path = make_run(tmp_path_factory.mktemp("served"), "rl_hints", steps=1, extra=HOSTILE)
    made = Server([RunIndex("rl_hints", path)], 0)
    thread = threading.Thread(target=made.serve_forever, args=(0.05,))
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


def fetch(server: Server, path: str, method: str = "GET", **headers: str) -> tuple[int, Any, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    connection.putrequest(method, path, skip_host=True)
    for name, value in {"Host": f"127.0.0.1:{server.server_port}", **headers}.items():
        connection.putheader(name, value)
    connection.endheaders()
    got = connection.getresponse()
    found = got.status, got.headers, got.read()
    connection.close()
    return found


def test_every_answer_forbids_other_sources(server: Server) -> None:
    for path in ("/", "/main.js", "/style.css", "/icon.svg", "/api/runs", "/nothing"):
        status, headers, _ = fetch(server, path)
        assert status == (404 if path == "/nothing" else 200)
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert "unsafe" not in headers["Content-Security-Policy"]
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert "Access-Control-Allow-Origin" not in headers
    assert server.server_address[0] == "127.0.0.1"


def test_hostile_text_is_only_ever_served_as_json(server: Server) -> None:
    for what in ("rollout?source=step_00001&number=0", "messages?source=step_00001&number=0&first=0&count=9"):
        status, headers, body = fetch(server, f"/api/run/0/{what}")
        assert status == 200
        assert headers["Content-Type"] == "application/json; charset=utf-8"
        assert HOSTILE in body.decode().replace('\\"', '"')
    for name in SCRIPTS:
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|new Function", assets()[name].decode()
        )


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1:1", "localhost.evil:{port}", ""]
)
def test_another_host_is_refused(server: Server, host: str) -> None:
    status, _, body = fetch(server, "/api/runs", Host=host.format(port=server.server_port))
    assert status == 421
    assert b"rl_hints" not in body
    assert fetch(server, "/api/runs", Host=f"localhost:{server.server_port}")[0] == 200


@pytest.mark.parametrize(
    "path",
    [
        "/../config.toml",
        "/..%2fconfig.toml",
        "/%2e%2e/%2e%2e/etc/passwd",
        "//etc/passwd",
        "/etc/passwd",
        "/style.css/../../index.py",
        "/page/main.js",
        "/config.toml",
        "/rollouts/step_00001.jsonl",
        "/api/run/0/rollout?source=../rollouts/step_00001&number=0",
        "/api/run/0/rollout?source=/etc/passwd&number=0",
        "/api/run/0/rollout?source=step_00001&number=-1",
        "/api/run/0/rollout?source=step_00001&number=99",
        "/api/run/0/rollout?source=step_00001&number=%C2%B2",
        "/api/run/0/rollout",
        "/api/run/-1/curves",
        "/api/run/7/curves",
        "/api/run/0/..%2f..%2fcurves",
        "/api/run/0/__class__",
        "/api/run/0/group?source=step_00001&group=../x",
        "/api/run/0/task?id=../../../etc/passwd",
    ],
)
def test_nothing_but_the_run_is_served(server: Server, path: str) -> None:
    status, _, body = fetch(server, path)
    assert status == 404
    assert set(json.loads(body)) == {"error"}


def test_the_server_only_reads(server: Server) -> None:
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert fetch(server, "/api/runs", method)[0] == 501


def test_one_file_holds_the_page(tmp_path: Path) -> None:
    run = RunIndex("rl_hints", make_run(tmp_path, "rl_hints", steps=2, extra=HOSTILE))
    out = tmp_path / "page.html"
    write_single(out, [run], HOSTILE, next_steps=NEXT)
    text = out.read_text()
    assert not re.search(r'(src|href)="(?!#)', text.split("<script>")[0].split('id="held"')[0])
    [held] = re.findall(r'<script type="application/json" id="held">(.*?)</script>', text, re.DOTALL)
    answers = json.loads(held)["answers"]
    assert answers["api/run/0/rollout?source=step_00001&number=0"]["hints"][0]["hint"]["text"].endswith(HOSTILE)
    assert (json.loads(held)["title"], json.loads(held)["next"]) == (HOSTILE, NEXT)
    assert not re.search(r"https?:|@import|url\(", text.replace(held, "").replace("http://www.w3.org/2000/svg", ""))
    scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(scripts[0].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in text
    assert text.count("<script") == 2


def test_a_file_that_is_full_holds_the_example_and_the_whole_list(tmp_path: Path) -> None:
    run = RunIndex("rl_hints", make_run(tmp_path, "rl_hints"))
    out = tmp_path / "page.html"
    write_single(out, [run], "t", max_bytes=1)
    [held] = re.findall(r'id="held">(.*?)</script>', out.read_text(), re.DOTALL)
    answers = json.loads(held)["answers"]
    assert len(answers["api/run/0/rollouts"]["rows"]) == 25
    found = answers["api/run/0/example"]
    where = f"source={found['source']}&number={found['number']}"
    assert [address for address in answers if "/rollout?" in address] == [f"api/run/0/rollout?{where}"]


def test_a_file_holds_what_was_noted_before_the_rest(tmp_path: Path) -> None:
    path = make_run(tmp_path, "rl", hinted=False)
    run, out = RunIndex("rl", path), tmp_path / "page.html"
    write_single(out, [run], "t", max_bytes=60_000)
    [held] = re.findall(r'id="held">(.*?)</script>', out.read_text(), re.DOTALL)
    opened = [one for address, one in json.loads(held)["answers"].items() if "/rollout?" in address]
    assert 0 < len(opened) < 16
    assert all(one["flags"] for one in opened)


def test_a_folder_of_runs_stands_for_them(tmp_path: Path) -> None:
    for name in ("b", "a"):
        make_run(tmp_path / "many", name, steps=1)
    make_run(tmp_path / "other", "a", steps=1)
    assert list(_folders([tmp_path / "many", tmp_path / "other" / "a"])) == ["a", "b", "other/a"]
    with pytest.raises(OffbookError, match="not a run folder"):
        _folders([tmp_path])


def test_the_verb_serves_until_it_is_interrupted(tmp_path: Path) -> None:
    path = make_run(tmp_path, "rl_hints", steps=1)
    command = [sys.executable, "-m", "offbook", "view", str(path), "--port"]
    served = subprocess.Popen(
        [*command, "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored in a background job
    )
    try:
        assert served.stdout
        url = served.stdout.readline().split()[0]
        with urllib.request.urlopen(f"{url}api/runs", timeout=20) as found:
            assert json.load(found)["runs"][0]["name"] == "rl_hints"
        port = url.rstrip("/").rsplit(":", 1)[1]
        second = subprocess.run([*command, port], capture_output=True, text=True, timeout=60)
        assert second.returncode == 1
        assert second.stderr.startswith(f"offbook: cannot listen on port {port}: ")
        assert second.stderr.count("\n") == 1
        served.send_signal(signal.SIGINT)
        assert served.wait(timeout=20) == 0
        assert served.stderr
        assert served.stderr.read() == ""
    finally:
        served.kill()
        served.wait()


def test_the_verb_writes_a_file(tmp_path: Path) -> None:
    path = make_run(tmp_path, "rl_hints", steps=1)
    page = tmp_path / "page.html"
    view([path], static=page)
    assert 'id="held"' in page.read_text()
