"""Exact search and replace, with explanations if the text is missing or occurs more than once."""

from __future__ import annotations

import difflib
import re
from itertools import islice

from offbook.agent.harness.matching import lines_of
from offbook.agent.harness.tool import ToolFailed

MAX_PLACES = 10  # named where a text occurs several times
MAX_LINES = 4  # of the file, quoted in a mismatch
QUOTED_CHARS = 120
COMPARED_LINES = 5000
SIMILAR = 0.6


def apply_edits(path: str, text: str, edits: list[tuple[str, str]]) -> str:
    """The text after all replacements, in order. An empty text can be given a first one."""
    if "\ufffd" in text:
        raise ToolFailed(f"{path} is not UTF-8 text; an edit would damage it")
    for number, (old, new) in enumerate(edits, 1):
        try:
            text = new if number == 1 and not text and not old else replace_once(path, text, old, new)
        except ToolFailed as error:
            if len(edits) == 1:
                raise
            raise ToolFailed(f"replacement {number} of {len(edits)} fails, so none was made: {error}") from None
    return text


def replace_once(path: str, text: str, old: str, new: str) -> str:
    """`text` with the only occurrence of `old` replaced."""
    if not old:
        raise ToolFailed(f"{path} has text already; say which part of it to replace")
    if old == new:
        raise ToolFailed("the new text is the same as the old: nothing would change")
    # Overlapping occurrences count: which one is meant is just as unclear.
    found = re.finditer(f"(?={re.escape(old)})", text)
    places = [match.start() for match in islice(found, MAX_PLACES + 1)]
    if not places:
        raise ToolFailed(mismatch(path, text, old))
    if len(places) > 1:
        times = f"more than {MAX_PLACES}" if len(places) > MAX_PLACES else str(len(places))
        lines = ", ".join(str(text.count("\n", 0, place) + 1) for place in places[:MAX_PLACES])
        raise ToolFailed(
            f"the text to replace occurs {times} times in {path}, at lines {lines}; give more of what surrounds it"
        )
    return text[: places[0]] + new + text[places[0] + len(old) :]


def mismatch(path: str, text: str, old: str) -> str:
    """Explain in at most six lines why `old` is not in `text`."""
    missing = f"the text to replace is not in {path}"
    if not text:
        return f"{missing}, which is empty"
    if "\r\n" in text and old.replace("\n", "\r\n") in text:
        return f"{missing}: its lines end in \\r\\n, yours in \\n"
    if "\\n" in old and old.replace("\\n", "\n") in text:
        return f"{missing}: you wrote \\n as two characters where the file has line breaks"
    have, want = lines_of(text), lines_of(old)
    first = _same_but_for_spaces(have, want)
    if first is not None:
        return f"{missing}, but this differs from it in spaces only{_difference(have, want, first)}:" + _quote(
            have, first, len(want)
        )
    nearest = _nearest(have, want)
    if nearest is None:
        return f"{missing}, nor anything like it; the file has {len(have)} lines"
    return f"{missing}; the nearest is:" + _quote(have, nearest, len(want))


def _same_but_for_spaces(have: list[str], want: list[str]) -> int | None:
    bare = ["".join(line.split()) for line in have]
    wanted = ["".join(line.split()) for line in want]
    if not any(wanted):
        return None
    for first in range(len(bare) - len(wanted) + 1):
        if bare[first : first + len(wanted)] == wanted:
            return first
    return None


def _difference(have: list[str], want: list[str], first: int) -> str:
    """The first line whose indentation differs, in words; nothing where the difference is elsewhere."""
    for offset, line in enumerate(want):
        theirs = have[first + offset]
        indent, wanted = _indent(theirs), _indent(line)
        if theirs.strip() and indent != wanted:
            return f" (line {first + offset + 1} starts with {_spelled(indent)}, yours with {_spelled(wanted)})"
        if theirs.rstrip() == line.rstrip() and theirs != line:
            return f" (line {first + offset + 1} differs in spaces at its end)"
    return ""


def _indent(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]


def _spelled(space: str) -> str:
    counts = [(space.count(" "), "space"), (space.count("\t"), "tab")]
    parts = [f"{count} {name}{'s' if count > 1 else ''}" for count, name in counts if count]
    return " and ".join(parts) or "no space"


def _nearest(have: list[str], want: list[str]) -> int | None:
    """Where the text would begin, going by the line of the file most like its longest line."""
    offset, line = max(enumerate(want), key=lambda entry: len(entry[1].strip()))
    matcher = difflib.SequenceMatcher(b=line.strip()[:QUOTED_CHARS])
    best, place = SIMILAR, None
    for number, candidate in enumerate(have[:COMPARED_LINES]):
        matcher.set_seq1(candidate.strip()[:QUOTED_CHARS])
        if matcher.real_quick_ratio() > best and matcher.quick_ratio() > best and matcher.ratio() > best:
            best, place = matcher.ratio(), max(0, number - offset)
    return place


def _quote(have: list[str], first: int, count: int) -> str:
    shown = have[first : first + min(count, MAX_LINES)]
    more = f"\n[{count - MAX_LINES} more lines]" if count > MAX_LINES else ""
    return "".join(f"\n{number}: {line[:QUOTED_CHARS]}" for number, line in enumerate(shown, first + 1)) + more
