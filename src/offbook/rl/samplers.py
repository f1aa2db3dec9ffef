"""Rollouts on other machines, by Ray (`pip install offbook[ray]`): docs/scale.md.

A sampler is a Ray actor with an engine, sandboxes and grading of its own. Groups go to the one that has least to do,
so the rollouts of a task share what was read of it, and each stays where it began. Weights go out and rollouts come
back through Ray's object store. The trainer and the reconciler stay in the run's own process, with all that survives
it. One that dies is started again by Ray, is given the last weights, and what it was doing is asked for again.

Left out: turns are not kept, so a rollout of one that dies begins anew.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offbook.core.config import Config
from offbook.core.weights import Weights
from offbook.engine import Engine, Session
from offbook.types import Completion, ModelLost, OffbookError, Prompt, Rollout

if TYPE_CHECKING:
    from offbook.rl.collector import Job

START_S = 300.0  # to find a place, import, load a model and take weights


class NotReady(Exception):
    """Of a sampler that Ray has just started again: it has no weights."""


@dataclass(frozen=True, slots=True)
class Sampled:
    rollouts: list[Rollout]
    held: float  # share of its keys and values
    grades: int  # so far


class Sampler:
    """The actor."""

    def __init__(self, config: Config, model: Path):
        from offbook.rl.collector import Collector

        self.collector = Collector(config, model)
        self.sessions: dict[int, Any] = {}
        self.is_ready = False

    async def apply(self, weights: Weights) -> None:
        await asyncio.to_thread(self.collector.engine.apply, weights)
        self.is_ready = True

    async def rollouts(self, jobs: Sequence[Job]) -> Sampled:
        self._refuse_without_weights()
        found = await self.collector.rollouts(jobs)
        return Sampled(found, self.collector.engine.kv_load, int(self.collector.metrics()["grades"]))

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
class Place:
    """A sampler as its run sees it."""

    actor: Any
    busy: int = 0  # rollouts that it works on
    held: float = 0.0
    grades: int = 0
    lost: ModelLost | None = None  # how it last ended, the same for all that it struck
    starts: int = 1
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass(slots=True, eq=False)
class PlacedSession(Session):
    samplers: Samplers
    place: Place
    number: int

    async def complete(self, prompt: Prompt, max_tokens: int) -> Completion:
        return await self.samplers.answer(self.place, "write", self.number, prompt, max_tokens)

    def close(self) -> None:
        self.place.actor.close.remote(self.number)


class Samplers(Engine):
    """An engine that is in many places, and does whole rollouts there."""

    in_lockstep = False
    version = 0

    def __init__(self, config: Config, model: Path):
        try:
            import ray
        except ImportError:
            raise OffbookError("Ray is not installed: pip install 'offbook[ray]'") from None
        self.ray, settings = ray, config.loop.ray
        self.in_lockstep = config.engine.kind == "local" and config.engine.mode == "lockstep"
        self._numbers, self._weights = itertools.count(), None
        self._owns_ray = not ray.is_initialized()
        if self._owns_ray:
            quietly = {"log_to_driver": False, "configure_logging": False, "include_dashboard": False}
            try:
                ray.init(settings.address or None, **quietly)
            except Exception as error:  # of any kind: it gives its own processes 30 s, which a busy machine takes
                said = (str(error).strip() or type(error).__name__).splitlines()[0]
                mend = "start a cluster by `ray start --head`, and give --loop.ray.address auto"
                raise OffbookError(f"Ray cannot be reached ({said}); {mend}") from None
        actor = ray.remote(max_restarts=-1, num_cpus=settings.cpus, num_gpus=settings.gpus)(Sampler)
        self.places = [Place(actor.remote(config, model.resolve())) for _ in range(settings.samplers)]

    @property
    def kv_load(self) -> float:
        return max(place.held for place in self.places)

    @property
    def grades(self) -> int:
        return sum(place.grades for place in self.places)

    def apply(self, weights: Weights) -> None:
        """Everywhere; returns when they are in."""
        firsts = weights.firsts()
        own = {name: weights.tensors[name].detach().cpu() for name in set(firsts.values())}
        tensors = {name: own[first] for name, first in firsts.items()}
        self._weights = self.ray.put(replace(weights, tensors=tensors, changes=None))
        for place, given in [(place, place.actor.apply.remote(self._weights)) for place in self.places]:
            try:
                self._wait(given)
            except self.ray.exceptions.RayActorError as error:
                self._mended(place, place.starts, error)
        self.version = weights.version

    def _wait(self, given: Any) -> None:
        try:
            self.ray.get(given, timeout=START_S)
        except self.ray.exceptions.GetTimeoutError:
            wanted = "loop.ray.samplers times loop.ray.cpus and loop.ray.gpus"
            raise OffbookError(
                f"a sampler has not taken its weights within {START_S:.0f} s; see whether the cluster has {wanted}"
            ) from None

    def _mended(self, place: Place, start: int, error: Exception) -> ModelLost:
        """Once for all that were struck: it is given the last weights again."""
        with place.lock:
            if place.starts == start or place.lost is None:
                self._wait(place.actor.apply.options(max_task_retries=-1).remote(self._weights))
                reason = str(error).strip().splitlines()[0] if str(error) else "it was started again"
                place.starts, place.lost = place.starts + 1, ModelLost(f"a sampler was lost: {reason}")
            return place.lost

    def open(self, key: str) -> PlacedSession:
        number = next(self._numbers)
        place = self.places[number % len(self.places)]
        place.actor.open.remote(number, key)
        return PlacedSession(self, place, number)

    async def rollouts(
        self, jobs: Sequence[Job], watch: Callable[[Rollout, bool], None], room: AbstractAsyncContextManager[Any]
    ) -> list[Rollout]:
        """In the order of the jobs. In lockstep all that one sampler has are decoded together."""
        places: dict[str, Place] = {}
        shares: dict[Place | int, list[Job]] = {}
        for number, job in enumerate(jobs):
            place = places.setdefault(job.group, min(self.places, key=lambda one: one.busy))
            place.busy += 1
            shares.setdefault(place if self.in_lockstep else number, []).append(job)
        found: dict[str, list[Rollout]] = {}

        async def share(some: list[Job]) -> None:
            place = places[some[0].group]
            async with room:
                done = await self.answer(place, "rollouts", some)
            place.held, place.grades = done.held, done.grades
            for rollout in done.rollouts:
                found.setdefault(rollout.id, []).append(rollout)
                watch(rollout, True)

        try:
            async with asyncio.TaskGroup() as tasks:
                for some in shares.values():
                    tasks.create_task(share(some))
        finally:
            for job in jobs:
                places[job.group].busy -= 1
        return [found[job.id].pop(0) for job in jobs]

    async def answer(self, place: Place, method: str, *arguments: Any) -> Any:
        """What a sampler says. Where it has died, it is given its weights again, and whoever asked is told."""
        start, asked = place.starts, getattr(place.actor, method).remote(*arguments)
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
        raise await asyncio.to_thread(self._mended, place, start, lost)

    async def aclose(self) -> None:
        for place in self.places:
            self.ray.kill(place.actor)
        if self._owns_ray:
            self.ray.shutdown()
