"""The search for leaks: does anything that the agent can read give the deleted code away?

A corpus is an index of everything readable, built once for places that do not change. A task's question is then a
look-up that names candidates, and only those are opened again and read closely.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path, PurePosixPath

import numpy as np
import numpy.typing as npt

from offbook.core import copies
from offbook.sandbox import hidden_in_sandboxes
from offbook.tasks.check import readable
from offbook.tasks.factory.audit.reading import Leaf, files_below, leaves, links_out
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
NEAR = 1500  # bytes around a name in which all its parameters stand, if the two belong together
WORD = re.compile(rb"[A-Za-z_][A-Za-z0-9_]{2,}")
# Machine code, pictures and what is compressed hold every short word somewhere and no table of symbols.
NOISE = (
    *(b"\x7fELF", b"\xcf\xfa\xed\xfe", b"MZ", b"!<arch>\n", b"\x89PNG", b"\xff\xd8\xff", b"GIF8"),
    *(b"PK\x03\x04", b"\x1f\x8b", b"BZh", b"\xfd7zXZ\x00", b"\x28\xb5\x2f\xfd"),
)
MOST_LINKED = 20_000  # files behind one link that leads out of a place
Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Leak:
    """A place that the agent can read and that gives deleted code away."""

    path: str  # inside archives as outer.zip!inner/path
    what: str  # "path::name" of the deleted code
    how: str  # which search found it
    evidence: str  # a short excerpt

    def __str__(self) -> str:
        return f"{self.what} in {self.path} ({self.how}): {self.evidence}"


@dataclass(frozen=True)
class Traces:
    """Deleted code, and what compiled files and symbol tables keep of it."""

    wanted: copies.Wanted
    parameters: tuple[re.Pattern[bytes], ...]
    module: PurePosixPath

    @classmethod
    def of(cls, wanted: copies.Wanted, source: str) -> Traces:
        nodes = ast.walk(copies.parsed(source)[1] or ast.Module([], []))
        function = next((node for node in nodes if isinstance(node, copies.FUNCTION)), None)
        every = function.args.posonlyargs + function.args.args + function.args.kwonlyargs if function else []
        names = [argument.arg for argument in every if argument.arg not in ("self", "cls")]
        return cls(wanted, tuple(map(_whole_word, names)), PurePosixPath(wanted.what.partition("::")[0]))

    @property
    def stem(self) -> str:
        return self.module.parent.name if self.module.stem == "__init__" else self.module.stem

    def in_compiled(self, leaf: Leaf) -> str:
        """The deleted name in a compiled file of its module: the source's path is in it, or the file is called so.

        Bytecode is not decoded. A compiled file that has the name is a finding even if it was compiled without the
        body: scrubbed trees have none.
        """
        ours = b"/".join(part.encode() for part in self.module.parts[-2:]) in leaf.data
        called = re.split(r"[/!]", leaf.name)[-1].partition(".")[0] == self.module.stem and leaf.name.startswith(TREE)
        found = (ours or called) and self.wanted.name.encode() in leaf.data
        return f"{self.wanted.name} in the bytecode of {self.module}" if found else ""

    def in_symbols(self, leaf: Leaf) -> str:
        """The deleted name near all of its parameters, in something that is about its module."""
        dotted = f"{self.stem}.{self.wanted.what.partition('::')[2]}"
        if dotted.encode() in leaf.data:
            return dotted
        if not self.parameters or self.stem.encode() not in leaf.data:
            return ""
        for match in _whole_word(self.wanted.name).finditer(leaf.data):
            around = leaf.data[max(0, match.start() - NEAR) : match.end() + NEAR]
            if all(parameter.search(around) for parameter in self.parameters):
                return f"{self.wanted.name} with its parameters"
        return ""


def _whole_word(word: str) -> re.Pattern[bytes]:
    """Binary formats put a length in front of a word, which may read as a digit."""
    return re.compile(rb"(?<![A-Za-z_])" + re.escape(word.encode()) + rb"(?![A-Za-z0-9_])")


def _is_compiled(data: bytes) -> bool:
    """Whether it starts like a .pyc of any Python 3."""
    return data[2:4] == b"\r\n" and 3000 <= int.from_bytes(data[:2], "little") < 4000


def _is_symbol_table(leaf: Leaf) -> bool:
    """Whether it is a text that lists what is defined where: mypy's cache as JSON, ctags."""
    head = leaf.data[:2048]
    if head.startswith(b"!_TAG_") or b".mypy_cache" in leaf.name.encode():
        return True
    return head.lstrip().startswith(b"{") and b'"SymbolTable"' in head


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
        files: Mapping[str, str | None] | None = None,
    ) -> list[Leak]:
        """Where the removed code ("path::name" -> source) is found, in order of path.

        `files` are the files of the place "tree" as the task has them, None where one is gone: they take the place of
        those that were indexed.
        """
        files = files or {}
        traces = [
            Traces.of(wanted, source)
            for what, source in removed.items()
            for wanted in copies.wanted_pieces(what, source, "")
        ]
        hidden = frozenset(f"{TREE}/{path}" for path in files)
        own = {f"{TREE}/{path}": Leaf(f"{TREE}/{path}", content.encode()) for path, content in files.items() if content}
        changed = _indexed((None, leaf) for leaf in own.values())
        found = [*_search(self._index, traces, hidden, {}), *_search(changed, traces, frozenset(), own)]
        first = {(leak.path, leak.what): leak for leak in reversed(found)}  # of several ways to find it, the first
        # What is in an archive without compression shows in the archive's own bytes too.
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


