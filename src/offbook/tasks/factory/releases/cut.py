"""A change cut into pieces by trial: sets of failing tests, each with the hunks that make them pass. A piece becomes a
task folder, or is refused with the reason.

A hunk is a function, method or class that came, went or changed, one other statement, one line of a list of names (an
import over several lines, `__all__`), or a whole new file. Deleted files stay: tests seldom need their absence.

Tests that enter the same changed functions are tried together. Their hunks are guessed, then left out as long as the
tests pass (delta debugging: Zeller and Hildebrandt, Simplifying and Isolating Failure-Inducing Input, 2002). Every
other failing test that passes with the same hunks joins the piece. Pieces that share most of their hunks are one.

The tree with the piece's hunks is what a deletion starts from, the older tree is what it leaves. The request is the
changelog's or commit's own words: `terse` is that alone, `normal` adds what tests look at, `detailed` docstrings.
"""

from __future__ import annotations

import ast
import asyncio
import difflib
import hashlib
import json
import re
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path, PurePosixPath

from pydantic import TypeAdapter

from offbook.core import pycode
from offbook.core.copies import shared_code
from offbook.core.runfolder import write_atomic
from offbook.sandbox import SandboxSpec
from offbook.tasks.factory.delete.symbols import Symbols, is_public, read_symbols
from offbook.tasks.factory.instruction.examples import split_name, words_of
from offbook.tasks.factory.instruction.instruct import TERSE_CHARACTERS, behaviours, first_sentence, listed, plain
from offbook.tasks.factory.instruction.needs import Needs
from offbook.tasks.factory.make import MakeSettings, Outcome, Shown, task_from
from offbook.tasks.factory.records import Taken
from offbook.tasks.factory.releases.release import Release, entries_for
from offbook.tasks.factory.types import Deletion, Feature, FunctionKey, files_of, identity_of
from offbook.tasks.factory.verification.verify import Verdict
from offbook.tasks.factory.workshop import Workshop
from offbook.tasks.grade import put
from offbook.tasks.suite import Round, SuiteRun, run_rounds, suite_sandbox

START_S = 20.0
SLOWER = 4.0
MAX_PIECES = 40
MAX_ROUNDS = 600  # of tests; what is begun is finished
PROBED = 12  # tests that represent those with the same changed functions
SHARED = 0.5  # of the hunks of two pieces, from which on they are one
AT_A_TIME = 12  # rounds in one sandbox
NOTICING_S = 20.0  # how long the tests may take, together, that a piece must not break
MAX_LINES = 1200
FEWEST_LINES = 2  # of a block that was added inside of a function, to be looked for elsewhere
MOST_BEHAVIOURS = 10
MORE_THAN_SOURCE = "needs more than the product's Python files"
TOO_MANY = "the cutting was stopped before it"
BREAKS = "its hunks alone break other tests"
WORD = re.compile(r"[A-Za-z_]\w*")
VERSION = re.compile(r"\s*(__version__|__version_info__|__version_tuple__|VERSION|version(_info|_tuple)?|__date__)\b")
TOP_NAME = re.compile(r"^(?:(?:async )?def |class )?([A-Za-z_]\w*)(?=\s*[(:=])", re.M)
LISTS = (ast.ImportFrom, ast.Import, ast.Assign, ast.AnnAssign, ast.AugAssign)
Passing = Callable[[Sequence[frozenset[int]]], Awaitable[list[bool]]]


@dataclass(frozen=True)
class Hunk:
    number: int
    path: str
    name: str  # the qualified name of a function or class; empty for other statements
    old: str
    new: str
    is_file: bool = False  # the whole of a new file

    @property
    def words(self) -> frozenset[str]:
        """Names that it adds."""
        return frozenset(WORD.findall(self.new)) - frozenset(WORD.findall(self.old))

    @property
    def defines(self) -> set[str]:
        """Names that other hunks may need it for."""
        if self.name:
            return set() if self.old else {self.name.rpartition(".")[2]}
        if not self.is_file:
            return {*self.words}
        path = PurePosixPath(self.path)
        return {*TOP_NAME.findall(self.new), path.stem if path.stem != "__init__" else path.parent.name}


