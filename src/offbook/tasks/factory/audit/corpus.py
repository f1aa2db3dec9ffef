"""The search for leaks: does anything that the agent can read give the deleted code away?

A corpus is an index of everything readable, built once for places that do not change. A task's question is then a
look-up that names candidates, and only those are opened again and read closely.
"""

from __future__ import annotations

import hashlib
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
from offbook.tasks.factory.audit import bytecode
from offbook.tasks.factory.audit.reading import Leaf, files_below, leaves, links_out
from offbook.tasks.factory.types import is_inside
from offbook.types import OffbookError, Task

LIBRARY = "python"  # how the standard library is called in a leak's path
REPEATED = 0.25  # of the removed lines, that the product may have elsewhere
SOURCE = (".py", ".pyi", ".pyx", ".pxd")
TREE = "tree"  # the place that a task's own files lie in
WINDOW, RENAMED_WINDOW = copies.FEWEST, 6
# What share of the kept shingles makes a file worth opening. Lower than the shares that decide.
CANDIDATE_SOURCE, CANDIDATE_OTHER, CANDIDATE_RENAMED, CANDIDATE_CODE = 0.6, 0.35, 0.35, 0.7
FEW_WORDS = 7  # of so few all have to be there
# Machine code, pictures and what is compressed hold every short word somewhere and no table of symbols.
NOISE = (
    *(b"\x7fELF", b"\xcf\xfa\xed\xfe", b"MZ", b"!<arch>\n", b"\x89PNG", b"\xff\xd8\xff", b"GIF8"),
    *(b"PK\x03\x04", b"\x1f\x8b", b"BZh", b"\xfd7zXZ\x00", b"\x28\xb5\x2f\xfd"),
)
MOST_LINKED = 20_000  # files behind one link that leads out of a place
Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
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
        self._leave_out = frozenset(leave_out)
        self._index = _indexed(self._all_leaves(places))

    @property
    def unread_leaks(self) -> list[Leak]:
        return [Leak(name, "", "unread", why) for name, why in self.unread.items()]

    def leaks(
        self,
        removed: Mapping[str, str],
        allowed: Mapping[str, str] | None = None,
        files: Mapping[str, str | None] | None = None,
    ) -> list[Leak]:
        """Where the removed code ("path::name" -> source) is found, in order of path.

        `allowed` is what may be seen of each, such as a stub's signature and docstring. `files` are the files of the
        place "tree" as the task has them, None where one is gone: they take the place of those that were indexed.
        """
        files, allowed = files or {}, allowed or {}
        traces = [
            bytecode.traces_of(wanted, removed[what], allowed.get(what, ""))
            for what, source in removed.items()
            for wanted in copies.wanted_pieces(what, source, allowed.get(what, ""))
        ]
        hidden = frozenset(f"{TREE}/{path}" for path in files)
        own = {f"{TREE}/{path}": Leaf(f"{TREE}/{path}", content.encode()) for path, content in files.items() if content}
        changed = _indexed((None, leaf) for leaf in own.values())
        found = [*_search(self._index, traces, hidden, {}), *_search(changed, traces, frozenset(), own)]
        first = {(leak.path, leak.what): leak for leak in reversed(found)}  # of several ways to find it, the first
        # What lies in an archive without compression shows in the archive's own bytes too.
        outer = {(leak.path.rpartition("!")[0], leak.what) for leak in found}
        return [first[place] for place in sorted(first.keys() - outer)]

    def _all_leaves(self, places: Mapping[str, Path]) -> Iterator[tuple[Path, Leaf]]:
        roots = [root.resolve() for root in places.values()]
        for label, root in places.items():
            if not root.exists():
                raise FileNotFoundError(f"{root} is not there to be audited")
            yield from self._leaves_below(label, root)
            for link, target in links_out(root).items():
                if not any(target.is_relative_to(other) for other in roots):
                    yield from self._leaves_below(f"{label}/{link}", target, MOST_LINKED)

    def _leaves_below(self, label: str, root: Path, most: int | None = None) -> Iterator[tuple[Path, Leaf]]:
        for number, (path, name) in enumerate(files_below(root, self._leave_out)):
            if most is not None and number >= most:
                self.unread[label] = f"leads to more than {most} files"
                return
            for leaf in leaves(path, f"{label}/{name}", self.unread.__setitem__):
                yield path, leaf


