"""Rollouts of later batches are sampled while the trainer works, nearly on-policy, and none is thrown away.

Batch b may begin when the weights of step b - 1 - max_staleness are in the engine: 0 is a synchronous run. A group is
due at the step whose weights are max_staleness newer than those that it began with. A step waits for the groups that
are due, and takes them and the oldest groups that are over, out of a window that begins at the oldest. So a few younger
rollouts overtake a long one and no more, and never so often that it gets too old. None is dropped for its age.

In lockstep the rollouts of a batch are sampled together, by one version, one batch after the other. With a staleness of
at most 1 all that is sampled and trained follows from the seed then. In the continuous mode, and by vLLM, new weights
go in while rollouts are running, and each token has its version.
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
from offbook.rl.rollout_buffer import Group, RolloutBuffer, State
from offbook.rl.tasks import Selected, Shuffled
from offbook.train.algorithms import has_gradient
from offbook.types import ModelLost, OffbookError, Rollout, ServerLost, Task

WINDOW = 0.3  # of the groups that may be ahead of a step: how far behind the oldest one a step may choose
DEATHS = 3  # of a kind, between two steps, end the run
SHOW_S = 1.0  # between two updates for the viewer
WAITING: tuple[State, ...] = ("requested", "running", "scored", "grouped")  # states of rollouts that no step has yet
KV_ROOM, KV_FULL = 0.6, 0.9  # of the KV cache
IDLE_LOAD, BUSY_LOAD = 2.0, 6.0  # processes that want to run, per core
LEAST = 4
UP, DOWN = 4, 0.7
LOOK_S = 2.0

Use = Callable[[], tuple[float, float]]  # share of the KV cache in use, load per core
log = logging.getLogger(__name__)


class ConcurrencyLimit:
    """How many rollouts run at once: more while engine and machine have room, fewer when either is full.

    Up by a few, down by a share, as TCP does it. First come, first served, so younger batches do not hold up the
    oldest. Left out: vLLM's own figures; it queues by itself what it has no room for. Each rollout enters it.
    """

    def __init__(self, use: Use, limit: int = 64):
        self.use, self.limit, self.running = use, limit, 0
        self._queue: deque[asyncio.Future[None]] = deque()
        self._looked = 0.0

    async def __aenter__(self) -> None:
        self.look()
        if self.running < self.limit and not self._queue:
            self.running += 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._queue.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # admitted in the same moment
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
        kv_load, load = self.use()
        if kv_load > KV_FULL or load > BUSY_LOAD:
            self.limit = max(LEAST, int(min(self.limit, self.running) * DOWN))
        elif kv_load < KV_ROOM and load < IDLE_LOAD and self._queue:
            self.limit += UP
        self._admit()

    def _leave(self) -> None:
        self.running -= 1
        self._admit()

    def _admit(self) -> None:
        while self._queue and self.running < self.limit:
            turn = self._queue.popleft()
            if not turn.done():
                turn.set_result(None)
                self.running += 1


class Scheduler:
    """Requests groups, samples them, gives them to steps. Their state is in the rollout buffer."""

    def __init__(self, config: Config, collector: Collector, buffer: RolloutBuffer, order: Shuffled | Selected):
        self.collector, self.buffer, self.order = collector, buffer, order
        self.engine: Engine = collector.engine
        self.settings, self.last = config.loop, config.train.steps
        self.num_groups = config.train.groups
        self.in_lockstep = config.engine.kind == "lockstep"
        self.window = 0 if self.in_lockstep else int(WINDOW * self.settings.max_staleness * self.num_groups)
        self.limit = ConcurrencyLimit(self._use)
        self._in_a_row = Counter[tuple[str, str]]()  # deaths since the last step
        self._losses: list[ModelLost] = list(self.engine.losses)  # that were counted
        self._worker_deaths = 0
        self._jobs: set[asyncio.Task[None]] = set()
        self._background: list[asyncio.Task[None]] = []
        self._is_paused = False
        self._problem: BaseException | None = None
        self._changed, self._changed_at, self._shown = asyncio.Event(), time.monotonic(), 0.0

    def _use(self) -> tuple[float, float]:
        return self.engine.kv_load, os.getloadavg()[0] / len(os.sched_getaffinity(0))

    def start(self) -> None:
        if self.in_lockstep:
            for group in self.buffer.waiting:
                if not self.has_batch(group.batch):
                    self.buffer.failed(group, "its batch was not over, and is sampled again", whole=True)
        self._fill()

    def has_batch(self, batch: int) -> bool:
        """Whether all of it was sampled before this process began."""
        same = [group for group in self.buffer.waiting if group.batch == batch]
        is_over = bool(same) and all(len(group.rollouts) == len(group.seats) for group in same)
        return is_over or batch in self.buffer.stored

    async def aclose(self) -> None:
        """Cancel what is running; it is kept up to its last turn."""
        jobs = [*self._jobs, *self._background]
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)
        self.buffer.close()

    def in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """Work that goes on as long as the run, and ends it if it fails."""
        job = asyncio.get_running_loop().create_task(work)
        self._background.append(job)
        job.add_done_callback(self._on_done)

    def _on_done(self, job: asyncio.Task[None]) -> None:
        if not job.cancelled() and (problem := job.exception()):
            self._problem = self._problem or problem
        self.on_change()

    def on_tasks(self, tasks: Iterable[Task]) -> None:
        """New tasks were made; there may be none."""
        assert isinstance(self.order, Selected)
        for task in tasks:
            self.order.add(task)

    async def take(self, step: int) -> list[list[Rollout]]:
        """The groups that a step is trained on; after a restart the same as before."""
        if step in self.buffer.stored:
            groups = self.buffer.stored.pop(step)
            for group in groups:
                self.buffer.already(group)
            return groups
        chosen: list[Group] = []

        def ready() -> bool:
            chosen[:] = choose(
                self.buffer.waiting,
                step=step,
                count=self.num_groups,
                window=self.window,
                max_staleness=self.settings.max_staleness,
            )
            return bool(chosen)

        await self.until(ready, lambda: f"the rollouts of step {step} ({self._state()})")
        self.buffer.given(step, chosen)
        self._in_a_row.clear()
        return [group.in_order() for group in chosen]

    async def publish(self, weights: Weights) -> None:
        """To the engine. In lockstep between two batches, else at once, in the middle of rollouts."""
        if self.in_lockstep:
            await self.until(lambda: not self._jobs, lambda: "the batch that is being sampled, to apply new weights")
        await self.apply(weights)
        self._fill()

    async def apply(self, weights: Weights) -> None:
        """In a thread: an engine may take minutes to start, and Ctrl-C has to work meanwhile."""
        if self.settings.max_staleness and self.engine.keeps_weights:  # the trainer changes its own meanwhile
            firsts = weights.firsts()
            copies = {name: weights.tensors[name].detach().clone() for name in set(firsts.values())}
            weights = replace(weights, tensors={name: copies[first] for name, first in firsts.items()})
        what = f"the engine to take the weights of {weights.version}"
        work = asyncio.to_thread(self.engine.apply, weights)
        await wait_with_heartbeat(work, Watchdog(lambda: what, math.inf, lambda: None))

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """No rollout of the run is sampled in here: the caller has the engine for itself."""
        self._is_paused = True
        try:
            await self.until(lambda: not self._jobs, lambda: "what is being sampled, to look at hints")
            yield
        finally:
            self._is_paused = False
            self._fill()

    def _fill(self) -> None:
        """Request what may be requested, begin what may begin."""
        newest = min(self.last, self.engine.version + self.settings.max_staleness + 1)
        while self.buffer.next_batch <= newest:
            tasks = self.order.tasks_of(self.buffer.next_batch, self.num_groups)
            self.buffer.request(self.buffer.next_batch, tasks)
        new = [group for group in self.buffer.waiting if not group.is_begun and group.batch <= newest]
        if not new or self._is_paused or self._problem:
            return
        if not self.in_lockstep:
            for group in new:
                self._begin([group])
        elif not self._jobs:
            self._begin([group for group in new if group.batch == new[0].batch])

    def _begin(self, groups: list[Group]) -> None:
        for group in groups:
            group.is_begun = True
        job = asyncio.get_running_loop().create_task(self._sample(groups))
        self._jobs.add(job)
        job.add_done_callback(self._on_sampled)

    def _on_sampled(self, job: asyncio.Task[None]) -> None:
        self._jobs.discard(job)
        self._on_done(job)
        if not job.cancelled():
            self._fill()

    async def _sample(self, groups: list[Group]) -> None:
        """All missing rollouts of these groups. If the model is lost they are retried: in lockstep all of them, else
        each from its last turn."""
        while True:
            for group in groups:
                self.buffer.running(group, self.engine.version)
            try:
                await self._sample_missing(groups)
                break
            except ModelLost as problem:
                self._on_loss(problem)
                for group in groups:
                    self.buffer.failed(group, str(problem), whole=self.in_lockstep)
        for group in groups:
            self.collector.settle(group.in_order())
            self.buffer.grouped(group)
            self._filter(group)

    async def _sample_missing(self, groups: Sequence[Group]) -> None:
        jobs: list[Job] = []
        by_id: dict[str, list[tuple[Group, int]]] = {}  # a batch may have a task twice
        for group in groups:
            for number, seat in enumerate(group.seats):
                if number not in group.rollouts:
                    by_id.setdefault(seat.id, []).append((group, number))
                    jobs.append(Job(group.task, seat.id, group.name, seat if self.buffer.keeps_turns else None))

        def on_rollout(rollout: Rollout, over: bool) -> None:
            if over:
                self.buffer.scored(*by_id[rollout.id].pop(), rollout)
                self._count_losses()
            self.on_change()

        await self.collector.rollouts(jobs, on_rollout, FREE if self.in_lockstep else self.limit)

    def _filter(self, group: Group) -> None:
        """Dynamic sampling: another task replaces a group whose rollouts all have the same reward, `loop.refill` times
        a batch. After that the group is trained on as it is, so sampling always ends."""
        replaced = self.buffer.refills[group.batch]
        if replaced >= self.settings.refill or has_gradient(group.in_order()):
            return
        (task,) = self.order.tasks_of(group.batch, 1)
        self.buffer.refill(group, self.num_groups + replaced, task)

    def _on_loss(self, problem: ModelLost) -> None:
        """Count a lost model once, however many rollouts report it."""
        if any(problem is one for one in self._losses):
            return
        self._losses.append(problem)
        self._count_death("model", problem, problem.server if isinstance(problem, ServerLost) else "")
        log.warning("%s; what is lost of what it was writing is asked for again", problem)

    def _count_losses(self) -> None:
        """Of the monitors' worker, and of vLLM servers that restarted by themselves: each restart costs time."""
        monitors = self.collector.monitors
        while monitors is not None and self._worker_deaths < monitors.worker.deaths:
            self._worker_deaths += 1
            self._count_death("worker", OffbookError("the process that judges rollouts was killed"))
        for loss in self.engine.losses:
            self._on_loss(loss)

    def _count_death(self, who: str, problem: OffbookError, server: str = "") -> None:
        """Each of several servers has a count of its own."""
        self.buffer.deaths[who] += 1
        self._in_a_row[who, server] += 1
        self.buffer.note("died", who=who, why=str(problem))
        if self._in_a_row[who, server] >= DEATHS:
            which = f"the third time between two steps (of {self.buffer.deaths[who]} in all)"
            ends = "so the run ends; the same command goes on from what is kept"
            raise type(problem)(f"{problem}; that was {which}, {ends}")

    def on_change(self) -> None:
        now = time.monotonic()
        if now - self._shown > SHOW_S:
            self._shown = now
            kv_load, load = self._use()
            began = [group.version for group in self.buffer.waiting if group.version is not None]
            self.buffer.show({
                **{f"slots {state}": count for state, count in self.buffer.counts.items()},
                "weights of step": self.engine.version,
                "oldest begun at step": min(began, default=self.engine.version),
                "engine full, share": round(kv_load, 3),
                "load a core": round(load, 2),
                "most at once": self.limit.limit,
                "restarts of the model": self.buffer.deaths["model"],
                "restarts of the worker": self.buffer.deaths["worker"],
                "restarts of the run": self.buffer.restarts,
            })  # fmt: skip
        self._changed_at = now
        self._changed.set()

    async def until(self, ready: Callable[[], bool], what: Callable[[], str]) -> None:
        """Wait with a printed reason and a timeout: it ends when nothing at all has happened for too long."""
        watchdog = Watchdog(what, self.settings.deadline_s, lambda: self._changed_at)
        while not ready():
            if self._problem:
                raise self._problem
            self._changed.clear()
            try:
                async with asyncio.timeout(processes.TELL_S):
                    await self._changed.wait()
            except TimeoutError:
                watchdog.look()

    def _state(self) -> str:
        over = sum(group.is_over for group in self.buffer.waiting)
        return f"{over} of {len(self.buffer.waiting)} groups are over, a step takes {self.num_groups}"

    def metrics(self, step: int, groups: Iterable[Iterable[Rollout]]) -> dict[str, Any]:
        """How old a step's tokens are, and whether long rollouts are passed over."""
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
            **{f"slots/{state}": self.buffer.counts[state] for state in WAITING},
            **self.buffer.lengths(),
            "deaths": self.buffer.deaths["model"],
            "deaths/worker": self.buffer.deaths["worker"],
            "restarts": self.buffer.restarts,
            "rollouts_at_once": self.limit.limit,
        }


def choose(waiting: Sequence[Group], step: int, count: int, window: int, max_staleness: int) -> list[Group]:
    """Which groups a step is given, the oldest first; none where it has to wait."""
    due = [group for group in waiting if group.version is not None and group.version + 1 + max_staleness <= step]
    if not all(group.is_over for group in due):
        return []
    over = [group for group in waiting[: count + window] if group.is_over]
    chosen = [*due, *(group for group in over if group not in due)][:count]
    return [group for group in waiting if group in chosen] if len(chosen) == count else []