@dataclass(slots=True)
class Hunks:
    """All hunks between two versions of a product's Python files."""

    hunks: list[Hunk] = field(default_factory=list)
    # path -> stretches of the file: the hunk that decides which text is there (None: always the old), old, new
    stretches: dict[str, list[tuple[int | None, str, str]]] = field(default_factory=dict)

    def add(self, path: str, name: str, old: str, new: str, is_file: bool = False) -> int:
        self.hunks.append(Hunk(len(self.hunks), path, name, old, new, is_file))
        return len(self.hunks) - 1

    def applied(self, chosen: Collection[int]) -> dict[str, str]:
        """The files that these hunks change, with them and no others."""
        return {
            path: "".join(new if hunk in chosen else old for hunk, old, new in self.stretches[path])
            for path in sorted({self.hunks[number].path for number in chosen})
        }


def hunks_between(old: Mapping[str, str], new: Mapping[str, str]) -> Hunks:
    """What only states the version is no hunk: it stays as it was."""
    found = Hunks()
    for path in sorted(new):
        if path not in old:
            found.stretches[path] = [(found.add(path, "", "", new[path], is_file=True), "", new[path])]
        elif old[path] != new[path]:
            _compare(found, path, old[path], new[path])
    return found


@dataclass(frozen=True)
class _Statement:
    """A statement with the comments above it, or a part of one: of a class its head and members, of a list of names
    its lines."""

    name: str
    text: str
    around: tuple[str, ...]  # keys of the statements that it is a part of


def _compare(found: Hunks, path: str, old: str, new: str) -> None:
    """A class or list that is on one side alone is one unit, like any statement that is no part of another."""
    sides = (_statements(old), _statements(new))
    divided = ({key for one in side.values() for key in one.around} for side in sides)
    both = set.intersection(*divided)
    unit_of: dict[str, str] = {}
    names: dict[str, str] = {}
    texts: dict[str, list[str]] = {}  # of a unit, old and new
    for number, side in enumerate(sides):
        for key, one in side.items():
            unit = unit_of[key] = next((whole for whole in one.around if whole not in both), key)
            names[unit] = one.name if unit == key else unit.partition("def ")[2]
            texts.setdefault(unit, ["", ""])[number] += one.text
    numbers = {
        unit: found.add(path, names[unit], was, now)
        for unit, (was, now) in texts.items()
        if was != now and not VERSION.match((now or was).lstrip("\n"))
    }
    before, after = sides
    stretches: list[tuple[int | None, str, str]] = []
    matcher = difflib.SequenceMatcher(None, list(before), list(after), autojunk=False)
    for how, i1, i2, j1, j2 in matcher.get_opcodes():
        for key in list(before)[i1:i2]:
            now = after[key].text if how == "equal" else ""
            stretches.append((numbers.get(unit_of[key]), before[key].text, now))
        for key in list(after)[j1:j2] if how != "equal" else ():
            stretches.append((numbers.get(unit_of[key]), "", after[key].text))
    if numbers:
        found.stretches[path] = stretches


def _statements(source: str) -> dict[str, _Statement]:
    """By a key of what it is. Keys that come again get a number."""
    lines = source.splitlines(keepends=True)
    try:
        parts = [*_of_body(pycode.parse(source).body, lines, 0, len(lines), ())]
    except pycode.NO_PYTHON:
        parts = []
    if "".join(one.text for _, one in parts) != source or len(lines) != source.count("\n") + (source[-1:] != "\n"):
        parts = [("file", _Statement("", source, ()))]  # no Python, or line breaks that Python does not count
    seen: Counter[str] = Counter()
    found = {}
    for key, one in parts:
        seen[key] += 1
        found[f"{key}#{seen[key]}"] = one
    return found


