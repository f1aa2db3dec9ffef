"""The files of a sandbox as seen from outside: a stack of folders read, written and compared without mounting it.

A command may be running meanwhile, so every step goes from an open folder to a name in it and never follows a link:
links are read and resolved here, inside the tree, where the file system would resolve them on the host. Only the top
folder is written to, and only while no command runs, because the kernel must not have it mounted then.
"""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from uuid import uuid4

from offbook.sandbox.folders import MAX_DEPTH, OPEN_FILE, OPEN_FOLDER, in_history, publish, recordable
from offbook.sandbox.sandbox import HISTORY, Changes, Names, PathRefused, Sandbox

READ_BYTES = 16 * 1024 * 1024
MAX_LINKS = 40  # as in the kernel
OPAQUE = "user.overlay.opaque"
IGNORED = "__pycache__"
Kind = Literal["file", "folder", "link", "other", "whiteout"]
KINDS: dict[int, Kind] = {stat.S_IFREG: "file", stat.S_IFDIR: "folder", stat.S_IFLNK: "link"}
Parts = tuple[str, ...]


@dataclass(frozen=True)
class Entry:
    kind: Kind
    root: str  # the folder of the stack that it is in
    descriptor: int  # its open parent folder
    status: os.stat_result


class Folder:
    """One folder in all layers that have it, open, by their roots, top first."""

    def __init__(self) -> None:
        self.opened: dict[str, int] = {}

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self.opened.values():
            os.close(descriptor)

    def find(self, name: str) -> Entry | None:
        for root, descriptor in self.opened.items():
            with suppress(FileNotFoundError):
                status = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
                kind = kind_of(status)
                return None if kind == "whiteout" else Entry(kind, root, descriptor, status)
        return None

    def child(self, name: str) -> Folder:
        """The folder of this name. A link or a file in its place is an OSError."""
        found = Folder()
        try:
            for root, descriptor in self.opened.items():
                try:
                    kind = kind_of(os.stat(name, dir_fd=descriptor, follow_symlinks=False))
                except FileNotFoundError:
                    continue
                if kind != "folder":
                    if not found.opened:
                        raise system_error(errno.ENOENT if kind == "whiteout" else errno.ENOTDIR, name)
                    break
                found.opened[root] = os.open(name, OPEN_FOLDER, dir_fd=descriptor)
                with suppress(OSError):  # no such attribute, or a file system without them
                    if os.getxattr(found.opened[root], OPAQUE) == b"y":
                        break
            if not found.opened:
                raise system_error(errno.ENOENT, name)
        except BaseException:
            found.__exit__()
            raise
        return found

    def entries(self) -> dict[str, Entry]:
        """By name, from the topmost layer that has the name, whiteouts included."""
        seen: dict[str, Entry] = {}
        for root, descriptor in self.opened.items():
            with os.scandir(descriptor) as scan:
                for item in scan:
                    if item.name not in seen:
                        with suppress(FileNotFoundError):  # removed since
                            status = item.stat(follow_symlinks=False)
                            seen[item.name] = Entry(kind_of(status), root, descriptor, status)
        return seen

    def read(self, name: str) -> bytes:
        """The bytes of a regular file; one byte more than READ_BYTES means that there are more."""
        entry = self.find(name)
        if entry is None:
            raise system_error(errno.ENOENT, name)
        # Not blocking: the file may have been replaced by a pipe.
        with open(os.open(name, OPEN_FILE, dir_fd=entry.descriptor), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise PathRefused(f"{name} is not a file")
            return file.read(READ_BYTES + 1)


class Merged:
    """`roots` are folders of the host, top first. `name` is the tree's path in the sandbox, for absolute links."""

    def __init__(self, roots: Sequence[str], name: str = "/app"):
        self.roots = roots
        self.name = name

    def folder(self, parts: Sequence[str]) -> Folder:
        folder = Folder()
        try:
            for root in self.roots:
                folder.opened[root] = os.open(root, OPEN_FOLDER)
        except BaseException:
            folder.__exit__()
            raise
        for name in parts:
            with folder:
                folder = folder.child(name)
        return folder

    def walk(self, start: Parts = ()) -> Iterator[tuple[Parts, Folder, dict[str, Entry]]]:
        """Every folder from `start` down, open, with its entries, whiteouts included.

        A folder that a running command removed or closed to us is skipped.
        """
        pending = [start]
        while pending:
            parts = pending.pop()
            with suppress(OSError), self.folder(parts) as folder:
                entries = folder.entries()
                yield parts, folder, entries
                if len(parts) < MAX_DEPTH:
                    pending += [(*parts, name) for name, entry in entries.items() if entry.kind == "folder"]

    def files(self, start: Parts = ()) -> Iterator[Parts]:
        for parts, _, entries in self.walk(start):
            yield from ((*parts, name) for name, entry in entries.items() if entry.kind == "file")

    def resolve(self, path: str, follow_last: bool = True) -> tuple[Parts, Kind | None]:
        """The end of a path: names from the tree's root without links, and its kind, None if nothing is there."""
        pending = self._split(path, path)[::-1]
        done: list[str] = []
        num_links = 0
        kind: Kind | None = "folder"
        while pending:
            name = pending.pop()
            if name == "..":
                if not done:
                    raise PathRefused(f"{path} is outside of the repository")
                done.pop()
                kind = "folder"
                continue
            with self.folder(done) as folder:
                entry = folder.find(name)
                kind = entry.kind if entry else None
                if entry and kind == "link" and (pending or follow_last):
                    num_links += 1
                    if num_links > MAX_LINKS:
                        raise PathRefused(f"{path} goes through too many links")
                    link = os.readlink(name, dir_fd=entry.descriptor)
                    if link.startswith("/"):
                        done.clear()
                    pending += self._split(link, path)[::-1]
                    kind = "folder"
                    continue
            done.append(name)
            if kind is None:
                if ".." in pending:
                    raise system_error(errno.ENOENT, path)
                return (*done, *reversed(pending)), None
            if kind != "folder" and pending:
                raise system_error(errno.ENOTDIR, path)
            if len(done) > MAX_DEPTH:
                raise PathRefused(f"{path} is nested too deeply")
        return tuple(done), kind

    def _split(self, path: str, given: str) -> list[str]:
        """The names in a path or a link, refused if it leads out of the tree as written."""
        try:
            os.fsencode(path)
        except UnicodeEncodeError:  # a lone surrogate
            raise PathRefused(f"{given!r} is not a path") from None
        if "\0" in path:
            raise PathRefused(f"{given!r} is not a path")
        if path.startswith("/"):
            if path != self.name and not path.startswith(self.name + "/"):
                raise PathRefused(f"{given} is outside of the repository")
            path = path[len(self.name) :]
        return [name for name in path.split("/") if name not in ("", ".")]

    def read(self, path: str) -> bytes:
        parts, kind = self.resolve(path)
        if kind is None:
            raise system_error(errno.ENOENT, path)
        if kind != "file":
            raise PathRefused(f"{path} is not a file")
        with refusing_races(path), self.folder(parts[:-1]) as folder:
            content = folder.read(parts[-1])
        if len(content) > READ_BYTES:
            raise PathRefused(f"{path} is larger than {READ_BYTES >> 20} MB")
        return content

    def names(self, path: str) -> Names:
        parts, kind = self.resolve(path)
        if kind is None:
            raise system_error(errno.ENOENT, path)
        with refusing_races(path), self.folder(parts) as folder:
            entries = folder.entries()
        kinds = {name: entry.kind for name, entry in entries.items() if entry.kind != "whiteout"}
        return sorted(name + "/" if kind == "folder" else name for name, kind in kinds.items())

    def copy_out(self, path: str, into: Path) -> None:
        """Copy the regular files below a folder of the tree to a new folder."""
        start, _ = self.resolve(path)
        into.mkdir(parents=True)
        for parts, _, entries in self.walk(start):
            inside = into.joinpath(*parts[len(start) :])
            inside.mkdir(exist_ok=True)
            for name, entry in entries.items():
                if entry.kind == "file":
                    descriptor = os.open(name, OPEN_FILE, dir_fd=entry.descriptor)
                    with open(descriptor, "rb") as source, open(inside / name, "xb") as target:
                        shutil.copyfileobj(source, target)

    def write(self, path: str, content: bytes) -> None:
        """Write a file atomically; a file that was there keeps its mode."""
        parts, kind = self.resolve(path)
        if kind not in (None, "file") or not parts:
            raise PathRefused(f"{path or 'an empty path'} is not a file")
        *parents, name = parts
        mode = 0o644
        if kind == "file":
            with self.folder(parents) as folder:
                entry = folder.find(name)
                assert entry is not None
                mode = stat.S_IMODE(entry.status.st_mode)
        with self._top_folder(parents) as top:
            partial = f".offbook-{uuid4().hex}"
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with open(os.open(partial, flags, 0o600, dir_fd=top), "wb") as file:
                try:
                    file.write(content)
                    os.fchmod(file.fileno(), mode)
                    os.rename(partial, name, src_dir_fd=top, dst_dir_fd=top)
                except BaseException:
                    os.unlink(partial, dir_fd=top)
                    raise

    def remove(self, path: str) -> None:
        """Remove a file or a link itself, not its target."""
        parts, kind = self.resolve(path, follow_last=False)
        if kind is None:
            raise system_error(errno.ENOENT, path)
        if kind == "folder":
            raise PathRefused(f"{path} is not a file")
        *parents, name = parts
        with self._top_folder(parents) as top:
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=top)
            with self.folder(parents) as folder:
                if folder.find(name) is not None:  # a layer below has it too
                    # Overlayfs marks a deleted name with a 0:0 character device, which needs no privileges.
                    os.mknod(name, stat.S_IFCHR, os.makedev(0, 0), dir_fd=top)

    @contextmanager
    def _top_folder(self, parts: Sequence[str]) -> Iterator[int]:
        """A folder of the top layer, open. Missing ones are made, as the kernel does when it copies a folder up."""
        top = os.open(self.roots[0], OPEN_FOLDER)
        try:
            for depth, name in enumerate(parts):
                with self.folder(parts[:depth]) as folder:
                    if folder.find(name) is None:
                        with suppress(FileNotFoundError):
                            os.unlink(name, dir_fd=top)  # the whiteout of an older file
                        make_folder(top, name, 0o755, opaque=len(folder.opened) > 1)
                    else:
                        with suppress(FileExistsError), folder.child(name) as below:
                            first = next(iter(below.opened.values()))
                            make_folder(top, name, stat.S_IMODE(os.fstat(first).st_mode), opaque=False)
                inner = os.open(name, OPEN_FOLDER, dir_fd=top)
                os.close(top)
                top = inner
            yield top
        finally:
            os.close(top)

    def changes(self, base: Merged) -> Changes:
        """What differs from `base`, without compiled Python. Files that both have from one folder are not read."""
        gone = {parts for parts in base.files() if IGNORED not in parts}
        changed = Changes()
        for parts, folder, entries in self.walk():
            for name, entry in entries.items() if IGNORED not in parts else ():
                place = (*parts, name)
                if entry.kind != "file" or name == IGNORED:
                    continue
                if entry.root in base.roots:
                    gone.discard(place)
                    continue
                # A running command may remove the file, and its owner may take away the right to read it.
                with suppress(OSError, PathRefused):
                    content = folder.read(name)
                    is_old = place in gone
                    gone.discard(place)
                    if is_old:
                        with base.folder(parts) as below:
                            if content == below.read(name):
                                continue
                    changed.put(recordable(place), content)
        changed.update(dict.fromkeys(map(recordable, gone)))
        return changed.settled()


