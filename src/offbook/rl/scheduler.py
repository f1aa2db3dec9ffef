"""Rollouts of later batches while the trainer works, nearly on-policy, and nothing thrown away.

Batch b may begin when the weights of step b - 1 - max_staleness are in the engine: 0 is a synchronous run. A group is
due at the step whose weights are max_staleness newer than those that it began with. A step waits for what is due, and
takes that and the oldest groups that are over, out of a window that begins at the oldest. So a long rollout is
overtaken by a few younger ones and no more, and never so often that it gets too old. None is dropped for its age.

In lockstep the rollouts of a batch are sampled together, by one version, one batch after the other. With a staleness of
at most 1 all that is sampled and trained follows from the seed then. In the continuous mode, and by vLLM, new weights
go in while rollouts are under way, and each token has its version.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any

from offbook.core import processes
from offbook.core.config import Config
from offbook.core.processes import Watchdog, wait_with_heartbeat
from offbook.core.weights import Weights
from offbook.engine import Engine
from offbook.rl.collector import FREE, Collector, Job
from offbook.rl.rollout_buffer import FilteredGroup, Group, RolloutBuffer, State, Unfinished
from offbook.rl.tasks import Selected, Shuffled
from offbook.tasks.select import Record, TasksUsedUp
from offbook.types import ModelLost, OffbookError, Rollout, ServerLost, Task

log = logging.getLogger(__name__)


ROOM, FULL = 0.6, 0.9  # of the keys and values that the engine may hold
IDLE_LOAD, BUSY_LOAD = 2.0, 6.0  # processes that want to run, a core
LEAST = 4
UP, DOWN = 4, 0.7
LOOK_S = 2.0

Use = Callable[[], tuple[float, float]]  # share of keys and values held, load a core


class ConcurrencyLimit:
    """Entered by each rollout while it works."""

    def __init__(self, use: Use, limit: int = 64):
        self.use, self.limit, self.running = use, limit, 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._looked = 0.0

    async def __aenter__(self) -> None:
        self.look()
        if self.running < self.limit and not self._waiting:
            self.running += 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it had its turn in the same moment
                self._leave()
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.look()
        self._leave()

    def look(self) -> None:
        """Every few seconds; a change of the limit has to show before the next."""
        now = time.monotonic()
        if now - self._looked < LOOK_S:
            return
        self._looked = now
        held, load = self.use()
        if held > FULL or load > BUSY_LOAD:
            self.limit = max(LEAST, int(min(self.limit, self.running) * DOWN))
        elif held < ROOM and load < IDLE_LOAD and self._waiting:
            self.limit += UP
        self._admit()

    def _leave(self) -> None:
        self.running -= 1
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self.running < self.limit:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                self.running += 1


def use_of(engine: Engine) -> Use:
    cores = len(os.sched_getaffinity(0))

    def use() -> tuple[float, float]:
        return engine.kv_load, os.getloadavg()[0] / cores

    return use


WINDOW = 0.3  # of the groups that may be ahead of a step: how far behind the oldest one a step may choose
DEATHS = 3  # of a kind, between two steps, end the run
SHOW_S = 1.0  # between two looks for the viewer
WAITING: tuple[State, ...] = ("requested", "running", "scored", "grouped")  # states of slots that no step has yet


class Scheduler:
    def __init__(
        self,
        config: Config,
        collector: Collector,
        engine: Engine,
        slots: RolloutBuffer,
        order: Shuffled | Selected,
        recalled: Unfinished,
    ):
        self.collector, self.engine, self.slots, self.order = collector, engine, slots, order
        self.settings, self.last = config.loop, config.train.steps
        self.num_groups = config.train.groups
        self.in_lockstep = config.engine.kind == "local" and config.engine.mode == "lockstep"
        ahead = self.settings.max_staleness * self.num_groups
        self.window = 0 if self.in_lockstep else int(WINDOW * ahead)
        self.stored, self.next_batch = recalled.stored, recalled.next_batch
        self.waiting = recalled.groups  # that no step was given yet, the oldest first
        self.deaths, self.restarts = recalled.deaths, recalled.restarts
        self.refills, self.aside = recalled.refills, recalled.aside  # of batches; since the last step
        self._in_a_row = Counter[tuple[str, str]]()  # deaths since the last step
        self._lost: list[ModelLost] = list(self.engine.losses)  # counted
        self._worker_deaths = 0
        self.pace = ConcurrencyLimit(use_of(collector.engine))
        self._jobs: set[asyncio.Task[None]] = set()
        self._beside: list[asyncio.Task[None]] = []
        self._bringing: list[Callable[[], bool]] = []
        self._begun: set[Group] = set()
        self._held = False
        self._problem: BaseException | None = None
        self._used_up: TasksUsedUp | None = None
        self._changed, self._changed_at, self._shown = asyncio.Event(), time.monotonic(), 0.0

    def start(self) -> None:
        if self.in_lockstep:
            for group in self.waiting:
                if not self.has_batch(group.batch):
                    self.slots.failed(group, "its batch was not over, and is sampled again", whole=True)
        self._fill()

    def has_batch(self, batch: int) -> bool:
        """Whether all of it was sampled before this process began."""
        same = [group for group in self.waiting if group.batch == batch]
        is_over = bool(same) and all(len(group.rollouts) == len(group.seats) for group in same)
        return is_over or batch in self.stored

    async def aclose(self) -> None:
        """What is under way ends where it is; it is kept up to its last turn."""
        jobs = [*self._jobs, *self._beside]
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)
        self.slots.close()

    def beside(self, work: Coroutine[Any, Any, None], brings_tasks: Callable[[], bool] = lambda: False) -> None:
        """Something that goes on as long as the run, and ends it where it fails. While it `brings_tasks`, `added` will
        be called, and those that are there are not all."""
        self._bringing.append(brings_tasks)
        job = asyncio.get_running_loop().create_task(work)
        self._beside.append(job)
        job.add_done_callback(self._failed)

    def _failed(self, job: asyncio.Task[None]) -> None:
        if not job.cancelled() and (problem := job.exception()):
            self._problem = self._problem or problem
        self.tell()

    def added(self, tasks: Iterable[Task]) -> None:
        """That came later; or that none came."""
        assert isinstance(self.order, Selected)
        for task in tasks:
            self.order.add(task)
        self._used_up = None
        self._fill()
        self.tell()

    async def take(self, step: int) -> list[list[Rollout]]:
        """The groups that a step is trained on; what it was given before a restart, if it was."""
        if step in self.stored:
            groups = self.stored.pop(step)
            for group in groups:
                self.slots.already(group)
            return groups
        chosen: list[Group] = []

        def ready() -> bool:
            chosen[:] = choose(self.waiting, step, self.num_groups, self.window, self.settings.max_staleness)
            return bool(chosen)

        await self.until(ready, lambda: f"the rollouts of step {step} ({self._state(step)})")
        self.waiting = [group for group in self.waiting if group not in chosen]
        self._begun.difference_update(chosen)
        self.slots.given(step, chosen)
        self._in_a_row.clear()
        return [group.in_order() for group in chosen]

    def to_keep(self, weights: Weights) -> Weights:
        """vLLM's engine keeps them by reference for a server that has to be started again. By then the trainer may be
        changing its own, so it gets a copy."""
        if not (self.settings.max_staleness and self.engine.keeps_weights):
            return weights
        firsts = weights.firsts()
        copies = {name: weights.tensors[name].detach().clone() for name in set(firsts.values())}
        return replace(weights, tensors={name: copies[first] for name, first in firsts.items()})

    async def publish(self, weights: Weights) -> None:
        """To the engine. In lockstep between two batches, else at once, in the middle of rollouts."""
        if self.in_lockstep:
            await self.until(lambda: not self._jobs, lambda: "the batch that is being sampled, to apply new weights")
        await self.apply(weights)
        self._fill()

    async def apply(self, weights: Weights) -> None:
        """Beside this thread: an engine that comes up for them takes minutes, and Ctrl-C is answered meanwhile."""
        what = f"the engine to take the weights of {weights.version}"
        work = asyncio.to_thread(self.engine.apply, self.to_keep(weights))
        await wait_with_heartbeat(work, Watchdog(lambda: what, math.inf, lambda: None))

    @asynccontextmanager
    async def quiet(self) -> AsyncIterator[None]:
        """Nothing is sampled in here but by whoever asked."""
        self._held = True
        try:
            await self.until(lambda: not self._jobs, lambda: "what is being sampled, to look at hints")
            yield
        finally:
            self._held = False
            self._fill()

    def _fill(self) -> None:
        """Request what may be requested, begin what may begin."""
        newest = min(self.last, self.engine.version + self.settings.max_staleness + 1)
        while self.next_batch <= newest:
            try:
                tasks = self.order.tasks_of(self.next_batch, self.num_groups)
            except TasksUsedUp as reason:
                self._used_up = reason
                break
            self.waiting += self.slots.request(self.next_batch, tasks)
            self.next_batch += 1
        new = [group for group in self.waiting if group not in self._begun and group.batch <= newest]
        if not new or self._held or self._problem:
            return
        if not self.in_lockstep:
            for group in new:
                self._begin([group])
        elif not self._jobs:
            self._begin([group for group in new if group.batch == new[0].batch])

    def _begin(self, groups: list[Group]) -> None:
        self._begun.update(groups)
        job = asyncio.get_running_loop().create_task(self._sample(groups))
        self._jobs.add(job)
        job.add_done_callback(self._over)

    def _over(self, job: asyncio.Task[None]) -> None:
        self._jobs.discard(job)
        self._failed(job)
        if not job.cancelled():
            self._fill()

    async def _sample(self, groups: list[Group]) -> None:
        """All rollouts of these groups that are not there yet. Where the model is lost on the way, they begin again, in
        lockstep all of them, else each behind its last turn."""
        while True:
            for group in groups:
                self.slots.running(group, self.engine.version)
            missing = [
                (group, number)
                for group in groups
                for number in range(len(group.seats))
                if number not in group.rollouts
            ]
            try:
                await self._sampled(missing)
                break
            except ModelLost as problem:
                self._died(problem)
                for group in groups:
                    self.slots.failed(group, str(problem), whole=self.in_lockstep)
        for group in groups:
            self.collector.settle(group.in_order())
            self.slots.grouped(group)
            self._refill(group)

    def _refill(self, group: Group) -> None:
        """Another task takes the place of one whose rollouts are all worth the same, so many times in a batch. Then, or
        where no task is left, the group is trained on as it is: no run samples for ever."""
        rollouts, done = group.in_order(), self.refills[group.batch]
        if done >= self.settings.refill or len({rollout.reward.total for rollout in rollouts}) > 1:
            return
        try:
            (task,) = self.order.tasks_of(group.batch, 1)
        except TasksUsedUp:
            return
        self.refills[group.batch] += 1
        self.aside.append(FilteredGroup(group.task.id, Record.of(rollouts)))
        self.waiting[self.waiting.index(group)] = self.slots.refill(group, self.num_groups + done, task)

    async def _sampled(self, missing: Sequence[tuple[Group, int]]) -> None:
        by_id: dict[str, list[tuple[Group, int]]] = {}  # a batch may have a task twice
        for group, number in missing:
            by_id.setdefault(group.seats[number].id, []).append((group, number))

        def watch(rollout: Rollout, over: bool) -> None:
            if over:
                self.slots.scored(*by_id[rollout.id].pop(), rollout)
                self._look_at_worker()
                self._look_at_servers()
            self.tell()

        seats = [(group, group.seats[number]) for group, number in missing]
        jobs = [Job(group.task, seat.id, group.name, seat if self.slots.keeps_turns else None) for group, seat in seats]
        await self.collector.rollouts(jobs, watch, FREE if self.in_lockstep else self.pace)

    def _died(self, problem: ModelLost) -> None:
        """Once for all that it struck."""
        if any(problem is one for one in self._lost):
            return
        self._lost.append(problem)
        self._count("model", problem, problem.server if isinstance(problem, ServerLost) else "")
        log.warning("%s; what is lost of what it was writing is asked for again", problem)

    def _look_at_worker(self) -> None:
        """It says by itself that it died."""
        monitors = self.collector.monitors
        while monitors is not None and self._worker_deaths < monitors.worker.deaths:
            self._worker_deaths += 1
            self._count("worker", OffbookError("the process that judges rollouts was killed"))

    def _look_at_servers(self) -> None:
        """vLLM's come back by themselves; one that is lost again and again costs its start each time."""
        for loss in self.engine.losses:
            self._died(loss)

    def _count(self, who: str, problem: OffbookError, server: str = "") -> None:
        """Of several servers each has deaths of its own."""
        self.deaths[who] += 1
        self._in_a_row[who, server] += 1
        self.slots.note("died", who=who, why=str(problem))
        if self._in_a_row[who, server] >= DEATHS:
            told = f"the third time between two steps (of {self.deaths[who]} in all)"
            ends = "so the run ends; the same command goes on from what is kept"
            raise type(problem)(f"{problem}; that was {told}, {ends}")

    def tell(self) -> None:
        """Something happened."""
        now = time.monotonic()
        if now - self._shown > SHOW_S:
            self._shown = now
            self.slots.show(self._now())
        self._changed_at = now
        self._changed.set()

    def _now(self) -> dict[str, float]:
        held, load = self.pace.use()
        began = [group.version for group in self.waiting if group.version is not None]
        return {
            **{f"slots {state}": count for state, count in self.slots.counts.items()},
            "weights of step": self.engine.version,
            "oldest begun at step": min(began, default=self.engine.version),
            "engine full, share": round(held, 3),
            "load a core": round(load, 2),
            "most at once": self.pace.limit,
            "restarts of the model": self.deaths["model"],
            "restarts of the worker": self.deaths["worker"],
            "restarts of the run": self.restarts,
        }

    async def until(self, ready: Callable[[], bool], what: Callable[[], str]) -> None:
        """Every wait has a reason, which is told, and an end: when nothing at all has happened for too long."""
        watchdog = Watchdog(what, self.settings.deadline_s, lambda: self._changed_at)
        while not ready():
            if self._problem:
                raise self._problem
            if self._used_up and not self._jobs and not self._brings_tasks:
                raise self._used_up
            self._changed.clear()
            try:
                async with asyncio.timeout(processes.TELL_S):
                    await self._changed.wait()
            except TimeoutError:
                watchdog.look()

    @property
    def _brings_tasks(self) -> bool:
        return any(is_busy() for is_busy in self._bringing)

    def _state(self, step: int) -> str:
        over = sum(group.is_over for group in self.waiting)
        more = "; harder tasks are being made" if self._used_up and self._brings_tasks else ""
        return f"{over} of {len(self.waiting)} groups are over, a step takes {self.num_groups}{more}"

    def metrics(self, step: int, groups: Iterable[Iterable[Rollout]]) -> dict[str, Any]:
        """How old what a step was given is, by token, and whether long rollouts are passed over."""
        ages = Counter(
            step - 1 - version
            for group in groups
            for rollout in group
            for segment in rollout.segments
            for version in segment.versions
            if version >= 0
        )
        count = max(1, ages.total())
        return {
            "staleness": sum(age * number for age, number in ages.items()) / count,
            "staleness/max": max(ages, default=0),
            "staleness/too_old": sum(n for age, n in ages.items() if age > self.settings.max_staleness),
            **{f"slots/{state}": self.slots.counts[state] for state in WAITING},
            **self.slots.lengths(),
            "deaths": self.deaths["model"],
            "deaths/worker": self.deaths["worker"],
            "restarts": self.restarts,
            "rollouts_at_once": self.pace.limit,
        }


def choose(waiting: Sequence[Group], step: int, count: int, window: int, max_staleness: int) -> list[Group]:
    """Which groups a step is given, the oldest first; none where it has to wait."""
    due = [group for group in waiting if group.version is not None and group.version + 1 + max_staleness <= step]
    if not all(group.is_over for group in due):
        return []
    over = [group for group in waiting[: count + window] if group.is_over]
    chosen = [*due, *(group for group in over if group not in due)][:count]
    return [group for group in waiting if group in chosen] if len(chosen) == count else []
