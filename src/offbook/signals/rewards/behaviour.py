"""How an agent behaves, apart from solving the task. A part is a plain function of task and rollout, from -1 to 0.

A part is bounded, so its weight is the most that it can ever cost. Every part can be earned by solving less or by
faking; docs/rewards.md says how, and so all of them are off unless the configuration gives them a weight.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from offbook.signals.trajectory import Trajectory
from offbook.signals.trajectory.diff import DEFINED
from offbook.signals.trajectory.lint import findings
from offbook.types import Rollout, Task

BROKEN_CALLS = 5  # so many cost the whole part
LINT_FINDINGS = 10
FREE_COMMENTS = 0.25  # share of the added lines that may be comments
FREE_TERMINAL = 0.5  # share of the calls that may go to the terminal
FINAL_WORDS = 150
HANDED_IN = ("finish", "answer")
TERMINAL = frozenset({"run_command", "bash", "run_tests"})


def broken_calls(task: Task, rollout: Rollout) -> float:
    """Calls that could not be run: unknown tools, malformed arguments. They are scored, never thrown away: an agent
    whose broken rollouts are discarded learns to break those that go badly."""
    return -min(1.0, rollout.usage.invalid_calls / BROKEN_CALLS)


def open_todos(task: Task, rollout: Rollout) -> float:
    """The share of the last todo list that is not done."""
    items: list[dict[str, str]] = []
    for one in Trajectory(rollout).uses:
        if one.tool == "todo" and one.answer and one.answer.status == "ok":
            items = next((value for value in one.call.arguments.values() if isinstance(value, list)), [])
    return -sum(item.get("status") != "done" for item in items) / len(items) if items else 0.0


def lint(task: Task, rollout: Rollout) -> float:
    """Findings in changed Python sources of each kind beyond those that were there before (trajectory/lint.py)."""
    trajectory = Trajectory(rollout, task)
    found = 0
    for path, text in trajectory.sources.items():
        found += (findings(path, text) - findings(path, trajectory.before(path) or "")).total()
    return -min(1.0, found / LINT_FINDINGS)


def comments(task: Task, rollout: Rollout) -> float:
    """How far the share of comments among the added lines goes beyond a quarter."""
    excess = Trajectory(rollout).comment_share - FREE_COMMENTS
    return -max(0.0, excess / (1 - FREE_COMMENTS))


def question(task: Task, rollout: Rollout) -> float:
    """-1 where the agent changed nothing and ended by asking something."""
    return -1.0 if Trajectory(rollout).question and not rollout.changed else 0.0


def final_word(task: Task, rollout: Rollout) -> float:
    """The share of three demands that the closing message fails: it is there, names something that was changed, and
    takes no more than 150 words."""
    trajectory = Trajectory(rollout)
    words = trajectory.final
    names = [name for path in rollout.changed for name in (path, path.rpartition("/")[2])]
    for file in trajectory.diff:  # functions and classes in or around which lines were added
        names += DEFINED.findall("\n".join([*file.added.values(), *file.around]))
    is_named = any(re.search(rf"(?<!\w){re.escape(name)}(?!\w)", words) for name in names)
    failed = (not words.strip(), not is_named and bool(rollout.changed), not 0 < len(words.split()) <= FINAL_WORDS)
    return -sum(failed) / len(failed)


def terminal_only(task: Task, rollout: Rollout) -> float:
    """How far the share of calls to the terminal goes beyond a half, where the task has tools besides it."""
    offered = {rollout.own_names.get(name, name) for name in rollout.tools} - {"finish", "todo"}
    used = [one.tool in TERMINAL for one in Trajectory(rollout).uses if one.tool in offered]
    share = sum(used) / len(used) if used and offered - TERMINAL else 0.0
    return -max(0.0, (share - FREE_TERMINAL) / (1 - FREE_TERMINAL))


def unfinished(task: Task, rollout: Rollout) -> float:
    """-1 where a limit ended the work, or nothing was changed. The tests grade whatever files are there, so they do not
    teach handing it in; and where no rollout solves its task, giving up at once would earn the most."""
    return 0.0 if rollout.stop in HANDED_IN and rollout.changed else -1.0


PARTS: dict[str, Callable[[Task, Rollout], float]] = {
    part.__name__: part
    for part in (broken_calls, open_todos, lint, comments, question, final_word, terminal_only, unfinished)
}