@dataclass(frozen=True, slots=True)
class _Postings:
    """Which leaves have which hash: two parallel arrays, sorted by hash."""

    hashes: copies.Hashes
    leaves: npt.NDArray[np.uint32]

    def counts(self, wanted: copies.Hashes, num_leaves: int) -> Numbers:
        """How many of the wanted hashes each leaf has."""
        starts = np.searchsorted(self.hashes, wanted, side="left")
        ends = np.searchsorted(self.hashes, wanted, side="right")
        runs = [self.leaves[start:end] for start, end in zip(starts, ends, strict=True) if end > start]
        return np.bincount(np.concatenate(runs), minlength=num_leaves) if runs else np.zeros(num_leaves, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class _Index:
    where: list[list[tuple[Path | None, str]]]  # of each leaf: the file it comes out of, its names; equal ones are one
    is_source: npt.NDArray[np.bool_]
    is_bytecode: npt.NDArray[np.bool_]
    named: _Postings
    renamed: _Postings
    words: _Postings  # of bytecode and tables of symbols


def _indexed(found: Iterable[tuple[Path | None, Leaf]]) -> _Index:
    where: list[list[tuple[Path | None, str]]] = []
    numbers: dict[bytes, int] = {}
    compiled: list[bool] = []
    kept: dict[str, list[tuple[copies.Hashes, int]]] = {"named": [], "renamed": [], "words": []}
    for path, leaf in found:
        number = numbers.setdefault(hashlib.blake2b(leaf.data, digest_size=16).digest(), len(where))
        if number < len(where):
            where[number].append((path, leaf.name))
            continue
        where.append([(path, leaf.name)])
        compiled.append(bytecode.is_bytecode(leaf.data))
        named, renamed = _kept_of(leaf.text)
        kept["named"].append((named, number))
        kept["renamed"].append((renamed, number))
        if (leaf.is_binary and not leaf.data.startswith(NOISE)) or bytecode.is_symbol_table(leaf):
            kept["words"].append((copies.hashed(bytecode.words_in(leaf.data)), number))
    source = [any(name.endswith(SOURCE) for _, name in names) for names in where]
    postings = {name: _sorted_postings(parts) for name, parts in kept.items()}
    return _Index(where, np.array(source, dtype=bool), np.array(compiled, dtype=bool), **postings)


@lru_cache(maxsize=2048)  # repositories have pytest and what it needs in common, and a candidate's files are read twice
def _kept_of(text: str) -> tuple[copies.Hashes, copies.Hashes]:
    tokens = copies.tokens_of(copies.normalise(text))
    named, renamed = copies.named_shingles(tokens), copies.renamed_shingles(tokens)
    return copies.winnowed(named, WINDOW), copies.winnowed(renamed, RENAMED_WINDOW)


def _sorted_postings(parts: list[tuple[copies.Hashes, int]]) -> _Postings:
    hashes = np.concatenate([part for part, _ in parts] or [np.zeros(0, dtype=np.uint64)])
    numbers = np.repeat(
        np.array([number for _, number in parts], dtype=np.uint32), [len(part) for part, _ in parts] or []
    )
    order = np.argsort(hashes, kind="stable")
    return _Postings(hashes[order], numbers[order])


def _search(
    index: _Index, traces: list[bytecode.Traces], hidden: frozenset[str], own: Mapping[str, Leaf]
) -> Iterator[Leak]:
    """Candidates are opened file by file, so an archive with many of them is unpacked once."""
    to_open: dict[Path | None, dict[str, tuple[int, list[bytecode.Traces]]]] = defaultdict(dict)
    for trace in traces:
        for number in _candidates(index, trace):
            places = [(path, name) for path, name in index.where[number] if name.partition("!")[0] not in hidden]
            if places:
                path, name = places[0]
                to_open[path].setdefault(name, (number, []))[1].append(trace)
    for path, wanted_of in to_open.items():
        opened = (
            own.values() if path is None else leaves(path, next(iter(wanted_of)).partition("!")[0], lambda *_: None)
        )
        left = dict(wanted_of)
        for leaf in opened:
            if leaf.name not in left:
                continue
            number, wanted = left.pop(leaf.name)
            for trace, how, evidence in _looked_at(leaf, wanted, bool(index.is_source[number])):
                for _, name in index.where[number]:
                    if name.partition("!")[0] not in hidden:
                        yield Leak(name, trace.wanted.what, how, evidence)
            if not left:
                break


def _candidates(index: _Index, trace: bytecode.Traces) -> list[int]:
    count = len(index.where)
    chosen = np.zeros(count, dtype=bool)
    lowest = np.where(index.is_source, CANDIDATE_SOURCE, CANDIDATE_OTHER)
    for shingles in trace.wanted.named:
        kept = copies.winnowed(shingles, WINDOW)
        if len(kept):
            chosen |= index.named.counts(kept, count) >= lowest * len(kept)
    for shingles in trace.wanted.renamed:
        kept = copies.winnowed(shingles, RENAMED_WINDOW)
        if len(shingles) >= copies.FEWEST_RENAMED:
            chosen |= index.renamed.counts(kept, count) >= CANDIDATE_RENAMED * len(kept)
    if trace.parts:
        counts = index.words.counts(copies.hashed(trace.words), count)
        share = CANDIDATE_CODE if len(trace.words) > FEW_WORDS else 1.0
        chosen |= index.is_bytecode & (counts >= share * len(trace.words))
    if trace.secret:
        names = copies.hashed([trace.wanted.name, trace.stem])
        chosen |= ~index.is_bytecode & (index.words.counts(np.unique(names), count) == len(np.unique(names)))
    return [int(number) for number in np.flatnonzero(chosen)]


def _looked_at(leaf: Leaf, wanted: list[bytecode.Traces], source: bool) -> Iterator[tuple[bytecode.Traces, str, str]]:
    page = copies.page_of(leaf.text, source)
    module = bytecode.read_bytecode(leaf.data) if bytecode.is_bytecode(leaf.data) else None
    functions = copies.Functions(leaf.text if source else "")
    for trace in wanted:
        if found := copies.found_in(page, trace.wanted):
            yield trace, *found
        elif name := functions.same_as(trace.wanted):
            yield trace, "structure", f"def {name}"
        elif module is not None:
            if evidence := bytecode.found_in_bytecode(module, trace):
                yield trace, "bytecode", evidence
        elif (leaf.is_binary or bytecode.is_symbol_table(leaf)) and (
            evidence := bytecode.found_in_symbols(leaf.data, trace)
        ):
            yield trace, "symbols", evidence


def given_away(
    leaks: Sequence[Leak], removed: Mapping[str, str], targets: Iterable[str], product: Sequence[str]
) -> list[Leak]:
    """All leaks, unless they are no more than the product repeating itself: small parts of what was removed, no target
    among them, that other code of the product has as well. Whoever reads that code does what the task asks for."""
    wanted = {*targets}
    repeated_in_product = {leak.what for leak in leaks if is_inside(leak.path.removeprefix("tree/"), product)}
    for leak in leaks:
        committed = leak.path.startswith("tree/.git!") and leak.what in repeated_in_product  # the same file once more
        if leak.what in wanted or not (committed or is_inside(leak.path.removeprefix("tree/"), product)):
            return list(leaks)
    repeated = sum(len(removed[what].split("\n")) for what in {leak.what for leak in leaks})
    return [] if repeated <= REPEATED * sum(len(source.split("\n")) for source in removed.values()) else list(leaks)


def standard_library(environment: Path) -> Corpus:
    base = os.path.realpath(environment / "python" / "bin" / "python")
    (library,) = (environment / "python" / "lib").iterdir()
    return _library_corpus(Path(base).parent.parent / "lib" / library.name, tuple(hidden_in_sandboxes(environment)))


@cache
def _library_corpus(folder: Path, hidden: tuple[Path, ...]) -> Corpus:
    return Corpus({LIBRARY: folder}, leave_out=hidden)


def audit_all(
    tasks: Sequence[Task], bad: dict[str, str], progress: Callable[[float], None] = lambda share: None
) -> dict[str, list[Leak]]:
    """By task: where its deleted code can be read. What tasks have in common is read once. Those whose folders cannot
    be read are put into `bad` with the reason."""
    shared: dict[Path, Corpus] = {}
    found: dict[str, list[Leak]] = {}
    for number, task in enumerate(tasks, 1):
        with readable(task, bad):
            found[task.id] = _audit(task, shared)
        progress(number / len(tasks))
    return found


def _audit(task: Task, shared: dict[Path, Corpus]) -> list[Leak]:
    removed = removed_from(task)
    places = [Corpus({"tree": task.tree})]
    environment = task.suite.environment
    if environment is not None:
        if environment not in shared:
            shared[environment] = Corpus({"deps": environment / "deps"})
        places += [shared[environment], standard_library(environment)]
    leaks = [leak for corpus in places for leak in corpus.leaks(removed)]
    targets = task.deleted.targets if task.deleted else tuple(removed)
    unread = [leak for corpus in places for leak in corpus.unread_leaks]
    return given_away(leaks, removed, targets, task.sources) + unread


def removed_from(task: Task) -> dict[str, str]:
    """The deleted code, piece by piece, as its maker wrote it down."""
    file = task.folder / "solution" / "removed.json"
    if not file.is_file():
        raise OffbookError(
            f"{task.folder} does not say what was deleted (solution/removed.json), so nothing can be searched for"
        )
    removed = json.loads(file.read_text())
    return {str(what): str(source) for what, source in removed.items()}
