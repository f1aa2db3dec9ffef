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
import numpy.typing as npt

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
WINDOW = copies.FEWEST
RENAMED_WINDOW = 6
# What share of the kept shingles makes a file worth opening. Lower than the shares that decide.
CANDIDATE_SOURCE = 0.6
CANDIDATE_OTHER = 0.35
CANDIDATE_RENAMED = 0.35


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

    `leave_out` are folders that the agent does not see.
    """

    def __init__(self, places: Mapping[str, Path], leave_out: Iterable[Path] = ()):
        self.unread: dict[str, str] = {}
        self._index = _Index(self._leaves(places, frozenset(leave_out)))

    @property
    def unread_leaks(self) -> list[Leak]:
        return [Leak(name, "", "unread", why) for name, why in self.unread.items()]

    def leaks(self, removed: Mapping[str, str], files: Mapping[str, str | None] | None = None) -> list[Leak]:
        """Where the removed code ("path::name" -> source) is found, in order of path.

        `files` are the files of the place "tree" as the task has them, None where one is gone: they take the place of
        those that were indexed.
        """
        files = {f"{TREE}/{path}": text for path, text in (files or {}).items()}
        own = [Leaf(path, text.encode()) for path, text in files.items() if text]
        wanted = [piece for what, source in removed.items() for piece in copies.wanted_pieces(what, source, "")]
        found = [leak for leak in self._index.search(wanted) if leak.path.partition("!")[0] not in files]
        found += [leak for leaf in own for leak in _looked_at(leaf, wanted)]
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
                for leaf in leaves(path, f"{label}/{name}", self.unread.__setitem__):
                    digest = hash(leaf.data)
                    if not (path.is_dir() and digest in seen):
                        seen.add(digest)
                        yield path, leaf


class _Index:
    """Which leaves have which shingles."""

    def __init__(self, found: Iterable[tuple[Path, Leaf]]):
        self.where: list[tuple[Path, str]] = []  # of each leaf: the file it comes out of, its name
        named = []
        renamed = []
        for path, leaf in found:
            self.where.append((path, leaf.name))
            shingles = _kept_of(leaf.text)
            named.append(shingles[0])
            renamed.append(shingles[1])
        self.named = _Postings(named)
        self.renamed = _Postings(renamed)
        is_source = np.array([name.endswith(SOURCE) for _, name in self.where], dtype=bool)
        self.lowest = np.where(is_source, CANDIDATE_SOURCE, CANDIDATE_OTHER)

    def search(self, wanted: Sequence[copies.Wanted]) -> Iterator[Leak]:
        """Candidates are opened file by file, so an archive with many of them is unpacked once."""
        to_open: dict[Path, dict[str, list[copies.Wanted]]] = defaultdict(lambda: defaultdict(list))
        for piece in wanted:
            chosen = np.zeros(len(self.where), dtype=bool)
            for shingles in piece.named:
                chosen |= self.named.shares(copies.winnowed(shingles, WINDOW), len(chosen)) >= self.lowest
            for shingles in piece.renamed:
                if len(shingles) >= copies.FEWEST_RENAMED:
                    kept = copies.winnowed(shingles, RENAMED_WINDOW)
                    chosen |= self.renamed.shares(kept, len(chosen)) >= CANDIDATE_RENAMED
            for number in np.flatnonzero(chosen):
                path, name = self.where[number]
                to_open[path][name].append(piece)
        for path, pieces_of in to_open.items():
            name = next(iter(pieces_of)).partition("!")[0]
            for leaf in leaves(path, name, lambda *_: None):
                if leaf.name in pieces_of:
                    yield from _looked_at(leaf, pieces_of[leaf.name])


class _Postings:
    """Two parallel arrays, sorted by hash."""

    def __init__(self, hashes_of: Sequence[copies.Hashes]):
        """From the hashes of each leaf."""
        hashes = np.concatenate([*hashes_of, np.zeros(0, dtype=np.uint64)])
        numbers = np.repeat(np.arange(len(hashes_of), dtype=np.uint32), [len(each) for each in hashes_of])
        order = np.argsort(hashes, kind="stable")
        self.hashes = hashes[order]
        self.leaves = numbers[order]

    def shares(self, wanted: copies.Hashes, num_leaves: int) -> npt.NDArray[np.float64]:
        """Which share of the wanted hashes each leaf has."""
        if not len(wanted):
            return np.zeros(num_leaves)
        starts = np.searchsorted(self.hashes, wanted, side="left")
        ends = np.searchsorted(self.hashes, wanted, side="right")
        runs = [self.leaves[start:end] for start, end in zip(starts, ends, strict=True)]
        return np.bincount(np.concatenate(runs), minlength=num_leaves) / len(wanted)


@lru_cache(maxsize=2048)  # repositories have pytest and what it needs in common, and a candidate's files are read twice
def _kept_of(text: str) -> tuple[copies.Hashes, copies.Hashes]:
    tokens = copies.tokens_of(copies.normalise(text))
    named = copies.winnowed(copies.named_shingles(tokens), WINDOW)
    return named, copies.winnowed(copies.renamed_shingles(tokens), RENAMED_WINDOW)


def _looked_at(leaf: Leaf, wanted: Sequence[copies.Wanted]) -> Iterator[Leak]:
    is_source = leaf.name.endswith(SOURCE)
    page = copies.page_of(leaf.text, is_source)
    functions = copies.Functions(leaf.text if is_source else "")
    for piece in wanted:
        if found := copies.found_in(page, piece):
            yield Leak(leaf.name, piece.what, *found)
        elif name := functions.same_as(piece):
            yield Leak(leaf.name, piece.what, "structure", f"def {name}")


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