def _of_body(
    body: Sequence[ast.stmt], lines: Sequence[str], start: int, end: int, around: tuple[str, ...]
) -> Iterator[tuple[str, _Statement]]:
    prefix = f"{around[-1].removeprefix('def ')}." if around else ""
    for node in body:
        last = node.end_lineno or start
        key, name = _key(node, prefix)
        if isinstance(node, ast.ClassDef) and _first(node.body[0]) >= node.lineno:
            first = _first(node.body[0])
            yield f"head {name}", _Statement("", "".join(lines[start:first]), (*around, key))
            yield from _of_body(node.body, lines, first, last, (*around, key))
        elif isinstance(node, LISTS) and last - start > 2:
            for line in lines[start:last]:
                yield f"{key} {line.strip().rstrip(',')}", _Statement("", line, (*around, key))
        else:
            yield key, _Statement(name, "".join(lines[start:last]), around)
        start = last
    if start < end:
        yield f"rest {prefix}", _Statement("", "".join(lines[start:end]), around)


def _first(node: ast.stmt) -> int:
    """The number of lines before it."""
    return min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", ()))]) - 1


def _key(node: ast.stmt, prefix: str) -> tuple[str, str]:
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return f"def {prefix}{node.name}", f"{prefix}{node.name}"
        case ast.ImportFrom():
            return f"from {'.' * node.level}{node.module or ''}", ""
        case ast.Assign(targets=[ast.Name(id=name), *_]) | ast.AnnAssign(target=ast.Name(id=name)):
            return f"= {prefix}{name}", ""
        case ast.Expr(value=ast.Constant()):
            return f"doc {prefix}", ""
    return f"{type(node).__name__} {ast.unparse(node)[:60]}", ""


@dataclass(frozen=True)
class Piece:
    hunks: tuple[int, ...]
    tests: tuple[str, ...]
    refused: str = ""
    evidence: str = ""


@dataclass(frozen=True)
class Cut:
    stable: tuple[str, ...]  # tests that pass on both trees
    pieces: tuple[Piece, ...]
    digest: str = ""  # of the hunks: pieces name them by their numbers


_CUT = TypeAdapter(Cut)


async def cut_release(release: Release, hunks: Hunks, spec: SandboxSpec, progress: Callable[[str], None]) -> Cut:
    """Kept in folder/cut.json."""
    path = release.repository.folder / "cut.json"
    texts = "\0".join(f"{hunk.path}\0{hunk.old}\0{hunk.new}" for hunk in hunks.hunks)
    digest = hashlib.sha256(texts.encode()).hexdigest()
    if path.is_file() and (known := _CUT.validate_json(path.read_bytes())).digest == digest:
        return known
    stable, pieces = await Cutter(release, hunks, spec, progress).cut()
    found = Cut(tuple(sorted(stable)), tuple(pieces), digest)
    write_atomic(path, json.dumps(asdict(found)))
    return found


