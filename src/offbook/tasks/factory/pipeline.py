"""From repositories to a folder of verified tasks, in this order (`_Run` has a method for each):

    prepare     source, dependencies, reliable tests, and which test enters which function
    settle      whole repositories are held out, over all calls
    candidates  what can be deleted; of two releases or a commit the pieces of the change
    make        delete, verify, write the request and the task folder (make.py)

    out/train/ID/, out/heldout/ID/      task folders; whole repositories are held out, so their code is really unseen
    out/.factory/                       what later calls go on from (records.py)
    out/.factory/NAME/                  a prepared repository: tree/, deps/, python/, map.json (prepare/)
    out/.factory/NAME/made.json         all of them are done, and what came out

Every step that is done is found done by the next call, which goes on from there. Several processes, also of several
machines, may work into one folder: a repository belongs to one at a time (a lock file), the others take the next one.
"""

from __future__ import annotations

import asyncio
import errno
import json
import random
import re
import shutil
import zlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from pydantic import TypeAdapter

from offbook.core.runfolder import Held, only_writer, write_atomic
from offbook.sandbox import SandboxSpec
from offbook.tasks.factory.features import FeatureSettings, Finder
from offbook.tasks.factory.make import MakeSettings, Outcome, make_task
from offbook.tasks.factory.prepare.prepare import Progress, clear, prepare
from offbook.tasks.factory.prepare.source import one_spelling
from offbook.tasks.factory.prepare.tests import map_tests
from offbook.tasks.factory.records import Taken, earlier_outcomes, record, settle
from offbook.tasks.factory.releases.cut import cut_release, hunks_between, identity, make_piece
from offbook.tasks.factory.releases.release import is_release, open_release, prepare_release
from offbook.tasks.factory.types import LEVELS, Level, Unprepared
from offbook.tasks.factory.verification.verify import ENDLESS
from offbook.tasks.factory.workshop import Workshop, open_workshop
from offbook.types import OffbookError

MIX: tuple[Level, ...] = ("hybrid", "hybrid", "gone", "gone", "stub")  # how often each comes up in a mixture
REPOSITORIES = 2  # that candidates are taken from at a time: while one is read, another one's tests run
POLL_S = 2.0  # between looks at what another process holds
OURS = "an error of the factory"
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EMFILE, errno.ENFILE)  # will not be better with the next one
LATE = re.compile(r"Timeout|stopped in|imported within|longer than \d+ s|did not end|timed out")


@dataclass
class Made:
    """What came out of one repository."""

    source: str
    name: str = ""
    version: str = ""
    split: str = "train"
    unprepared: str = ""  # why there is nothing
    log: str = ""
    num_tests: int = 0
    num_excluded: int = 0
    candidates: int = 0
    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def verified(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if not outcome.refused]


@dataclass(frozen=True)
class _Candidate:
    id: str
    kind: str
    level: str
    make: Callable[[Path, SandboxSpec, MakeSettings, Taken], Awaitable[Outcome]]  # into that folder


OnOutcome = Callable[[Made], None]
_MADE = TypeAdapter(Made)


async def make_tasks(
    sources: Sequence[str],
    out: Path,
    spec: SandboxSpec,
    settings: MakeSettings | None = None,
    progress: Progress = lambda message: None,
    on_outcome: OnOutcome = lambda made: None,
) -> list[Made]:
    """A repository that cannot be prepared is named with the reason, and the others go on."""
    settings = settings or MakeSettings()
    if settings.level not in (*LEVELS, "mix"):
        raise OffbookError(f"there is no level {settings.level}; it is one of {', '.join(LEVELS)} and mix")
    run = _Run(out, spec, settings, progress, on_outcome)
    result = [Made(source) for source in dict.fromkeys(map(one_spelling, sources))]
    try:
        await run.each(result, settings.jobs, run.prepare)
        for made in result:
            if LATE.search(made.unprepared):  # a timeout that parallel work may have caused
                progress(f"{made.source}: {made.unprepared}; once more, alone")
                made.unprepared = ""
                await run.each([made], 1, run.prepare)
        ready = [made for made in result if not made.unprepared]
        if ready:
            splits = settle(out, [made.name for made in ready], settings.heldout)
            for made in ready:
                made.split = splits[made.name]
        await run.each(ready, REPOSITORIES, run.make)
    except BaseExceptionGroup as group:
        first: BaseException = group
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        raise first from None
    return result


