"""The same code in two repositories: vendored copies, forks, functions that everybody copies from one another.

What a task's deletion took away is seen as the set of its runs of SHINGLE tokens, without comments, docstrings and
layout. Of that set the smallest hashes are kept, which is enough to tell which share two sets have in common (Broder
1997, bottom-k sketch); a set of fewer is kept whole.
"""

from __future__ import annotations

import json
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from offbook.core.copies import divided, normalise, parsed, tokens_of, without_comments

SHINGLE, KEPT = 5, 64
SAME = 0.7  # of the runs of both
MOST = 200  # that are compared: those that have most in common
Sketch = tuple[int, ...]


def sketch_of(sources: Iterable[str]) -> Sketch:
    """Of Python. What is nothing but comments and docstrings is taken as it is."""
    return sketch_of_words(
        tokens_of(normalise(divided(*parsed(without_comments(source)))[1])) or tokens_of(source) for source in sources
    )


def sketch_of_words(texts: Iterable[Sequence[str]]) -> Sketch:
    found: set[int] = set()
    for words in texts:
        for start in range(max(1, len(words) - SHINGLE + 1)):
            found.add(zlib.crc32(" ".join(words[start : start + SHINGLE]).encode()))
    return tuple(sorted(found)[:KEPT])


def shared(one: Sketch, other: Sketch) -> float:
    """The share of what both have together, about."""
    size = KEPT if KEPT in (len(one), len(other)) else len({*one, *other})
    smallest = sorted({*one, *other})[:size]
    return len({*smallest} & {*one} & {*other}) / len(smallest) if smallest else 0.0


class Taken:
    """What tasks of all repositories of a factory took away, as their outcomes say, of other processes too."""

    def __init__(self, factory: Path):
        self._factory = factory
        self._read: dict[Path, int] = {}  # how far
        self._known: list[tuple[str, str, Sketch]] = []  # repository, task, sketch
        self._having: dict[int, list[int]] = defaultdict(list)  # hash -> places in that list

    def repeats(self, repository: str, sketch: Sequence[int]) -> str:
        """The task of another repository that is nearly the same, or nothing."""
        for path in sorted(self._factory.glob("*/outcomes.jsonl")):
            for row in self._new_in(path):
                for number in row[2]:
                    self._having[number].append(len(self._known))
                self._known.append(row)
        near = Counter(place for number in sketch for place in self._having.get(number, ()))
        for place, _ in near.most_common(MOST):
            other, task, known = self._known[place]
            if other != repository and shared(tuple(sketch), known) >= SAME:
                return task
        return ""

    def _new_in(self, path: Path) -> Iterator[tuple[str, str, Sketch]]:
        start = self._read.get(path, 0)
        if path.stat().st_size == start:
            return
        with open(path, "rb") as file:
            file.seek(start)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._read[path] = start + len(whole)
        for line in whole.splitlines():
            with suppress(ValueError):  # of a call that was killed
                row = json.loads(line)
                if row.get("sketch") and not row["refused"]:
                    yield row["repository"], row["id"], tuple(row["sketch"])