@dataclass
class Cutter:
    release: Release
    hunks: Hunks
    spec: SandboxSpec
    progress: Callable[[str], None]
    rounds: int = 0
    stable: frozenset[str] = frozenset()

    @property
    def every(self) -> frozenset[int]:
        return frozenset(range(len(self.hunks.hunks)))

    async def cut(self) -> tuple[frozenset[str], list[Piece]]:
        """The tests that pass on both trees, and the pieces: those that are refused first."""
        name = self.release.repository.name
        tests = self.release.repository.tests
        self.progress(f"{name}: running the newer tests on the older tree, {len(self.every)} hunks behind")
        without, whole = await self.run([frozenset(), self.every], tests)
        self.stable = frozenset(without.passed & whole.passed)
        failing = [test for test in tests if test not in without.passed]
        waiting = [test for test in failing if test in whole.passed]
        refused = []
        if beyond := [test for test in failing if test not in whole.passed]:
            refused.append(Piece((), tuple(beyond), MORE_THAN_SOURCE, f"{len(beyond)} tests, as {beyond[0]}"))
        found: list[Piece] = []
        left = set(waiting)
        for entered, group in sorted(self._entered(waiting).items(), key=lambda one: (len(one[0]), sorted(one[0]))):
            mine = [test for test in group if test in left]
            left -= {*mine}
            if mine and (len(found) >= MAX_PIECES or self.rounds > MAX_ROUNDS):
                refused.append(Piece((), tuple(mine), TOO_MANY, mine[0]))
            elif mine:
                chosen = await self._needed(self._with_names(entered), mine[:PROBED])
                (run,) = await self.run([chosen], sorted({*left, *mine}))
                left -= run.passed
                if run.passed:
                    found.append(Piece(tuple(sorted(chosen)), tuple(sorted(run.passed))))
                done = f"{len(left)} of {len(waiting)} failing tests left"
                self.progress(f"{name}: {done}, {len(found)} pieces, {self.rounds} rounds")
        return self.stable, [*refused, *[await self._finished(one, waiting) for one in _merged(found)]]

    def _entered(self, tests: Iterable[str]) -> dict[frozenset[int], list[str]]:
        """The tests by the hunks that they enter in the newer tree."""
        entered: dict[str, set[int]] = {test: set() for test in tests}
        for key, entering in self.release.workshop.map.tests_of.items():
            for hunk in self.hunks.hunks:
                is_inside = hunk.is_file or (hunk.name and f"{key.name}.".startswith(f"{hunk.name}."))
                for test in entered.keys() & entering if hunk.path == key.path and is_inside else ():
                    entered[test].add(hunk.number)
        groups: dict[frozenset[int], list[str]] = defaultdict(list)
        for test, hunks in entered.items():
            groups[frozenset(hunks)].append(test)
        return groups

    def _with_names(self, hunks: Iterable[int]) -> frozenset[int]:
        """With the hunks that add a name which those use for the first time."""
        found = {*hunks}
        waiting = [*found]
        while waiting:
            words = self.hunks.hunks[waiting.pop()].words
            more = {one.number for one in self.hunks.hunks if one.defines & words} - found
            found |= more
            waiting += more
        return frozenset(found)

    async def _needed(self, start: frozenset[int], tests: Sequence[str]) -> frozenset[int]:
        """The fewest hunks with which the tests pass."""

        async def passing(sets: Sequence[frozenset[int]]) -> list[bool]:
            return [run.passed >= {*tests} for run in await self.run(sets, tests)]

        paths = {self.hunks.hunks[number].path for number in start}
        starts = [start, frozenset(one.number for one in self.hunks.hunks if one.path in paths), self.every]
        good = await passing(starts)
        return await minimal(starts[good.index(True)] if any(good) else self.every, passing)

    async def _finished(self, piece: Piece, waiting: Sequence[str]) -> Piece:
        """The piece with all tests that it makes pass, or refused if it breaks others: stable tests that enter a file
        which the hunks change, the quick ones first."""
        hunks = frozenset(piece.hunks)
        paths = {self.hunks.hunks[number].path for number in hunks}
        tests_of = self.release.workshop.map.tests_of
        entering = {test for key, tests in tests_of.items() if key.path in paths for test in tests}
        seconds = self.release.repository.seconds
        noticing: list[str] = []
        for test in sorted(entering & self.stable, key=lambda test: (seconds[test], test)):
            if sum(seconds[one] for one in noticing) + seconds[test] <= NOTICING_S:
                noticing.append(test)
        (run,) = await self.run([hunks], [*noticing, *waiting])
        if broken := [test for test in noticing if test not in run.passed]:
            return Piece(piece.hunks, piece.tests, BREAKS, broken[0])
        return Piece(piece.hunks, tuple(test for test in waiting if test in run.passed))

    async def run(self, sets: Sequence[frozenset[int]], tests: Sequence[str]) -> list[SuiteRun]:
        """The tests with each set of hunks on the older tree."""
        self.rounds += len(sets)
        release, repository = self.release, self.release.repository
        limit_s = START_S + SLOWER * sum(repository.seconds[test] for test in tests)
        rounds = []
        for chosen in sets:
            files = self.hunks.applied(chosen)
            changes: dict[str, str | None] = {**files, **release.tests_on(files)}
            rounds.append(Round(files_of(tests), tests, changes, timeout_s=limit_s))
        newer = {path: text for path, text in release.tests.items() if release.old_files.get(path) != text}
        found = []
        for start in range(0, len(rounds), AT_A_TIME):
            part = rounds[start : start + AT_A_TIME]
            async with await suite_sandbox(repository.tree, repository.suite, self.spec) as sandbox:
                await put(sandbox, newer)
                found += await run_rounds(sandbox, repository.suite, part, limit_s * len(part))
        return found


