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
OPEN_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe must not make us wait
MAX_DEPTH = 100  # folders nested deeper than this are not looked into
ENTRY_BYTES = 1024  # what a name costs at least, so that a million empty files count for something


def open_beneath(root: str, parts: Sequence[str]) -> int:
    folder = os.open(root, OPEN_FOLDER)
    for name in parts:
        try:
            inner = os.open(name, OPEN_FOLDER, dir_fd=folder)
        finally:
            os.close(folder)
        folder = inner
    return folder


def walk(root: str) -> Iterator[tuple[tuple[str, ...], list[os.DirEntry[str]]]]:
    """Every folder below `root` with its entries. One descriptor is open at a time, however deep it goes.

    A folder that is gone or closed to us by the time we come to it is passed over.
    """
    pending: list[tuple[str, ...]] = [()]
    while pending:
        parts = pending.pop()
        try:
            folder = open_beneath(root, parts)
        except OSError:
            continue
        try:
            entries = _scan(folder)
            yield parts, entries
        finally:
            os.close(folder)
        if len(parts) < MAX_DEPTH:
            pending += [(*parts, entry.name) for entry in entries if entry.is_dir(follow_symlinks=False)]


def regular_files(root: str) -> Iterator[tuple[str, ...]]:
    for parts, entries in walk(root):
        yield from ((*parts, entry.name) for entry in entries if entry.is_file(follow_symlinks=False))


def recordable(parts: Sequence[str]) -> str:
    """A name that is not UTF-8 comes as lone surrogates, which no record of the rollout could be written with."""
    return os.fsencode("/".join(parts)).decode(errors="replace")


def in_history(path: str) -> bool:
    return path == HISTORY or path.startswith(HISTORY + "/")


def refuse_history(path: str) -> None:
    if in_history(path):
        raise PathRefused(f"{HISTORY} can be read and not written")


def publish(folder: str, name: str, text: str) -> None:
    """A file that appears whole and is replaced, never changed."""
    if any(part in ("", ".", "..") for part in name.split("/")) or "\0" in name:
        raise PathRefused(f"{name!r} is not a name under {HISTORY}")
    target = Path(folder, name)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{uuid4().hex}")
    partial.write_bytes(text.encode(errors="replace"))
    partial.chmod(0o444)
    partial.rename(target)


def bytes_in(root: str) -> int:
    """The room that everything below `root` takes on the disk."""
    total = 0
    for _, entries in walk(root):
        for entry in entries:
            try:
                total += max(entry.stat(follow_symlinks=False).st_blocks * 512, ENTRY_BYTES)
            except OSError:  # removed since
                continue
    return total


def deleted_bytes(pids: Sequence[int], roots: tuple[str, ...]) -> int:
    """Files without a name that are still open take room which no walk through folders finds."""
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

    Each folder in it is emptied by moving the folders inside up to the top, so no path is long and nothing is nested.
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
