"""A release cut into pieces: sets of failing tests, each with the hunks that it takes to make them pass.

Tests that enter the same changed functions are tried together. Their hunks are guessed from what they enter and from
the names that those hunks bring, and hunks are then left out as long as the tests pass without them (delta debugging,
as in Zeller and Hildebrandt, Simplifying and Isolating Failure-Inducing Input, 2002). Every other failing test that
passes with the same hunks joins the piece. Pieces that mostly share their lines are one.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from pydantic import TypeAdapter

from offbook.core.runfolder import write_atomic
from offbook.sandbox import SandboxSpec
from offbook.tasks.factory.releases.hunks import Hunk
from offbook.tasks.factory.releases.release import Release
from offbook.tasks.factory.types import FunctionKey, files_of
from offbook.tasks.grade import put
from offbook.tasks.suite import Round, SuiteRun, run_rounds, suite_sandbox

START_S, SLOWER = 20.0, 4.0
MAX_PIECES = 40
MAX_ROUNDS = 800  # of tests, for one jump
FINISHING = 200  # of these, for pieces that are cut: one each, and many where one breaks tests
PROBED = 12  # tests that speak for those with the same changed functions
SHARED = 0.5  # of the lines of two pieces, from which on they are one
AT_A_TIME = 12  # rounds in one sandbox
NOTICING_S = 20.0  # how long the tests may take, together, that a piece must not break
MORE_THAN_SOURCE = "needs more than the product's Python files"
TOO_MANY = "the cutting was stopped before it"
BREAKS = "its hunks alone break other tests"
Passing = Callable[[Sequence[frozenset[int]]], Awaitable[list[bool]]]


@dataclass(frozen=True, slots=True)
class Piece:
    hunks: tuple[int, ...]
    tests: tuple[str, ...]
    refused: str = ""
    evidence: str = ""


@dataclass(frozen=True, slots=True)
class Cut:
    failing: int  # tests of the newer release that the older one fails
    stable: tuple[str, ...]  # that pass on both
    pieces: tuple[Piece, ...]
    rounds: int
    is_whole: bool = True  # no test was left because of a limit


_CUT = TypeAdapter(Cut)


def pieces_for(limit: int) -> int:
    """How many to cut for so many tasks: about half of them become one."""
    return 2 * limit + 2


async def cut_release(release: Release, spec: SandboxSpec, progress: Callable[[str], None], limit: int = 0) -> Cut:
    """Kept in folder/cut.json and made again only for a higher limit. Of a whole one no limit takes anything away."""
    path = release.repository.folder / "cut.json"
    texts = "\0".join(f"{hunk.path}\0{hunk.old}\0{hunk.new}" for hunk in release.hunks.hunks)
    digest = hashlib.sha256(texts.encode()).hexdigest()  # pieces name hunks by their numbers
    data = json.loads(path.read_bytes()) if path.is_file() else {}
    if data.get("digest") == digest and (data.get("is_whole") or 0 < limit <= data.get("limit", 0)):
        return _CUT.validate_python({key: data[key] for key in data if key not in ("digest", "limit")})
    found = await Cutter(release, spec, progress, limit).cut()
    write_atomic(path, json.dumps({**asdict(found), "digest": digest, "limit": limit}))
    return found


class OutOfRounds(Exception):
    pass


@dataclass
class Cutter:
    release: Release
    spec: SandboxSpec
    progress: Callable[[str], None]
    limit: int = 0  # of tasks; 0 is none
    rounds: int = 0
    reserved: int = 0  # rounds that others will need
    is_whole: bool = True
    stable: set[str] = field(default_factory=set)

    async def cut(self) -> Cut:
        name, every = self.release.repository.name, frozenset(range(len(self.release.hunks.hunks)))
        tests = self.release.repository.tests
        self.progress(f"{name}: the newer release's tests on the older one, {len(every)} hunks apart")
        without, whole = await self.run([frozenset(), every], tests)
        self.stable = without.passed & whole.passed
        failing = [test for test in tests if test not in without.passed]
        waiting = [test for test in failing if test in whole.passed]
        pieces = []
        if beyond := [test for test in failing if test not in whole.passed]:
            pieces.append(Piece((), tuple(beyond), MORE_THAN_SOURCE, f"{len(beyond)} tests, as {beyond[0]}"))
        self.reserved = FINISHING
        found = self._merged(await self._pieces(waiting, every, pieces))
        for place, piece in enumerate(found, 1):
            self.reserved = len(found) - place
            pieces.append(await self._whole_piece(piece, every, waiting))
        return Cut(len(failing), tuple(sorted(self.stable)), tuple(pieces), self.rounds, self.is_whole)

    async def _pieces(self, waiting: Sequence[str], every: frozenset[int], refused: list[Piece]) -> list[Piece]:
        found: list[Piece] = []
        left = set(waiting)
        for entered, alike in sorted(self._alike(waiting).items(), key=lambda one: (len(one[0]), sorted(one[0]))):
            tests = [test for test in alike if test in left]
            if not tests:
                continue
            if self.limit and len(self._merged(found)) >= pieces_for(self.limit):
                self.is_whole = False
                break
            if len(found) >= MAX_PIECES:
                refused.append(Piece((), tuple(tests), TOO_MANY, tests[0]))
                continue
            try:
                hunks = await self._needed(self.closure(entered), tests[:PROBED], every)
                (run,) = await self.run([hunks], sorted(left))
            except OutOfRounds:
                refused.append(Piece((), tuple(tests), TOO_MANY, tests[0]))
                continue
            joined = left & run.passed
            left -= joined
            self.progress(
                f"{self.release.repository.name}: {len(left)} of {len(waiting)} failing tests left, "
                f"{len(found) + 1} pieces, {self.rounds} rounds"
            )
            found.append(Piece(tuple(sorted(hunks)), tuple(sorted(joined))))
        return found

    def _alike(self, tests: Iterable[str]) -> dict[frozenset[int], list[str]]:
        """Tests by the changed functions that they enter in the newer release."""
        of_file: dict[str, list[Hunk]] = defaultdict(list)
        for hunk in self.release.hunks.hunks:
            of_file[hunk.path].append(hunk)
        entered: dict[str, set[int]] = {test: set() for test in tests}
        for key, entering in self.release.map.tests_of.items():
            numbers = [hunk.number for hunk in of_file.get(key.path, ()) if _holds(hunk, key)]
            for test in entering if numbers else ():
                if test in entered:
                    entered[test].update(numbers)
        alike: dict[frozenset[int], list[str]] = defaultdict(list)
        for test, hunks in entered.items():
            alike[frozenset(hunks)].append(test)
        return alike

    def closure(self, hunks: Iterable[int]) -> frozenset[int]:
        """With the hunks that bring a name which those use for the first time, and that list a name which came."""
        every = self.release.hunks.hunks
        found, waiting = set(hunks), list(hunks)
        while waiting:
            hunk = every[waiting.pop()]
            for other in every:
                if other.number not in found and (other.defines & hunk.words or lists(other, hunk)):
                    found.add(other.number)
                    waiting.append(other.number)
        return frozenset(found)

    async def _needed(self, start: frozenset[int], tests: Sequence[str], every: frozenset[int]) -> frozenset[int]:
        """The fewest of them with which the tests pass, and lists that name what came with these."""

        async def passing(sets: Sequence[frozenset[int]]) -> list[bool]:
            return [run.passed >= {*tests} for run in await self.run(sets, tests)]

        first = [start, self._of_files(start), every]
        begin = next(
            chosen for chosen, good in zip(first, await passing(first), strict=True) if good or chosen is every
        )
        kept = await minimal(begin, passing)
        hunks = self.release.hunks.hunks
        listing = {one.number for one in hunks for other in kept if lists(one, hunks[other])}
        complete = kept | listing
        return complete if complete == kept or (await passing([complete]))[0] else kept

    def _of_files(self, hunks: frozenset[int]) -> frozenset[int]:
        paths = {self.release.hunks.hunks[number].path for number in hunks}
        return frozenset(hunk.number for hunk in self.release.hunks.hunks if hunk.path in paths)

    def _merged(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Pieces of which one has most of the other's lines, as one."""
        lines = [hunk.changed_lines for hunk in self.release.hunks.hunks]

        def weight(hunks: Iterable[int]) -> int:
            return sum(lines[number] for number in hunks) + 1

        merged: list[Piece] = []
        for piece in sorted(pieces, key=lambda one: -weight(one.hunks)):
            mine = {*piece.hunks}
            for place, other in enumerate(merged):
                theirs = {*other.hunks}
                if weight(mine & theirs) >= SHARED * weight(mine | theirs):
                    merged[place] = Piece(tuple(sorted(mine | theirs)), tuple(sorted({*piece.tests, *other.tests})))
                    break
            else:
                merged.append(piece)
        return merged

    async def _whole_piece(self, piece: Piece, every: frozenset[int], waiting: Sequence[str]) -> Piece:
        """With all tests that it makes pass. If it breaks others, with what these take."""
        hunks, broken = frozenset(piece.hunks), list[str]()
        try:
            for _ in range(2):
                if broken:
                    more = frozenset[int]().union(*self._alike(broken))
                    tests = [*piece.tests[:PROBED], *broken[:PROBED]]
                    hunks = await self._needed(self.closure(hunks | more), tests, every)
                noticing = self._noticing(hunks)
                (run,) = await self.run([hunks], [*noticing, *waiting])
                broken = [test for test in noticing if test not in run.passed]
                if not broken:
                    return Piece(tuple(sorted(hunks)), tuple(test for test in waiting if test in run.passed))
        except OutOfRounds:
            return Piece(piece.hunks, piece.tests, TOO_MANY, "".join(piece.tests[:1]))
        return Piece(piece.hunks, piece.tests, BREAKS, broken[0])

    def _noticing(self, hunks: Iterable[int]) -> list[str]:
        """Tests of both releases that enter a file which the hunks change, the quick ones first, up to a limit."""
        paths = {self.release.hunks.hunks[number].path for number in hunks}
        entering = {test for key, tests in self.release.map.tests_of.items() if key.path in paths for test in tests}
        seconds, found, spent_s = self.release.repository.seconds, list[str](), 0.0
        for test in sorted(entering & self.stable, key=lambda test: (seconds[test], test)):
            spent_s += seconds[test]
            if spent_s > NOTICING_S:
                break
            found.append(test)
        return found

    async def run(self, sets: Sequence[frozenset[int]], tests: Sequence[str]) -> list[SuiteRun]:
        """The tests with each set of hunks on the older release."""
        if self.rounds + len(sets) > MAX_ROUNDS - self.reserved:
            raise OutOfRounds
        self.rounds += len(sets)
        parts = [sets[start : start + AT_A_TIME] for start in range(0, len(sets), AT_A_TIME)]
        return [run for part in parts for run in await self._run(part, tests)]

    async def _run(self, sets: Sequence[frozenset[int]], tests: Sequence[str]) -> list[SuiteRun]:
        release, repository = self.release, self.release.repository
        limit_s = START_S + SLOWER * sum(repository.seconds[test] for test in tests)
        rounds = []
        for chosen in sets:
            files = release.hunks.applied(chosen)
            changes: Mapping[str, str | None] = {**files, **release.tests_on(files)}
            rounds.append(Round(files_of(tests), tests, changes, timeout_s=limit_s))
        async with await suite_sandbox(repository.tree, repository.suite, self.spec) as sandbox:
            await put(
                sandbox, {path: text for path, text in release.tests.items() if release.old_files.get(path) != text}
            )
            return await run_rounds(sandbox, repository.suite, rounds, limit_s * len(rounds))


