"""Harder tasks from a task that has become easy, verified like any other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

from offbook.sandbox import BoxSpec
from offbook.taskgen.delete.delete import delete
from offbook.taskgen.features import FeatureSettings, closure, find_features, merged, nearest
from offbook.taskgen.make import Outcome, make_task
from offbook.taskgen.mapping import load_map
from offbook.taskgen.nouns import Feature, FunctionKey, Level
from offbook.taskgen.prepare.prepare import load_repository
from offbook.taskgen.workshop import Workshop, open_workshop
from offbook.types import OffbookError, Task

Way = Literal["terser", "gone", "widen", "merge"]
WAYS: tuple[Way, ...] = get_args(Way)


def workshop_of(task: Task) -> Workshop:
    """The repository that a task was made from, where it still lies beside it."""
    environment = task.suite.environment
    if task.deleted is None or environment is None or not (environment / "repository.json").is_file():
        raise OffbookError(f"{task.folder} was not made from a repository that is still here, so it cannot be changed")
    return open_workshop(load_repository(environment), load_map(environment / "map.json"))


async def harden(
    task: Task, out: Path, spec: BoxSpec, ways: Sequence[Way] = WAYS, workshop: Workshop | None = None
) -> list[Outcome]:
    """A task for each way in which this one can be made harder, in `out`: with fewer words (terser), with the names
    gone that were stubs (gone), with the functions that use it (widen), with its nearest neighbour (merge).

    Every one is verified from the start. A way that leads nowhere has an outcome that says why.
    """
    workshop = workshop or workshop_of(task)
    assert task.deleted is not None
    feature = feature_of(task, workshop)
    level: Level = next(known for known in ("stub", "hybrid", "gone") if known == task.deleted.level)
    outcomes = []
    for way in ways:
        harder = _harder(workshop, feature, way)
        if way == "gone" and (level == "gone" or not _names_can_go(workshop, feature)):
            harder = None
        if harder is None:
            outcomes.append(Outcome(task.id, workshop.repository.name, task.deleted.kind, way, NO_WAY, _why_not(way)))
            continue
        renamed = Feature(f"{harder.id}-{way}", harder.kind, harder.targets, harder.functions, harder.tests)
        new_level: Level = "gone" if way == "gone" else level
        folder = out / renamed.id
        if folder.is_dir():
            raise OffbookError(f"{folder} is there already")
        out.mkdir(parents=True, exist_ok=True)
        wording = "terse" if way == "terser" else "normal"
        outcomes.append(await make_task(workshop, renamed, new_level, folder, spec, wording))
    return outcomes


NO_WAY = "there is no such way"


def _why_not(way: Way) -> str:
    return {
        "terser": "it has no shorter instruction",
        "gone": "its names are gone already, or what is left needs them",
        "widen": "nothing that could be deleted too uses it",
        "merge": "no neighbour goes with it within the limits",
    }[way]


def _names_can_go(workshop: Workshop, feature: Feature) -> bool:
    """Or they would be stubs as before, and the task the same."""
    deletion = delete(workshop.files, workshop.symbols, feature, "gone")
    return bool({*feature.targets} & {*deletion.deleted})


def feature_of(task: Task, workshop: Workshop) -> Feature:
    assert task.deleted is not None
    functions = tuple(_key(name) for name in task.deleted.functions)
    tests = {test for key in functions for test in workshop.map.tests_of.get(key, ())}
    kind: Literal["single", "cluster"] = "cluster" if task.deleted.kind == "cluster" else "single"
    return Feature(task.id, kind, tuple(_key(name) for name in task.deleted.targets), functions, tuple(sorted(tests)))


def _key(name: str) -> FunctionKey:
    path, _, function = name.partition("::")
    return FunctionKey(path, function)


def _harder(workshop: Workshop, feature: Feature, way: Way) -> Feature | None:
    settings = FeatureSettings(repo=workshop.repository.name)
    if way in ("terser", "gone"):
        return feature
    if way == "merge":
        singles = find_features(workshop.symbols, workshop.map, workshop.repository.tests, settings)
        other = nearest(feature, singles, workshop.symbols, len(workshop.repository.tests), settings)
        return merged([feature, other], settings) if other else None
    users = {user for key in feature.targets for user in workshop.symbols.callers[key]} - {*feature.functions}
    tests = {*feature.tests} | {test for user in users for test in workshop.map.tests_of.get(user, ())}
    functions = closure(workshop.symbols, workshop.map, tests)
    if not {*functions} > {*feature.functions} or len(tests) > settings.max_cluster_share * len(
        workshop.repository.tests
    ):
        return None
    targets = [*feature.targets, *(user for user in sorted(users) if user in functions)]
    wide = Feature("", "cluster", tuple(targets), tuple(functions), tuple(sorted(tests)))
    return merged([wide], settings)
