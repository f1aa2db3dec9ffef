"""Rollouts on other machines, by Ray (`pip install offbook[ray]`): docs/scale.md.

A sampler is a Ray actor with an engine, sandboxes and grading of its own. Groups go to the sampler with the fewest
rollouts, so the rollouts of a task share its prefix cache. Weights go out and rollouts come back through Ray's object
store. Trainer, scheduler and rollout buffer stay in the run's own process. Ray restarts an actor that dies; it is given
the last weights, and its rollouts start over.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from offbook.core.config import Config
from offbook.core.weights import Weights
from offbook.engine import Engine, Session
from offbook.rl.collector import Collector, OnRollout, unwatched
from offbook.rl.scheduler import Job
from offbook.types import Completion, ModelLost, OffbookError, Prompt, Rollout

START_S = 300.0  # timeout to find a place, import, load a model and take weights


class NotReady(Exception):
    """Ray has just restarted the sampler: it has no weights and no sessions."""


class Sampler:
    """The actor."""

    def __init__(self, config: Config, model: Path):
        self.collector = Collector(config, model)
        self.sessions: dict[int, Session] = {}
        self.is_ready = False

    async def apply(self, weights: Weights) -> None:
        await asyncio.to_thread(self.collector.engine.apply, weights)
        self.is_ready = True

    async def open(self, number: int, key: str) -> None:
        if self.is_ready:
            self.sessions[number] = self.collector.engine.open(key)

    async def rollout(self, number: int, job: Job) -> tuple[Rollout, int]:
        """With the number of gradings so far."""
        session = self._session(number)
        del self.sessions[number]
        found = await self.collector.rollout(job, session=session)
        return found, self.collector.grades

    async def write(self, number: int, prompt: Prompt, max_tokens: int) -> Completion:
        return await self._session(number).complete(prompt, max_tokens)

    def _session(self, number: int) -> Session:
        if number not in self.sessions:
            raise NotReady
        return self.sessions[number]

    async def close(self, number: int) -> None:
        if session := self.sessions.pop(number, None):
            session.close()


@dataclass(eq=False)
class Replica:
    """A sampler as its run sees it."""

    actor: Any
    busy: int = 0  # its open sessions
    grades: int = 0
    lost: ModelLost | None = None  # the last loss, one object for all rollouts that report it
    starts: int = 1
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass(eq=False)
class ReplicaSession(Session):
    samplers: Samplers
    replica: Replica
    number: int

    async def complete(self, prompt: Prompt, max_tokens: int) -> Completion:
        answer: Completion = await self.samplers.call(self.replica, "write", self.number, prompt, max_tokens)
        return answer

    def close(self) -> None:
        self.replica.busy -= 1
        self.replica.actor.close.remote(self.number)


class Samplers(Engine):
    """An engine of many replicas, which sample whole rollouts."""

    version = 0

    def __init__(self, config: Config, model: Path):
        try:
            import ray
        except ImportError:
            raise OffbookError("Ray is not installed: pip install 'offbook[ray]'") from None
        self.ray = ray
        settings = config.loop.ray
        self._numbers = itertools.count()
        self._weights: Any = None
        self._owns_ray = not ray.is_initialized()
        if self._owns_ray:
            try:
                ray.init(
                    settings.address or None, log_to_driver=False, configure_logging=False, include_dashboard=False
                )
            except Exception as error:  # of any kind
                said = (str(error).strip() or type(error).__name__).splitlines()[0]
                way_out = "start a cluster by `ray start --head`, and give --loop.ray.address auto"
                raise OffbookError(f"Ray cannot be reached ({said}); {way_out}") from None
        per_engine = config.engine.vllm.gpus if config.engine.kind == "vllm" else 1
        gpus = per_engine if torch.cuda.is_available() else 0
        actor = ray.remote(max_restarts=-1, num_cpus=1, num_gpus=gpus)(Sampler)
        self.replicas = [Replica(actor.remote(config, model.resolve())) for _ in range(settings.samplers)]
        self._last = ("", self.replicas[0])  # the group that was opened last

    def apply(self, weights: Weights) -> None:
        """Returns when all replicas have them."""
        firsts = weights.firsts()
        own = {name: weights.tensors[name].detach().cpu() for name in set(firsts.values())}
        tensors = {name: own[first] for name, first in firsts.items()}
        self._weights = self.ray.put(replace(weights, tensors=tensors))
        asked = [one.actor.apply.remote(self._weights) for one in self.replicas]
        for replica, given in zip(self.replicas, asked, strict=True):
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
            problem = f"a sampler has not taken its weights within {START_S:.0f} s"
            raise OffbookError(f"{problem}; see whether the cluster has {wanted}") from None

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
        """At the replica with the fewest open sessions; the rollouts of a group, at the same one."""
        group = key.rpartition("/")[0]
        number = next(self._numbers)
        if group != self._last[0]:
            self._last = group, min(self.replicas, key=lambda one: one.busy)
        replica = self._last[1]
        replica.busy += 1
        replica.actor.open.remote(number, key)
        return ReplicaSession(self, replica, number)

    async def call(self, replica: Replica, method: str, *arguments: Any) -> Any:
        """A method of a sampler. If it died it is given its weights again, and ModelLost is raised."""
        start = replica.starts
        asked = getattr(replica.actor, method).remote(*arguments)
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

    async def rollout(self, job: Job, on_rollout: OnRollout = unwatched, session: Session | None = None) -> Rollout:
        """The sampler has opened the session already, so in lockstep its rollouts are decoded together."""
        session = session or self._sessions.pop(job)
        assert isinstance(session, ReplicaSession)
        replica = session.replica
        asked = Job(job.task, job.id, job.group)
        try:
            rollout, replica.grades = await self.engine.call(replica, "rollout", session.number, asked)
        finally:
            session.close()
        self.recall([rollout])
        return rollout
