"""A change cut into pieces by trial: sets of hunks, each with the failing tests that it makes pass. A piece becomes a
task folder, or is refused with the reason.

A hunk is a function, method or class that came, went or changed, one other statement, one line of a list of names (an
import over several lines, `__all__`), or a whole new file. Deleted files stay: tests seldom need their absence.

Tests that enter the same changed functions are tried together. Their hunks are guessed, then left out as long as the
tests pass (delta debugging: Zeller and Hildebrandt, Simplifying and Isolating Failure-Inducing Input, 2002). Every
other failing test that passes with the same hunks joins the piece. Pieces that share most of their hunks are one.
Whether a piece breaks other tests is seen when its task is verified.

The tree with the piece's hunks is what a deletion starts from, the older tree is what it leaves. The request is the
changelog's or commit's own words: `terse` is that alone, `normal` adds what tests look at, `detailed` docstrings.
"""

from __future__ import annotations

import ast
import asyncio
import difflib
import hashlib
import io
import re
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path, PurePosixPath

from offbook.core.pycode import nodes, try_parse
from offbook.sandbox import SandboxSpec
from offbook.tasks.factory.delete.symbols import is_public, read_symbols
from offbook.tasks.factory.instruction.examples import words_of
from offbook.tasks.factory.instruction.instruct import TERSE_CHARACTERS, behaviours, listed, plain
from offbook.tasks.factory.instruction.needs import Needs
from offbook.tasks.factory.make import MakeSettings, Outcome, Shown, task_from
from offbook.tasks.factory.records import Taken
from offbook.tasks.factory.releases.release import Release, entries_for
from offbook.tasks.factory.types import Deletion, Feature, FunctionKey, files_of, identity_of, last
from offbook.tasks.factory.verification.verify import Verdict
from offbook.tasks.factory.workshop import Workshop
from offbook.tasks.suite import Round, SuiteRun, run_rounds, suite_sandbox

START_S = 20.0
SLOWER = 4.0
MAX_ROUNDS = 600  # of tests; what is begun is finished
PROBED = 12  # tests that represent those with the same changed functions
SHARED = 0.5  # of the hunks of two pieces, from which on they are one
AT_A_TIME = 12  # rounds in one sandbox
MOST_BEHAVIOURS = 10
WORD = re.compile(r"[A-Za-z_]\w*")
Chosen = frozenset[int]  # hunks, by their numbers
Passing = Callable[[Sequence[Chosen]], Awaitable[list[bool]]]


@dataclass(frozen=True)
class Hunk:
    path: str
    name: str  # the qualified name of a function or class; empty for other statements
    old: str
    new: str
    is_file: bool = False  # the whole of a new file

    @property
    def words(self) -> set[str]:
        """Names that it adds."""
        return {*WORD.findall(self.new)} - {*WORD.findall(self.old)}

    @property
    def defines(self) -> set[str]:
        """Names that other hunks may need it for."""
        return {last(self.name)} if self.name else {*self.words, PurePosixPath(self.path).stem}

    def has(self, key: FunctionKey) -> bool:
        """Whether the function is changed by it or inside of it."""
        return self.path == key.path and (self.is_file or f"{key.name}.".startswith(f"{self.name}."))


@dataclass(frozen=True)
class Hunks:
    """All hunks between two versions of a product's Python files."""

    hunks: list[Hunk] = field(default_factory=list)
    # path -> stretches of the file: the hunk that decides which text is there (None: always the old), old, new
    stretches: dict[str, list[tuple[int | None, str, str]]] = field(default_factory=dict)

    def applied(self, chosen: Collection[int]) -> dict[str, str]:
        """The files that these hunks change, with them and no others."""
        return {
            path: "".join(new if hunk in chosen else old for hunk, old, new in self.stretches[path])
            for path in sorted({self.hunks[number].path for number in chosen})
        }


def hunks_between(old: Mapping[str, str], new: Mapping[str, str]) -> Hunks:
    found = Hunks()
    for path, text in sorted(new.items()):
        if path not in old:
            found.stretches[path] = [(len(found.hunks), "", text)]
            found.hunks.append(Hunk(path, "", "", text, is_file=True))
        elif old[path] != text:
            _compare(found, path, old[path], text)
    return found


