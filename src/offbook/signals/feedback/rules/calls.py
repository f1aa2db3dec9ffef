"""Calls that could not be run, that were made before, or that read more than was needed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from offbook.signals.trajectory import At, ToolUse, Trajectory

HUGE_LINES = 600
HUGE_CHARS = 24_000  # about 6,000 tokens
WIDE_EDITS = 3  # so many edits of a file are worth reading all of it
LINES_LEFT = re.compile(r"\[cut: (\d{1,9}) lines are left, read on from line \d+\]$")
CHARS_LEFT = re.compile(r"\[(\d{1,9}) characters left out\]|(\d{1,9}) characters elided")
PROSE = (".md", ".rst", ".txt", ".log", ".out")


def unknown_tool(trajectory: Trajectory) -> Iterator[tuple[At, str]]:
    """A call to a tool that this task does not have: invented, or removed."""
    for use in trajectory.uses:
        if use.answer and use.answer.status == "unknown_tool":
            yield use.at, use.call.name


def malformed_arguments(trajectory: Trajectory) -> Iterator[tuple[At, str]]:
    """A call that is not valid JSON or whose arguments are not the tool's."""
    for use in trajectory.uses:
        if use.call.error or (use.answer and use.answer.status == "malformed"):
            yield use.at, use.output or use.call.error or ""


def repeated_call(trajectory: Trajectory) -> Iterator[tuple[At, str]]:
    """The same call with the same answer as before, which is still in the window, and nothing changed in between."""
    seen: dict[tuple[int, str, str, str], ToolUse] = {}
    for use in trajectory.uses:
        if not use.went_well or not use.output.strip() or (use.command and use.command.watches):
            continue
        arguments = json.dumps(use.call.arguments, sort_keys=True, default=repr)
        key = (use.segment, use.call.name, arguments, use.output)
        earlier = seen.get(key)
        if earlier and earlier.message != use.message and not _worth_again(trajectory, earlier, use):
            yield use.at, f"{use.call.name}: the same call and answer as in message {earlier.message}"
        seen[key] = use


def _worth_again(trajectory: Trajectory, earlier: ToolUse, again: ToolUse) -> bool:
    """Whether something happened in between that an agent may want to see the effect of."""
    files = _files_read(again)
    for use in trajectory.uses[earlier.order + 1 : again.order]:
        if use.kind == "edit" and use.path in files and use.ran:
            return True  # whether or not it applied: a text that was not found is a reason to look once more
        if use.may_write and (not files or use.kind != "edit"):
            return True
        if trajectory.rollout.foreign and _is_stateful(use):
            return True
    return False


def _files_read(use: ToolUse) -> tuple[str, ...]:
    if use.kind == "read":
        return (use.path,)
    return use.command.shown if use.command else ()


def _is_stateful(use: ToolUse) -> bool:
    """In other agents' shells a folder stays changed, and some of their tools are not known to us."""
    line = next((value for value in use.call.arguments.values() if isinstance(value, str)), "")
    return use.kind == "other" or (use.kind == "command" and bool(re.search(r"\b(cd|pushd|export)\b", line)))


def whole_file_read(trajectory: Trajectory) -> Iterator[tuple[At, str]]:
    """All of a huge source file, without a range, that is not edited in several places later."""
    for use in trajectory.uses:
        files = _files_read(use)
        if len(files) != 1 or not use.went_well or files[0].endswith(PROSE) or _has_range(use):
            continue
        lines, chars = _size(use.output)
        if lines < HUGE_LINES and chars < HUGE_CHARS:
            continue
        later = trajectory.uses[use.order + 1 :]
        if sum(one.kind == "edit" and one.path == files[0] for one in later) < WIDE_EDITS:
            extent = f"{lines} lines" if lines >= HUGE_LINES else f"{chars} characters"
            yield use.at, f"{use.call.name} without a range: {extent}"


def _has_range(use: ToolUse) -> bool:
    """Any argument other than the path may be one."""
    given = [value for value in use.call.arguments.values() if value is not None and value != "view"]
    return use.kind == "read" and len(given) != 1


def _size(answer: str) -> tuple[int, int]:
    """Lines and characters of what was asked for: what is shown and what the answer says was cut off."""
    lines, chars = answer.count("\n"), len(answer)
    if cut := LINES_LEFT.search(answer[-200:]):
        lines += int(cut.group(1))
    elif "characters" in answer and (cut := CHARS_LEFT.search(answer)):
        chars += int(cut.group(1) or cut.group(2))
    return lines, chars
