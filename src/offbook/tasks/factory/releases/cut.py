"""A change cut into pieces by trial: sets of failing tests, each with the hunks that make them pass. A piece becomes a
task folder, or is refused with the reason.

A hunk is a function, method or class that came, went or changed, one other statement, one line of a list of names (an
import over several lines, `__all__`), or a whole new file. Deleted files stay: tests seldom need their absence.

Tests that enter the same changed functions are tried together. Their hunks are guessed, then left out as long as the
tests pass (delta debugging: Zeller and Hildebrandt, Simplifying and Isolating Failure-Inducing Input, 2002). Every
other failing test that passes with the same hunks joins the piece. Pieces that share most of their lines are one.

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
from offbook.tasks.factory.delete.symbols import Symbols, read_symbols
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
PROBED = 12  # tests that speak for those with the same changed functions
SHARED = 0.5  # of the lines of two pieces, from which on they are one
AT_A_TIME = 12  # rounds in one sandbox
NOTICING_S = 20.0  # how long the tests may take, together, that a piece must not break
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
    def defines(self) -> frozenset[str]:
        """Names that other hunks may need it for."""
        if self.name:
            return frozenset() if self.old else frozenset({self.name.rpartition(".")[2]})
        if self.is_file:
            path = PurePosixPath(self.path)
            return frozenset({*TOP_NAME.findall(self.new), path.stem if path.stem != "__init__" else path.parent.name})
        return self.words

    @property
    def changed_lines(self) -> int:
        matcher = difflib.SequenceMatcher(None, self.old.split("\n"), self.new.split("\n"), autojunk=False)
        return sum(j2 - j1 + i2 - i1 for how, i1, i2, j1, j2 in matcher.get_opcodes() if how != "equal")

    def lists(self, other: Hunk) -> bool:
        """Whether it is a list that names the function or class which the other hunk adds."""
        return not self.name and not self.is_file and bool(other.name and not other.old) and other.name in self.words


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
            _compare(found, path, _statements(old[path]), _statements(new[path]))
    return found


@dataclass(frozen=True)
class _Statement:
    """A statement with the comments above it. `parts` are a class's head and members, or the lines of a list."""

    key: str
    text: str
    name: str = ""
    parts: tuple[_Statement, ...] = ()


def _statements(source: str) -> list[_Statement]:
    lines = source.splitlines(keepends=True)
    try:
        body = pycode.parse(source).body
    except (SyntaxError, ValueError):
        body = []
    if not body or "\f" in source or len(source.split("\n")) - source.endswith("\n") != len(lines):
        return [_Statement("file", source)]  # no Python, or line breaks that Python does not count
    return _of_body(body, lines, start=0, end=len(lines), prefix="")


def _of_body(body: Sequence[ast.stmt], lines: Sequence[str], start: int, end: int, prefix: str) -> list[_Statement]:
    """The statements of lines[start:end]. Those that share a line are one."""
    groups: list[list[ast.stmt]] = []
    for node in body:
        if groups and _first(node) < (groups[-1][-1].end_lineno or 0):
            groups[-1].append(node)
        else:
            groups.append([node])
    found = []
    for group in groups:
        node = group[0]
        last = group[-1].end_lineno or start
        key, name = _key(node, prefix)
        parts: list[_Statement] = []
        if isinstance(node, ast.ClassDef) and _first(node.body[0]) > node.lineno - 1 and len(group) == 1:
            first = _first(node.body[0])
            parts = [_Statement(f"head {name}", "".join(lines[start:first]))]
            parts += _of_body(node.body, lines, start=first, end=last, prefix=f"{name}.")
        elif isinstance(node, LISTS) and last - start > 2:
            parts = [_Statement(f"{key} {line.strip().rstrip(',')}", line) for line in lines[start:last]]
        found.append(_Statement(key, "".join(lines[start:last]), name, tuple(parts)))
        start = last
    if start < end:
        found.append(_Statement(f"rest {prefix}", "".join(lines[start:end])))
    return found


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


