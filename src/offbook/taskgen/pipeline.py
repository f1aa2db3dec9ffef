"""From repositories to a folder of verified tasks.

    out/train/ID/, out/heldout/ID/      task folders; whole repositories are held out, so their code is really unseen
    out/.factory/NAME/                  a prepared repository: tree/, deps/, python/, map.json (prepare/)
    out/.factory/NAME/outcomes.jsonl    what became of each of its candidates, in order of being done

Every step that is done is found done by the next call, which goes on from there.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import time
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from offbook.sandbox import BoxSpec
from offbook.taskgen.delete.delete import Refused, apply_proposal
from offbook.taskgen.features import FeatureSettings, find_features, left_out
from offbook.taskgen.make import Outcome, make_task, task_from
from offbook.taskgen.mapping import load_map, map_tests
from offbook.taskgen.nouns import Feature, Level, Unprepared
from offbook.taskgen.prepare.prepare import PrepareLimits, load_repository, prepare, silent
from offbook.taskgen.prepare.source import one_spelling
from offbook.taskgen.proposals import Proposal, deletion_of
from offbook.taskgen.rewrite import Propose, Rewrite
from offbook.taskgen.verify import VerifySettings
from offbook.taskgen.workshop import Workshop, open_workshop
from offbook.tasks import load_task
from offbook.types import OffbookError

LEVELS: tuple[Level, ...] = ("stub", "hybrid", "gone")
MIX: tuple[Level, ...] = ("hybrid", "hybrid", "gone", "gone", "stub")  # how often each comes up in a mixture
Mixture = str  # one of LEVELS, or "mix"


@dataclass(frozen=True, slots=True)
class FactorySettings:
    level: Mixture = "hybrid"
    wording: str = "normal"
    max_tasks: int = 0  # of each repository; 0 is no limit
    jobs: int = field(default_factory=lambda: (os.cpu_count() or 1) + 1)  # candidates at a time: each waits for a box
    heldout: float = 0.2  # share of the repositories
    pytest_options: tuple[str, ...] = ()  # in the place of those that a repository's settings ask for
    start: str = ""  # a command that gets a box ready for the tests
    python: Path | None = None
    rewrite: Rewrite | None = None
    propose: Propose | None = None
    num_proposals: int = 0  # that a model is asked for, of each repository
    prepare: PrepareLimits = field(default_factory=PrepareLimits)
    verify: VerifySettings = field(default_factory=VerifySettings)


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


Told = Callable[[str], None]
OnOutcome = Callable[[Made], None]


async def make_tasks(
    sources: Sequence[str],
    out: Path,
    spec: BoxSpec,
    settings: FactorySettings | None = None,
    progress: Told = silent,
    on_outcome: OnOutcome = lambda made: None,
) -> list[Made]:
    """A repository that cannot be prepared is named with the reason, and the others go on."""
    settings = settings or FactorySettings()
    if settings.level not in (*LEVELS, "mix"):
        raise OffbookError(f"there is no level {settings.level}; it is one of {', '.join(LEVELS)} and mix")
    result = [Made(source) for source in dict.fromkeys(map(one_spelling, sources))]
    for made in result:
        if not await _prepared(made, out, spec, settings, progress):
            on_outcome(made)
    ready = [made for made in result if not made.unprepared]
    splits = split_of((made.name for made in ready), settings.heldout, settled_splits(out))
    for made in ready:
        made.split = splits[made.name]
        workshop = await _opened(made, out, progress)
        began = time.monotonic()
        await _make_from(workshop, out / made.split, made, spec, settings, on_outcome)
        if settings.propose:
            progress(f"{made.name}: asking a model what could be deleted")
            for proposal in await settings.propose(workshop, made.source, settings.num_proposals):
                made.candidates += 1
                made.outcomes.append(await _proposed(workshop, proposal, out / made.split, spec, settings))
                on_outcome(made)
        made.make_s = time.monotonic() - began
    return result


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


async def _prepared(made: Made, out: Path, spec: BoxSpec, settings: FactorySettings, progress: Told) -> bool:
    """Whether the repository of `made` is ready, which is told about it, or why it is not."""
    folder, began = out / ".factory" / folder_name(made.source), time.monotonic()
    try:
        repository = await prepare(
            made.source,
            folder,
            spec,
            progress,
            settings.prepare,
            settings.python,
            settings.pytest_options,
            settings.start,
        )
        progress(f"{repository.name}: finding out which test enters which function")
        await map_tests(repository, spec)
    except Unprepared as error:
        made.unprepared = str(error)
        log = folder / "prepare.log"
        made.log = str(log) if log.is_file() else ""
        return False
    made.name, made.version = repository.name, repository.version
    made.num_tests, made.num_excluded = len(repository.tests), len(repository.excluded)
    made.prepare_s = time.monotonic() - began
    return True


async def _opened(made: Made, out: Path, progress: Told) -> Workshop:
    folder, began = out / ".factory" / folder_name(made.source), time.monotonic()
    progress(f"{made.name}: reading everything that an agent could read")
    workshop = await asyncio.to_thread(open_workshop, load_repository(folder), load_map(folder / "map.json"))
    made.prepare_s += time.monotonic() - began
    return workshop


async def _make_from(
    workshop: Workshop, place: Path, made: Made, spec: BoxSpec, settings: FactorySettings, on_outcome: OnOutcome
) -> None:
    symbols, tests = workshop.symbols, workshop.repository.tests
    limits = FeatureSettings(repo=workshop.repository.name)
    features = find_features(symbols, workshop.map, tests, limits)
    reasons = left_out(symbols, workshop.map, tests, features, limits)
    made.left_out = {f"{key.path}::{key.name}": why for key, why in sorted(reasons.items())}
    made.candidates = len(features)
    record = Record(workshop.repository.folder / "outcomes.jsonl")
    place.mkdir(parents=True, exist_ok=True)
    slots = asyncio.Semaphore(settings.jobs)

    async def one(feature: Feature) -> None:
        level = level_of(feature.id, settings.level)
        known = record.known(feature.id, level)
        folder = place / feature.id
        if known is None and folder.is_dir():
            known = Outcome(feature.id, made.name, feature.kind, level, "a task of that name is there", str(folder))
        elif known is None or (not known.refused and not folder.is_dir()):
            async with slots:
                if settings.max_tasks and len(made.verified) >= settings.max_tasks:
                    return
                known = await make_task(
                    workshop, feature, level, folder, spec, settings.wording, settings.verify, settings.rewrite
                )
                if settings.max_tasks and not known.refused and len(made.verified) >= settings.max_tasks:
                    shutil.rmtree(folder)  # others were under way when the last one was made
                    return
                record.add(known)
        made.outcomes.append(known)
        on_outcome(made)

    async with asyncio.TaskGroup() as jobs:
        for feature in _varied(features):
            jobs.create_task(one(feature))


def level_of(feature_id: str, level: Mixture) -> Level:
    if level == "mix":
        return MIX[zlib.crc32(feature_id.encode()) % len(MIX)]
    return next(known for known in LEVELS if known == level)


def _varied(features: Sequence[Feature]) -> list[Feature]:
    """In an order that says nothing, so that the first so many are like all of them."""
    return sorted(features, key=lambda feature: zlib.crc32(feature.id.encode()))


class Record:
    """What became of candidates, kept as a line each, so that no candidate is tried twice."""

    def __init__(self, path: Path):
        self._path = path
        self._known: dict[tuple[str, str], Outcome] = {}
        for line in path.read_text().splitlines() if path.is_file() else []:
            try:
                outcome = Outcome(**json.loads(line))
            except (ValueError, TypeError):  # the last line of a call that was killed, or of an older offbook
                continue
            self._known[outcome.id, outcome.level] = outcome

    def known(self, candidate: str, level: str) -> Outcome | None:
        return self._known.get((candidate, level))

    def add(self, outcome: Outcome) -> None:
        self._known[outcome.id, outcome.level] = outcome
        with open(self._path, "a") as file:
            file.write(json.dumps(asdict(outcome)) + "\n")


def funnel(outcomes: Iterable[Outcome]) -> dict[str, int]:
    """How many candidates were refused for which reason, the most frequent first."""
    counts = Counter(outcome.refused for outcome in outcomes if outcome.refused)
    return dict(counts.most_common())


async def make_proposed(
    proposals: Sequence[Proposal],
    out: Path,
    spec: BoxSpec,
    settings: FactorySettings | None = None,
    progress: Told = silent,
    on_outcome: OnOutcome = lambda made: None,
) -> list[Made]:
    """Tasks from deletions that somebody proposes as patches: held to the same as our own, refused with the reason."""
    settings = settings or FactorySettings()
    by_source: dict[str, list[Proposal]] = defaultdict(list)
    for proposal in proposals:
        by_source[one_spelling(proposal.source)].append(proposal)
    settled = settled_splits(out)
    result = []
    for source, wanted in by_source.items():
        made = Made(source)
        result.append(made)
        if not await _prepared(made, out, spec, settings, progress):
            on_outcome(made)
            continue
        made.split = settled.get(made.name, "train")
        made.candidates = len(wanted)
        workshop = await _opened(made, out, progress)
        for proposal in wanted:
            made.outcomes.append(await _proposed(workshop, proposal, out / made.split, spec, settings))
            on_outcome(made)
    return result


async def _proposed(
    workshop: Workshop, proposal: Proposal, place: Path, spec: BoxSpec, settings: FactorySettings
) -> Outcome:
    try:
        changed = apply_proposal(workshop.files, proposal.patch)
        deletion = deletion_of(workshop, proposal, changed)
    except Refused as error:
        return Outcome(proposal.name, workshop.repository.name, "single", "", "the proposal is refused", str(error))
    place.mkdir(parents=True, exist_ok=True)
    folder = place / deletion.feature.id
    if folder.is_dir():
        why = f"{folder} is there already"
        return Outcome(deletion.feature.id, workshop.repository.name, "single", "", "the proposal is refused", why)
    return await task_from(workshop, deletion, folder, spec, settings.wording, settings.verify, settings.rewrite)
