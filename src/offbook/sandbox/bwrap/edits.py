"""Writing to the top layer of a stack from outside, and finding what differs from the tree at its bottom.

Only while no command runs: the kernel must not have the top layer mounted when it is changed.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from uuid import uuid4

from offbook.sandbox.box import PathRefused
from offbook.sandbox.bwrap.merged import (
    READ_BYTES,
    Folder,
    Merged,
    kind_of,
    make_folder,
    make_whiteout,
    read_regular,
)
from offbook.sandbox.folders import MAX_DEPTH, OPEN_FOLDER, open_beneath, walk

IGNORED = "__pycache__"


def write(view: Merged, path: str, content: bytes) -> None:
    """Appears whole, keeps the mode of a file that was there."""
    target = view.resolve(path)
    if target.kind not in (None, "file"):
        raise PathRefused(f"{path} is not a file")
    if not target.parts:
        raise PathRefused(f"{path or 'an empty path'} is not a file")
    *parents, name = target.parts
    with _top_folder(view, parents) as top:
        mode = 0o644
        if target.kind == "file":
            with view.folder(parents) as folder:
                entry = folder.find(name)
                assert entry is not None
                mode = stat.S_IMODE(os.stat(name, dir_fd=entry.descriptor, follow_symlinks=False).st_mode)
        partial = f".offbook-{uuid4().hex}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(partial, flags, 0o600, dir_fd=top), "wb") as file:
            try:
                file.write(content)
                os.fchmod(file.fileno(), mode)
                os.rename(partial, name, src_dir_fd=top, dst_dir_fd=top)
            except BaseException:
                os.unlink(partial, dir_fd=top)
                raise


def remove(view: Merged, path: str) -> None:
    """A file or a link itself, not what it leads to."""
    target = view.resolve(path, follow_last=False)
    if target.kind is None:
        raise FileNotFoundError(errno.ENOENT, "no such file", path)
    if target.kind == "folder":
        raise PathRefused(f"{path} is not a file")
    *parents, name = target.parts
    with _top_folder(view, parents) as top:
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=top)
        with view.folder(parents) as folder:
            if folder.find(name) is not None:  # a layer below has it too
                make_whiteout(name, top)


@contextmanager
def _top_folder(view: Merged, parts: Sequence[str]) -> Iterator[int]:
    """The folder in the top layer, open. Folders that are missing there are made, as the kernel would when it copies
    one up; one that was nowhere before must not let anything shine through from below."""
    top = os.open(view.roots[0], OPEN_FOLDER)
    try:
        for depth, name in enumerate(parts):
            with view.folder(parts[:depth]) as folder:
                _make_in_top(folder, top, name)
            inner = os.open(name, OPEN_FOLDER, dir_fd=top)
            os.close(top)
            top = inner
        yield top
    finally:
        os.close(top)


def _make_in_top(folder: Folder, top: int, name: str) -> None:
    if folder.find(name) is None:
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=top)  # the whiteout of what was there once
        make_folder(top, name, 0o755, opaque=True)
        return
    try:
        os.stat(name, dir_fd=top, follow_symlinks=False)
    except FileNotFoundError:
        with folder.child(name) as below:
            make_folder(top, name, stat.S_IMODE(os.fstat(below.descriptors[0]).st_mode), opaque=False)


def changes(view: Merged) -> dict[str, str | None]:
    """Looks at what the layers hold and never at the whole tree, so its cost goes with what was written."""
    base = view.roots[-1]
    above = Merged(view.roots[:-1])
    changed: dict[str, str | None] = {}
    pending: list[tuple[str, ...]] = [()]
    while pending:
        parts = pending.pop()
        if IGNORED in parts:
            continue
        try:
            with above.folder(parts) as folder:
                found, inner = _folder_changes(folder, base, parts)
        except (FileNotFoundError, NotADirectoryError):  # a command is running and took it away
            continue
        if len(parts) < MAX_DEPTH:
            pending += [(*parts, name) for name in inner]
        for path, content in found.items():
            if IGNORED not in path:
                changed[_name(path)] = content
    return dict(sorted(changed.items()))


def _folder_changes(
    folder: Folder, base: str, parts: tuple[str, ...]
) -> tuple[dict[tuple[str, ...], str | None], list[str]]:
    """What changed right in this folder, and the names of the folders in it that have to be looked at."""
    changed: dict[tuple[str, ...], str | None] = {}
    inner: list[str] = []
    entries = folder.entries(whiteouts=True)
    for name, entry in entries.items():
        place = (*parts, name)
        before = _base_file(base, place)
        if entry.kind == "folder":
            inner.append(name)
            if before is not None:
                changed[place] = None
            continue
        changed |= dict.fromkeys(_base_files(base, place))
        if entry.kind == "file":
            content = read_regular(name, entry.descriptor)
            if content == before:
                del changed[place]
            else:
                changed[place] = _text(content)
    if folder.cut:  # nothing of the tree is seen here any more
        for name in _base_names(base, parts):
            if name not in entries:
                changed |= dict.fromkeys(_base_files(base, (*parts, name)))
    return changed, inner


def _text(content: bytes) -> str:
    if len(content) <= READ_BYTES:
        return content.decode(errors="replace")
    return (
        content[:READ_BYTES].decode(errors="replace") + f"\n[more than {READ_BYTES >> 20} MB: the rest is left out]\n"
    )


def _base_file(base: str, parts: tuple[str, ...]) -> bytes | None:
    """None where the tree has no regular file there."""
    try:
        folder = open_beneath(base, parts[:-1])
    except OSError:
        return None
    try:
        return read_regular(parts[-1], folder)
    except (OSError, PathRefused):
        return None
    finally:
        os.close(folder)


def _base_files(base: str, parts: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Every regular file of the tree that is at this place or below it."""
    try:
        kind = kind_of(os.lstat(os.path.join(base, *parts)))
    except OSError:
        return
    if kind == "file":
        yield parts
    elif kind == "folder":
        for inner, entries in walk(os.path.join(base, *parts)):
            yield from ((*parts, *inner, entry.name) for entry in entries if entry.is_file(follow_symlinks=False))


def _base_names(base: str, parts: tuple[str, ...]) -> list[str]:
    try:
        folder = open_beneath(base, parts)
    except OSError:
        return []
    try:
        return os.listdir(folder)
    finally:
        os.close(folder)


def _name(parts: tuple[str, ...]) -> str:
    """A name that is not UTF-8 comes as lone surrogates, which no record of the rollout could be written with."""
    return os.fsencode("/".join(parts)).decode(errors="replace")