def _compare(found: Hunks, path: str, old: Sequence[_Statement], new: Sequence[_Statement]) -> None:
    both = {*_divisible(old)} & {*_divisible(new)}
    before = _numbered(_divided(old, both))
    after = _numbered(_divided(new, both))
    moved: dict[str, int | None] = {}  # what moved is one hunk in two places
    stretches: list[tuple[int | None, str, str]] = []
    matcher = difflib.SequenceMatcher(None, list(before), list(after), autojunk=False)
    for how, i1, i2, j1, j2 in matcher.get_opcodes():
        gone = list(before)[i1:i2]
        came = list(after)[j1:j2]
        for key in (*gone, *came):
            one = after.get(key) or before[key]
            was, now = (side[key].text if key in side else "" for side in (before, after))
            if key not in moved:
                same = was == now and how == "equal"
                fixed = same or VERSION.match(one.text.lstrip("\n"))
                moved[key] = None if fixed else found.add(path, one.name, was, now)
        if how == "equal":
            stretches += [(moved[key], before[key].text, after[key].text) for key in gone]
        else:
            stretches += [(moved[key], before[key].text, "") for key in gone]
            stretches += [(moved[key], "", after[key].text) for key in came]
    if any(hunk is not None for hunk, _, _ in stretches):
        found.stretches[path] = stretches


def _divisible(statements: Iterable[_Statement]) -> Iterator[str]:
    for one in statements:
        if one.parts:
            yield one.key
            yield from _divisible(one.parts)


def _divided(statements: Iterable[_Statement], both: Collection[str]) -> Iterator[_Statement]:
    """Statements that are there on both sides in their parts."""
    for one in statements:
        if one.key in both:
            yield from _divided(one.parts, both)
        else:
            yield one