class _Run:
    """One call of `make_tasks`."""

    def __init__(self, out: Path, spec: SandboxSpec, settings: MakeSettings, progress: Progress, on_outcome: OnOutcome):
        self.out = out
        self.spec = spec
        self.settings = settings
        self.progress = progress
        self.on_outcome = on_outcome
        self.slots = asyncio.Semaphore(settings.jobs)  # candidates at a time, of all repositories
        self.taken = Taken(out / ".factory")
        self.asked = {"level": settings.level, "limit": settings.max_tasks}  # what made.json is the answer to

    def folder(self, made: Made) -> Path:
        return self.out / ".factory" / folder_name(made.source)

    async def each(self, result: Sequence[Made], at_a_time: int, work: Callable[[Made], Awaitable[None]]) -> None:
        """For every repository, so many at a time. One that another process works on is waited for last."""
        slots = asyncio.Semaphore(at_a_time)
        order = list(result)
        random.shuffle(order)  # or processes that were started together would all want the same one

        async def one(made: Made) -> None:
            said = ""
            while True:
                async with slots:
                    try:
                        with only_writer(self.folder(made)):
                            return await work(made)
                    except Held as error:
                        if error.whose != said:
                            said = error.whose
                            self.progress(f"{made.name or made.source}: {said} works on it")
                await asyncio.sleep(POLL_S)

        async with asyncio.TaskGroup() as jobs:
            for made in order:
                jobs.create_task(one(made))

    async def prepare(self, made: Made) -> None:
        """Prepare and map one repository; `made.unprepared` says why it cannot be done."""
        folder = self.folder(made)
        ready = prepare_release if is_release(made.source) else prepare
        try:
            repository = await ready(made.source, folder, self.spec, self.progress, self.settings.prepare)
            if not (folder / "map.json").is_file():
                self.progress(f"{repository.name}: finding out which test enters which function")
            await map_tests(repository, self.spec)
        except Exception as error:  # the border of a repository: the others go on
            made.unprepared = str(error)
            if not isinstance(error, Unprepared):
                made.unprepared = f"it cannot be prepared ({_described(error)})"
            if not (folder / "outcomes.jsonl").is_file():  # or its tasks need the folder
                clear(folder)
            made.log = str(folder / "prepare.log") if (folder / "prepare.log").is_file() else ""
            self.on_outcome(made)
            return
        made.name = repository.name
        made.version = repository.version
        made.num_tests = len(repository.tests)
        made.num_excluded = len(repository.excluded)

    async def make(self, made: Made) -> None:
        """What ends one repository leaves the others, and its own tasks as far as they are."""
        try:
            if not self._found_made(made):
                await self._make(made)
            if 0 < self.settings.max_tasks < len(made.verified):
                self.progress(f"{made.name}: {len(made.verified)} tasks are there and stay, more than --limit asks for")
        except (OffbookError, ExceptionGroup):
            raise
        except Exception as error:  # the border of a repository
            made.unprepared = f"{OURS} ({_described(error)})"
        self.on_outcome(made)

    def _found_made(self, made: Made) -> bool:
        """Whether an earlier call has done all that this one would, and its folders are there."""
        with suppress(OSError, ValueError, KeyError):
            data = json.loads((self.folder(made) / "made.json").read_bytes())
            found = _MADE.validate_python(data["made"])
            folders = [self.out / made.split / outcome.id for outcome in found.verified]
            if data["asked"] == self.asked and all((folder / "task.toml").is_file() for folder in folders):
                made.candidates = found.candidates
                made.outcomes = found.outcomes
                return True
        return False

    async def _make(self, made: Made) -> None:
        folder = self.folder(made)
        self.progress(f"{made.name}: reading everything that an agent could read")
        workshop = await asyncio.to_thread(open_workshop, folder)
        (self.out / made.split).mkdir(parents=True, exist_ok=True)
        find = self._pieces if is_release(made.source) else self._features
        candidates = await find(made, workshop)
        made.candidates = len(candidates)
        earlier = earlier_outcomes(folder / "outcomes.jsonl")
        late: list[_Candidate] = []

        async def one(candidate: _Candidate, alone: bool = False) -> None:
            async with self.slots:
                outcome = await self._outcome(made, candidate, earlier, alone)
            if outcome is None:
                return
            if not alone and (is_late(outcome) or outcome.refused == OURS):  # a full pipe, a process that was killed
                late.append(candidate)
                return
            made.outcomes.append(outcome)
            self.on_outcome(made)

        async with asyncio.TaskGroup() as jobs:
            # In an order that says nothing, so that the first so many are like all of them.
            for candidate in sorted(candidates, key=lambda candidate: zlib.crc32(candidate.id.encode())):
                jobs.create_task(one(candidate))
        for candidate in late:
            await one(candidate, alone=True)
        if not any(outcome.refused == OURS for outcome in made.outcomes):
            found = {"asked": self.asked, "made": _MADE.dump_python(made, mode="json")}
            write_atomic(folder / "made.json", json.dumps(found))

    async def _features(self, made: Made, workshop: Workshop) -> list[_Candidate]:
        finder = Finder(workshop.symbols, workshop.map, workshop.repository.tests, FeatureSettings(repo=made.name))
        candidates = []
        for feature in finder.features():
            level = level_of(feature.id, self.settings.level)
            candidates.append(_Candidate(feature.id, feature.kind, level, partial(make_task, workshop, feature, level)))
        return candidates

    async def _pieces(self, made: Made, workshop: Workshop) -> list[_Candidate]:
        release = open_release(workshop)
        hunks = hunks_between(release.product, release.newer)
        cut = await cut_release(release, hunks, self.spec, self.progress)
        candidates = []
        for piece in cut.pieces:
            make = partial(make_piece, release, hunks, piece, cut.stable)
            candidates.append(_Candidate(identity(release, hunks, piece), "release", "release", make))
        return candidates

    async def _outcome(
        self, made: Made, candidate: _Candidate, earlier: Mapping[tuple[str, str], Outcome], alone: bool
    ) -> Outcome | None:
        """What became of it, now or in an earlier call; None where there are tasks enough."""
        folder = self.out / made.split / candidate.id
        known = earlier.get((candidate.id, candidate.level))
        if folder.is_dir():  # made at any level
            made_before = [each for each in earlier.values() if each.id == candidate.id and not each.refused]
            there = Outcome(
                candidate.id, made.name, candidate.kind, candidate.level, "a task of that name is there", str(folder)
            )
            return made_before[0] if made_before else known or there
        if known is not None and known.refused:
            return known
        if self._has_enough(made):
            return None
        try:
            outcome = await candidate.make(folder, self.spec, self.settings, self.taken)
        except Exception as error:  # the border of a candidate
            why = _described(error)[:300]
            return Outcome(candidate.id, made.name, candidate.kind, candidate.level, OURS, why)
        if self._has_enough(made) and not outcome.refused:
            shutil.rmtree(folder)  # others were under way when the last one was made
            return None
        if alone or not is_late(outcome):
            record(self.folder(made) / "outcomes.jsonl", outcome)
        return outcome

    def _has_enough(self, made: Made) -> bool:
        return 0 < self.settings.max_tasks <= len(made.verified)


def _described(error: Exception) -> str:
    """The words of an error; raised again where the next repository would meet it too."""
    if isinstance(error, OSError) and error.errno in FULL:
        raise error
    return str(error) if isinstance(error, OffbookError) else f"{type(error).__name__}: {error}"


def is_late(outcome: Outcome) -> bool:
    """Whether it was refused for a timeout, which parallel work may have caused."""
    return bool(outcome.refused) and (outcome.refused == ENDLESS or bool(LATE.search(outcome.evidence)))


def folder_name(source: str) -> str:
    """What a repository's folder is called: readable, and another one for every source."""
    plain = re.sub(r"[^a-zA-Z0-9._-]+", "-", source.removeprefix("pypi:")).strip("-.")[-60:]
    return plain if source.startswith("pypi:") else f"{plain}-{zlib.crc32(source.encode()):08x}"


def level_of(feature_id: str, level: str) -> Level:
    if level == "mix":
        return MIX[zlib.crc32(feature_id.encode()) % len(MIX)]
    return next(known for known in LEVELS if known == level)
