"""Which rollouts run when: those of later batches are sampled while the trainer works, and none is dropped for its age.

Batch b may begin when the weights of step b - 1 - max_staleness are in the engine; 0 is a synchronous run. A group is
due at the step whose weights are max_staleness newer than those that it began with. A step waits for the groups that
are due, and takes them and the oldest finished groups within a window. So a few young rollouts overtake a long one,
and none is trained too old.

In lockstep the rollouts of a batch are sampled together, by one version, one batch after the other, so with a staleness
of at most 1 everything follows from the seed. In continuous mode and with vLLM, new weights go in while rollouts run,
and each token has its version.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from offbook.core import processes
from offbook.core.config import Config
from offbook.core.processes import Watchdog, wait_with_heartbeat
from offbook.core.weights import Weights
from offbook.rl.collector import FREE, Collector
from offbook.rl.rollout_buffer import Group, Job, RolloutBuffer
from offbook.rl.tasks import Selected, Shuffled
from offbook.train.algorithms import has_gradient
from offbook.types import ModelLost, Rollout, ServerLost

WINDOW = 0.3  # of the groups that may be ahead of a step: how far behind the oldest one a step may choose
DEATHS = 3  # of the model, between two steps, end the run
SHOW_S = 1.0  # between two updates for the viewer
KV_ROOM, KV_FULL = 0.6, 0.9  # of the KV cache
IDLE_LOAD, BUSY_LOAD = 2.0, 6.0  # processes that want to run, per core
LEAST = 4
UP, DOWN = 4, 0.7
LOOK_S = 2.0
log = logging.getLogger(__name__)


class ConcurrencyLimit:
    """How many rollouts run at once: up by a few while engine and machine have room, down by a share when either is
    full, as in TCP. Each rollout enters it."""

    def __init__(self, use: Callable[[], tuple[float, float]], limit: int = 64):
        self.use = use  # share of the KV cache in use, load per core
        self.limit = limit
        self.running = 0
        self._free = asyncio.Condition()
        self._looked = 0.0

    async def __aenter__(self) -> None:
        async with self._free:
            self.look()
            await self._free.wait_for(lambda: self.running < self.limit)
            self.running += 1

    async def __aexit__(self, *_: object) -> None:
        async with self._free:
            self.running -= 1
            self.look()
            self._free.notify_all()

    def look(self) -> None:
        """At most every few seconds: a change of the limit has to show before the next."""
        now = time.monotonic()
        if now - self._looked < LOOK_S:
            return
        self._looked = now
        kv_load, load = self.use()
        if kv_load > KV_FULL or load > BUSY_LOAD:
            self.limit = max(LEAST, int(min(self.limit, self.running) * DOWN))
        elif kv_load < KV_ROOM and load < IDLE_LOAD and self.running >= self.limit:
            self.limit += UP


class Scheduler:
    """Requests groups, has them sampled, and gives them to steps. Their state is in the rollout buffer."""

    def __init__(self, config: Config, collector: Collector, buffer: RolloutBuffer, order: Shuffled | Selected):
        self.collector = collector
        self.engine = collector.engine
        self.buffer = buffer
        self.order = order
        self.settings = config.loop
        self.last_batch = config.train.steps
        self.num_groups = config.train.groups
        self.in_lockstep = config.engine.kind == "lockstep"
        self.limit = ConcurrencyLimit(self._use)
        self._in_a_row = Counter[str]()  # losses since the last step, by server
        self._losses: list[ModelLost] = list(self.engine.losses)  # that were counted
        self._sampling: set[asyncio.Task[None]] = set()
        self._background: list[asyncio.Task[None]] = []
        self._is_paused = False
        self._problem: BaseException | None = None
        self._changed = asyncio.Event()
        self._changed_at = time.monotonic()
        self._shown = 0.0

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
        return batch in self.buffer.stored or (bool(same) and all(group.is_scored for group in same))

    async def aclose(self) -> None:
        """Cancel what is running; it is kept up to its last turn."""
        jobs = [*self._sampling, *self._background]
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)

    def in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """Run work beside the steps; if it fails, the run ends."""
        job = asyncio.get_running_loop().create_task(work)
        self._background.append(job)
        job.add_done_callback(self._on_done)

    def _on_done(self, job: asyncio.Task[None]) -> None:
        if not job.cancelled() and (problem := job.exception()):
            self._problem = self._problem or problem
        self.on_change()

    async def take(self, step: int) -> list[list[Rollout]]:
        """The groups that a step is trained on; after a restart the same as before."""
        if step in self.buffer.stored:
            return self.buffer.stored.pop(step)
        staleness = self.settings.max_staleness
        window = 0 if self.in_lockstep else int(WINDOW * staleness * self.num_groups)
        chosen: list[Group] = []

        def ready() -> bool:
            chosen[:] = choose(self.buffer.waiting, step, self.num_groups, window, staleness)
            return bool(chosen)

        def waited_for() -> str:
            over = sum(group.is_over for group in self.buffer.waiting)
            state = f"{over} of {len(self.buffer.waiting)} groups are over, a step takes {self.num_groups}"
            return f"the rollouts of step {step} ({state})"

        await self.until(ready, waited_for)
        self.buffer.given(step, chosen)
        self._in_a_row.clear()
        return [group.rollouts for group in chosen]

    async def publish(self, weights: Weights) -> None:
        """New weights to the engine. In lockstep between two batches, else at once, in the middle of rollouts."""
        if self.in_lockstep:
            await self.until(lambda: not self._sampling, lambda: "the batch that is being sampled, for new weights")
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
        """Inside, no rollout of the run is sampled: the caller has the engine for itself."""
        self._is_paused = True
        try:
            await self.until(lambda: not self._sampling, lambda: "what is being sampled, to probe hints")
            yield
        finally:
            self._is_paused = False
            self._fill()

    def _fill(self) -> None:
        """Request what may be requested, begin what may begin."""
        newest = min(self.last_batch, self.engine.version + self.settings.max_staleness + 1)
        while self.buffer.next_batch <= newest:
            batch = self.buffer.next_batch
            self.buffer.request(batch, self.order.tasks_of(batch, self.num_groups))
        new = [group for group in self.buffer.waiting if not group.is_begun and group.batch <= newest]
        if not new or self._is_paused or self._problem:
            return
        if not self.in_lockstep:
            for group in new:
                self._begin([group])
        elif not self._sampling:
            self._begin([group for group in new if group.batch == new[0].batch])

    def _begin(self, groups: list[Group]) -> None:
        for group in groups:
            group.is_begun = True
        job = asyncio.get_running_loop().create_task(self._sample(groups))
        self._sampling.add(job)
        job.add_done_callback(self._on_sampled)

    def _on_sampled(self, job: asyncio.Task[None]) -> None:
        self._sampling.discard(job)
        self._on_done(job)
        if not job.cancelled():
            self._fill()

    async def _sample(self, groups: list[Group]) -> None:
        """All missing rollouts of these groups. If the model is lost they are retried: in lockstep all of them, else
        each from its last turn."""
        is_lost = True
        while is_lost:
            for group in groups:
                self.buffer.running(group, self.engine.version)
            jobs = [job for group in groups for job in group.jobs if job.rollout is None]
            try:
                await self.collector.side_by_side(jobs, self._rollout)
                is_lost = False
            except ModelLost as problem:
                self._on_loss(problem)
                for group in groups:
                    self.buffer.failed(group, str(problem), whole=self.in_lockstep)
        for group in groups:
            self.collector.compare_group(group.rollouts)
            group.is_over = True
            replaced = self.buffer.refills[group.batch]
            if replaced < self.settings.refill and not has_gradient(group.rollouts):  # dynamic sampling
                (task,) = self.order.tasks_of(group.batch, 1)
                self.buffer.refill(group, task)

    async def _rollout(self, job: Job) -> None:
        asked = time.monotonic()
        async with FREE if self.in_lockstep else self.limit:
            waited = time.monotonic() - asked
            rollout = await self.collector.rollout(job, lambda rollout, over: self.on_change())
        rollout.usage.slot_seconds = waited
        self.buffer.scored(job, rollout)
        for loss in self.engine.losses:  # servers that restarted by themselves
            self._on_loss(loss)
        self.on_change()

    def _on_loss(self, problem: ModelLost) -> None:
        """Count a lost model once, however many rollouts report it; each of several servers has its own count."""
        if any(problem is one for one in self._losses):
            return
        self._losses.append(problem)
        self.buffer.deaths += 1
        server = problem.server if isinstance(problem, ServerLost) else ""
        self._in_a_row[server] += 1
        self.buffer.note("died", why=str(problem))
        if self._in_a_row[server] >= DEATHS:
            which = f"the third time between two steps (of {self.buffer.deaths} in all)"
            ends = "so the run ends; the same command goes on from what is kept"
            raise type(problem)(f"{problem}; that was {which}, {ends}")
        log.warning("%s; what it was writing is asked for again", problem)

    def on_change(self) -> None:
        self._changed_at = time.monotonic()
        self._changed.set()
        if self._changed_at - self._shown < SHOW_S:
            return
        self._shown = self._changed_at
        kv_load, load = self._use()
        self.buffer.show({
            **{f"slots {state}": count for state, count in self.buffer.counts.items()},
            "weights of step": self.engine.version,
            "engine full, share": round(kv_load, 3),
            "load a core": round(load, 2),
            "most at once": self.limit.limit,
            "restarts of the model": self.buffer.deaths,
            "restarts of the run": self.buffer.restarts,
        })  # fmt: skip

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

    def metrics(self, step: int, groups: Iterable[Iterable[Rollout]]) -> dict[str, Any]:
        """How old a step's tokens are, in steps, and what became of rollouts so far."""
        segments = [segment for group in groups for rollout in group for segment in rollout.segments]
        ages = [step - 1 - version for segment in segments for version in segment.versions if version >= 0]
        counts = self.buffer.counts
        return {
            "staleness": sum(ages) / max(1, len(ages)),
            "staleness/max": max(ages, default=0),
            "staleness/too_old": sum(age > self.settings.max_staleness for age in ages),
            **{f"slots/{state}": counts[state] for state in ("requested", "running", "scored")},
            "deaths": self.buffer.deaths,
            "restarts": self.buffer.restarts,
            "rollouts_at_once": self.limit.limit,
        }


def choose(waiting: Sequence[Group], step: int, count: int, window: int, max_staleness: int) -> list[Group]:
    """The groups that a step is given, the oldest first; none where it has to wait."""
    due = [group for group in waiting if group.version is not None and group.version + 1 + max_staleness <= step]
    if not all(group.is_over for group in due):
        return []
    over = [group for group in waiting[: count + window] if group.is_over]
    chosen = [*due, *(group for group in over if group not in due)][:count]
    return [group for group in waiting if group in chosen] if len(chosen) == count else []