def _compare(found: Hunks, path: str, old: str, new: str) -> None:
    """Classes that both versions have are compared part by part; others are one segment."""
    classes = [{node.name for node in nodes(try_parse(text), ast.ClassDef)} for text in (old, new)]
    before = _segments(old, classes[0] & classes[1])
    after = _segments(new, classes[0] & classes[1])
    order = list(after)
    place = 0
    for key in before:
        if key in after:
            place = order.index(key) + 1
        else:
            order.insert(place, key)
            place += 1
    stretches = found.stretches[path] = []
    for key in order:
        was = before.get(key, "")
        now = after.get(key, "")
        number = None
        if was != now:
            number = len(found.hunks)
            found.hunks.append(Hunk(path, key[4:].rstrip("#") if key.startswith("def ") else "", was, now))
        stretches.append((number, was, now))


def _segments(source: str, divided: Set[str]) -> dict[str, str]:
    """The text in pieces, by keys of what they are: statements with the comments above them, or parts of them."""
    lines = io.StringIO(source).readlines()
    tree = try_parse(source)
    found: dict[str, str] = {}

    def put(key: str, start: int, end: int) -> None:
        while key in found:  # the same name once more
            key += "#"
        found[key] = "".join(lines[start:end])

    def walk(body: Iterable[ast.stmt], start: int, end: int, prefix: str) -> None:
        for node in body:
            stop = node.end_lineno or end
            key = _key(node, prefix)
            if isinstance(node, ast.ClassDef) and node.name in divided:
                first = node.body[0].lineno - 1 - len(getattr(node.body[0], "decorator_list", ()))
                put(f"head {key}", start, first)
                walk(node.body, first, stop, f"{prefix}{node.name}.")
            elif stop - start > 2 and (isinstance(node, ast.ImportFrom) or key == "= __all__"):
                for number in range(start, stop):
                    put(f"{key} {lines[number].strip().rstrip(',')}", number, number + 1)
            else:
                put(key, start, stop)
            start = stop
        put(f"rest {prefix}", start, end)

    walk(tree.body if tree else (), 0, len(lines), "")
    return found


def _key(node: ast.stmt, prefix: str) -> str:
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return f"def {prefix}{node.name}"
        case ast.ImportFrom():
            return f"from {'.' * node.level}{node.module}"
        case ast.Assign(targets=[target, *_]) | ast.AnnAssign(target=target) | ast.AugAssign(target=target):
            return f"= {prefix}{ast.unparse(target)}"
        case ast.Expr(value=ast.Constant()):
            return f"doc {prefix}"
    return f"{prefix} {ast.unparse(node)[:60]}"


@dataclass(frozen=True)
class Piece:
    hunks: tuple[int, ...]
    tests: tuple[str, ...]  # that fail without it


