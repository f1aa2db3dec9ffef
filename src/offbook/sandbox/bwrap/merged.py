"""What a stack of layers looks like from inside the sandbox, read, written and compared from outside without mounting
anything. It is written only while no command runs: the kernel must not have the top layer mounted then.

The agent's commands may run while the harness reads. So every step goes from an open folder to a name in it and never
follows a link: links are read and resolved here, inside the tree, where the file system would resolve them on the host.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from uuid import uuid4

from offbook.sandbox.folders import MAX_DEPTH, OPEN_FILE, OPEN_FOLDER, recordable
from offbook.sandbox.sandbox import Changes, Names, PathRefused

READ_BYTES = 16 * 1024 * 1024
MAX_LINKS = 40  # as in the kernel
OPAQUE = "user.overlay.opaque"
IGNORED = "__pycache__"  # no change by anybody

Kind = Literal["file", "folder", "link", "other", "whiteout"]


@dataclass(frozen=True)
class Entry:
    kind: Kind
    descriptor: int  # the open folder that holds the name


@dataclass(frozen=True)
class Resolved:
    """Where a path leads: names from the tree's root with no link among them."""

    parts: tuple[str, ...]
    kind: Kind | None  # None: there is nothing


class Folder:
    """One folder in all layers that have it, open, top first. `cut`: something hides what lies further below."""

    def __init__(self, descriptors: list[int], cut: bool):
        self.descriptors = descriptors
        self.cut = cut

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)

    def find(self, name: str) -> Entry | None:
        for descriptor in self.descriptors:
            with suppress(FileNotFoundError):
                kind = kind_of(os.stat(name, dir_fd=descriptor, follow_symlinks=False))
                return None if kind == "whiteout" else Entry(kind, descriptor)
        return None

    def child(self, name: str) -> Folder:
        """The folder of this name. A link or a file in its place is an OSError."""
        found: list[int] = []
        try:
            for descriptor in self.descriptors:
                try:
                    kind = kind_of(os.stat(name, dir_fd=descriptor, follow_symlinks=False))
                except FileNotFoundError:
                    continue
                if kind != "folder":
                    if found:
                        return Folder(found, cut=True)
                    missing = kind == "whiteout"
                    raise OSError(errno.ENOENT if missing else errno.ENOTDIR, "not a folder", name)
                found.append(os.open(name, OPEN_FOLDER, dir_fd=descriptor))
                if is_opaque(found[-1]):
                    return Folder(found, cut=True)
            if not found:
                raise FileNotFoundError(errno.ENOENT, "no such folder", name)
        except BaseException:
            for descriptor in found:
                os.close(descriptor)
            raise
        return Folder(found, self.cut)

    def entries(self) -> dict[str, Entry]:
        """By name, as the topmost layer has it that has the name; whiteouts too."""
        seen: dict[str, Entry] = {}
        for descriptor in self.descriptors:
            with os.scandir(descriptor) as scan:
                for item in scan:
                    if item.name not in seen:
                        with suppress(FileNotFoundError):  # removed since
                            seen[item.name] = Entry(kind_of(item.stat(follow_symlinks=False)), descriptor)
        return seen

    def read(self, name: str) -> bytes:
        """The bytes of a regular file, at most one more than READ_BYTES."""
        entry = self.find(name)
        if entry is None:
            raise FileNotFoundError(errno.ENOENT, "no such file", name)
        return read_regular(name, entry.descriptor)


