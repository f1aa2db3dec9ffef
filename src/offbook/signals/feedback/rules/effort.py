"""More work than the task needs. What it needs is shown by the others of the group: those that solved it with little.

Left out: what was looked at because of a failing test, needed or not; calls that change something; and messages that
are long by themselves.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from offbook.signals.trajectory import At, ToolUse, Trajectory
from offbook.types import Rollout

TIMES = 3.0  # the tokens of any lean sibling
MIN_SOLVED = 2  # siblings that solved it: one alone may have been lucky
FINDING = frozenset({"search_codebase", "list_dir"})
Look = tuple[str, ...]  # what a call looks at; which part of it and for which words does not matter


def more_than_needed(trajectory: Trajectory, times: float = TIMES) -> Iterator[tuple[At, str]]:
    """A rollout that spent over three times the tokens of its lean siblings, at the first call that was not needed.

    Up to a place in its middle a rollout is judged by what all of it spent (harness/again.py keeps that), so a look can
    ask whether another message in that place would have been needed.
    """
    lean = _lean(trajectory)
    if not lean or spent(trajectory.rollout) <= times * max(map(spent, lean)):
        return
    for use, why in unneeded(trajectory):
        tokens = f"{spent(trajectory.rollout)} tokens, lean siblings at most {max(map(spent, lean))}"
        yield use.at, f"{use.call.name}: {why}; {tokens}"
        return


def unneeded(trajectory: Trajectory) -> Iterator[tuple[ToolUse, str]]:
    """Calls that change nothing and that a rollout of this task can do without, with the reason: no lean sibling looked
    at that, or it was looked at already and nothing has changed since. Nothing where too few siblings solved it.

    After a failing test run, and right after a call that failed, looking elsewhere has a reason.
    """
    needed = {_look(one) for sibling in _lean(trajectory) for one in Trajectory(sibling, trajectory.task).uses}
    seen: set[str] = set()
    segment, failing, failed = 0, False, False
    for use in trajectory.uses if needed else ():
        look = _look(use)
        call = json.dumps([use.call.name, use.call.arguments], sort_keys=True, default=repr)
        if use.may_write or use.segment != segment:  # what a summary left behind may be looked up again
            seen, segment = set(), use.segment
        if look and call in seen:
            yield use, "the same call as before, and nothing has changed since"
        elif look and look not in needed and not failing and not failed:
            yield use, "no lean sibling looked at that"
        if use.went_well:
            seen.add(call)
        if use.tests:
            failing = bool(use.tests.failed)
        failed = not use.went_well


def spent(rollout: Rollout) -> int:
    """What it wrote and what it asked tools for."""
    return rollout.usage.sampled_tokens + rollout.usage.output_tokens


def _lean(trajectory: Trajectory) -> list[Rollout]:
    """The half of the siblings that solved the task, and with the fewest tokens. Other agents' tokens are not known."""
    solved = sorted((one for one in trajectory.siblings if one.solved and spent(one)), key=spent)
    return solved[: (len(solved) + 1) // 2] if len(solved) >= MIN_SOLVED else []


def _look(use: ToolUse) -> Look:
    """Empty for what is no look: an edit, the end, tools that are not known."""
    if not use.ran or use.may_write:
        return ()
    if use.tests:
        return ("tests",)
    if use.kind == "read":
        return ("read", use.path)
    if use.command and not use.command.watches:
        programs = sorted({words[0] for words in use.simple if words})
        return ("read", *use.command.shown) if use.command.shown else ("command", *programs)
    return (use.tool,) if use.tool in FINDING else ()
