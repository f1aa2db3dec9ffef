"""What the processes of one start of a sandbox open, as the kernel tells it (fanotify, a mark on every mount of the
sandbox).

The marks are on the sandbox's own mounts, so nothing that happens outside is seen, and nothing inside can take them
off. The kernel gives this to root only. Renaming, looking at names and sizes, and folders are not opens of files.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import re
import struct
from contextlib import suppress
from functools import cache

from offbook.sandbox.access import MAX_PATHS, Opened

CLOSE_ON_EXEC = 1
NONBLOCK = 2
MARK_ADD = 0x01
MARK_MOUNT = 0x10
ON_OPEN = 0x20
OVERFLOW = 0x4000
HERE = -100  # AT_FDCWD
EVENT = struct.Struct("=IBBHQii")  # struct fanotify_event_metadata
READ_BYTES = 64 * 1024
NOT_FILES = ("/proc", "/dev")


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _group() -> int:
    """A descriptor that events are read from, or -1: not allowed here, or too many at once."""
    return int(_libc().fanotify_init(CLOSE_ON_EXEC | NONBLOCK, os.O_RDONLY | os.O_CLOEXEC))


def _mark(group: int, path: str) -> bool:
    mask = ctypes.c_uint64(ON_OPEN)
    return int(_libc().fanotify_mark(group, MARK_ADD | MARK_MOUNT, mask, HERE, os.fsencode(path))) == 0


@cache
def can_watch() -> bool:
    group = _group()
    if group < 0:
        return False
    try:
        return _mark(group, "/")
    finally:
        os.close(group)


class AccessWatch:
    """From before the first command of a launch until after its last process."""

    def __init__(self, pid: int):
        """`pid` is process 1 of the sandbox, which must not start anything yet."""
        self._paths: dict[str, None] = {}
        self._cut = 0
        with open(f"/proc/{pid}/mountinfo") as file:
            escaped = [line.split()[4] for line in file]
        points = [re.sub(r"\\(\d{3})", lambda found: chr(int(found[1], 8)), point) for point in escaped]
        self._mounts = os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)  # names last as long as the mounts
        self.group = _group()
        if self.group < 0:
            self._cut = 1
            return
        for point in points:
            if not point.startswith(NOT_FILES) and not _mark(self.group, f"/proc/{pid}/root{point}"):
                self._cut += 1
        asyncio.get_running_loop().add_reader(self.group, self.read)

    def read(self) -> None:
        """Take what has happened so far."""
        while self.group >= 0:
            try:
                data = os.read(self.group, READ_BYTES)
            except BlockingIOError:
                return
            except OSError:  # a file of this batch cannot be opened by us, or there is no descriptor left
                self._cut += 1
                continue
            offset = 0
            while offset < len(data):
                length, _, _, _, mask, descriptor, _ = EVENT.unpack_from(data, offset)
                offset += length
                if mask & OVERFLOW:
                    self._cut += 1
                if descriptor < 0:
                    continue
                path = os.readlink(f"/proc/self/fd/{descriptor}")
                os.close(descriptor)
                if path in self._paths:
                    continue
                if len(self._paths) < MAX_PATHS:
                    self._paths[path] = None
                else:
                    self._cut += 1

    def opened(self) -> Opened:
        self.read()
        return Opened(tuple(self._paths), self._cut)

    def stop(self) -> None:
        if self.group >= 0:
            self.read()
            asyncio.get_running_loop().remove_reader(self.group)

    def close(self) -> None:
        """Lets the sandbox's mounts go, which may take a while where they are on a disk."""
        for descriptor in (self.group, self._mounts):
            with suppress(OSError):
                os.close(descriptor)
        self.group = self._mounts = -1
