"""Harder tasks from a task that has become easy, verified like any other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, get_args

from offbook.sandbox import SandboxSpec
from offbook.tasks.factory.delete.delete import delete
from offbook.tasks.factory.features import FeatureSettings, Finder
from offbook.tasks.factory.make import MakeSettings, Outcome, make_task
from offbook.tasks.factory.types import LEVELS, Feature, FunctionKey
from offbook.tasks.factory.workshop import Workshop, open_workshop
from offbook.types import OffbookError, Task

Way = Literal["terser", "gone", "widen", "merge"]
WAYS: tuple[Way, ...] = get_args(Way)
NO_WAY = "it cannot be made harder in this way"
THERE = "it is there already"


def workshop_of(task: Task) -> Workshop:
    """The repository that a task was made from, while it is still there."""
    environment = task.suite.environment
    if task.deleted is None or environment is None or not (environment / "repository.json").is_file():
        raise OffbookError(f"{task.folder} was not made from a repository that is still here, so it cannot be changed")
    return open_workshop(environment)


async def harden(
    task: Task,
    out: Path,
    spec: SandboxSpec,
    ways: Sequence[Way] = WAYS,
    workshop: Workshop | None = None,
    settings: MakeSettings | None = None,
) -> list[Outcome]:
    """A task for each way in which this one can be made harder, in `out`: with fewer words (terser), with the names
    gone that were stubs (gone), with the functions that use it (widen), with its nearest neighbour (merge).

    Every one is verified from the start. A way that leads nowhere has an outcome that says why, and so has one whose
    task is there already.
    """
    workshop = workshop or workshop_of(task)
    assert task.deleted is not None
    if task.deleted.kind == "release":
        raise OffbookError(f"{task.folder} was made from two releases, and only deletions are made harder")
    feature = feature_of(task, workshop)
    level = next(known for known in LEVELS if known == task.deleted.level)
    out.mkdir(parents=True, exist_ok=True)
    outcomes = []
    for way in ways:
        harder = None if way == level == "gone" else _harder(workshop, feature, way)
        folder = out / f"{(harder or feature).id}-{way}"
        outcome = Outcome(task.id, workshop.repository.name, task.deleted.kind, way)
        if harder is None:
            outcome = replace(outcome, refused=NO_WAY, evidence=way)
        elif folder.is_dir():
            outcome = replace(outcome, refused=THERE, evidence=str(folder))
        else:
            wording = replace(settings or MakeSettings(), wording="terse" if way == "terser" else "normal")
            new_level = "gone" if way == "gone" else level
            outcome = await make_task(workshop, replace(harder, id=folder.name), new_level, folder, spec, wording)
        outcomes.append(outcome)
    return outcomes


def feature_of(task: Task, workshop: Workshop) -> Feature:
    assert task.deleted is not None
    targets = tuple(map(FunctionKey.of, task.deleted.targets))
    functions = tuple(map(FunctionKey.of, task.deleted.functions))
    tests = {test for key in functions for test in workshop.map.tests_of.get(key, ())}
    return Feature(task.id, "cluster" if len(targets) > 1 else "single", targets, functions, tuple(sorted(tests)))


def _harder(workshop: Workshop, feature: Feature, way: Way) -> Feature | None:
    if way == "terser":
        return feature
    if way == "gone":  # or its names would be stubs as before, and the task the same
        deletion = delete(workshop.files, workshop.symbols, feature, "gone")
        return feature if {*feature.targets} & {*deletion.deleted} else None
    settings = FeatureSettings(repo=workshop.repository.name)
    finder = Finder(workshop.symbols, workshop.map, workshop.repository.tests, settings)
    if way == "merge":
        other = finder.nearest(feature, finder.features())
        return finder.merged(feature, other) if other else None
    users = {user for key in feature.targets for user in workshop.symbols.callers[key]} - {*feature.functions}
    tests = {*feature.tests} | {test for user in users for test in workshop.map.tests_of.get(user, ())}
    functions = finder.closure([*feature.targets, *users], tests) | {*feature.functions}
    if not functions > {*feature.functions} or len(tests) > settings.max_cluster_share * finder.num_tests:
        return None
    return finder.feature("cluster", [*feature.targets, *users.intersection(functions)], functions, tests)
