"""Task selection: without replacement, and preferring tasks that are sometimes solved.

A group whose rollouts all have the same outcome teaches nothing, so the weight of a task is the chance that two of its
rollouts differ, estimated from earlier rollouts of this task or, without any, of similar tasks. Tasks that took more
turns and thinking are drawn more often, as long as they are solved at all.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from offbook.core.runfolder import RunFolder
from offbook.types import OffbookError, Rollout, Task

PRIOR = 2.0  # rollouts' worth of trust in tasks of the same kind
LEAST = 0.02  # the chance to differ that every task is taken to have: none is given up for good
EFFORT = 0.5  # how far turns and thinking count: 0 is not at all


@dataclass(slots=True)
class Record:
    rollouts: int = 0
    solved: int = 0
    turns: int = 0
    thinking: int = 0

    @classmethod
    def of(cls, rollouts: Iterable[Rollout]) -> Record:
        """Without those that broke off for no fault of the agent's: the task was used, and nothing is known of it."""
        whole = [rollout for rollout in rollouts if not rollout.fault]
        record = cls(len(whole))
        for rollout in whole:
            record.solved += rollout.solved
            record.turns += rollout.usage.turns
            record.thinking += rollout.usage.thinking_tokens
        return record

    def add(self, other: Record) -> None:
        self.rollouts += other.rollouts
        self.solved += other.solved
        self.turns += other.turns
        self.thinking += other.thinking

    @property
    def effort(self) -> float:
        """Turns and thinking tokens per rollout, on one scale: a turn for every hundred tokens."""
        return (self.turns + self.thinking / 100) / max(1, self.rollouts)


@dataclass(slots=True)
class History:
    """What rollouts have shown of tasks."""

    records: dict[str, Record] = field(default_factory=dict)

    @classmethod
    def of_runs(cls, runs: Iterable[Path], before_step: int | None = None) -> History:
        history = cls()
        for run in runs:
            folder = RunFolder.open(run)
            for step in folder.steps():
                if before_step is None or step < before_step:
                    rollouts, _ = folder.rollouts(step)
                    history.add(rollouts)
        return history

    def add(self, rollouts: Iterable[Rollout]) -> None:
        for rollout in rollouts:
            self.shown(rollout.task, Record.of([rollout]))

    def shown(self, task: str, record: Record) -> None:
        self.records.setdefault(task, Record()).add(record)


class TasksUsedUp(OffbookError):
    """A step needs more tasks than there are left."""


class Sampler:
    """Draws tasks without putting any back. The same seed and the same history draw the same ones."""

    def __init__(self, tasks: Sequence[Task], seed: int, used: Iterable[str] = ()):
        taken = set(used)
        self._left = {task.id: task for task in sorted(tasks, key=lambda task: task.id) if task.id not in taken}
        self._all = {task.id: task for task in tasks}
        self._seed = seed

    def add(self, task: Task) -> None:
        """One that came later. In the order of a sampler that had it from the start."""
        self._all[task.id] = task
        self._left = dict(sorted([*self._left.items(), (task.id, task)]))

    def draw(self, count: int, history: History) -> list[Task]:
        if count > len(self._left):
            raise TasksUsedUp(
                f"{count} more tasks are wanted and {len(self._left)} are left that this run has not used; "
                "make more tasks, or train for fewer steps"
            )
        weights = self.weights(history)
        rng = random.Random(f"{self._seed}/{len(self._left)}")
        # Keys u^(1/w) in falling order are a weighted draw without putting back (Efraimidis and Spirakis, 2006).
        keys = {task_id: math.log(1 - rng.random()) / weights[task_id] for task_id in self._left}
        chosen = sorted(self._left, key=lambda task_id: -keys[task_id])[:count]
        return [self._left.pop(task_id) for task_id in chosen]

    def weights(self, history: History) -> dict[str, float]:
        """Of each task that is left: the chance that two rollouts of it end differently, more where it takes work."""
        rates = self._rates_of_kinds(history)
        efforts = [record.effort for record in history.records.values() if record.rollouts]
        middle = sorted(efforts)[len(efforts) // 2] if efforts else 0.0
        result = {}
        for task_id, task in self._left.items():
            record = history.records.get(task_id, Record())
            rate = (record.solved + PRIOR * rates[_kind(task)]) / (record.rollouts + PRIOR)
            share = (record.effort / middle) ** EFFORT if record.rollouts and middle else 1.0
            result[task_id] = max(LEAST, 2 * rate * (1 - rate)) * share
        return result

    def _rates_of_kinds(self, history: History) -> dict[tuple[str, str], float]:
        """How often tasks of one repository and difficulty are solved; half where nothing is known."""
        solved: dict[tuple[str, str], float] = defaultdict(lambda: 1.0)
        rollouts: dict[tuple[str, str], float] = defaultdict(lambda: 2.0)
        for task_id, record in history.records.items():
            if task_id in self._all:
                kind = _kind(self._all[task_id])
                solved[kind] += record.solved
                rollouts[kind] += record.rollouts
        return {_kind(task): solved[_kind(task)] / rollouts[_kind(task)] for task in self._all.values()}


def _kind(task: Task) -> tuple[str, str]:
    return task.origin, task.difficulty
