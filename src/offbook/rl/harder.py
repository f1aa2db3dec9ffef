"""Harder tasks from those that became easy, made while a run trains. A killed run resumes what it had begun."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from itertools import chain, groupby
from pathlib import Path

from offbook.core.config import Config
from offbook.rl.scheduler import RolloutBuffer, Selected
from offbook.sandbox import SandboxSpec
from offbook.tasks import load_task
from offbook.tasks.factory.harden import THERE, harden, workshop_of
from offbook.tasks.select import Record
from offbook.types import OffbookError, Rollout, Task

RECENT, FEWEST = 8, 3  # steps and groups of the recent solve rate
Shown = tuple[Task, float]


class Harder:
    """Tasks that nearly all rollouts solve are made harder through the factory, verified there, and drawn later. All
    tasks must have been solved as often within RECENT steps, by FEWEST groups.

    OUT/harder/ID/    those that were made
    """

    def __init__(
        self,
        config: Config,
        buffer: RolloutBuffer,
        tasks: dict[str, Task],
        order: Selected,
        done: int = 0,
    ):
        self.share = config.tasks.harden
        self.buffer = buffer
        self.tasks = tasks
        self.order = order
        self.spec = SandboxSpec(**config.sandbox.model_dump())
        self.folder = buffer.run.path / "harder"
        self._recent: deque[list[Shown]] = deque(maxlen=RECENT)  # by step
        for step in [step for step in buffer.run.steps() if step <= done][-RECENT:]:
            rollouts, _ = buffer.run.rollouts(step)
            groups = groupby(rollouts, lambda one: one.group)
            self._recent.append(self._shown([list(group) for _, group in groups]))
        self._easy: asyncio.Queue[Task] = asyncio.Queue()
        lines = buffer.lines
        over = {line["task"] for line in lines if line["state"] == "harder"}
        easy = [line["task"] for line in lines if line["state"] == "easy"]
        self._seen = {*over, *easy}
        for id in easy:
            if id not in over and id in tasks:
                self._easy.put_nowait(tasks[id])

    def observe(self, groups: Iterable[list[Rollout]], filtered: Iterable[tuple[str, Record]] = ()) -> None:
        """Take in the groups of a step, and queue the tasks that became easy."""
        self._recent.append(self._shown(groups, filtered))
        shares = [share for step in self._recent for _, share in step]
        recent = sum(shares) / len(shares) if len(shares) >= FEWEST else 0.0
        for task, solved in chain(*self._recent):
            if task.deleted and min(solved, recent) >= self.share and task.id not in self._seen:
                self._seen.add(task.id)
                self.buffer.note("easy", task=task.id, solved=solved, recent=recent)
                self._easy.put_nowait(task)

    def _shown(self, groups: Iterable[list[Rollout]], filtered: Iterable[tuple[str, Record]] = ()) -> list[Shown]:
        """Tasks with the share of their rollouts that solved them."""
        records = [*((group[0].task, Record.of(group)) for group in groups), *filtered]
        known = [(self.tasks[id], record) for id, record in records if record.rollouts and id in self.tasks]
        return [(task, record.solved / record.rollouts) for task, record in known]

    async def run(self) -> None:
        while True:
            task = await self._easy.get()
            why = ""
            folders: list[Path] = []
            try:
                workshop = await asyncio.to_thread(workshop_of, task)
                outcomes = await harden(task, self.folder, self.spec, workshop=workshop)
                folders = [self.folder / one.id for one in outcomes if not one.refused]
                folders += [Path(one.evidence) for one in outcomes if one.refused == THERE]
            except OffbookError as reason:  # its repository is not here any more
                why = str(reason)
            new = [one for one in map(load_task, dict.fromkeys(folders)) if one.id not in self.tasks]
            self.buffer.note("harder", task=task.id, made=[one.id for one in new], why=why)
            for one in new:
                self.tasks[one.id] = one
                self.order.add(one)
