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
import json
import random
import re
import shutil
import zlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
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
from offbook.tasks.factory.releases.cut import Cutter, hunks_between, identity, make_piece
from offbook.tasks.factory.releases.release import is_release, open_release, prepare_release
from offbook.tasks.factory.types import LEVELS, Level, Unprepared
from offbook.tasks.factory.verification.verify import ENDLESS
from offbook.tasks.factory.workshop import Workshop, open_workshop
from offbook.types import OffbookError

MIX: tuple[Level, ...] = ("hybrid", "hybrid", "gone", "gone", "stub")  # how often each comes up in a mixture
REPOSITORIES = 2  # that candidates are taken from at a time: while one is read, another one's tests run
POLL_S = 2.0  # between looks at what another process holds
OURS = "an error of the factory"
AGAIN = (ENDLESS, OURS)  # reasons that parallel work may have caused: the next call tries again


@dataclass
class Made:
    """What came out of one repository."""

    source: str
    name: str = ""
    version: str = ""
    split: str = "train"
    unprepared: str = ""  # why there is nothing
    num_tests: int = 0
    num_excluded: int = 0
    candidates: int = 0
    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def verified(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if not outcome.refused]


Make = Callable[[Path, SandboxSpec, MakeSettings, Taken], Awaitable[Outcome]]  # a task in that folder
Candidate = tuple[Outcome, Make]
OnOutcome = Callable[[Made], None]
_OUTCOMES = TypeAdapter(list[Outcome])


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
    await run.each(result, settings.jobs, run.prepare)
    ready = [made for made in result if not made.unprepared]
    splits = settle(out, [made.name for made in ready], settings.heldout) if ready else {}
    for made in ready:
        made.split = splits[made.name]
    await run.each(ready, REPOSITORIES, run.make)
    return result


@dataclass
class _Run:
    """One call of `make_tasks`."""

    out: Path
    spec: SandboxSpec
    settings: MakeSettings
    progress: Progress
    on_outcome: OnOutcome

    def __post_init__(self) -> None:
        self.slots = asyncio.Semaphore(self.settings.jobs)  # candidates at a time, of all repositories
        self.taken = Taken(self.out / ".factory")
        self.asked = {"level": self.settings.level, "limit": self.settings.max_tasks}  # what made.json answers

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

        try:
            async with asyncio.TaskGroup() as jobs:
                for made in order:
                    jobs.create_task(one(made))
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None

    async def prepare(self, made: Made) -> None:
        """Prepare and map one repository; `made.unprepared` says why it cannot be done."""
        folder = self.folder(made)
        ready = prepare_release if is_release(made.source) else prepare
        try:
            repository = await ready(made.source, folder, self.spec, self.progress, self.settings.prepare)
            self.progress(f"{repository.name}: finding out which test enters which function")
            await map_tests(repository, self.spec)
        except Exception as error:  # the border of a repository: the others go on
            why = _described(error)
            made.unprepared = why if isinstance(error, Unprepared) else f"it cannot be prepared ({why})"
            if not (folder / "outcomes.jsonl").is_file():  # or its tasks need the folder
                clear(folder)
            self.on_outcome(made)
            return
        made.name = repository.name
        made.version = repository.version
        made.num_tests = len(repository.tests)
        made.num_excluded = len(repository.excluded)

    async def make(self, made: Made) -> None:
        """What ends one repository leaves the others, and its own tasks as far as they are."""
        try:
            path = self.folder(made) / "made.json"
            earlier = json.loads(path.read_bytes()) if path.is_file() else {}
            if earlier.get("asked") == self.asked:  # all of this was done by an earlier call, or by another process
                made.candidates = earlier["candidates"]
                made.outcomes = _OUTCOMES.validate_python(earlier["outcomes"])
            else:
                await self._make(made)
        except OffbookError:
            raise
        except Exception as error:  # the border of a repository
            made.unprepared = f"{OURS} ({_described(error)})"
        self.on_outcome(made)

    async def _make(self, made: Made) -> None:
        folder = self.folder(made)
        self.progress(f"{made.name}: reading everything that an agent could read")
        workshop = await asyncio.to_thread(open_workshop, folder)
        (self.out / made.split).mkdir(parents=True, exist_ok=True)
        candidates = await self._candidates(made, workshop)
        made.candidates = len(candidates)
        earlier = earlier_outcomes(folder / "outcomes.jsonl")

        async def one(candidate: Outcome, make: Make) -> None:
            place = self.out / made.split / candidate.id
            outcome = earlier.get((candidate.id, candidate.level))
            async with self.slots:
                if place.is_dir() and (outcome is None or outcome.refused):
                    outcome = replace(candidate, refused="a task of that name is there", evidence=str(place))
                if outcome is None or not (outcome.refused or place.is_dir()):
                    if self._has_enough(made):
                        return
                    try:
                        outcome = await make(place, self.spec, self.settings, self.taken)
                    except Exception as error:  # the border of a candidate
                        outcome = replace(candidate, refused=OURS, evidence=_described(error)[:300])
                    if self._has_enough(made) and not outcome.refused:
                        shutil.rmtree(place)  # others were under way when the last one was made
                        return
                    if outcome.refused not in AGAIN:
                        record(folder / "outcomes.jsonl", outcome)
            made.outcomes.append(outcome)
            self.on_outcome(made)

        async with asyncio.TaskGroup() as jobs:
            # In an order that says nothing, so that the first so many are like all of them.
            for candidate, make in sorted(candidates, key=lambda pair: zlib.crc32(pair[0].id.encode())):
                jobs.create_task(one(candidate, make))
        if not any(outcome.refused in AGAIN for outcome in made.outcomes):
            outcomes = _OUTCOMES.dump_python(made.outcomes, mode="json")
            found = {"asked": self.asked, "candidates": made.candidates, "outcomes": outcomes}
            write_atomic(folder / "made.json", json.dumps(found))

    async def _candidates(self, made: Made, workshop: Workshop) -> list[Candidate]:
        candidates: list[Candidate] = []
        if is_release(made.source):
            release = open_release(workshop)
            hunks = hunks_between(release.product, release.newer)
            stable, pieces = await Cutter(release, hunks, self.spec, self.progress).cut()
            for piece in pieces:
                candidate = Outcome(identity(release, hunks, piece), made.name, "release", "release")
                candidates.append((candidate, partial(make_piece, release, hunks, piece, stable)))
            return candidates
        finder = Finder(workshop.symbols, workshop.map, workshop.repository.tests, FeatureSettings(repo=made.name))
        for feature in finder.features():
            mixed = MIX[zlib.crc32(feature.id.encode()) % len(MIX)]
            level = next((known for known in LEVELS if known == self.settings.level), mixed)
            candidate = Outcome(feature.id, made.name, feature.kind, level)
            candidates.append((candidate, partial(make_task, workshop, feature, level)))
        return candidates

    def _has_enough(self, made: Made) -> bool:
        return 0 < self.settings.max_tasks <= len(made.verified)


def _described(error: Exception) -> str:
    return str(error) if isinstance(error, OffbookError) else f"{type(error).__name__}: {error}"


def folder_name(source: str) -> str:
    """What a repository's folder is called: readable, and another one for every source."""
    plain = re.sub(r"[^a-zA-Z0-9._-]+", "-", source.removeprefix("pypi:")).strip("-.")[-60:]
    return plain if source.startswith("pypi:") else f"{plain}-{zlib.crc32(source.encode()):08x}"
