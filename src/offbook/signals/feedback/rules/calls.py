"""Calls that could not be run, that were made before, or that read more than was needed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from offbook.signals.trajectory import Acts, At, Exchange

HUGE_LINES = 600
HUGE_CHARS = 24_000  # about 6,000 tokens
WIDE_EDITS = 3  # so many edits of a file are worth reading all of it
LINES_LEFT = re.compile(r"\[cut: (\d{1,9}) lines are left, read on from line \d+\]$")
CHARS_LEFT = re.compile(r"\[(\d{1,9}) characters left out\]|(\d{1,9}) characters elided")
PROSE = (".md", ".rst", ".txt", ".log", ".out")


def unknown_tool(acts: Acts) -> Iterator[tuple[At, str]]:
    """A call to a tool that this task does not have: invented, or removed."""
    for exchange in acts.exchanges:
        if exchange.answer and exchange.answer.status == "unknown_tool":
            yield exchange.at, exchange.call.name


def malformed_arguments(acts: Acts) -> Iterator[tuple[At, str]]:
    """A call that is not valid JSON or whose arguments are not the tool's."""
    for exchange in acts.exchanges:
        if exchange.call.error or (exchange.answer and exchange.answer.status == "malformed"):
            yield exchange.at, exchange.output or exchange.call.error or ""


def repeated_call(acts: Acts) -> Iterator[tuple[At, str]]:
    """The same call with the same answer as before, which is still in the window, and nothing changed in between."""
    seen: dict[tuple[int, str, str, str], Exchange] = {}
    for exchange in acts.exchanges:
        if not exchange.went_well or not exchange.output.strip() or (exchange.command and exchange.command.watches):
            continue
        arguments = json.dumps(exchange.call.arguments, sort_keys=True, default=repr)
        key = (exchange.segment, exchange.call.name, arguments, exchange.output)
        earlier = seen.get(key)
        if earlier and earlier.message != exchange.message and not _worth_again(acts, earlier, exchange):
            yield exchange.at, f"{exchange.call.name}: the same call and answer as in message {earlier.message}"
        seen[key] = exchange


def _worth_again(acts: Acts, earlier: Exchange, again: Exchange) -> bool:
    """Whether something happened in between that an agent may want to see the effect of."""
    files = _files_read(again)
    for exchange in acts.exchanges[earlier.order + 1 : again.order]:
        if exchange.kind == "edit" and exchange.path in files and exchange.ran:
            return True  # whether or not it applied: a text that was not found is a reason to look once more
        if exchange.may_write and (not files or exchange.kind != "edit"):
            return True
        if acts.rollout.foreign and _is_stateful(exchange):
            return True
    return False


def _files_read(exchange: Exchange) -> tuple[str, ...]:
    if exchange.kind == "read":
        return (exchange.path,)
    return exchange.command.shown if exchange.command else ()


def _is_stateful(exchange: Exchange) -> bool:
    """In other agents' shells a folder stays changed, and some of their tools are not known to us."""
    line = next((value for value in exchange.call.arguments.values() if isinstance(value, str)), "")
    return exchange.kind == "other" or (exchange.kind == "command" and bool(re.search(r"\b(cd|pushd|export)\b", line)))


def whole_file_read(acts: Acts) -> Iterator[tuple[At, str]]:
    """All of a huge source file, without a range, that is not edited in several places later."""
    for exchange in acts.exchanges:
        files = _files_read(exchange)
        if len(files) != 1 or not exchange.went_well or files[0].endswith(PROSE) or _has_range(exchange):
            continue
        lines, chars = _size(exchange.output)
        if lines < HUGE_LINES and chars < HUGE_CHARS:
            continue
        later = acts.exchanges[exchange.order + 1 :]
        if sum(one.kind == "edit" and one.path == files[0] for one in later) < WIDE_EDITS:
            extent = f"{lines} lines" if lines >= HUGE_LINES else f"{chars} characters"
            yield exchange.at, f"{exchange.call.name} without a range: {extent}"


def _has_range(exchange: Exchange) -> bool:
    """Anything beside the path may be one."""
    given = [value for value in exchange.call.arguments.values() if value is not None and value != "view"]
    return exchange.kind == "read" and len(given) != 1


def _size(answer: str) -> tuple[int, int]:
    """Lines and characters of what was asked for: what is shown and what the answer says was cut off."""
    lines, chars = answer.count("\n"), len(answer)
    if cut := LINES_LEFT.search(answer[-200:]):
        lines += int(cut.group(1))
    elif "characters" in answer and (cut := CHARS_LEFT.search(answer)):
        chars += int(cut.group(1) or cut.group(2))
    return lines, chars
