"""How many rollouts work at once: more while engine and machine have room, fewer when either is full.

Up by a few, down by a share, as TCP does it. Whoever waits longest is next, so the oldest batch is not held up by
younger ones. Left out: vLLM's own figures; it queues by itself what it has no room for.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType

from offbook.engine import Engine

ROOM, FULL = 0.6, 0.9  # of the keys and values that the engine may hold
IDLE_LOAD, BUSY_LOAD = 2.0, 6.0  # processes that want to run, a core
LEAST = 4
UP, DOWN = 4, 0.7
LOOK_S = 2.0

Use = Callable[[], tuple[float, float]]  # share of keys and values held, load a core


class Pace:
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
