"""Waits with a watchdog, and child processes that end with their parent."""

import asyncio
import ctypes
import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from offbook.types import Hung, OffbookError

TELL_S = 60.0  # between two log lines about a wait
PARENT_DIED = 1  # prctl's PR_SET_PDEATHSIG
T = TypeVar("T")
log = logging.getLogger(__name__)


class Watchdog:
    """Deadline of a wait. Each look logs what is waited for, and raises once the `signs` of life have not changed for
    `deadline_s`: Hung if the wait is for a `thread`, which cannot be ended."""

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
                f"nothing has happened for {silent_s:.0f} s (loop.deadline_s), waiting for {self.what()}; the same "
                "command goes on from what is kept"
            )


async def wait_with_heartbeat(work: Awaitable[T], watchdog: Watchdog) -> T:
    """Await work that cannot be cancelled. A wait that ends early leaves the work running."""
    job = asyncio.ensure_future(work)
    job.add_done_callback(lambda job: job.cancelled() or job.exception())  # read, or asyncio warns
    while not job.done():
        await asyncio.wait({job}, timeout=TELL_S)
        if not job.done():
            watchdog.look()
    return job.result()


def end_with(parent: int, how: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel end this process when its `parent` ends. Call it in the new process."""
    ctypes.CDLL(None).prctl(PARENT_DIED, how)
    if os.getppid() != parent:  # it ended before
        os._exit(1)
