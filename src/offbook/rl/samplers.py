"""Rollouts on other machines, by Ray (`pip install offbook[ray]`): docs/scale.md.

A sampler is a Ray actor with an engine, sandboxes and grading of its own. Groups go to the sampler with the fewest
rollouts, so the rollouts of a task share its prefix cache. Weights go out and rollouts come back through Ray's object
store. Trainer, scheduler and rollout buffer stay in the run's own process. Ray restarts an actor that dies; it is given
the last weights, and its rollouts are retried.

Left out: turns are not kept, so a rollout of a dead sampler starts over.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from offbook.core.config import Config
from offbook.core.weights import Weights
from offbook.engine import Engine, Session
from offbook.rl.collector import FREE, Collector, Job, OnRollout, first_offbook_error, unwatched
from offbook.types import Completion, ModelLost, OffbookError, Prompt, Rollout

START_S = 300.0  # timeout to find a place, import, load a model and take weights


class NotReady(Exception):
    """Ray has just restarted the sampler: it has no weights."""


class Sampler:
    """The actor."""

    def __init__(self, config: Config, model: Path):
        self.collector = Collector(config, model)
        self.sessions: dict[int, Session] = {}
        self.is_ready = False

    async def apply(self, weights: Weights) -> None:
        await asyncio.to_thread(self.collector.engine.apply, weights)
        self.is_ready = True

    async def rollouts(self, jobs: Sequence[Job]) -> tuple[list[Rollout], float, int]:
        """With the load of the KV cache and the gradings so far."""
        self._refuse_without_weights()
        found = await self.collector.rollouts(jobs)
        return found, self.collector.engine.kv_load, self.collector.grades

    async def open(self, number: int, key: str) -> None:
        self._refuse_without_weights()
        self.sessions[number] = self.collector.engine.open(key)

    async def write(self, number: int, prompt: Prompt, max_tokens: int) -> Completion:
        self._refuse_without_weights()
        return await self.sessions[number].complete(prompt, max_tokens)

    async def close(self, number: int) -> None:
        if session := self.sessions.pop(number, None):
            session.close()

    def _refuse_without_weights(self) -> None:
        if not self.is_ready:
            raise NotReady


@dataclass(slots=True, eq=False)
class Replica:
    """A sampler as its run sees it."""

    actor: Any
    busy: int = 0  # its rollouts
    kv_load: float = 0.0
    grades: int = 0
    lost: ModelLost | None = None  # the last loss, one object for all rollouts that report it
    starts: int = 1
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass(slots=True, eq=False)
class ReplicaSession(Session):
    samplers: Samplers
    replica: Replica
    number: int

    async def complete(self, prompt: Prompt, max_tokens: int) -> Completion:
        answer: Completion = await self.samplers.call(self.replica, "write", self.number, prompt, max_tokens)
        return answer

    def close(self) -> None:
        self.replica.actor.close.remote(self.number)


class Samplers(Engine):
    """An engine of many replicas, which sample whole rollouts."""

    in_lockstep = False
    version = 0

    def __init__(self, config: Config, model: Path):
        try:
            import ray
        except ImportError:
            raise OffbookError("Ray is not installed: pip install 'offbook[ray]'") from None
        self.ray, settings = ray, config.loop.ray
        self.in_lockstep = config.engine.kind == "lockstep"
        self._numbers, self._weights = itertools.count(), None
        self._owns_ray = not ray.is_initialized()
        if self._owns_ray:
            quietly = {"log_to_driver": False, "configure_logging": False, "include_dashboard": False}
            try:
                ray.init(settings.address or None, **quietly)
            except Exception as error:  # of any kind: Ray gives its own processes 30 s, which a busy machine takes
                said = (str(error).strip() or type(error).__name__).splitlines()[0]
                way_out = "start a cluster by `ray start --head`, and give --loop.ray.address auto"
                raise OffbookError(f"Ray cannot be reached ({said}); {way_out}") from None
        per_engine = config.engine.vllm.gpus if config.engine.kind == "vllm" else 1
        gpus = per_engine if torch.cuda.is_available() else 0
        actor = ray.remote(max_restarts=-1, num_cpus=1, num_gpus=gpus)(Sampler)
        self.replicas = [Replica(actor.remote(config, model.resolve())) for _ in range(settings.samplers)]

    @property
    def kv_load(self) -> float:
        return max(replica.kv_load for replica in self.replicas)

    def apply(self, weights: Weights) -> None:
        """Everywhere; returns when they are in."""
        firsts = weights.firsts()
        own = {name: weights.tensors[name].detach().cpu() for name in set(firsts.values())}
        tensors = {name: own[first] for name, first in firsts.items()}
        self._weights = self.ray.put(replace(weights, tensors=tensors))
        for replica, given in [(one, one.actor.apply.remote(self._weights)) for one in self.replicas]:
            try:
                self._wait(given)
            except self.ray.exceptions.RayActorError as error:
                self._restarted(replica, replica.starts, error)
        self.version = weights.version

    def _wait(self, given: Any) -> None:
        try:
            self.ray.get(given, timeout=START_S)
        except self.ray.exceptions.GetTimeoutError:
            wanted = "a processor, and the engine's GPUs, for each of loop.ray.samplers"
            raise OffbookError(
                f"a sampler has not taken its weights within {START_S:.0f} s; see whether the cluster has {wanted}"
            ) from None

    def _restarted(self, replica: Replica, start: int, error: Exception) -> ModelLost:
        """Give a restarted sampler the last weights, once for all calls that its death failed."""
        with replica.lock:
            if replica.starts == start or replica.lost is None:
                self._wait(replica.actor.apply.options(max_task_retries=-1).remote(self._weights))
                reason = str(error).strip().splitlines()[0] if str(error) else "it was started again"
                replica.starts += 1
                replica.lost = ModelLost(f"a sampler was lost: {reason}")
            return replica.lost

    def open(self, key: str) -> ReplicaSession:
        number = next(self._numbers)
        replica = self.replicas[number % len(self.replicas)]
        replica.actor.open.remote(number, key)
        return ReplicaSession(self, replica, number)

    async def call(self, replica: Replica, method: str, *arguments: Any) -> Any:
        """A method of a sampler. If it died it is given its weights again, and ModelLost is raised."""
        start, asked = replica.starts, getattr(replica.actor, method).remote(*arguments)
        try:
            return await asked
        except asyncio.CancelledError:
            self.ray.cancel(asked)
            raise
        except self.ray.exceptions.RayTaskError as error:
            if not isinstance(error.cause, NotReady):
                raise error.cause from None
            lost: Exception = error.cause
        except self.ray.exceptions.RayActorError as error:
            lost = error
        raise await asyncio.to_thread(self._restarted, replica, start, lost)

    async def aclose(self) -> None:
        for replica in self.replicas:
            self.ray.kill(replica.actor)
        if self._owns_ray:
            self.ray.shutdown()


class RayCollector(Collector):
    """A collector whose rollouts are sampled and scored by samplers."""

    @cached_property
    def engine(self) -> Samplers:
        assert self.model is not None
        return Samplers(self.config, self.model)

    @property
    def grades(self) -> int:
        return sum(replica.grades for replica in self.engine.replicas)

    async def rollouts(
        self, jobs: Sequence[Job], on_rollout: OnRollout = unwatched, limit: AbstractAsyncContextManager[Any] = FREE
    ) -> list[Rollout]:
        """In lockstep all rollouts of one sampler are decoded together."""
        of_group: dict[str, Replica] = {}
        batches: dict[Replica | int, list[Job]] = {}
        for number, job in enumerate(jobs):
            replica = of_group.setdefault(job.group, min(self.engine.replicas, key=lambda one: one.busy))
            replica.busy += 1
            batches.setdefault(replica if self.engine.in_lockstep else number, []).append(job)
        found: dict[str, list[Rollout]] = {}

        async def sample(some: list[Job]) -> None:
            replica = of_group[some[0].group]
            async with limit:
                rollouts, replica.kv_load, replica.grades = await self.engine.call(replica, "rollouts", some)
            for rollout in rollouts:
                found.setdefault(rollout.id, []).append(rollout)
                on_rollout(rollout, True)

        try:
            with first_offbook_error():
                async with asyncio.TaskGroup() as tasks:
                    for some in batches.values():
                        tasks.create_task(sample(some))
        finally:
            for job in jobs:
                of_group[job.group].busy -= 1
        rollouts = [found[job.id].pop(0) for job in jobs]
        self.recall(rollouts)
        return rollouts