@contextmanager
def refusing_races(path: str) -> Iterator[None]:
    """Refuse a path where the agent has just put a link or a pipe."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.ENXIO):
            raise PathRefused(f"{path} is not a file") from None
        raise system_error(error.errno or 0, path) from None


def system_error(code: int, path: str) -> OSError:
    """With the system's wording, which the pocket model was trained on."""
    return OSError(code, os.strerror(code), path)


def kind_of(status: os.stat_result) -> Kind:
    if stat.S_ISCHR(status.st_mode) and status.st_rdev == 0:
        return "whiteout"
    return KINDS.get(stat.S_IFMT(status.st_mode), "other")


def make_folder(within: int, name: str, mode: int, opaque: bool) -> None:
    os.mkdir(name, dir_fd=within)
    folder = os.open(name, OPEN_FOLDER, dir_fd=within)
    try:
        os.fchmod(folder, mode)
        if opaque:
            os.setxattr(folder, OPAQUE, b"y")
    finally:
        os.close(folder)


class FolderSandbox(Sandbox):
    """A sandbox whose files are in folders of this machine."""

    _base: str  # the tree that it was made from
    _history: str

    def _merged(self) -> Merged:
        """The files of the tree now."""
        raise NotImplementedError

    def _files(self, path: str) -> Merged:
        return Merged([self._history], HISTORY) if in_history(path) else self._merged()

    async def read(self, path: str) -> str:
        return self._files(path).read(path).decode(errors="replace")

    async def list(self, path: str) -> Names:
        return self._files(path).names(path)

    async def files(self) -> Names:
        return sorted("/".join(parts) for parts in self._merged().files())

    async def changes(self) -> Changes:
        return await asyncio.to_thread(self._merged().changes, Merged([self._base]))

    async def publish(self, name: str, text: str) -> None:
        publish(self._history, name, text)