class Merged:
    """`roots` are folders of the host, top first. `name` is where the sandbox sees the tree: links to there lead
    inside."""

    def __init__(self, roots: Sequence[str], name: str = "/app"):
        self.roots = roots
        self.name = name

    def folder(self, parts: Sequence[str]) -> Folder:
        folder = Folder([], cut=False)
        try:
            folder.descriptors.extend(os.open(root, OPEN_FOLDER) for root in self.roots)
        except BaseException:
            folder.__exit__()
            raise
        for name in parts:
            with folder:
                folder = folder.child(name)
        return folder

    def walk(
        self, start: tuple[str, ...] = (), passing: tuple[type[OSError], ...] = (OSError,)
    ) -> Iterator[tuple[tuple[str, ...], Folder, dict[str, Entry]]]:
        """Every folder from `start` down, open, with its entries, whiteouts too. Those that one of `passing` keeps us
        from are passed over: a command may be running that took one away or closed it to us."""
        pending = [start]
        while pending:
            parts = pending.pop()
            with suppress(*passing), self.folder(parts) as folder:
                entries = folder.entries()
                yield parts, folder, entries
                if len(parts) < MAX_DEPTH:
                    pending += [(*parts, name) for name, entry in entries.items() if entry.kind == "folder"]

    def resolve(self, path: str, follow_last: bool = True) -> Resolved:
        pending = list(reversed(self.split(path)))
        done: list[str] = []
        num_links = 0
        while pending:
            name = pending.pop()
            if name == "..":
                if not done:
                    raise PathRefused(f"{path} is outside of the repository")
                done.pop()
                continue
            with self.folder(done) as folder:
                entry = folder.find(name)
                if entry is None:
                    if ".." in pending:
                        raise FileNotFoundError(errno.ENOENT, "no such folder", path)
                    return Resolved((*done, name, *reversed(pending)), None)
                if entry.kind == "link" and (pending or follow_last):
                    num_links += 1
                    if num_links > MAX_LINKS:
                        raise PathRefused(f"{path} goes through too many links")
                    link = os.readlink(name, dir_fd=entry.descriptor)
                    if link.startswith("/"):
                        done.clear()
                    pending += reversed(self.split(link, path))
                    continue
            done.append(name)
            if entry.kind != "folder":
                if pending:
                    raise NotADirectoryError(errno.ENOTDIR, "a file is no folder", path)
                return Resolved(tuple(done), entry.kind)
            if len(done) > MAX_DEPTH:
                raise PathRefused(f"{path} is nested too deeply")
        return Resolved(tuple(done), "folder")

    def split(self, path: str, given: str = "") -> list[str]:
        """The names in a path or a link, refused where it leads out of the tree as written."""
        given = given or path
        try:
            os.fsencode(path)
        except UnicodeEncodeError:  # a lone surrogate
            raise PathRefused(f"{given!r} is not a path") from None
        if "\0" in path:
            raise PathRefused(f"{given!r} is not a path")
        if path.startswith("/"):
            inside = path == self.name or path.startswith(self.name + "/")
            if not inside:
                raise PathRefused(f"{given} is outside of the repository")
            path = path[len(self.name) :]
        return [name for name in path.split("/") if name not in ("", ".")]

    def read(self, path: str) -> bytes:
        target = self.resolve(path)
        if target.kind is None:
            raise FileNotFoundError(errno.ENOENT, "no such file", path)
        if target.kind != "file":
            raise PathRefused(f"{path} is not a file")
        with refusing_races(path), self.folder(target.parts[:-1]) as folder:
            content = folder.read(target.parts[-1])
        if len(content) > READ_BYTES:
            raise PathRefused(f"{path} is larger than {READ_BYTES >> 20} MB")
        return content

    def names(self, path: str) -> Names:
        target = self.resolve(path)
        if target.kind is None:
            raise FileNotFoundError(errno.ENOENT, "no such folder", path)
        with refusing_races(path), self.folder(target.parts) as folder:
            kinds = {name: entry.kind for name, entry in folder.entries().items() if entry.kind != "whiteout"}
        inside = "/".join(target.parts)
        return sorted(name + "/" if self._leads_to_folder(f"{inside}/{name}".lstrip("/"), kind) else name
                      for name, kind in kinds.items())  # fmt: skip

    def files(self, start: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
        for parts, _, entries in self.walk(start):
            yield from ((*parts, name) for name, entry in entries.items() if entry.kind == "file")

    def copy_out(self, path: str, into: Path) -> None:
        start = self.resolve(path).parts
        into.mkdir(parents=True)
        for parts, _, entries in self.walk(start):
            inside = into.joinpath(*parts[len(start) :])
            inside.mkdir(exist_ok=True)
            for name, entry in entries.items():
                if entry.kind == "file":
                    descriptor = os.open(name, OPEN_FILE, dir_fd=entry.descriptor)
                    with open(descriptor, "rb") as source, open(inside / name, "xb") as target:
                        shutil.copyfileobj(source, target)

    def _leads_to_folder(self, path: str, kind: Kind) -> bool:
        if kind != "link":
            return kind == "folder"
        try:
            return self.resolve(path).kind == "folder"
        except (OSError, PathRefused):
            return False


@contextmanager
def refusing_races(path: str) -> Iterator[None]:
    """Where a link stands in a place that was none a moment ago, or a pipe, the agent is trying something."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.ENXIO):
            raise PathRefused(f"{path} is not a file") from None
        raise


def read_regular(name: str, folder: int) -> bytes:
    """At most one byte more than READ_BYTES, which tells that there is more."""
    descriptor = os.open(name, OPEN_FILE, dir_fd=folder)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise PathRefused(f"{name} is not a file")
        chunks = []
        wanted = READ_BYTES + 1
        while wanted and (chunk := os.read(descriptor, min(wanted, 1 << 20))):
            chunks.append(chunk)
            wanted -= len(chunk)
    finally:
        os.close(descriptor)
    return b"".join(chunks)


def kind_of(status: os.stat_result) -> Kind:
    if stat.S_ISREG(status.st_mode):
        return "file"
    if stat.S_ISDIR(status.st_mode):
        return "folder"
    if stat.S_ISLNK(status.st_mode):
        return "link"
    # How an overlay writes down that a name of the layers below is gone.
    return "whiteout" if stat.S_ISCHR(status.st_mode) and status.st_rdev == 0 else "other"


def is_opaque(folder: int) -> bool:
    try:
        return os.getxattr(folder, OPAQUE) == b"y"
    except OSError:  # no such attribute, or a file system without them
        return False


def make_folder(within: int, name: str, mode: int, opaque: bool) -> None:
    os.mkdir(name, dir_fd=within)
    folder = os.open(name, OPEN_FOLDER, dir_fd=within)
    try:
        os.fchmod(folder, mode)
        if opaque:
            os.setxattr(folder, OPAQUE, b"y")
    finally:
        os.close(folder)


def make_whiteout(name: str, within: int) -> None:
    """Overlayfs marks a deleted name with a 0:0 character device, which needs no privileges."""
    os.mknod(name, stat.S_IFCHR, os.makedev(0, 0), dir_fd=within)


def write_file(view: Merged, path: str, content: bytes) -> None:
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


def remove_file(view: Merged, path: str) -> None:
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


def changes_of(view: Merged) -> Changes:
    """Looks at what the layers hold and never at the whole tree, so its cost goes with what was written."""
    above = Merged(view.roots[:-1])
    base = Merged(view.roots[-1:])
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
    # A command is running and took it away, or its owner took away its own right to read it.
    with suppress(FileNotFoundError, PermissionError):
        content = read_regular(place[-1], entry.descriptor)
        with suppress(OSError, PathRefused):
            if content == below.read(place[-1]):
                changed.pop(recordable(place), None)
                return
        changed.put(recordable(place), content)
