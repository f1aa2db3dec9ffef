"""Writing to the top layer of a stack from outside, and finding what differs from the tree at its bottom.

Only while no command runs: the kernel must not have the top layer mounted when it is changed.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from uuid import uuid4

from offbook.sandbox.bwrap.merged import Entry, Folder, Merged, make_folder, make_whiteout, read_regular
from offbook.sandbox.folders import OPEN_FOLDER, recordable
from offbook.sandbox.sandbox import Changes, PathRefused

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
        make_folder(top, name, 0o755, opaque=len(folder.descriptors) > 1)
        return
    try:
        os.stat(name, dir_fd=top, follow_symlinks=False)
    except FileNotFoundError:
        with folder.child(name) as below:
            make_folder(top, name, stat.S_IMODE(os.fstat(below.descriptors[0]).st_mode), opaque=False)


def changes(view: Merged) -> Changes:
    """Looks at what the layers hold and never at the whole tree, so its cost goes with what was written."""
    above, base = Merged(view.roots[:-1]), Merged(view.roots[-1:])
    changed = Changes()
    for parts, folder, entries in above.walk(passing=(FileNotFoundError, NotADirectoryError)):
        if IGNORED in parts:
            continue
        try:
            below = base.folder(parts)
        except OSError:  # the tree has no such folder
            below = Folder([], cut=False)
        with below:
            hidden = below.entries().keys() - entries.keys() if folder.cut else ()
            for name in (*entries, *hidden):
                if name != IGNORED:
                    _take_change(changed, (*parts, name), entries.get(name), below, base)
    return changed.settled()


def _take_change(changed: Changes, place: tuple[str, ...], entry: Entry | None, below: Folder, base: Merged) -> None:
    """Record what an entry of the layers, or one that they hide, means for the tree's own files at its place."""
    before = below.find(place[-1])
    gone: Iterable[tuple[str, ...]] = ()
    if before is not None and before.kind == "file":
        gone = [place]
    elif before is not None and before.kind == "folder" and (entry is None or entry.kind != "folder"):
        gone = [path for path in base.files(place) if IGNORED not in path]
    changed.update(dict.fromkeys(map(recordable, gone)))
    if entry is None or entry.kind != "file":
        return
    # A command is running and took it away, or it was closed to its own owner, and is nobody's to hand in.
    with suppress(FileNotFoundError, PermissionError):
        content = read_regular(place[-1], entry.descriptor)
        with suppress(OSError, PathRefused):
            if content == below.read(place[-1]):
                changed.pop(recordable(place), None)
                return
        changed.put(recordable(place), content)
