"""Several vLLM servers as one engine: each has the whole model, and a rollout stays at the server it was opened at.

Rollouts of a group have a common prefix, so a group goes to one server, which reads the prefix once: the one with the
fewest open sessions. An open rollout is never moved.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from offbook.core.config import VllmConfig
from offbook.core.routers import Mixture
from offbook.core.weights import Weights
from offbook.engine.base import Engine
from offbook.engine.vllm.engine import VllmEngine, VllmSession, running_loop
from offbook.engine.vllm.gpus import gpus_of_copies
from offbook.engine.vllm.server import Progress, Server
from offbook.types import ServerLost

log = logging.getLogger(__name__)


def servers_of(
    model: Path, settings: VllmConfig, context: int, logs: Path, progress: Progress, mixture: Mixture | None
) -> list[Server]:
    """All servers of a configuration, named or to be started: each with settings, GPUs and a log of its own."""
    urls = settings.given_urls
    if urls:
        each = [(settings.model_copy(update={"url": url}), f"vLLM at {url}", "") for url in urls]
    else:
        each = [(settings, f"vLLM {number}", gpus) for number, gpus in enumerate(gpus_of_copies(settings))]
    if len(each) == 1:
        return [Server(model, each[0][0], context, logs / "vllm.log", progress, mixture)]
    return [
        Server(model, own, context, logs / f"vllm-{number}.log", progress, mixture, name, gpus)
        for number, (own, name, gpus) in enumerate(each)
    ]


class Balance:
    """Open sessions by server, and the server of each group that has some."""

    def __init__(self, servers: int):
        self.open = [0] * servers
        self._home: dict[str, int] = {}
        self._sessions = Counter[str]()

    def enter(self, group: str) -> int:
        """The server for one more session of this group; without a name it is a group of its own."""
        least = self.open.index(min(self.open))
        server = self._home.setdefault(group, least) if group else least
        self._sessions[group] += 1
        self.open[server] += 1
        return server

    def leave(self, group: str, server: int) -> None:
        self.open[server] -= 1
        self._sessions[group] -= 1
        if not self._sessions[group]:
            self._home.pop(group, None)


class SeveralEngines(Engine):
    """All servers get the same weights; each is restarted by itself if it dies."""

    keeps_weights = True

    def __init__(self, engines: Sequence[VllmEngine]):
        self.engines = list(engines)
        self.balance = Balance(len(self.engines))

    @property
    def version(self) -> int:
        """The version that all servers have."""
        return min(engine.version for engine in self.engines)

    @property
    def positions(self) -> int:
        return min(engine.positions for engine in self.engines)

    @property
    def losses(self) -> list[ServerLost]:
        return [loss for engine in self.engines for loss in engine.losses]

    def open(self, key: str) -> VllmSession:
        """A rollout's key is its group's name and its number in it."""
        group = key.rpartition("/")[0]
        server = self.balance.enter(group)
        session = self.engines[server].open(key)
        session.leave = partial(self.balance.leave, group, server)
        return session

    def apply(self, weights: Weights) -> None:
        """To all in parallel. If it fails at one, the others have the new weights, and the next call brings all to the
        same ones; tokens always carry the version of the server that sampled them."""
        caller = running_loop()
        self._in_parallel(lambda engine: engine.apply(weights, caller))

    def pause(self) -> None:
        self._in_parallel(lambda engine: engine.pause())

    async def aclose(self) -> None:
        ends = await asyncio.gather(*(engine.aclose() for engine in self.engines), return_exceptions=True)
        _raise_first([end for end in ends if end is not None])

    def _in_parallel(self, work: Callable[[VllmEngine], None]) -> None:
        """In daemon threads, which do not delay the end of the process: a server may take minutes to start."""
        problems: list[BaseException] = []

        def one(engine: VllmEngine) -> None:
            try:
                work(engine)
            except Exception as problem:
                problems.append(problem)

        threads = [threading.Thread(target=one, args=(engine,), daemon=True) for engine in self.engines]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        _raise_first(problems)


def _raise_first(problems: Sequence[BaseException]) -> None:
    """Raise the first error and log the others."""
    for other in problems[1:]:
        log.warning("%s", other)
    if problems:
        raise problems[0]
