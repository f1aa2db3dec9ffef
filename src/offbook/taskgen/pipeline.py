"""From repositories to a folder of verified tasks.

    out/train/ID/, out/heldout/ID/      task folders; whole repositories are held out, so their code is really unseen
    out/.factory/NAME/                  a prepared repository: tree/, deps/, python/, map.json (prepare/)
    out/.factory/NAME/outcomes.jsonl    what became of each of its candidates, in order of being done

Every step that is done is found done by the next call, which goes on from there.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import time
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from offbook.sandbox import BoxSpec
from offbook.taskgen.features import FeatureSettings, Finder
from offbook.taskgen.make import MakeSettings, Outcome, make_task, task_from
from offbook.taskgen.nouns import LEVELS, Feature, Level, Unprepared
from offbook.taskgen.prepare.prepare import Told, prepare
from offbook.taskgen.prepare.source import one_spelling
from offbook.taskgen.prepare.tests import map_tests
from offbook.taskgen.proposals import Proposal, Refused, apply_proposal, deletion_of
from offbook.taskgen.releases.changelog import entries_between
from offbook.taskgen.releases.cut import CutSettings, Piece, cut_release
from offbook.taskgen.releases.jumps import is_release, jumps
from offbook.taskgen.releases.make import make_piece
from offbook.taskgen.releases.pieces import identity
from offbook.taskgen.releases.release import open_release, prepare_release
from offbook.taskgen.workshop import Workshop, open_workshop
from offbook.tasks import load_task
from offbook.types import OffbookError

MIX: tuple[Level, ...] = ("hybrid", "hybrid", "gone", "gone", "stub")  # how often each comes up in a mixture
_OUTCOME = TypeAdapter(Outcome)


@dataclass(slots=True)
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
    left_out: dict[str, str] = field(default_factory=dict)  # functions in no candidate, and why
    outcomes: list[Outcome] = field(default_factory=list)
    prepare_s: float = 0.0
    make_s: float = 0.0

    @property
    def verified(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if not outcome.refused]


@dataclass(frozen=True, slots=True)
class _Candidate:
    id: str
    kind: str
    level: str
    make: Callable[[Path], Awaitable[Outcome]]  # into that folder


OnOutcome = Callable[[Made], None]


async def make_tasks(
    sources: Sequence[str],
    out: Path,
    spec: BoxSpec,
    settings: MakeSettings | None = None,
    progress: Told = lambda message: None,
    on_outcome: OnOutcome = lambda made: None,
    proposals: Sequence[Proposal] = (),
) -> list[Made]:
    """A repository that cannot be prepared is named with the reason, and the others go on.

    `proposals` are deletions that somebody proposes as patches: held to the same as our own, refused with the reason.
    """
    settings = settings or MakeSettings()
    if settings.level not in (*LEVELS, "mix"):
        raise OffbookError(f"there is no level {settings.level}; it is one of {', '.join(LEVELS)} and mix")
    run = _Run(out, spec, settings, progress, on_outcome)
    known = await jumps(map(one_spelling, sources), settings.prepare.source)
    whole = {source: list[Proposal]() for source in known}
    wanted = dict(whole)
    for proposal in proposals:
        wanted.setdefault(one_spelling(proposal.source), []).append(proposal)
    result = [Made(source, unprepared=known.get(source, "")) for source in wanted]
    for made in await run.prepare(result, settings.heldout if sources else 0.0):
        workshop = await run.open(made)
        began = time.monotonic()
        if is_release(made.source):
            await run.releases(made, workshop)
        elif made.source in whole:
            await run.features(made, workshop)
            if settings.propose:
                progress(f"{made.name}: asking a model what could be deleted")
                wanted[made.source] += await settings.propose(workshop, made.source, settings.num_proposals)
        await run.proposals(made, workshop, wanted[made.source])
        made.make_s = time.monotonic() - began
    return result


@dataclass(frozen=True, slots=True)
class _Run:
    """One call, and who is told of it."""

    out: Path
    spec: BoxSpec
    settings: MakeSettings
    progress: Told
    on_outcome: OnOutcome

    def folder(self, made: Made) -> Path:
        return self.out / ".factory" / folder_name(made.source)

    async def prepare(self, result: Sequence[Made], heldout: float) -> list[Made]:
        """Those that are ready, with their splits. The others are told why they are not."""
        for made in result:
            if made.unprepared:
                continue
            folder, began = self.folder(made), time.monotonic()
            try:
                if is_release(made.source):
                    arguments = (self.spec, self.progress, self.settings.prepare)
                    repository = await prepare_release(made.source, folder, *arguments)
                else:
                    repository = await prepare(made.source, folder, self.spec, self.progress, self.settings.prepare)
                    self.progress(f"{repository.name}: finding out which test enters which function")
                    await map_tests(repository, self.spec)
            except Unprepared as error:
                made.unprepared = str(error)
                made.log = str(folder / "prepare.log") if (folder / "prepare.log").is_file() else ""
                self.on_outcome(made)
                continue
            made.name, made.version = repository.name, repository.version
            made.num_tests, made.num_excluded = len(repository.tests), len(repository.excluded)
            made.prepare_s = time.monotonic() - began
        ready = [made for made in result if not made.unprepared]
        splits = split_of((made.name for made in ready), heldout, settled_splits(self.out))
        for made in ready:
            made.split = splits[made.name]
        return ready

    async def open(self, made: Made) -> Workshop:
        began = time.monotonic()
        self.progress(f"{made.name}: reading everything that an agent could read")
        workshop = await asyncio.to_thread(open_workshop, self.folder(made))
        (self.out / made.split).mkdir(parents=True, exist_ok=True)
        made.prepare_s += time.monotonic() - began
        return workshop

    async def features(self, made: Made, workshop: Workshop) -> None:
        finder = Finder(workshop.symbols, workshop.map, workshop.repository.tests, FeatureSettings(repo=made.name))
        features = finder.features()
        made.left_out = {str(key): why for key, why in sorted(finder.left_out(features).items())}

        def candidate(feature: Feature) -> _Candidate:
            level = level_of(feature.id, self.settings.level)

            async def make(folder: Path) -> Outcome:
                return await make_task(workshop, feature, level, folder, self.spec, self.settings)

            return _Candidate(feature.id, feature.kind, level, make)

        await self._all(made, [candidate(feature) for feature in features])

    async def releases(self, made: Made, workshop: Workshop) -> None:
        release = open_release(workshop)
        cut = await cut_release(release, self.spec, CutSettings(), self.progress)
        entries = entries_between(release.old_files, release.new_files, release.repository.version)

        def candidate(piece: Piece) -> _Candidate:
            async def make(folder: Path) -> Outcome:
                return await make_piece(release, piece, cut.stable, entries, folder, self.spec, self.settings)

            return _Candidate(identity(release, piece), "release", "release", make)

        await self._all(made, [candidate(piece) for piece in cut.pieces])

    async def _all(self, made: Made, candidates: Sequence[_Candidate]) -> None:
        made.candidates = len(candidates)
        earlier = earlier_outcomes(self.folder(made) / "outcomes.jsonl")
        slots = asyncio.Semaphore(self.settings.jobs)

        async def one(candidate: _Candidate) -> None:
            async with slots:
                outcome = await self._one(made, candidate, earlier)
            if outcome is not None:
                made.outcomes.append(outcome)
                self.on_outcome(made)

        async with asyncio.TaskGroup() as jobs:
            # In an order that says nothing, so that the first so many are like all of them.
            for candidate in sorted(candidates, key=lambda candidate: zlib.crc32(candidate.id.encode())):
                jobs.create_task(one(candidate))

    async def _one(
        self, made: Made, candidate: _Candidate, earlier: Mapping[tuple[str, str], Outcome]
    ) -> Outcome | None:
        """What became of it, now or in an earlier call; None where there are tasks enough."""
        known = earlier.get((candidate.id, candidate.level))
        folder = self.out / made.split / candidate.id
        if known is None and folder.is_dir():
            there = "a task of that name is there"
            return Outcome(candidate.id, made.name, candidate.kind, candidate.level, there, str(folder))
        if known is not None and (known.refused or folder.is_dir()):
            return known

        def enough() -> bool:
            return bool(self.settings.max_tasks) and len(made.verified) >= self.settings.max_tasks

        if enough():
            return None
        outcome = await candidate.make(folder)
        if enough() and not outcome.refused:
            shutil.rmtree(folder)  # others were under way when the last one was made
            return None
        with open(self.folder(made) / "outcomes.jsonl", "a") as file:
            file.write(_OUTCOME.dump_json(outcome).decode() + "\n")
        return outcome

    async def proposals(self, made: Made, workshop: Workshop, proposals: Sequence[Proposal]) -> None:
        made.candidates += len(proposals)
        for proposal in proposals:
            made.outcomes.append(await self._proposal(made, workshop, proposal))
            self.on_outcome(made)

    async def _proposal(self, made: Made, workshop: Workshop, proposal: Proposal) -> Outcome:
        name = proposal.name
        try:
            deletion = deletion_of(workshop, proposal, apply_proposal(workshop.files, proposal.patch))
            name = deletion.feature.id
            folder = self.out / made.split / name
            if folder.is_dir():
                raise Refused(f"{folder} is there already")
        except Refused as error:
            return Outcome(name, made.name, "single", "", "the proposal is refused", str(error))
        return await task_from(workshop, deletion, folder, self.spec, self.settings)


def folder_name(source: str) -> str:
    """What a repository's folder is called: readable, and another one for every source."""
    plain = re.sub(r"[^a-zA-Z0-9._-]+", "-", source.removeprefix("pypi:")).strip("-.")[-60:]
    return plain if source.startswith("pypi:") else f"{plain}-{zlib.crc32(source.encode()):08x}"


