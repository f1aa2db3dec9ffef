"""The same code in two repositories: vendored copies, forks, functions that everybody copies from one another.

What a task's deletion took away is seen as the set of its runs of SHINGLE tokens, without comments, docstrings and
layout. Of that set the smallest hashes are kept, which is enough to tell which share two sets have in common (Broder
1997, bottom-k sketch); a set of fewer is kept whole.
"""

from __future__ import annotations

import ast
import io
import json
import tokenize
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

SHINGLE, KEPT = 5, 64
SAME = 0.7  # of the runs of both
MOST = 200  # that are compared: those that have most in common
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
Sketch = tuple[int, ...]


def sketch_of(sources: Iterable[str]) -> Sketch:
    found: set[int] = set()
    for source in sources:
        words = _words(source)
        for start in range(max(1, len(words) - SHINGLE + 1)):
            found.add(zlib.crc32(" ".join(words[start : start + SHINGLE]).encode()))
    return tuple(sorted(found)[:KEPT])


def shared(one: Sketch, other: Sketch) -> float:
    """The share of what both have together, about."""
    size = KEPT if KEPT in (len(one), len(other)) else len({*one, *other})
    smallest = sorted({*one, *other})[:size]
    return len({*smallest} & {*one} & {*other}) / len(smallest) if smallest else 0.0


def _words(source: str) -> list[str]:
    """The tokens, as Python sees them; the words of what it cannot read."""
    with suppress(SyntaxError, ValueError, RecursionError):  # of a method: it is indented
        tree = ast.parse(f"if 1:\n{source}").body[0] if source[:1] in (" ", "\t") else ast.parse(source)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and ast.get_docstring(node):
                node.body = node.body[1:] or [ast.Pass()]
        source = "\n".join(map(ast.unparse, getattr(tree, "body")))  # noqa: B009  # of a module or of `if 1`
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    except (SyntaxError, tokenize.TokenError):
        return source.split()
    return [token.string for token in tokens if token.type not in LAYOUT]


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
