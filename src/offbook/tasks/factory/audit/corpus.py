"""The search for leaks: does anything that the agent can read give the deleted code away?

A corpus is an index of everything readable, built once for places that do not change. A task's question is then a
look-up that names candidates, and only those are opened again and read closely.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

import numpy as np

from offbook.core import copies
from offbook.sandbox import hidden_in_sandboxes
from offbook.tasks.check import readable
from offbook.tasks.factory.audit.reading import Leaf, files_below, leaves
from offbook.tasks.factory.types import is_inside
from offbook.types import OffbookError, Task

LIBRARY = "python"  # how the standard library is called in a leak's path
REPEATED = 0.25  # of the removed lines, that the product may have elsewhere
SOURCE = (".py", ".pyi", ".pyx", ".pxd")
TREE = "tree"  # the place that a task's own files lie in
CANDIDATE = 0.35  # of the kept shingles make a file worth opening: less than the shares that decide


@dataclass(frozen=True)
class Leak:
    """A place that the agent can read and that gives deleted code away."""

    path: str  # inside archives as outer.zip!inner/path
    what: str  # "path::name" of the deleted code
    how: str  # which search found it
    evidence: str  # a short excerpt

    def __str__(self) -> str:
        return f"{self.what} in {self.path} ({self.how}): {self.evidence}"


class Corpus:
    """An index of all files below the places; `unread` says what is not in it and why.

    The index is two parallel arrays, sorted by hash: kept shingles, and the numbers of the leaves that have them.
    `leave_out` are folders that the agent does not see.
    """

    def __init__(self, places: Mapping[str, Path], leave_out: Iterable[Path] = ()):
        self.unread: dict[str, str] = {}
        self._where: list[tuple[Path, str]] = []  # of each leaf: the file it comes out of, its name
        kept = [np.zeros(0, dtype=np.uint64)]
        for path, leaf in self._leaves(places, frozenset(leave_out)):
            self._where.append((path, leaf.name))
            kept.append(_kept_of(leaf.text))
        hashes = np.concatenate(kept)
        numbers = np.repeat(np.arange(len(self._where), dtype=np.uint32), [len(each) for each in kept[1:]])
        order = np.argsort(hashes, kind="stable")
        self._hashes = hashes[order]
        self._numbers = numbers[order]

    @property
    def unread_leaks(self) -> list[Leak]:
        return [Leak(name, "", "unread", why) for name, why in self.unread.items()]

    def leaks(self, removed: Mapping[str, str], files: Mapping[str, str | None] | None = None) -> list[Leak]:
        """Where the removed code ("path::name" -> source) is found, in order of path.

        `files` are the files of the place "tree" as the task has them, None where one is gone: they take the place of
        those that were indexed.
        """
        files = {f"{TREE}/{path}": text for path, text in (files or {}).items()}
        wanted = [piece for what, source in removed.items() for piece in copies.wanted_pieces(what, source)]
        found = [leak for leak in self._search(wanted) if leak.path.partition("!")[0] not in files]
        for path, text in files.items():
            if text:
                found += _looked_at(Leaf(path, text.encode()), wanted)
        first = {(leak.path, leak.what): leak for leak in reversed(found)}  # of several ways to find it, the first
        # What is in an archive without compression shows in the archive's own bytes too.
        outer = {(leak.path.rpartition("!")[0], leak.what) for leak in found}
        return [first[place] for place in sorted(first.keys() - outer)]

    def _leaves(self, places: Mapping[str, Path], leave_out: frozenset[Path]) -> Iterator[tuple[Path, Leaf]]:
        for label, root in places.items():
            if not root.exists():
                raise FileNotFoundError(f"{root} is not there to be audited")
            seen = set()
            # Git folders last, without what a file has too: that is the same text once more.
            for path, name in sorted(files_below(root, leave_out), key=lambda found: found[0].is_dir()):
                for leaf in leaves(path, f"{label}/{name}", self.unread):
                    digest = hash(leaf.data)
                    if not (path.is_dir() and digest in seen):
                        seen.add(digest)
                        yield path, leaf

    def _search(self, wanted: Sequence[copies.Wanted]) -> Iterator[Leak]:
        """Candidates are opened file by file, so an archive with many of them is unpacked once."""
        to_open: dict[Path, dict[str, list[copies.Wanted]]] = defaultdict(lambda: defaultdict(list))
        for piece in wanted:
            for number in sorted({number for way, hashes in piece.shingles for number in self._having(way, hashes)}):
                path, name = self._where[number]
                to_open[path][name].append(piece)
        for path, pieces_of in to_open.items():
            name = next(iter(pieces_of)).partition("!")[0]
            for leaf in leaves(path, name, {}):
                if leaf.name in pieces_of:
                    yield from _looked_at(leaf, pieces_of[leaf.name])

    def _having(self, way: copies.Way, shingles: copies.Hashes) -> list[int]:
        """The numbers of the leaves that have enough of the wanted shingles."""
        kept = copies.winnowed(shingles, way.window)
        starts = np.searchsorted(self._hashes, kept, side="left")
        ends = np.searchsorted(self._hashes, kept, side="right")
        having = [self._numbers[start:end] for start, end in zip(starts, ends, strict=True)]
        numbers: list[int] = np.flatnonzero(np.bincount(np.concatenate(having)) >= CANDIDATE * len(kept)).tolist()
        return numbers


@lru_cache(maxsize=2048)  # repositories have pytest and what it needs in common, and a candidate's files are read twice
def _kept_of(text: str) -> copies.Hashes:
    tokens = copies.tokens_of(copies.normalise(text))
    return np.concatenate([copies.winnowed(way.shingles(tokens), way.window) for way in copies.WAYS])


def _looked_at(leaf: Leaf, wanted: Sequence[copies.Wanted]) -> Iterator[Leak]:
    page = copies.Page(leaf.text, leaf.name.endswith(SOURCE))
    for piece in wanted:
        if found := page.find(piece):
            yield Leak(leaf.name, piece.what, *found)


def given_away(
    leaks: Sequence[Leak], removed: Mapping[str, str], targets: Iterable[str], product: Sequence[str]
) -> list[Leak]:
    """All leaks, unless they are no more than the product repeating itself: small parts of what was removed, no target
    among them, that other code of the product has as well. To read that code is what the task asks for."""
    found = {leak.what for leak in leaks}
    in_product = all(is_inside(leak.path.removeprefix(f"{TREE}/"), product) for leak in leaks)
    repeated = sum(len(removed[what].split("\n")) for what in found)
    most = REPEATED * sum(len(source.split("\n")) for source in removed.values())
    return [] if in_product and not found & {*targets} and repeated <= most else list(leaks)


def standard_library(environment: Path) -> Corpus:
    base = os.path.realpath(environment / "python" / "bin" / "python")
    (library,) = (environment / "python" / "lib").iterdir()
    return _corpus_of(Path(base).parent.parent / "lib" / library.name, tuple(hidden_in_sandboxes(environment)))


@cache
def _corpus_of(library: Path, hidden: tuple[Path, ...]) -> Corpus:
    return Corpus({LIBRARY: library}, leave_out=hidden)


def audit_all(
    tasks: Sequence[Task], bad: dict[str, str], progress: Callable[[float], None] = lambda share: None
) -> dict[str, list[Leak]]:
    """By task: where its deleted code can be read. What tasks have in common is read once. Those whose folders cannot
    be read are put into `bad` with the reason."""
    installed = cache(lambda environment: [Corpus({"deps": environment / "deps"}), standard_library(environment)])
    found: dict[str, list[Leak]] = {}
    for number, task in enumerate(tasks, 1):
        with readable(task, bad):
            removed = removed_from(task)
            places = [Corpus({TREE: task.tree})]
            if task.suite.environment is not None:
                places += installed(task.suite.environment)
            leaks = [leak for corpus in places for leak in corpus.leaks(removed)]
            targets = task.deleted.targets if task.deleted else removed
            found[task.id] = given_away(leaks, removed, targets, task.sources)
            found[task.id] += [leak for corpus in places for leak in corpus.unread_leaks]
        progress(number / len(tasks))
    return found


def removed_from(task: Task) -> dict[str, str]:
    """The deleted code, piece by piece, as its maker wrote it down."""
    file = task.folder / "solution" / "removed.json"
    if not file.is_file():
        raise OffbookError(
            f"{task.folder} does not say what was deleted (solution/removed.json), so nothing can be searched for"
        )
    removed: dict[str, str] = json.loads(file.read_text())
    return removed