def _holds(hunk: Hunk, key: FunctionKey) -> bool:
    """Whether the function is in the hunk: it, what it is nested in, or its class."""
    return hunk.is_file or (bool(hunk.name) and f"{key.name}.".startswith(f"{hunk.name}."))


def lists(hunk: Hunk, came: Hunk) -> bool:
    """Whether it is no code of its own and names a function or class that came."""
    return not hunk.name and not hunk.is_file and bool(came.name and not came.old) and came.name in hunk.words


async def minimal(start: frozenset[int], passing: Passing) -> frozenset[int]:
    """No part of it can be left out alone. Hunks are left out in ever smaller groups."""
    kept, size = start, max(1, len(start) // 2)
    while kept:
        order = sorted(kept)
        groups = [frozenset(order[place : place + size]) for place in range(0, len(order), size)]
        good = await passing([kept - group for group in groups])
        spare = [group for group, fine in zip(groups, good, strict=True) if fine]
        kept, all_at_once = await _without(kept, spare, passing)
        if size == 1 and (all_at_once or not spare):
            break
        size = max(1, min(size, len(kept)) // 2)
    return kept


async def _without(
    kept: frozenset[int], spare: Sequence[frozenset[int]], passing: Passing
) -> tuple[frozenset[int], bool]:
    """Each group can go by itself; as many of them as can go together. Whether all could."""
    if not spare:
        return kept, True
    if len(spare) > 1:
        together = kept.difference(*spare)
        if (await passing([together]))[0]:
            return together, True
    left = kept - spare[0]
    for group in spare[1:]:
        if (await passing([left - group]))[0]:
            left -= group
    return left, len(spare) == 1