def split_of(names: Iterable[str], heldout: float, settled: Mapping[str, str] | None = None) -> dict[str, str]:
    """Which repositories are held out: of those that are not `settled`, the first by the checksums of their names, as
    many as are missing from the share of all. By name, so another source of the same code is on the same side."""
    splits = dict(settled or {})
    order = sorted({*names} - splits.keys(), key=lambda name: zlib.crc32(name.encode()))
    total = len(splits) + len(order)
    count = min(max(1, round(heldout * total)), total - 1) if heldout else 0
    count -= sum(split == "heldout" for split in splits.values())
    return splits | {name: "heldout" if place < count else "train" for place, name in enumerate(order)}


def settled_splits(out: Path) -> dict[str, str]:
    """Where the repositories are that have tasks in `out` already."""
    found: dict[str, str] = {}
    for split in ("train", "heldout"):
        for path in sorted((out / split).glob("[!.]*/task.toml")):
            found.setdefault(load_task(path.parent).origin.rpartition("==")[0], split)
    return found


def level_of(feature_id: str, level: str) -> Level:
    if level == "mix":
        return MIX[zlib.crc32(feature_id.encode()) % len(MIX)]
    return next(known for known in LEVELS if known == level)


def earlier_outcomes(path: Path) -> dict[tuple[str, str], Outcome]:
    """What became of candidates in earlier calls, by id and level, so that none is tried twice."""
    found = {}
    for line in path.read_text().splitlines() if path.is_file() else []:
        with suppress(ValidationError):  # the last line of a call that was killed
            outcome = _OUTCOME.validate_json(line)
            found[outcome.id, outcome.level] = outcome
    return found


def funnel(outcomes: Iterable[Outcome]) -> dict[str, int]:
    """How many candidates were refused for which reason, the most frequent first."""
    return dict(Counter(outcome.refused for outcome in outcomes if outcome.refused).most_common())
