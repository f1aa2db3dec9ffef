"""Task selection: every task once, then those that are sometimes solved.

A group whose rollouts all have the same outcome teaches nothing, so the weight of a task is the chance that two of its
rollouts differ, estimated from earlier rollouts of this task or, without any, of similar tasks and from its difficulty:
easy tasks come first. Tasks that took more turns and thinking are drawn more often, as long as they are solved at all.
A task that has been drawn once more than another has half the weight.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from offbook.core.runfolder import RunFolder
from offbook.types import OffbookError, Rollout, Task

PRIOR = 2.0  # rollouts' worth of trust in tasks of the same kind
EXPECTED = {"hard": 0.15, "normal": 0.3}  # the solve rate of a difficulty of which nothing is known
EXPECTED_EASY = 0.5  # of the others
LEAST = 0.02  # the chance to differ that every task is taken to have: none is given up for good
EFFORT = 0.5  # how far turns and thinking count: 0 is not at all


@dataclass(slots=True)
class Record:
    rollouts: float = 0
    solved: float = 0
    turns: int = 0
    thinking: int = 0

    @classmethod
    def of(cls, rollouts: Iterable[Rollout]) -> Record:
        """Without those that broke off for no fault of the agent's: the task was used, and nothing is known of it."""
        record = cls()
        for rollout in rollouts:
            if not rollout.fault:
                usage = rollout.usage
                record.add(cls(1, rollout.solved, usage.turns, usage.thinking_tokens))
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
    groups: Counter[str] = field(default_factory=Counter)  # of each task

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
        """Of one step."""
        groups: dict[tuple[str, str], list[Rollout]] = {}
        for rollout in rollouts:
            groups.setdefault((rollout.task, rollout.group), []).append(rollout)
        for (task, _), group in groups.items():
            self.shown(task, Record.of(group))

    def shown(self, task: str, record: Record) -> None:
        """One group of it."""
        self.records.setdefault(task, Record()).add(record)
        self.groups[task] += 1


class Sampler:
    """Draws tasks. The same seed, history and draws before give the same ones."""

    def __init__(self, tasks: Sequence[Task], seed: int, used: Iterable[str] = ()):
        """`used` has a task as often as it was drawn before."""
        self._tasks = {task.id: task for task in sorted(tasks, key=lambda task: task.id)}
        self._drawn = Counter(used)
        self._seed = seed

    def add(self, task: Task) -> None:
        """One that came later. In the order of a sampler that had it from the start."""
        self._tasks = dict(sorted([*self._tasks.items(), (task.id, task)]))

    @property
    def passes(self) -> int:
        """How often each task was drawn at least."""
        return min(self._drawn[task_id] for task_id in self._tasks)

    def draw(self, count: int, history: History) -> list[Task]:
        """Different tasks. Those that were never drawn come before the others."""
        if count > len(self._tasks):
            raise OffbookError(
                f"a step takes {count} tasks and there are {len(self._tasks)}; make more, or lower train.groups"
            )
        weights = self.weights(history)
        rng = random.Random(f"{self._seed}/{len(self._tasks) - self._drawn.total()}")
        # Keys u^(1/w) in falling order are a weighted draw without putting back (Efraimidis and Spirakis, 2006).
        keys = {
            task_id: math.log(1 - rng.random()) / weights[task_id]
            for task_id in sorted(self._tasks, key=lambda one: (self._drawn[one] > 0, one))
        }
        chosen = sorted(keys, key=lambda task_id: (self._drawn[task_id] > 0, -keys[task_id]))[:count]
        self._drawn.update(chosen)
        return [self._tasks[task_id] for task_id in chosen]

    def weights(self, history: History) -> dict[str, float]:
        """The chance that two rollouts of a task differ, more where it takes work, less where it came often."""
        rates = self._rates_of_kinds(history)
        efforts = [record.effort for record in history.records.values() if record.rollouts]
        middle = sorted(efforts)[len(efforts) // 2] if efforts else 0.0
        passes = self.passes
        result = {}
        for task_id, task in self._tasks.items():
            record = history.records.get(task_id, Record())
            rate = (record.solved + PRIOR * rates[_kind(task)]) / (record.rollouts + PRIOR)
            share = (record.effort / middle) ** EFFORT if record.rollouts and middle else 1.0
            result[task_id] = max(LEAST, 2 * rate * (1 - rate)) * share * 0.5 ** (self._drawn[task_id] - passes)
        return result

    def _rates_of_kinds(self, history: History) -> dict[tuple[str, str], float]:
        """How often tasks of one repository and difficulty are solved."""
        kinds = {_kind(task) for task in self._tasks.values()}
        seen = {kind: Record(PRIOR, PRIOR * EXPECTED.get(kind[1], EXPECTED_EASY)) for kind in kinds}
        for task_id, record in history.records.items():
            if task_id in self._tasks:
                seen[_kind(self._tasks[task_id])].add(record)
        return {kind: record.solved / record.rollouts for kind, record in seen.items()}


def _kind(task: Task) -> tuple[str, str]:
    return task.origin, task.difficulty
