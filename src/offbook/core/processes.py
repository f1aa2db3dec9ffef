"""Processes that write, wait and end together: one writer per run folder, watched waits, children that end with their
parent."""

from __future__ import annotations

import asyncio
import ctypes
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from filelock import FileLock, Timeout

from offbook.core.runfolder import writing
from offbook.types import Hung, OffbookError

TELL_S = 60.0  # between two log lines about a wait
LOCK_S = 2.0  # for the children of a killed writer to end: they have its lock's file open
PARENT_DIED = 1  # prctl's PR_SET_PDEATHSIG
T = TypeVar("T")
log = logging.getLogger(__name__)


class Held(OffbookError):
    """Another process writes into the folder."""

    def __init__(self, folder: Path, whose: str):
        super().__init__(f"{folder} is being written by {whose}; wait until it is done, or give another --out")
        self.whose = whose


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Refuse other writers of a run folder meanwhile; readers are free. The kernel drops the lock of a process that
    ends, however it ends. The file .lock says who holds it."""
    path = folder / ".lock"
    is_new = not folder.exists()
    if path.is_symlink():
        raise OffbookError(f"{path} is a link, and a lock is never one; remove it")
    with writing(path):
        lock = FileLock(path, timeout=LOCK_S, is_singleton=False, thread_local=False)
        try:
            lock.acquire()
        except Timeout:
            raise Held(folder, _owner(path)) from None
    pid = os.getpid()
    try:
        path.write_text(json.dumps([pid, socket.gethostname(), time.strftime("%Y-%m-%d %H:%M:%S")]))
        yield
    finally:
        if os.getpid() == pid:  # a forked child shares the lock and must not release it
            path.unlink(missing_ok=True)
            lock.release()
        if is_new:
            with suppress(OSError):  # not empty by now
                folder.rmdir()


def _owner(path: Path) -> str:
    try:
        pid, host, since = json.loads(path.read_text())
    except (OSError, ValueError, TypeError):
        return "another process"
    return f"process {pid} on {host} since {since}"


class Watchdog:
    """Deadline of a wait. Each look logs what is waited for, and raises once the `signs` of life have not changed for
    `deadline_s`, with the lines at which the threads are whose names begin with `thread`."""

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


async def wait_with_heartbeat(work: Awaitable[T], watchdog: Watchdog) -> T:
    """Await work that cannot be cancelled. A wait that ends early leaves the work running."""
    job = asyncio.ensure_future(work)
    job.add_done_callback(lambda job: job.cancelled() or job.exception())  # read, or asyncio warns
    while not job.done():
        await asyncio.wait({job}, timeout=TELL_S)
        if not job.done():
            watchdog.look()
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


def end_with(parent: int, how: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel end this process when its `parent` ends. Call it in the new process."""
    ctypes.CDLL(None).prctl(PARENT_DIED, how)
    if os.getppid() != parent:  # it ended before
        os._exit(1)
