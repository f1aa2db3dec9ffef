"""Waits across threads and processes: what is waited for is said, and nothing is waited for without end."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable
from typing import TypeVar

from offbook.types import Hung, OffbookError

TELL_S = 60.0  # between two words about what is waited for
T = TypeVar("T")
log = logging.getLogger(__name__)


class Patience:
    """Of whoever waits: each look says what for. Where the `signs` of life have been the same for `deadline_s`, the
    next look ends the wait, and says where the threads are whose names begin with `thread`."""

    def __init__(self, what: Callable[[], str], deadline_s: float, signs: Callable[[], object], thread: str = ""):
        self.what, self.deadline_s, self.signs, self.thread = what, deadline_s, signs, thread
        self.began = self.since = time.monotonic()
        self.seen = signs()

    def look(self) -> None:
        now = time.monotonic()
        if (seen := self.signs()) != self.seen:
            self.seen, self.since = seen, now
        log.warning("waiting for %s for %.0f s", self.what(), now - self.began)
        if (silent_s := now - self.since) >= self.deadline_s:
            raise (Hung if self.thread else OffbookError)(
                f"nothing has happened for {silent_s:.0f} s (loop.deadline_s), waiting for {self.what()}"
                f"{where(self.thread) if self.thread else ''}; the same command goes on from what is kept"
            )


async def told(work: Awaitable[T], patience: Patience) -> T:
    """Something that cannot be ended from outside. Whoever ends the wait leaves it to its end."""
    job = asyncio.ensure_future(work)
    job.add_done_callback(lambda job: job.cancelled() or job.exception())  # where nobody waits any more, it is read
    while not job.done():
        await asyncio.wait({job}, timeout=TELL_S)
        if not job.done():
            patience.look()
    return job.result()


def where(name: str) -> str:
    """The line of offbook that each of these threads is at."""
    lines = []
    for thread in threading.enumerate():
        frame = sys._current_frames().get(thread.ident or 0)
        if frame is None or not thread.name.startswith(name):
            continue
        own = [one for one in traceback.extract_stack(frame) if "/offbook/" in one.filename]
        lines += [f"{one.filename.rpartition('/offbook/')[2]}:{one.lineno}, {one.name}" for one in own[-1:]]
    return f", which is at {' and '.join(lines)}" if lines else ""