def _numbered(statements: Iterable[_Statement]) -> dict[str, _Statement]:
    seen: Counter[str] = Counter()
    found = {}
    for one in statements:
        seen[one.key] += 1
        found[f"{one.key}#{seen[one.key]}"] = one
    return found


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
        self.progress(f"{name}: the newer tests on the older tree, {len(self.every)} hunks apart")
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
            if not mine:
                continue
            left -= {*mine}
            if len(found) >= MAX_PIECES or self.rounds > MAX_ROUNDS:
                refused.append(Piece((), tuple(mine), TOO_MANY, mine[0]))
                continue
            chosen = await self._needed(self._with_names(entered), mine[:PROBED])
            (run,) = await self.run([chosen], sorted({*left, *mine}))
            left -= run.passed
            if run.passed:
                found.append(Piece(tuple(sorted(chosen)), tuple(sorted(run.passed))))
            done = f"{len(left)} of {len(waiting)} failing tests left"
            self.progress(f"{name}: {done}, {len(found)} pieces, {self.rounds} rounds")
        return self.stable, [*refused, *[await self._finished(one, waiting) for one in self._merged(found)]]

    def _entered(self, tests: Iterable[str]) -> dict[frozenset[int], list[str]]:
        """The tests by the hunks that they enter in the newer tree."""
        of_file: dict[str, list[Hunk]] = defaultdict(list)
        for hunk in self.hunks.hunks:
            of_file[hunk.path].append(hunk)
        entered: dict[str, set[int]] = {test: set() for test in tests}
        for key, entering in self.release.workshop.map.tests_of.items():
            for hunk in of_file.get(key.path, ()):
                if hunk.is_file or (hunk.name and f"{key.name}.".startswith(f"{hunk.name}.")):
                    for test in entered.keys() & entering:
                        entered[test].add(hunk.number)
        groups: dict[frozenset[int], list[str]] = defaultdict(list)
        for test, hunks in entered.items():
            groups[frozenset(hunks)].append(test)
        return groups

    def _with_names(self, hunks: Iterable[int]) -> frozenset[int]:
        """With the hunks that add a name which those use for the first time, or list one which they add."""
        found = {*hunks}
        waiting = [*found]
        while waiting:
            hunk = self.hunks.hunks[waiting.pop()]
            more = {one.number for one in self.hunks.hunks if one.defines & hunk.words or one.lists(hunk)} - found
            found |= more
            waiting += more
        return frozenset(found)

    async def _needed(self, start: frozenset[int], tests: Sequence[str]) -> frozenset[int]:
        """The fewest hunks with which the tests pass, and the lists that name what these add."""

        async def passing(sets: Sequence[frozenset[int]]) -> list[bool]:
            return [run.passed >= {*tests} for run in await self.run(sets, tests)]

        hunks = self.hunks.hunks
        paths = {hunks[number].path for number in start}
        starts = [start, frozenset(one.number for one in hunks if one.path in paths), self.every]
        good = await passing(starts)
        kept = await minimal(starts[good.index(True)] if any(good) else self.every, passing)
        complete = kept | {one.number for one in hunks for other in kept if one.lists(hunks[other])}
        return complete if complete == kept or (await passing([complete]))[0] else kept

    def _merged(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Pieces that share most of their lines, as one."""
        lines = [hunk.changed_lines for hunk in self.hunks.hunks]

        def weight(hunks: Iterable[int]) -> int:
            return sum(lines[number] for number in hunks) + 1

        merged: list[Piece] = []
        for piece in sorted(pieces, key=lambda one: -weight(one.hunks)):
            mine = {*piece.hunks}
            for number, other in enumerate(merged):
                theirs = {*other.hunks}
                if weight(mine & theirs) >= SHARED * weight(mine | theirs):
                    merged[number] = Piece(tuple(sorted(mine | theirs)), tuple(sorted({*piece.tests, *other.tests})))
                    break
            else:
                merged.append(piece)
        return merged

    async def _finished(self, piece: Piece, waiting: Sequence[str]) -> Piece:
        """The piece with all tests that it makes pass. If it breaks others, once more with what these take."""
        hunks = frozenset(piece.hunks)
        for is_last in (False, True):
            # Stable tests that enter a file which the hunks change, the quick ones first, up to a limit.
            paths = {self.hunks.hunks[number].path for number in hunks}
            tests_of = self.release.workshop.map.tests_of
            entering = {test for key, tests in tests_of.items() if key.path in paths for test in tests}
            seconds = self.release.repository.seconds
            noticing: list[str] = []
            spent_s = 0.0
            for test in sorted(entering & self.stable, key=lambda test: (seconds[test], test)):
                spent_s += seconds[test]
                if spent_s > NOTICING_S:
                    break
                noticing.append(test)
            (run,) = await self.run([hunks], [*noticing, *waiting])
            broken = [test for test in noticing if test not in run.passed]
            if not broken:
                return Piece(tuple(sorted(hunks)), tuple(test for test in waiting if test in run.passed))
            if is_last or self.rounds > MAX_ROUNDS:
                break
            more = hunks.union(*self._entered(broken))
            hunks = await self._needed(self._with_names(more), [*piece.tests[:PROBED], *broken[:PROBED]])
        return Piece(piece.hunks, piece.tests, BREAKS, broken[0])

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
        one_by_one = len(spare) > 1 and not (await passing([together]))[0]
        if one_by_one:
            together = kept - spare[0]
            for group in spare[1:]:
                if (await passing([together - group]))[0]:
                    together -= group
        kept = together
        if size == 1 and not one_by_one:
            break
        size = max(1, min(size, len(kept)) // 2)
    return kept


MAX_LINES = 1200
MOST_LINES = 16
MOST_BEHAVIOURS = 10
FEWEST_LINES = 2  # of a block that was added inside of a function, to be looked for elsewhere


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
    lines = sum(hunks.hunks[number].changed_lines for number in piece.hunks)
    refused = piece.refused
    evidence = piece.evidence
    if not refused and lines > MAX_LINES:
        refused = f"it takes over {MAX_LINES} lines"
        evidence = f"{lines} lines"
    if refused:
        return Outcome(
            identity(release, hunks, piece), release.repository.name, "release", "release", refused, evidence
        )
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
    named = next((hunk for hunk in sorted(mine, key=lambda hunk: -hunk.changed_lines) if hunk.name), None)
    stem = PurePosixPath(mine[0].path).stem if mine else words_of("".join(piece.tests[:1]))
    texts = [f"{hunk.path}\0{hunk.new}" for hunk in mine] or piece.tests
    digest = hashlib.sha256("\0".join(texts).encode()).hexdigest()[:6]
    return identity_of(release.repository.name, release.new_version, named.name if named else stem, digest)


@dataclass(frozen=True)
class Change:
    """A piece as a deletion: `old` and `new` are the product without and with it."""

    hunks: tuple[Hunk, ...]
    workshop: Workshop  # the tree with its hunks, with the tests that go with it
    deletion: Deletion
    old: Symbols
    came: tuple[FunctionKey, ...]  # functions and classes that are new
    changed: tuple[FunctionKey, ...]  # functions that were there

    @property
    def new(self) -> Symbols:
        return self.workshop.symbols

    def public(self, keys: Sequence[FunctionKey]) -> list[FunctionKey]:
        return [key for key in keys if not re.search(r"(^|[/.])_(?!_)", f"{key.path.removesuffix('.py')}.{key.name}")]


def change_of(release: Release, hunks: Hunks, piece: Piece, stable: Collection[str]) -> Change:
    after = hunks.applied(piece.hunks)
    before = {path: release.product.get(path) for path in after}
    roots = release.repository.import_roots
    old = read_symbols(release.product, roots)
    new = read_symbols({**release.product, **after}, roots)
    own = {key for key, function in new.functions.items() if key.path in after and not function.nested}
    sources = {key: new.functions[key].source(after[key.path]) for key in own}
    known = {key: old.functions[key].source(before[key.path] or "") for key in own & old.functions.keys()}
    classes = {FunctionKey(path, name) for path in after if path in new.modules for name in new.modules[path].bases}
    classes -= {FunctionKey(path, name) for path, module in old.modules.items() for name in module.bases}
    came = tuple(sorted(classes | (own - known.keys())))
    changed = tuple(sorted(key for key in known if known[key] != sources[key]))
    functions = tuple(sorted(key for key in (*came, *changed) if key in own))
    removed = {str(key): sources[key] for key in came if key in own}
    removed |= {str(key): added_lines(known[key], sources[key], FEWEST_LINES) for key in changed}
    removed = {what: text for what, text in removed.items() if text.strip()}
    if not removed:
        removed = {f"{path}::": added_lines(before[path] or "", text, 1) for path, text in after.items()}
        removed = {what: text for what, text in removed.items() if text.strip()}
    there = {path: text for path, text in before.items() if text is not None}
    without = {**release.tests, **release.tests_on(there)}
    feature = Feature(
        identity(release, hunks, piece),
        "release",
        tuple(key for key in functions if new.functions[key].public) or functions[:1],
        functions,
        tuple(sorted(piece.tests)),
    )
    deletion = Deletion(
        feature,
        "release",
        dict(before),
        removed,
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
    return Change(tuple(hunks.hunks[number] for number in piece.hunks), workshop, deletion, old, came, changed)


def added_lines(old: str, new: str, fewest: int) -> str:
    """The stretches of at least so many lines that the new text has more."""
    lines = new.split("\n")
    codes = difflib.SequenceMatcher(None, old.split("\n"), lines, autojunk=False).get_opcodes()
    stretches = [lines[j1:j2] for how, _, _, j1, j2 in codes if how != "equal" and j2 - j1 >= fewest]
    return "\n".join(line for stretch in stretches for line in stretch)


def requests(release: Release, change: Change, tests: Sequence[str]) -> dict[str, str]:
    """In three lengths; empty where neither an entry nor the docstrings of most public functions say what is asked.

    What is new is declared by `Needs.stated`; here stands what else changes.
    """
    keys = change.public((*change.came, *change.changed))
    names = {part for key in (*change.came, *change.changed) for part in (key.name, key.simple, *key.name.split("."))}
    for hunk in change.hunks:
        names |= set() if hunk.is_file else _parameters(hunk.new) - _parameters(hunk.old)
    names = {name for name in names if not name.startswith("__")}
    spoken = [*map(words_of, tests), *(key.name.replace(".", "_") for key in (*change.came, *change.changed))]
    words = {word for name in spoken for word in split_name(name) if len(word) > 3 and word != "test"}
    entries = entries_for(release.entries, names, words)
    if release.message and not entries:
        entries = release.entries[:1]
    documented = {key: text for key in keys if (text := _said_now(change, key))}
    is_copied = any(shared_code(text, change.deletion.removed) for text in documented.values())
    if not entries and (is_copied or not documented or 2 * len(documented) < len(keys)):
        return {}
    said = " ".join(entries)
    functions = [change.new.functions[key] for key in (*change.came, *change.changed) if key in change.new.functions]
    found = behaviours(tests, functions)
    lines = [f"- {line}" for key in change.public(change.changed) if (line := _changed(change, key, said))]
    docstrings = [f"## `{key.name}`\n\n{text}" for key, text in documented.items() if key in change.changed]

    def whole(docstrings: Sequence[str], most: int) -> str:
        covered = f"It will be checked for: {'; '.join(found[:most])}." if found else ""
        parts = [said or _summary(change, keys), "\n".join(lines[:MOST_LINES]), *docstrings, covered]
        return "\n\n".join(filter(None, parts)).strip() + "\n"

    short = next((text for text in (said, *entries[:1]) if 0 < len(text) < TERSE_CHARACTERS), "")
    return {
        "terse": short or _summary(change, keys),
        "normal": whole([] if said or is_copied else docstrings, MOST_BEHAVIOURS),
        "detailed": whole([] if is_copied else docstrings, 2 * MOST_BEHAVIOURS),
    }


def _summary(change: Change, keys: Sequence[FunctionKey]) -> str:
    came = [key for key in keys if key in change.came and not key.is_inside(change.came)]
    names = listed([f"`{key.name}`" for key in (came or keys)[:8]])
    paths = listed(sorted({key.path for key in came or keys} or {hunk.path for hunk in change.hunks})[:3])
    if came:
        first = change.new.functions.get(came[0])
        text = f"Please add {names} to {paths}. {first_sentence(first.docstring) if first else ''}"
    else:
        text = f"Please change {names} in {paths}." if keys else f"Please change what {paths} does."
    return text.strip()[: TERSE_CHARACTERS - 1]


def _changed(change: Change, key: FunctionKey, said: str) -> str:
    after = change.new.functions[key].signature
    if change.old.functions[key].signature != after:
        return f"`{key.name}` in `{key.path}` becomes `{after}`."
    return "" if key.simple in said else f"`{key.name}` in `{key.path}` changes."


def _said_now(change: Change, key: FunctionKey) -> str:
    """What a docstring says that it did not say before."""
    before = change.old.functions.get(key)
    after = change.new.functions.get(key)
    known = {line.strip() for line in before.docstring.split("\n") if line.strip()} if before else set[str]()
    fresh = [line for line in (after.docstring if after else "").split("\n") if line.strip() not in known]
    tells = any(">>>" not in line and len(line.split()) > 2 for line in fresh)
    return plain("\n".join(fresh)).strip() if tells else ""


def _parameters(text: str) -> set[str]:
    """Names in the parentheses of definitions."""
    heads = re.findall(r"^\s*(?:async )?def \w+\((.*?)\)\s*(?:->.*?)?:", text, re.M | re.S)
    return {name for inside in heads for name in re.findall(r"(?:^|,)\s*\**(\w+)", inside)} - {"self", "cls"}
