"""Several vLLM servers as one engine: each has all of the model, and a rollout stays at the one that it was opened at.

Rollouts of a group begin alike, so they go to one server, which then reads their beginning once. A new group goes to
the server with the fewest open sessions. Where a group's server has FAR more of them than the least busy one, the rest
of the group goes there: a beginning is read once for FAR sessions at least, and no server stands still beside a group
of any size. Left out: moving a rollout that is open, whose keys and values would be read again.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from offbook.core.config import VllmConfig
from offbook.core.routers import Mixture
from offbook.core.weights import Gathered, Weights
from offbook.engine.base import Engine, Session
from offbook.engine.vllm.engine import VllmEngine, VllmSession, running_loop
from offbook.engine.vllm.gpus import gpus_of_copies
from offbook.engine.vllm.server import Place, Progress, Server
from offbook.types import Completion, Prompt, ServerLost

log = logging.getLogger(__name__)
FAR = 16  # open sessions


def servers_of(
    model: Path, settings: VllmConfig, context: int, logs: Path, progress: Progress, mixture: Mixture | None
) -> list[Server]:
    """All that a configuration names, or has started: each with settings, GPUs and a log of its own."""
    if urls := settings.given_urls:
        own = [settings.model_copy(update={"url": url}) for url in urls]
        places = [Place(f"vLLM at {url}") for url in urls]
    else:
        gpus, ports = gpus_of_copies(settings), set[int]()
        own = [settings] * len(gpus)
        places = [Place(f"vLLM {number}", each, ports) for number, each in enumerate(gpus)]
    if len(own) == 1:
        return [Server(model, own[0], context, logs / "vllm.log", progress, mixture)]
    files = [logs / f"vllm-{number}.log" for number in range(len(own))]
    each = zip(own, files, places, strict=True)
    return [Server(model, one, context, file, progress, mixture, place) for one, file, place in each]


@dataclass(slots=True)
class _Group:
    home: int  # the server that the next session of the group goes to
    sessions: int = 0  # that are open


class Balance:
    """Who is where."""

    def __init__(self, servers: int):
        self.open = [0] * servers
        self._groups: dict[str, _Group] = {}  # with open sessions

    def enter(self, name: str) -> int:
        """The server for one more session of this group."""
        least = self.open.index(min(self.open))
        group = self._groups.setdefault(name, _Group(least))
        if self.open[group.home] >= self.open[least] + FAR:
            group.home = least
        group.sessions += 1
        self.open[group.home] += 1
        return group.home

    def leave(self, name: str, server: int) -> None:
        self.open[server] -= 1
        self._groups[name].sessions -= 1
        if not self._groups[name].sessions:
            del self._groups[name]


@dataclass(slots=True, eq=False)
class CountedSession(Session):
    """One rollout's way to its server."""

    session: VllmSession
    leave: Callable[[], None]
    is_open: bool = True

    async def complete(self, prompt: Prompt, max_tokens: int) -> Completion:
        return await self.session.complete(prompt, max_tokens)

    async def alive(self) -> None:
        """As of the server that this is at; the others' losses are not its own."""
        await self.session.alive()

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            self.leave()


class SeveralEngines(Engine):
    """As VllmEngine is. Of its servers all are given the same weights; each is brought back by itself where it dies."""

    keeps_weights = True

    def __init__(self, engines: Sequence[VllmEngine]):
        self.engines = list(engines)
        self.balance = Balance(len(self.engines))

    def at(self, temperature: float) -> SeveralEngines:
        """The same model on the same servers, which count the sessions of both."""
        other = copy.copy(self)
        other.engines = [engine.at(temperature) for engine in self.engines]
        return other

    @property
    def version(self) -> int:
        """That all have: where one did not take new weights, the one before."""
        return min(engine.version for engine in self.engines)

    @property
    def positions(self) -> int:
        return min(engine.positions for engine in self.engines)

    @property
    def losses(self) -> list[ServerLost]:
        return [loss for engine in self.engines for loss in engine.losses]

    def open(self, key: str) -> CountedSession:
        """A rollout's key is its group's name and its number in it."""
        group = key.rpartition("/")[0] or key
        server = self.balance.enter(group)
        return CountedSession(self.engines[server].open(key), partial(self.balance.leave, group, server))

    def apply(self, weights: Weights) -> None:
        """To all at once. Where it fails at one the others have the new weights, tokens carry the version of the server
        that sampled them, and this raises when all are through: the next call brings all to the same ones."""
        caller = running_loop()
        if isinstance(weights.tensors, Gathered):
            weights = replace(weights, tensors=_one_at_a_time(weights.tensors))
        self._at_once(lambda engine: engine.apply(weights, caller))

    def pause(self) -> None:
        self._at_once(lambda engine: engine.pause())

    async def aclose(self) -> None:
        ends = await asyncio.gather(*(engine.aclose() for engine in self.engines), return_exceptions=True)
        _raise_first(ends)

    def _at_once(self, work: Callable[[VllmEngine], None]) -> None:
        """By threads that no end of the process waits for: a server may take minutes to come up."""
        ends: list[BaseException] = []

        def one(engine: VllmEngine) -> None:
            try:
                work(engine)
            except Exception as problem:
                ends.append(problem)

        threads = [threading.Thread(target=one, args=(engine,), daemon=True) for engine in self.engines]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        _raise_first(ends)


def _raise_first(ends: Sequence[BaseException | None]) -> None:
    """And tell of the others."""
    problems = [problem for problem in ends if problem is not None]
    for other in problems[1:]:
        log.warning("%s", other)
    if problems:
        raise problems[0]


def _one_at_a_time(tensors: Gathered) -> Gathered:
    """All ranks take part in putting a tensor together, so threads wait for one another."""
    lock = threading.Lock()

    def gather(name: str) -> Any:
        with lock:
            return tensors.gather(name)

    return replace(tensors, gather=gather)
