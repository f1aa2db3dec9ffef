"""Steps that had nothing to learn from: what is said of them, and when they end a run."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_loop import train
from viewdata import call, say

from offbook.core.config import load_config
from offbook.core.runfolder import RunFolder
from offbook.rl.train import has_signal, waits, why_no_signal
from offbook.rl.train_step import has_gradient, shares_without
from offbook.types import Event, Reward, Rollout, Segment, Usage
from offbook.view.about import overview
from offbook.view.index import RunIndex

CONFIG = load_config([], {"model": "some/model", "tasks.source": "my tasks", "harness.turns": "7"})
OWN_NAMES = {name: name for name in ("read_file", "edit_file", "run_command", "run_tests")}


def rollout(number: int, *said: tuple[str, object], stop: str = "answer", changed: bool = False, solved: float = 0.0):
    segment = Segment()
    say(segment, "user", "Fill in the function.")
    for text, one in said:
        say(segment, "assistant", text, one)  # type: ignore[arg-type]
        say(segment, "tool", "fine", status="malformed" if one.error else "ok")  # type: ignore[attr-defined]
    say(segment, "assistant", "Done.")
    made = Rollout(f"r/{number}", "t", "g", tuple(OWN_NAMES), [segment], stop)  # type: ignore[arg-type]
    made.own_names, made.reward = OWN_NAMES, Reward({"outcome": solved})
    made.changed = {"a.py": "x = 1\n"} if changed else {}
    return made


READ, TESTS = call("read_file", path="a.py"), call("run_tests")
SHELL = call("run_command", command="cd x && python -m pytest -q tests; python -m pytest -q")
BROKEN = ("<tool_call>{", type(READ[1])("", error="the call is not JSON"))
CUT_OFF = [rollout(n, READ, stop="turns") for n in range(2)]


def test_what_rollouts_did_not_do() -> None:
    rollouts = [rollout(1), rollout(2, BROKEN), rollout(3, READ, SHELL), rollout(4, TESTS, changed=True)]
    assert shares_without(rollouts) == {"no_call": 0.5, "no_edit": 0.75, "no_test_run": 0.5}


def test_a_group_has_a_gradient_where_rewards_differ() -> None:
    alike, other = [rollout(1), rollout(2)], rollout(3, solved=1.0)
    assert not has_gradient(alike)
    assert has_gradient([*alike, other])
    assert has_gradient([other], baseline=0.4)
    other.events.append(Event(0, "machine_fault", "no space"))
    assert not has_gradient([*alike, other]), "what the machine ended is in no mean"


@pytest.mark.parametrize(
    ("group", "cause", "help"),
    [
        ([rollout(n, BROKEN) for n in range(3)], "3 of 3 rollouts made no call", "offbook fit some/model"),
        ([rollout(n, READ) for n in range(3)], "made calls and changed no file", "--data demos:'my tasks'"),
        ([*CUT_OFF, rollout(2, READ)], "2 of 3 rollouts were cut off by harness.turns", "raise it, or offbook sft"),
        ([rollout(n, READ, stop="wall") for n in range(3)], "cut off by harness.wall_s", "raise it, or offbook sft"),
        ([rollout(n, READ, changed=True) for n in range(3)], "the tests never pass", "--level stub"),
        ([rollout(n, READ, solved=1.0) for n in range(3)], "all 3 rollouts solved", "--level gone"),
        ([rollout(n, stop="crash") for n in range(3)], "crashed", "offbook view"),
    ],
)
def test_the_likely_cause_is_named_with_what_helps(group: list[Rollout], cause: str, help: str) -> None:
    said = why_no_signal([group], CONFIG)
    assert cause in said
    assert help in said


def test_tasks_that_are_solved_always_or_never() -> None:
    groups = [[rollout(n, READ, solved=float(of)) for n in range(3)] for of in range(2)]
    assert "by all of its rollouts or by none (3 of 6 rollouts)" in why_no_signal(groups, CONFIG)


def test_how_the_work_ends_is_no_signal_where_none_is_solved() -> None:
    """Else the quickest way to give up is learned."""
    row = {"groups_with_gradient": 1.0, "reward/outcome": 0.0, "reward/effort": -1.0, "reward/unfinished": -0.5}
    assert not has_signal(row, CONFIG)
    assert has_signal(row | {"reward/outcome": 0.1}, CONFIG)
    assert has_signal(row | {"reward/lint": -0.1}, CONFIG), "other parts judge the work"
    assert has_signal(row | {"hint/signal_tokens": 4.0}, CONFIG)


@pytest.mark.parametrize("engine", ["lockstep", "continuous"])
def test_steps_without_a_signal_end_the_run(cache: Path, model: Path, tmp_path: Path, engine: str) -> None:
    """One message a rollout solves nothing, so all groups are alike."""
    more = ["--harness.turns", "1", "--feedback.weight", "0", "--train.steps", "6", "--engine.kind", engine]
    more += ["--checkpoint.every", "9", "--train.no_signal_steps", "2"]
    process = train(cache, model, tmp_path / "run", *more)
    assert process.returncode == 1
    assert process.stderr.count("had no signal: ") == 3, "of each step, and where it ends"
    assert "step 2: 2 steps in a row had no signal: 6 of 6 rollouts" in process.stderr
    assert "the last checkpoint is of step 2; --train.no_signal_steps 0 goes on anyway" in process.stderr
    folder = RunFolder(tmp_path / "run")
    rows, _ = folder.metrics()
    assert [row["groups_with_gradient"] for row in rows] == [0, 0]
    assert rows[-1]["no_signal"] in process.stderr
    index = RunIndex("run", folder.path)
    index.refresh()
    assert overview(index)["no_signal"] == {"steps": 2, "why": rows[-1]["no_signal"]}
    more[-1] = "0"
    process = train(cache, model, tmp_path / "run", *more[:-4], "--train.no_signal_steps", "0")
    assert process.returncode == 0, process.stderr
    assert len(RunFolder(tmp_path / "run").metrics()[0]) == 6


def test_a_step_in_which_hints_teach_has_a_signal(cache: Path, model: Path, tmp_path: Path) -> None:
    more = ["--harness.turns", "1", "--feedback.gate", "0", "--train.steps", "3", "--train.no_signal_steps", "1"]
    process = train(cache, model, tmp_path / "run", *more)
    rows, _ = RunFolder(tmp_path / "run").metrics()
    assert process.returncode == 0, process.stderr
    assert [row["groups_with_gradient"] for row in rows] == [0, 0, 0]
    assert all(row["hint/signal_tokens"] > 0 for row in rows)
    assert "had no signal" not in process.stderr


def test_a_long_step_says_which_rollout_was_last_and_what_it_spent_its_time_on() -> None:
    quick = Usage(seconds=50.0, model_seconds=2.0, longest_call="bash cat", longest_call_seconds=48.4, timeouts=1)
    slow = Usage(seconds=70.0, model_seconds=60.0, summary_seconds=20.0, scoring_seconds=8.0, slot_seconds=0.4)
    slow.longest_call, slow.longest_call_seconds = "read_file a.py", 4.0
    groups = [[Rollout("step1/a/0", "a", "a", (), usage=quick), Rollout("step1/a/1", "a", "a", (), usage=slow)]]
    found = waits(groups, 81.0, in_lockstep=False)
    assert found.pop("waited_for") == (
        "waited 81 s for rollouts; last was step1/a/1: model 40 s, summary 20 s, tools 10 s, scoring 8 s; "
        "longest call: `bash cat` of step1/a/0, 48 s"
    )
    assert found == {
        "slowest/slot_s": 0.4,
        "slowest/model_s": 40.0,
        "slowest/summary_s": 20.0,
        "slowest/tools_s": 10.0,
        "slowest/scoring_s": 8.0,
        "longest_call_s": 48.4,
        "timeouts": 1,
    }
    assert "waited_for" not in waits(groups, 59.0, in_lockstep=False)
    assert "(in lockstep with others' tools)" in waits(groups, 81.0, in_lockstep=True)["waited_for"]
