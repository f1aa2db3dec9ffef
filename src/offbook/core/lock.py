"""One writer a run folder: two that train into the same one would ruin it without a word."""

from __future__ import annotations

import _thread
import errno
import fcntl
import json
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import IO, Any

from offbook.core.runfolder import writing
from offbook.types import OffbookError

log = logging.getLogger(__name__)
BEAT_S, DEAD_S = 15.0, 60.0  # between a writer's signs of life, and how long without one it is taken for alive


class Held(OffbookError):
    """Somebody else writes there."""

    def __init__(self, folder: Path, whose: str):
        super().__init__(f"{folder} is being written by {whose}; wait until it is done, or give another --out")
        self.whose = whose


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """While this process writes into a run folder, others that would are refused. Readers are not held up.

    The owner is in the file .lock and touches it all the time, in a thread: a step may take hours. It counts no longer
    when its process is gone from this machine, or when it has not touched the file for a minute.
    """
    path = folder / ".lock"
    is_new = not folder.exists()
    with writing(path):
        mine = _take(path)
    over = threading.Event()
    threading.Thread(target=_beat, args=(path, mine, over), daemon=True).start()

    def release() -> None:
        over.set()
        if mine["pid"] == os.getpid() and _owner(path) == mine:
            path.unlink()

    def die(number: int, frame: FrameType | None) -> None:
        release()
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)

    is_ours = (
        threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    )
    if is_ours:
        signal.signal(signal.SIGTERM, die)
    try:
        yield
    finally:
        if is_ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        release()
        if is_new:
            with suppress(OSError):  # it holds something by now
                folder.rmdir()


def _take(path: Path) -> dict[str, Any]:
    mine = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
    with _alone_with(path) as file:
        owner, silent_s = _owner(path), time.time() - os.fstat(file.fileno()).st_mtime
        if owner and silent_s < DEAD_S and not (owner["host"] == mine["host"] and _is_gone(owner["pid"])):
            whose = f"process {owner['pid']} on {owner['host']} since {owner['since']}"
            raise Held(path.parent, whose)
        file.truncate(0)
        json.dump(mine, file)
    return mine


@contextmanager
def _alone_with(path: Path) -> Iterator[IO[str]]:
    """The file, for this process alone: of two that would take a lock over, one comes second and sees the first."""
    while True:
        with open(path, "a", opener=_not_through_links) as file:
            with suppress(OSError):  # some network file systems have no such locks
                fcntl.flock(file, fcntl.LOCK_EX)
            if not os.fstat(file.fileno()).st_nlink:
                continue  # released meanwhile, and so not what the next one looks at
            yield file
            return


def _not_through_links(name: str, flags: int) -> int:
    try:
        return os.open(name, flags | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise OffbookError(f"{name} is a link, and a lock is never one; remove it") from None


def _owner(path: Path) -> dict[str, Any] | None:
    """None where the file does not say who: whoever took it was killed before it had, or it is no lock of ours."""
    try:
        owner = json.loads(path.read_text())
    except (FileNotFoundError, ValueError, RecursionError):
        return None
    kinds = {"pid": int, "host": str, "since": str}
    is_whole = isinstance(owner, dict) and all(type(owner.get(key)) is kind for key, kind in kinds.items())
    return owner if is_whole else None


def _is_gone(pid: int) -> bool:
    if pid <= 0:  # a group of processes, or all
        return True
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):  # or a number that no process has
        return True
    except PermissionError:  # of another user
        return False
    return False


def _beat(path: Path, mine: dict[str, Any], over: threading.Event) -> None:
    while not over.wait(BEAT_S):
        try:
            if _owner(path) == mine:
                os.utime(path)
                continue
        except OSError:  # a file system that is away for a moment
            continue
        log.error("%s was moved, removed, or taken over while this process slept, which ends here", path.parent)
        _thread.interrupt_main()
        return