@dataclass
class Cutter:
    release: Release
    hunks: Hunks
    spec: SandboxSpec
    progress: Callable[[str], None]
    rounds: int = 0

    async def cut(self) -> tuple[set[str], list[Piece]]:
        """The tests that pass on both trees, and the pieces."""
        name = self.release.repository.name
        tests = self.release.repository.tests
        every = frozenset(range(len(self.hunks.hunks)))
        self.progress(f"{name}: running the newer tests on the older tree, {len(every)} hunks behind")
        without, whole = await self.run([frozenset(), every], tests)
        waiting = [test for test in tests if test in whole.passed - without.passed]
        left = {*waiting}
        found: list[Chosen] = []
        for entered, group in self._entered(waiting):
            mine = [test for test in group if test in left][:PROBED]
            if not mine or self.rounds > MAX_ROUNDS:
                continue
            chosen = await self._needed(entered, mine)
            (run,) = await self.run([chosen], sorted(left))
            left -= run.passed
            similar = [one for one in found if len(one & chosen) >= SHARED * len(one | chosen)][:1]
            found = [one for one in found if one not in similar] + [chosen.union(*similar)]
            self.progress(f"{name}: {len(left)} of {len(waiting)} failing tests left, {len(found)} pieces")
        pieces = []
        for chosen, run in zip(found, await self.run(found, waiting), strict=True):
            passing = tuple(test for test in waiting if test in run.passed)
            if chosen and passing:
                pieces.append(Piece(tuple(sorted(chosen)), passing))
        beyond = {*tests} - without.passed - whole.passed
        self.progress(f"{name}: of no piece are {len(left)} tests, and {len(beyond)} need more than Python files")
        return without.passed & whole.passed, pieces

    def _entered(self, tests: Sequence[str]) -> list[tuple[Chosen, list[str]]]:
        """The tests by the hunks that they enter in the newer tree, those that enter few first."""
        tests_of = self.release.workshop.map.tests_of
        entering = [
            {test for key, some in tests_of.items() if hunk.has(key) for test in some} for hunk in self.hunks.hunks
        ]
        entered = {test: [number for number, some in enumerate(entering) if test in some] for test in tests}
        order = sorted(tests, key=lambda test: (len(entered[test]), entered[test]))
        return [(frozenset(numbers), list(group)) for numbers, group in groupby(order, key=lambda test: entered[test])]

    async def _needed(self, entered: Chosen, tests: Sequence[str]) -> Chosen:
        """The fewest hunks with which the tests pass: of those that they enter, with those that add a name which these
        use for the first time, or else of all."""

        async def passing(sets: Sequence[Chosen]) -> list[bool]:
            return [run.passed >= {*tests} for run in await self.run(sets, tests)]

        hunks = self.hunks.hunks
        guess = {*entered}
        waiting = [*entered]
        while waiting:
            words = hunks[waiting.pop()].words
            more = {number for number, hunk in enumerate(hunks) if hunk.defines & words} - guess
            guess |= more
            waiting += more
        (is_enough,) = await passing([frozenset(guess)])
        return await minimal(frozenset(guess if is_enough else range(len(hunks))), passing)

    async def run(self, sets: Sequence[Chosen], tests: Sequence[str]) -> list[SuiteRun]:
        """The tests with each set of hunks on the older tree."""
        self.rounds += len(sets)
        repository = self.release.repository
        limit_s = START_S + SLOWER * sum(repository.seconds[test] for test in tests)
        found = []
        for start in range(0, len(sets), AT_A_TIME):
            rounds = []
            for chosen in sets[start : start + AT_A_TIME]:
                files = self.hunks.applied(chosen)
                changes: dict[str, str | None] = {**files, **self.release.tests_on(files)}
                rounds.append(Round(files_of(tests), tests, changes, timeout_s=limit_s))
            async with await suite_sandbox(repository.tree, repository.suite, self.spec) as sandbox:
                found += await run_rounds(sandbox, repository.suite, rounds, limit_s * len(rounds))
        return found


async def minimal(start: Chosen, passing: Passing) -> Chosen:
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
    workshop, deletion = await asyncio.to_thread(as_deletion, release, hunks, piece, stable)

    def show(workshop: Workshop, deletion: Deletion, verdict: Verdict) -> Shown:
        """The older tree as it is, and the newer tests."""
        needs = Needs(
            before=workshop.files,
            shown=release.workshop.files,
            failing=verdict.fail_to_pass,
            removed=deletion.removed,
            functions=deletion.feature.functions,
            targets=deletion.feature.targets,
            symbols=workshop.symbols,
            is_told=True,  # or `requests` has nothing
        )
        tree = {path: text for path, text in deletion.files.items() if text is not None}
        words = requests(release, workshop, deletion, verdict.fail_to_pass)
        return Shown(tree, words, {path: workshop.files[path] for path in release.tests}, needs)

    return await task_from(workshop, deletion, folder, spec, settings, taken, show)


def identity(release: Release, hunks: Hunks, piece: Piece) -> str:
    """The same for the same hunks of the same two trees."""
    mine = sorted((hunks.hunks[number] for number in piece.hunks), key=lambda hunk: (not hunk.name, -len(hunk.new)))
    about = mine[0].name or PurePosixPath(mine[0].path).stem
    digest = hashlib.sha256(repr(mine).encode()).hexdigest()[:6]
    return identity_of(release.repository.name, release.new_version, about, digest)


