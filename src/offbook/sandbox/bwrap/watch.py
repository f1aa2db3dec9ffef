"""The files that the processes of a command open, from the kernel (fanotify, a mark on every mount of the sandbox).

Opens outside the sandbox are not seen, and nothing inside can remove the marks. Only root may do this. Renaming,
reading names and sizes, and folders are not opens of files.
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
    """A descriptor to read events from, or -1: not allowed here, or too many at once."""
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
    """`pid` is process 1 of the sandbox, which must not start anything yet."""

    def __init__(self, pid: int):
        self._paths: dict[str, None] = {}
        self._num_cut = 0
        with open(f"/proc/{pid}/mountinfo") as file:
            escaped = [line.split()[4] for line in file]
        self._mounts = os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)  # keeps the mounts, and so the names
        self._group = _group()
        if self._group < 0:
            self._num_cut = 1
            return
        for point in escaped:
            path = re.sub(r"\\(\d{3})", lambda found: chr(int(found[1], 8)), point)
            if not path.startswith(NOT_FILES) and not _mark(self._group, f"/proc/{pid}/root{path}"):
                self._num_cut += 1
        asyncio.get_running_loop().add_reader(self._group, self._read)

    def _read(self) -> None:
        while self._group >= 0:
            try:
                data = os.read(self._group, READ_BYTES)
            except BlockingIOError:
                return
            except OSError:  # a file of this batch cannot be opened by us, or there is no descriptor left
                self._num_cut += 1
                continue
            offset = 0
            while offset < len(data):
                length, _, _, _, mask, descriptor, _ = EVENT.unpack_from(data, offset)
                offset += length
                self._num_cut += bool(mask & OVERFLOW)
                if descriptor < 0:
                    continue
                path = os.readlink(f"/proc/self/fd/{descriptor}")
                os.close(descriptor)
                if path in self._paths:
                    continue
                if len(self._paths) < MAX_PATHS:
                    self._paths[path] = None
                else:
                    self._num_cut += 1

    def stop(self) -> Opened:
        if self._group >= 0:
            self._read()
            asyncio.get_running_loop().remove_reader(self._group)
        return Opened(tuple(self._paths), self._num_cut)

    def close(self) -> None:
        """Release the sandbox's mounts, which may take a while if they are on a disk."""
        for descriptor in (self._group, self._mounts):
            if descriptor >= 0:
                with suppress(OSError):
                    os.close(descriptor)
        self._group = self._mounts = -1