@dataclass(frozen=True)
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


@dataclass(frozen=True)
class _Index:
    where: list[list[tuple[Path | None, str]]]  # of each leaf: the file it comes out of, its names; equal ones are one
    is_source: npt.NDArray[np.bool_]
    named: _Postings
    renamed: _Postings
    words: _Postings  # of compiled files and symbol tables


def _indexed(found: Iterable[tuple[Path | None, Leaf]]) -> _Index:
    where: list[list[tuple[Path | None, str]]] = []
    numbers: dict[bytes, int] = {}
    kept: dict[str, list[tuple[copies.Hashes, int]]] = {"named": [], "renamed": [], "words": []}
    for path, leaf in found:
        number = numbers.setdefault(hashlib.blake2b(leaf.data, digest_size=16).digest(), len(where))
        if number < len(where):
            where[number].append((path, leaf.name))
            continue
        where.append([(path, leaf.name)])
        named, renamed = _kept_of(leaf.text)
        kept["named"].append((named, number))
        kept["renamed"].append((renamed, number))
        if (leaf.is_binary and not leaf.data.startswith(NOISE)) or _is_symbol_table(leaf):
            found_words = set(WORD.findall(leaf.data))
            found_words |= {word[:-1] for word in found_words}  # the last letter may be the mark of what comes next
            kept["words"].append((copies.hashed([word.decode() for word in found_words]), number))
    source = [any(name.endswith(SOURCE) for _, name in names) for names in where]
    postings = {name: _sorted_postings(parts) for name, parts in kept.items()}
    return _Index(where, np.array(source, dtype=bool), **postings)


@lru_cache(maxsize=2048)  # repositories have pytest and what it needs in common, and a candidate's files are read twice
def _kept_of(text: str) -> tuple[copies.Hashes, copies.Hashes]:
    tokens = copies.tokens_of(copies.normalise(text))
    named = copies.named_shingles(tokens)
    renamed = copies.renamed_shingles(tokens)
    return copies.winnowed(named, WINDOW), copies.winnowed(renamed, RENAMED_WINDOW)


def _sorted_postings(parts: list[tuple[copies.Hashes, int]]) -> _Postings:
    hashes = np.concatenate([part for part, _ in parts] or [np.zeros(0, dtype=np.uint64)])
    numbers = np.repeat(
        np.array([number for _, number in parts], dtype=np.uint32), [len(part) for part, _ in parts] or []
    )
    order = np.argsort(hashes, kind="stable")
    return _Postings(hashes[order], numbers[order])


def _search(index: _Index, traces: list[Traces], hidden: frozenset[str], own: Mapping[str, Leaf]) -> Iterator[Leak]:
    """Candidates are opened file by file, so an archive with many of them is unpacked once."""
    to_open: dict[Path | None, dict[str, tuple[int, list[Traces]]]] = defaultdict(dict)
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


def _candidates(index: _Index, trace: Traces) -> list[int]:
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
    names = np.unique(
        copies.hashed([name for name in (trace.wanted.name, trace.stem) if WORD.fullmatch(name.encode())])
    )
    if len(names):
        chosen |= index.words.counts(names, count) == len(names)
    return [int(number) for number in np.flatnonzero(chosen)]


def _looked_at(leaf: Leaf, wanted: list[Traces], source: bool) -> Iterator[tuple[Traces, str, str]]:
    page = copies.page_of(leaf.text, source)
    functions = copies.Functions(leaf.text if source else "")
    is_compiled = _is_compiled(leaf.data)
    has_symbols = leaf.is_binary or _is_symbol_table(leaf)
    for trace in wanted:
        if found := copies.found_in(page, trace.wanted):
            yield trace, *found
        elif name := functions.same_as(trace.wanted):
            yield trace, "structure", f"def {name}"
        elif is_compiled:
            if evidence := trace.in_compiled(leaf):
                yield trace, "bytecode", evidence
        elif has_symbols and (evidence := trace.in_symbols(leaf)):
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