def as_deletion(release: Release, hunks: Hunks, piece: Piece, stable: Collection[str]) -> tuple[Workshop, Deletion]:
    """The tree with the piece's hunks and the tests that go with it, and what takes them away again."""
    after = hunks.applied(piece.hunks)
    before = {path: release.product.get(path) for path in after}
    old = release.workshop.symbols.functions
    symbols = read_symbols({**release.product, **after}, release.repository.import_roots)
    removed: dict[str, str] = {}
    for key, function in sorted(symbols.functions.items()):
        if key.path in after and not function.nested:
            source = function.source(after[key.path])
            known = old[key].source(before[key.path] or "") if key in old else ""
            if source != known:
                removed[str(key)] = added_lines(known, source, fewest=2 if known else 1)
    functions = tuple(map(FunctionKey.of, removed))
    if not any(removed.values()):
        removed = {f"{path}::": added_lines(before[path] or "", text, fewest=1) for path, text in after.items()}
    targets = tuple(key for key in functions if symbols.functions[key].public) or functions[:1]
    feature = Feature(identity(release, hunks, piece), "release", targets, functions, tuple(sorted(piece.tests)))
    deletion = Deletion(
        feature=feature,
        level="release",
        files=dict(before),
        removed={what: text for what, text in removed.items() if text.strip()},
        stubbed=functions,
        deleted=(),
        tests=release.tests_on({}),
    )
    workshop = replace(
        release.workshop,
        repository=replace(release.repository, tests=tuple(sorted({*stable, *piece.tests}))),
        files={**release.workshop.files, **release.tests_on(after), **after},
        symbols=symbols,
    )
    return workshop, deletion


def added_lines(old: str, new: str, fewest: int) -> str:
    """The stretches of at least so many lines that the new text has more."""
    lines = new.split("\n")
    codes = difflib.SequenceMatcher(None, old.split("\n"), lines, autojunk=False).get_opcodes()
    stretches = ["\n".join(lines[j1:j2]) for how, _, _, j1, j2 in codes if how != "equal" and j2 - j1 >= fewest]
    return "\n".join(stretches)


def requests(release: Release, workshop: Workshop, deletion: Deletion, tests: Sequence[str]) -> dict[str, str]:
    """In three lengths; empty where neither an entry nor the docstrings of the public functions say what is asked.

    What is new is declared by `Needs.stated`; here stands what else changes.
    """
    functions = [workshop.symbols.functions[key] for key in deletion.feature.functions]
    public = [function for function in functions if is_public(function.key)]
    documented = [function for function in public if function.docstring]
    names = {part for function in functions for part in function.key.name.split(".")}
    words = {word for test in tests for word in words_of(test).split() if len(word) > 3}
    entries = entries_for(release.entries, names, words) or release.fallback
    if not entries and 2 * len(documented) <= len(public):
        return {}
    wanted = [f"`{function.key.name}` in `{function.key.path}`" for function in public[:8]]
    said = " ".join(entries) or f"Please write or change {listed(wanted)}."
    old = release.workshop.symbols.functions
    signatures = [
        f"- `{one.key.name}` in `{one.key.path}` becomes `{one.signature}`."
        for one in public
        if one.key in old and old[one.key].signature != one.signature
    ]
    found = behaviours(tests, functions)[:MOST_BEHAVIOURS]
    covered = f"It will be checked for: {'; '.join(found)}." if found else ""
    texts = [f"## `{function.key.name}`\n\n{plain(function.docstring).strip()}" for function in documented]
    normal = "\n\n".join(filter(None, [said, "\n".join(signatures), covered, *([] if entries else texts)]))
    return {
        "terse": next((text for text in (said, *entries) if len(text) < TERSE_CHARACTERS), said[:TERSE_CHARACTERS]),
        "normal": f"{normal}\n",
        "detailed": "\n\n".join([normal, *(texts if entries else [])]) + "\n",
    }