def _merged(pieces: Iterable[Piece]) -> list[Piece]:
    """Pieces that share most of their hunks, as one."""
    merged: list[Piece] = []
    for piece in sorted(pieces, key=lambda one: -len(one.hunks)):
        mine = {*piece.hunks}
        for number, other in enumerate(merged):
            whole = mine.union(other.hunks)
            if len(mine.intersection(other.hunks)) >= SHARED * len(whole):
                merged[number] = Piece(tuple(sorted(whole)), tuple(sorted({*piece.tests, *other.tests})))
                break
        else:
            merged.append(piece)
    return merged


async def minimal(start: frozenset[int], passing: Passing) -> frozenset[int]:
    """No hunk of it can be left out alone. Hunks are left out in ever smaller groups."""
    kept = start
    size = max(1, len(start) // 2)
    while kept:
        order = sorted(kept)
        groups = [frozenset(order[first : first + size]) for first in range(0, len(order), size)]
        good = await passing([kept - group for group in groups])
        spare = [group for group, fine in zip(groups, good, strict=True) if fine]
        together = kept.difference(*spare)
        if len(spare) > 1 and not (await passing([together]))[0]:
            kept -= spare[0]  # the others are tried again without it
            continue
        kept = together
        if size == 1:
            break
        size = max(1, min(size, len(kept)) // 2)
    return kept


async def make_piece(
    release: Release,
    hunks: Hunks,
    piece: Piece,
    stable: Collection[str],
    folder: Path,
    spec: SandboxSpec,
    settings: MakeSettings,
    taken: Taken | None = None,
) -> Outcome:
    """`stable` are the tests that pass on both trees."""
    lines = sum(hunks.hunks[number].new.count("\n") for number in piece.hunks)
    refused = piece.refused or (f"it takes over {MAX_LINES} lines" if lines > MAX_LINES else "")
    if refused:
        id = identity(release, hunks, piece)
        return Outcome(id, release.repository.name, "release", "release", refused, piece.evidence or f"{lines} lines")
    change = await asyncio.to_thread(change_of, release, hunks, piece, stable)

    def show(workshop: Workshop, deletion: Deletion, verdict: Verdict) -> Shown:
        """The older tree as it is, and the newer tests."""
        tree = {path: text for path, text in deletion.files.items() if text is not None}
        hidden: dict[str, str | bytes] = {path: workshop.files[path] for path in release.tests}
        needs = Needs(
            before=workshop.files,
            shown=release.old_files,
            failing=verdict.fail_to_pass,
            removed=deletion.removed,
            functions=deletion.feature.functions,
            targets=deletion.feature.targets,
            symbols=workshop.symbols,
            is_told=True,  # or `requests` has nothing
        )
        return Shown(tree, requests(release, change, verdict.fail_to_pass), hidden, needs)

    return await task_from(change.workshop, change.deletion, folder, spec, settings, taken, show)


def identity(release: Release, hunks: Hunks, piece: Piece) -> str:
    """The same for the same hunks of the same two trees, or without any for the same tests."""
    mine = [hunks.hunks[number] for number in piece.hunks]
    named = max((hunk for hunk in mine if hunk.name), key=lambda hunk: len(hunk.new), default=None)
    stem = PurePosixPath(mine[0].path).stem if mine else words_of("".join(piece.tests[:1]))
    texts = [f"{hunk.path}\0{hunk.new}" for hunk in mine] or piece.tests
    digest = hashlib.sha256("\0".join(texts).encode()).hexdigest()[:6]
    return identity_of(release.repository.name, release.new_version, named.name if named else stem, digest)


@dataclass(frozen=True)
class Change:
    """A piece as a deletion."""

    workshop: Workshop  # the tree with its hunks, with the tests that go with it
    deletion: Deletion
    old: Symbols  # the product without it


def change_of(release: Release, hunks: Hunks, piece: Piece, stable: Collection[str]) -> Change:
    after = hunks.applied(piece.hunks)
    before = {path: release.product.get(path) for path in after}
    roots = release.repository.import_roots
    old = read_symbols(release.product, roots)
    new = read_symbols({**release.product, **after}, roots)
    removed: dict[str, str] = {}
    functions: list[FunctionKey] = []
    for key, function in sorted(new.functions.items()):
        if key.path not in after or function.nested:
            continue
        source = function.source(after[key.path])
        known = old.functions[key].source(before[key.path] or "") if key in old.functions else ""
        if source != known:
            functions.append(key)
            removed[str(key)] = added_lines(known, source, FEWEST_LINES) if known else source
    if not any(removed.values()):
        removed = {f"{path}::": added_lines(before[path] or "", text, 1) for path, text in after.items()}
    there = {path: text for path, text in before.items() if text is not None}
    without = {**release.tests, **release.tests_on(there)}
    feature = Feature(
        identity(release, hunks, piece),
        "release",
        tuple(key for key in functions if new.functions[key].public) or tuple(functions[:1]),
        tuple(functions),
        tuple(sorted(piece.tests)),
    )
    deletion = Deletion(
        feature,
        "release",
        dict(before),
        {what: text for what, text in removed.items() if text.strip()},
        stubbed=tuple(key for key in functions if new.functions[key].statements),
        deleted=(),
        tests={path: text for path, text in without.items() if release.old_files.get(path) != text},
    )
    workshop = replace(
        release.workshop,
        repository=replace(release.repository, tests=tuple(sorted({*stable, *piece.tests}))),
        files={**release.old_files, **release.tests, **release.tests_on(after), **after},
        symbols=new,
    )
    return Change(workshop, deletion, old)


def added_lines(old: str, new: str, fewest: int) -> str:
    """The stretches of at least so many lines that the new text has more."""
    lines = new.split("\n")
    codes = difflib.SequenceMatcher(None, old.split("\n"), lines, autojunk=False).get_opcodes()
    stretches = [lines[j1:j2] for how, _, _, j1, j2 in codes if how != "equal" and j2 - j1 >= fewest]
    return "\n".join(line for stretch in stretches for line in stretch)


def requests(release: Release, change: Change, tests: Sequence[str]) -> dict[str, str]:
    """In three lengths; empty where neither an entry nor the docstrings of the public functions say what is asked.

    What is new is declared by `Needs.stated`; here stands what else changes.
    """
    symbols = change.workshop.symbols
    keys = change.deletion.feature.functions
    functions = [symbols.functions[key] for key in keys]
    names = {part for key in keys for part in (key.name, *key.name.split("."))}
    for function in functions:
        known = change.old.functions.get(function.key)
        names |= {*WORD.findall(function.signature)} - {*WORD.findall(known.signature if known else "")}
    spoken = [*map(words_of, tests), *(key.name.replace(".", "_") for key in keys)]
    words = {word for name in spoken for word in split_name(name) if len(word) > 3 and word != "test"}
    entries = entries_for(release.entries, {name for name in names if not name.startswith("__")}, words)
    if release.message and not entries:
        entries = release.entries[:1]
    public = [function for function in functions if is_public(function.key)]
    documented = [function for function in public if function.docstring]
    if not entries and (not documented or 2 * len(documented) < len(public)):
        return {}
    names_of = listed([f"`{function.key.name}` in `{function.key.path}`" for function in public[:8]] or ["this"])
    about = first_sentence(public[0].docstring) if public else ""
    said = " ".join(entries) or f"Please write or change {names_of}. {about}".strip()
    lines = [
        f"- `{function.key.name}` in `{function.key.path}` becomes `{function.signature}`."
        for function in public
        if (known := change.old.functions.get(function.key)) and known.signature != function.signature
    ]
    texts = [f"## `{function.key.name}`\n\n{plain(function.docstring).strip()}" for function in documented]
    texts = [text for text in texts if not shared_code(text, change.deletion.removed)]
    found = behaviours(tests, functions)[:MOST_BEHAVIOURS]
    covered = f"It will be checked for: {'; '.join(found)}." if found else ""
    parts = [said, "\n".join(lines), covered]
    return {
        "terse": next((text for text in (said, *entries) if len(text) < TERSE_CHARACTERS), said[:TERSE_CHARACTERS]),
        "normal": "\n\n".join(filter(None, [*parts, *([] if entries else texts)])) + "\n",
        "detailed": "\n\n".join(filter(None, [*parts, *texts])) + "\n",
    }
