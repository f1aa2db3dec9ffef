"""Any text as overlapping runs of tokens, so that a copy of code is found however it is dressed.

Text is read in one way only, whether it is the deleted code, a page of documentation or a line of JSON: escapes are
undone; quotes, commas, comment marks and what stands in front of a line (`+`, `>>>`, a line number) fall away. What is
left is cut into shingles, runs of SHINGLE tokens. The second kind of shingle knows a free name only by how far back it
was last used, so it stays the same where local names are changed.
"""

from __future__ import annotations

import builtins
import html
import keyword
import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Hashes = npt.NDArray[np.uint64]

SHINGLE = 10  # tokens; a line or a line and a half of Python
RENAMED_SHINGLE = 16  # longer, because it says less
KEPT_NAMES = frozenset(keyword.kwlist) | frozenset(dir(builtins)) | {"self", "cls"}

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_NEWLINE_ESCAPE = re.compile(r"\\+[nrt]")
_CODE_ESCAPE = re.compile(r"\\+(?:u00|x)([0-9a-fA-F]{2})")
_MARKUP = re.compile(r"</[A-Za-z]|&(?:lt|gt|amp|quot|nbsp|#\d+|#x[0-9A-Fa-f]+);")
_TAG = re.compile(r"<[A-Za-z/!][^<>]{0,400}>")
_MARKS = r"[\s>|+\-#*!.:=~^/\"'`,;\\]"
_LINE_START = re.compile(rf"(?m)^{_MARKS}+(?:\d+[ \t:|]+{_MARKS}*)?|^\d+[ \t:|]+{_MARKS}*")
_TOKEN = re.compile(r"[^\W\d]\w*|\d[\w.]*|[^\w\s\"'`\\,;#\x00]")


def normalise(text: str) -> str:
    """The text without colours and escapes; a text with markup in it is followed by itself without the markup."""
    if "\x1b" in text:
        text = _ANSI.sub("", text)
    if "\\" in text:
        text = _CODE_ESCAPE.sub(lambda match: chr(int(match[1], 16)), _NEWLINE_ESCAPE.sub("\n", text))
    if _MARKUP.search(text):
        # Both, since `a <b and c> d` in source would pass for a tag.
        text = text + "\n" + html.unescape(_TAG.sub(" ", text))
    return _LINE_START.sub("", text)


def hashed(words: list[str]) -> Hashes:
    """Python's own hash of each word; good within one process, which is as long as an index lives."""
    return np.fromiter(map(hash, words), dtype=np.int64, count=len(words)).view(np.uint64)


_DOT, _OPEN = hashed([".", "("])
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_SHIFT = np.uint64(29)


def _rolled(columns: Iterator[Hashes], count: int) -> Hashes:
    total = np.zeros(count, dtype=np.uint64)
    for column in columns:
        total = (total ^ column) * _FACTOR
        total ^= total >> _SHIFT
    return total


def named_shingles(tokens: list[str]) -> Hashes:
    count = len(tokens) - SHINGLE + 1
    if count <= 0:
        return np.zeros(0, dtype=np.uint64)
    values = hashed(tokens)
    return _rolled((values[start : start + count] for start in range(SHINGLE)), count)


def renamed_shingles(tokens: list[str]) -> Hashes:
    """Free names are those that are no keyword, built-in, attribute or called function."""
    count = len(tokens) - RENAMED_SHINGLE + 1
    if count <= 0:
        return np.zeros(0, dtype=np.uint64)
    values = hashed(tokens)
    _, first, kinds = np.unique(values, return_index=True, return_inverse=True)
    is_name = [(tokens[i][0].isalpha() or tokens[i][0] == "_") and tokens[i] not in KEPT_NAMES for i in first]
    free = np.array(is_name, dtype=bool)[kinds]
    free[1:] &= values[:-1] != _DOT
    free[:-1] &= values[1:] != _OPEN
    places = np.flatnonzero(free)
    places = places[np.argsort(kinds[places], kind="stable")]
    again = kinds[places[1:]] == kinds[places[:-1]]
    distance = np.zeros(len(tokens), dtype=np.uint64)
    distance[places[1:][again]] = (places[1:] - places[:-1])[again]

    def column(offset: int) -> Hashes:
        inside = slice(offset, offset + count)
        # A use before the shingle's start is not part of the shingle.
        seen = np.where(distance[inside] <= np.uint64(offset), distance[inside], np.uint64(0))
        return np.where(free[inside], seen, values[inside])

    return _rolled((column(offset) for offset in range(RENAMED_SHINGLE)), count)


def winnowed(shingles: Hashes, window: int) -> Hashes:
    """The least of every `window` shingles in a row (Schleimer, Wilkerson and Aiken 2003, section 3).

    Two texts that share a run of `window` shingles share one of those kept.
    """
    if len(shingles) < window:
        return np.unique(shingles)
    count = len(shingles) - window + 1
    least = shingles[:count]
    for start in range(1, window):
        least = np.minimum(least, shingles[start : start + count])
    return np.unique(least)


def tokens_of(normalised: str) -> list[str]:
    return _TOKEN.findall(normalised)


@dataclass(frozen=True, slots=True)
class Page:
    """A text that has been opened again, with everything that is needed to look closely."""

    text: str
    tokens: list[str]
    named: Hashes
    renamed: Hashes
    is_source: bool


def page_of(text: str, is_source: bool) -> Page:
    text = normalise(text)
    tokens = tokens_of(text)
    return Page(text, tokens, named_shingles(tokens), renamed_shingles(tokens), is_source)


def best_stretch(shingles: Hashes, wanted: Hashes, num_tokens: int) -> tuple[float, int]:
    """The largest share of the wanted shingles that lies close together, and where that stretch starts.

    Over a whole large file the shingles of a function add up by chance; within its own length they do not.
    """
    distinct = np.unique(wanted)
    if not len(distinct):
        return 0.0, 0
    slots = np.minimum(np.searchsorted(distinct, shingles), len(distinct) - 1)
    hits = np.flatnonzero(distinct[slots] == shingles)
    if not len(hits):
        return 0.0, 0
    ends = np.searchsorted(hits, hits + int(num_tokens * 1.5) + SHINGLE)
    most = np.argsort(np.arange(len(hits)) - ends, kind="stable")[:16]
    counts = [len(np.unique(slots[hits[start : ends[start]]])) for start in most]
    best = int(np.argmax(counts))
    return counts[best] / len(distinct), int(hits[most[best]])


def excerpt(page: Page, start: int, length: int = 160) -> str:
    for number, match in enumerate(_TOKEN.finditer(page.text)):
        if number == start:
            return " ".join(page.text[match.start() : match.start() + length].split())
    return ""
