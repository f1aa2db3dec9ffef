"""Calls and test runs: those that could not be run, were made before, read too much, or are more than the task needs.

What a task needs is shown by the others of the group: those that solved it with little. Left out: what was looked at
because of a failing test, needed or not; calls that change something; and messages that are long by themselves.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from offbook.signals.trajectory import At, ToolUse, Trajectory
from offbook.types import Rollout

HUGE_LINES = 600
HUGE_CHARS = 24_000  # about 6,000 tokens
WIDE_EDITS = 3  # so many edits of a file are worth reading all of it
LINES_LEFT = re.compile(r"\[cut: (\d{1,9}) lines are left, read on from line \d+\]$")
CHARS_LEFT = re.compile(r"\[(\d{1,9}) characters left out\]")
PROSE = (".md", ".rst", ".txt", ".log", ".out")
LONG_S = 30.0  # a suite that takes so long is worth narrowing
CLAIM = re.compile(
    r"\b(tests?|suite|checks?)\b[^.\n]{0,40}\b(pass(es|ed|ing)?|succeeds?|succeeded|green)\b"
    r"|\b(done|fixed|implemented|completed?|resolved|finished|works|working)\b",
    re.IGNORECASE,
)
FAILURE_SAID = re.compile(
    r"fail|\bnot\b|n't\b|cannot|\bunable|\bexcept (for|that)|unrelated|pre-?exist|flaky|\bstill\b|remain|broken|"
    r"\bbut\b|however|\bpartial|\bred\b|unverified|todo|unfinished|incomplete",
    re.IGNORECASE,
)
CONDITION = re.compile(r"\b(should|would|could|once|if|unless|until|when|after|to be|try)\b", re.IGNORECASE)
TIMES = 3.0  # the tokens of any lean sibling
MIN_SOLVED = 2  # siblings that solved it: one alone may have been lucky
FINDING = frozenset({"search_codebase", "list_dir"})
Found = Iterator[tuple[At, str]]  # messages that broke a rule, and what shows it


def unknown_tool(trajectory: Trajectory) -> Found:
    """A call to a tool that this task does not have: invented, or removed."""
    for use in trajectory.uses:
        if use.answer and use.answer.status == "unknown_tool":
            yield use.at, use.call.name


def call_not_readable(trajectory: Trajectory) -> Found:
    """A call that is written as other models write theirs, and was not read."""
    for use in trajectory.uses:
        if use.call.other_dialect:
            yield use.at, use.call.error or ""


def malformed_arguments(trajectory: Trajectory) -> Found:
    """A call that is not valid JSON or whose arguments are not the tool's."""
    for use in trajectory.uses:
        is_wrong = use.call.error or (use.answer and use.answer.status == "malformed")
        if is_wrong and not use.call.other_dialect:
            yield use.at, use.output or use.call.error or ""


def repeated_call(trajectory: Trajectory) -> Found:
    """The same call with the same answer as before, which is still in the window, and nothing changed in between."""
    seen: dict[tuple[int, str, str], ToolUse] = {}
    for use in trajectory.uses:
        if not use.went_well or not use.output.strip() or use.command.watches:
            continue
        key = (use.segment, _spelled(use), use.output)
        earlier = seen.get(key)
        if earlier and earlier.message != use.message and not _worth_again(trajectory, earlier, use):
            yield use.at, f"{use.call.name}: the same call and answer as in message {earlier.message}"
        seen[key] = use


def _spelled(use: ToolUse) -> str:
    return json.dumps([use.call.name, use.call.arguments], sort_keys=True, default=repr)


def _worth_again(trajectory: Trajectory, earlier: ToolUse, again: ToolUse) -> bool:
    """Whether something happened in between that an agent may want to see the effect of."""
    files = _files_read(again)
    for use in trajectory.uses[earlier.order + 1 : again.order]:
        if use.kind == "edit" and use.path in files and use.ran:
            return True  # whether or not it applied: a text that was not found is a reason to look once more
        if use.may_write and (not files or use.kind != "edit"):
            return True
        # In other agents' shells a folder stays changed, and some of their tools are not known to us.
        moves = re.search(r"\b(cd|pushd|export)\b", use.command.line)
        if trajectory.rollout.foreign and (use.kind == "other" or moves):
            return True
    return False


def _files_read(use: ToolUse) -> list[str]:
    return [use.path] if use.kind == "read" else use.command.shown


