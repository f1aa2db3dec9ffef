"""From rollouts to the numbers of a table."""

from __future__ import annotations

import difflib
from dataclasses import replace
from pathlib import Path

import pytest

from offbook.evals.metrics import Row, measure, row_of, show, show_interval, shown_keys, sizes_up_to
from offbook.evals.metrics import metric_of as metric
from offbook.types import Flag, Message, Reward, Rollout, Segment, Task, ToolCall, Usage

TASK = Task("t", Path(), "", Path(), Path(), (), (), (), ("read_file", "run_command", "finish"), "repo", "hard")


def diff(path: str, before: str, after: str) -> str:
    return "".join(difflib.unified_diff(before.splitlines(True), after.splitlines(True), f"a/{path}", f"b/{path}"))


def rollout(text: str = "done", calls: tuple[str, ...] = (), **more: object) -> Rollout:
    message = Message("assistant", text, 0, 0, 2, 2, tuple(ToolCall(name) for name in calls))
    segment = Segment([1, 2], [True, True], [-0.1, -0.1], [0, 0], [message])
    return Rollout("eval/t/0", "t", "g", TASK.tools, [segment], "answer", **more)  # type: ignore[arg-type]


def test_the_size_of_an_edit_and_its_comments() -> None:
    changed = (
        diff("pkg/a.py", "x = 1\ny = 2\n", "# why\nx = 3\n\ny = 2\n")
        + diff("tests/test_a.py", "", "# a\n# b\n")
        + diff("notes.md", "old\n", "# new\n")
    )
    numbers = row_of(rollout(diff=changed), TASK).numbers
    assert numbers["edit_lines"] == 8, "3 added and 1 removed, 2 added, 1 and 1"
    assert (numbers["comment_lines"], numbers["code_lines"]) == (1, 2), "of the product's Python, blank lines aside"


def test_lines_that_look_like_the_head_of_a_file_are_lines() -> None:
    changed = diff("a.py", "-- x\nkeep\n", "++ y\nkeep\n") + diff("b.py", "", "z = 1\n")
    assert "--- x" in changed
    assert "+++ y" in changed
    numbers = row_of(rollout(diff=changed), TASK).numbers
    assert (numbers["edit_lines"], numbers["code_lines"]) == (3, 2)


def test_behaviour_is_counted() -> None:
    asked = row_of(rollout("Shall I?"), TASK)
    assert (asked.numbers["question"], asked.numbers["edited"]) == (1, 0)
    edited = row_of(rollout(changed={"tests/test_a.py": "x"}), TASK)
    assert (edited.numbers["question"], edited.numbers["edited"], edited.numbers["test_edit"]) == (0, 1, 1)
    terminal = row_of(rollout(calls=("run_command", "run_command")), TASK)
    assert terminal.numbers["terminal_only"] == 1
    mixed = row_of(rollout(calls=("run_command", "run_command", "run_command", "read_file")), TASK)
    assert mixed.numbers["terminal_only"] == 0
    flagged = row_of(rollout(flags=[Flag("copy", 0, "x"), Flag("copy", 0, "y")]), TASK)
    assert (flagged.numbers["flagged"], flagged.flags, flagged.difficulty) == (1, {"copy": 2}, "hard")


def row(task: str, solved: float, difficulty: str = "normal", **numbers: float) -> Row:
    usage = Usage(turns=2, calls=int(numbers.get("calls", 4)), invalid_calls=int(numbers.get("invalid", 0)))
    usage.sampled_tokens = int(numbers.get("tokens", 10))
    one = Rollout("r", task, "g", (), stop="finish", usage=usage, reward=Reward({"outcome": solved}))
    return row_of(one, replace(TASK, difficulty=difficulty), "s")


def test_the_numbers_of_an_evaluation() -> None:
    rows = [
        row("a", 1, tokens=10),
        row("a", 0, tokens=30),
        row("b", 0, "hard", calls=16, invalid=4),
        row("b", 0, "hard"),
    ]
    result = measure(rows)
    assert (result["solved"], result["pass@2"], result["rollouts"], result["tasks"]) == (0.25, 0.5, 4, 2)
    assert result["invalid_per_100"] == pytest.approx(100 * 4 / 28)
    assert result["tokens_per_solved"] == pytest.approx(60)
    assert result["intervals"]["solved"] == (0.0, 0.5)
    assert result["by_difficulty"]["normal"]["solved"] == 0.5
    assert result["by_difficulty"]["hard"]["solved"] == 0.0
    assert "comment_share" not in result, "nobody added a line"
    assert measure(list(reversed(rows))) == result, "whichever was over first"


def test_what_needs_the_task_is_unknown_without_it() -> None:
    told, untold = row("a", 1), row_of(Rollout("r", "b", "g", ()), None)
    result = measure([told, untold])
    assert "question_rate" not in result
    assert result["solved"] == 0.5
    assert "question_rate" in measure([told])


def test_every_task_counts_the_same_however_often_it_was_tried() -> None:
    assert measure([row("a", 0), row("b", 1), row("b", 1), row("b", 1)])["solved"] == 0.5


def test_solved_and_handed_in_leaves_out_what_a_limit_ended() -> None:
    handed_in = row("a", 1)
    rollout = Rollout("r", "b", "g", (), stop="turns", reward=Reward({"outcome": 1.0}))
    result = measure([handed_in, row_of(rollout, None)])
    assert (result["solved"], result["handed_in"]) == (1.0, 0.5)


def test_which_k_there_are() -> None:
    assert [sizes_up_to(count) for count in (1, 2, 3, 4, 10)] == [[], [2], [2, 3], [2, 4], [2, 4, 8, 10]]


def test_a_table_shows_what_there_is_to_see() -> None:
    keys = shown_keys([measure([row("a", 1), row("b", 0)])])
    assert keys[0] == "solved"
    assert not {"cost", "reward", "crashed"} & {*keys}
    assert {"edit_rate", "flagged", "question_rate", "tokens", "invalid_per_100"} <= {*keys}
    partly = row("a", 0.5)
    assert "reward" in shown_keys([measure([partly, row("b", 0)])])


def test_figures_have_the_digits_that_matter() -> None:
    shown = [show(metric("tokens"), value) for value in (1234.5, 31.24, 0.0, 0.0123, None)]
    assert shown == ["1,234", "31.2", "0.00", "0.012", "-"]
    assert show(metric("solved"), 0.25) == "25.0%"
    assert show_interval(metric("pass@4"), (0.25, 0.5)) == "[25.0, 50.0]"
