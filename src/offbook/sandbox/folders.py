"""Folders that the agent may be changing while we look: nothing here follows a symbolic link."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from uuid import uuid4

from offbook.sandbox.sandbox import HISTORY, PathRefused

OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
OPEN_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe must not block
MAX_DEPTH = 100  # folders nested deeper than this are not read
ENTRY_BYTES = 1024  # the least that a name counts as, so that a million empty files use up the disk limit


def walk(root: str) -> Iterator[tuple[tuple[str, ...], list[os.DirEntry[str]]]]:
    """Every folder below `root` with its entries, much faster than Merged: the disk limit is checked while files are
    made. One descriptor is open at a time, at any depth.

    A folder that is gone or closed to us by now is skipped.
    """
    pending: list[tuple[str, ...]] = [()]
    while pending:
        parts = pending.pop()
        try:
            folder = _open_beneath(root, parts)
        except OSError:
            continue
        try:
            entries = _scan(folder)
            yield parts, entries
        finally:
            os.close(folder)
        if len(parts) < MAX_DEPTH:
            pending += [(*parts, entry.name) for entry in entries if entry.is_dir(follow_symlinks=False)]


def _open_beneath(root: str, parts: Sequence[str]) -> int:
    folder = os.open(root, OPEN_FOLDER)
    for name in parts:
        try:
            inner = os.open(name, OPEN_FOLDER, dir_fd=folder)
        finally:
            os.close(folder)
        folder = inner
    return folder


def recordable(parts: Sequence[str]) -> str:
    """A path as UTF-8: other names come as lone surrogates, which no record of a rollout can be written with."""
    return os.fsencode("/".join(parts)).decode(errors="replace")


def in_history(path: str) -> bool:
    return path == HISTORY or path.startswith(HISTORY + "/")


def refuse_history(path: str) -> None:
    if in_history(path):
        raise PathRefused(f"{HISTORY} can be read and not written")


def publish(folder: str, name: str, text: str) -> None:
    """Write a file atomically. It is replaced, never changed."""
    if any(part in ("", ".", "..") for part in name.split("/")) or "\0" in name:
        raise PathRefused(f"{name!r} is not a name under {HISTORY}")
    target = Path(folder, name)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{uuid4().hex}")
    partial.write_bytes(text.encode(errors="replace"))
    partial.chmod(0o444)
    partial.rename(target)


def bytes_in(root: str) -> int:
    """The disk space of everything below `root`."""
    total = 0
    for _, entries in walk(root):
        for entry in entries:
            with suppress(OSError):  # removed since
                total += max(entry.stat(follow_symlinks=False).st_blocks * 512, ENTRY_BYTES)
    return total


def deleted_bytes(pids: Sequence[int], roots: tuple[str, ...]) -> int:
    """The disk space of deleted files that processes still have open, which no walk finds."""
    sizes: dict[tuple[int, int], int] = {}
    for pid in pids:
        with suppress(OSError):
            for number in os.listdir(f"/proc/{pid}/fd"):
                with suppress(OSError):
                    path = f"/proc/{pid}/fd/{number}"
                    name = os.readlink(path)
                    if name.endswith(" (deleted)") and name.startswith(roots):
                        status = os.stat(path)
                        sizes[status.st_dev, status.st_ino] = status.st_blocks * 512
    return sum(sizes.values())


def remove_tree(path: str) -> None:
    """Remove a folder whatever the agent did to it: rights taken away, names nested thousands deep.

    Each folder in it is emptied by moving its subfolders to the top, so no path is long and nothing is nested.
    """
    try:
        os.chmod(path, stat.S_IRWXU)
        top = os.open(path, OPEN_FOLDER)
    except FileNotFoundError:
        return
    try:
        numbers = count()
        prefix = uuid4().hex
        while entries := _scan(top):
            for entry in entries:
                if not entry.is_dir(follow_symlinks=False):
                    os.unlink(entry.name, dir_fd=top)
                    continue
                os.chmod(entry.name, stat.S_IRWXU, dir_fd=top)
                inner = os.open(entry.name, OPEN_FOLDER, dir_fd=top)
                try:
                    for child in _scan(inner):
                        if child.is_dir(follow_symlinks=False):
                            os.chmod(child.name, stat.S_IRWXU, dir_fd=inner)  # needed to move it
                            os.rename(child.name, f"{prefix}-{next(numbers)}", src_dir_fd=inner, dst_dir_fd=top)
                        else:
                            os.unlink(child.name, dir_fd=inner)
                finally:
                    os.close(inner)
                os.rmdir(entry.name, dir_fd=top)
    finally:
        os.close(top)
    os.rmdir(path)


def _scan(folder: int) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as scan:
        return list(scan)