def whole_file_read(trajectory: Trajectory) -> Found:
    """All of a huge source file, without a range, that is not edited in several places later."""
    for use in trajectory.uses:
        files = _files_read(use)
        if len(files) != 1 or not use.went_well or files[0].endswith(PROSE):
            continue
        given = [value for value in use.call.arguments.values() if value is not None and value != "view"]
        if use.kind == "read" and len(given) != 1:  # any argument other than the path may be a range
            continue
        # What is shown and what the answer says was cut off.
        lines = use.output.count("\n") + sum(map(int, LINES_LEFT.findall(use.output)))
        chars = len(use.output) + sum(map(int, CHARS_LEFT.findall(use.output)))
        edits = [one for one in trajectory.uses[use.order :] if one.kind == "edit" and one.path == files[0]]
        if (lines >= HUGE_LINES or chars >= HUGE_CHARS) and len(edits) < WIDE_EDITS:
            yield use.at, f"{use.call.name} without a range: {lines} lines, {chars} characters"


def whole_suite_again(trajectory: Trajectory) -> Found:
    """All tests, although nothing changed since all were run: by the same call, or where they take long."""
    last: ToolUse | None = None  # that ran the whole suite
    for use in trajectory.uses:
        if use.tests is None:
            continue
        if last and last.tests and not use.tests.selection and last.segment == use.segment:
            again = _spelled(last) == _spelled(use) or last.tests.seconds >= LONG_S
            if again and last.message != use.message and not _changed_since(trajectory, last, use):
                yield use.at, f"all tests ran in message {last.message} and nothing changed since"
        last = use if not use.tests.selection and use.tests.failed is not None else None


def _changed_since(trajectory: Trajectory, last: ToolUse, use: ToolUse) -> bool:
    """Whether files may be others than when the last tests ran. Another agent's unknown tools may do anything."""
    between = trajectory.uses[last.order + 1 : use.order]
    kinds = ("edit", "other") if trajectory.rollout.foreign else ("edit",)
    return not use.command.only_redirects or any(one.may_write or one.kind in kinds for one in between)


def claimed_success(trajectory: Trajectory) -> Found:
    """The last message says it is done or passing, and every test run since the last change failed."""
    last_change = max((one.order for one in trajectory.edits), default=0)
    runs = [one.tests.failed for one in trajectory.uses[last_change:] if one.tests]
    if not trajectory.end or not runs or not all(runs) or FAILURE_SAID.search(trajectory.final):
        return
    for sentence in re.split(r"(?<=[.!?])\s+|\n", trajectory.final):
        if CLAIM.search(sentence) and not CONDITION.search(sentence) and not sentence.rstrip().endswith("?"):
            yield trajectory.end, f"{sentence.strip()!r}, but the last tests had {runs[-1]} failing"
            return


def more_than_needed(trajectory: Trajectory, times: float = TIMES) -> Found:
    """A rollout that spent over three times the tokens of its lean siblings, at the first call that was not needed.

    Up to a place in its middle a rollout is judged by what all of it spent (harness/agent.py keeps that), so a look can
    ask whether another message in that place would have been needed.
    """
    most = max(map(spent, _lean(trajectory)), default=0)
    if most and spent(trajectory.rollout) > times * most:
        tokens = f"{spent(trajectory.rollout)} tokens, lean siblings at most {most}"
        found = [(use.at, f"{use.call.name}: {why}; {tokens}") for use, why in unneeded(trajectory)]
        yield from found[:1]


def unneeded(trajectory: Trajectory) -> Iterator[tuple[ToolUse, str]]:
    """Calls that change nothing and that a rollout of this task can do without, with the reason: no lean sibling looked
    at that, or it was looked at already and nothing has changed since. Nothing where too few siblings solved it.

    After a failing test run, and right after a call that failed, looking elsewhere has a reason.
    """
    needed = {_look(one) for sibling in _lean(trajectory) for one in Trajectory(sibling, trajectory.task).uses}
    seen: set[str] = set()
    segment = 0
    failing = failed = False
    for use in trajectory.uses if needed else ():
        look = _look(use)
        call = _spelled(use)
        if use.may_write or use.segment != segment:  # what a summary left behind may be looked up again
            seen = set()
            segment = use.segment
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


def _look(use: ToolUse) -> tuple[str, ...]:
    """What a call looks at; which part of it and for which words does not matter. Empty for what is no look: an edit,
    the end, tools that are not known."""
    if not use.ran or use.may_write:
        return ()
    if use.tests:
        return ("tests",)
    if files := _files_read(use):
        return ("read", *files)
    if use.kind == "command" and not use.command.watches:
        return ("command", *sorted({words[0] for words in use.simple}))
    return (use.tool,) if use.tool in FINDING else ()
