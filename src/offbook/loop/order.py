"""Which tasks a step trains on. The same run picks the same ones, also when it was killed in between."""

from __future__ import annotations

import random
from collections.abc import Iterable

from offbook.runfolder import RunFolder
from offbook.tasks.select import History, Sampler
from offbook.types import Rollout, Task


class Walk:
    """A shuffled walk over the tasks: none comes twice before all have come once."""

    def __init__(self, tasks: list[Task], seed: int, folder: RunFolder, done: int):
        self._tasks, self._seed = tasks, seed

    def tasks_of(self, step: int, groups: int) -> list[Task]:
        chosen = []
        for place in range((step - 1) * groups, step * groups):
            epoch, index = divmod(place, len(self._tasks))
            order = random.Random(f"{self._seed}/{epoch}").sample(range(len(self._tasks)), len(self._tasks))
            chosen.append(self._tasks[order[index]])
        return chosen

    def learn(self, groups: Iterable[Iterable[Rollout]]) -> None:
        """A walk goes its way whatever happens."""


class Selected:
    """By what this run's rollouts have shown so far of tasks of the same kind, and none twice (tasks/select.py)."""

    def __init__(self, tasks: list[Task], seed: int, folder: RunFolder, done: int):
        self._history = History.of_runs([folder.path], before_step=done + 1)
        self._sampler = Sampler(tasks, seed, self._history.records)

    def tasks_of(self, step: int, groups: int) -> list[Task]:
        return self._sampler.draw(groups, self._history)

    def learn(self, groups: Iterable[Iterable[Rollout]]) -> None:
        for group in groups:
            self._history.add(group)
