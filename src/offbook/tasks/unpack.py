"""Archives from strangers, unpacked so that nothing lands outside, nothing is followed and nothing grows without bound.

tarfile's own filters are not relied on: they have had holes, and zip files have none. Links are made after all files
are written, so that no file is written through one.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import IO, Any

from offbook.types import OffbookError

MB = 1024 * 1024
TAR_OVERHEAD = 4  # headers and padding: a tar of many small files is a few times larger than what they hold
STREAMS: dict[bytes, Callable[..., Any]] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\x00": lzma.open}
BROKEN = (tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, OSError, NotImplementedError)


class BadArchive(OffbookError):
    """What is not taken in, and why, in one sentence."""


def beneath(root: Path, name: str) -> Path:
    """Return `root / name` for a name that comes from a file: refused unless it is relative, plain and behind no link.

    Everything that writes, reads or deletes by such a name goes through here."""
    path = PurePosixPath(name)
    if not path.parts or _leads_out(name):
        raise BadArchive(f"{name!r} is no path inside {root}; nothing outside of it is touched")
    for depth in range(1, len(path.parts) + 1):
        if root.joinpath(*path.parts[:depth]).is_symlink():
            raise BadArchive(f"{name!r} leads through a link in {root}; links are not followed")
    return root / path


def _leads_out(name: str) -> bool:
    path = PurePosixPath(name)
    return path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name


@dataclass(frozen=True)
class SourceLimits:
    """How much of a source is taken before it counts as too large."""

    archive_mb: int = 64  # as it is downloaded
    tree_mb: int = 256  # unpacked
    files: int = 20_000
    seconds: float = 180.0  # for a download or a clone


@dataclass(slots=True)
class Unpacking:
    """A folder that is being filled, and what may still go into it."""

    what: str
    into: Path
    limits: SourceLimits
    num_bytes: int = 0
    num_files: int = 0
    links: dict[PurePosixPath, str] = field(default_factory=dict)

    def place(self, name: str) -> PurePosixPath:
        path = PurePosixPath(name)
        if _leads_out(name):
            raise BadArchive(f"{self.what} holds a file that would land outside of it: {name!r}")
        self.num_files += 1
        if self.num_files > self.limits.files:
            raise BadArchive(f"{self.what} holds more than {self.limits.files} files")
        return path

    def grow(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        if self.num_bytes > self.limits.tree_mb * MB:
            raise BadArchive(f"{self.what} is larger than {self.limits.tree_mb} MB")

    def folder(self, path: PurePosixPath) -> None:
        (self.into / path).mkdir(parents=True, exist_ok=True)

    def file(self, path: PurePosixPath, content: IO[bytes], executable: bool) -> None:
        target = self.into / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)  # an archive may hold a name twice; the last one counts
        with open(target, "xb") as file:
            while chunk := content.read(MB):
                self.grow(len(chunk))
                file.write(chunk)
        target.chmod(0o755 if executable else 0o644)

    def link(self, path: PurePosixPath, target: str) -> None:
        if not stays_inside(path, target):
            raise BadArchive(f"{self.what} holds a link that leaves it: {str(path)!r}")
        self.links[path] = target

    def make_links(self) -> None:
        for path, target in self.links.items():
            place = self.into / path
            if any(parent in self.links for parent in path.parents):
                raise BadArchive(f"{self.what} holds a file behind a link: {str(path)!r}")
            if os.path.lexists(place):
                raise BadArchive(f"{self.what} holds a link in the place of a file or folder: {str(path)!r}")
            place.parent.mkdir(parents=True, exist_ok=True)
            place.symlink_to(target)


def stays_inside(path: PurePosixPath, target: str) -> bool:
    """Whether a link can only lead to its own tree: up no further than its depth, and never up again after down.

    `a/../b` is refused too: if `a` is itself a link, it does not mean `b`. And so is what is not written plainly:
    `os.path.realpath` of a link `a` to `a//` is the root of the machine.
    """
    if not target or target != str(PurePosixPath(target)):
        return False
    parts = PurePosixPath(target).parts
    ups = 0
    while ups < len(parts) and parts[ups] == "..":
        ups += 1
    return not target.startswith("/") and ups < len(path.parts) and ".." not in parts[ups:]


def unpack(archive: Path, into: Path, what: str, limits: SourceLimits) -> None:
    """Into an empty folder."""
    unpacking = Unpacking(what, into, limits)
    try:
        if zipfile.is_zipfile(archive):
            _unpack_zip(archive, unpacking)
        else:
            with open(archive, "rb") as file:
                start = file.read(6)
            opened = next((opener for magic, opener in STREAMS.items() if start.startswith(magic)), open)
            with opened(archive, "rb") as stream:
                _unpack_tar(_Bounded(stream, unpacking), unpacking)
        unpacking.make_links()
    except BROKEN as error:
        raise BadArchive(f"{what} is no archive that can be unpacked ({error or type(error).__name__})") from None


class _Bounded(io.RawIOBase):
    """A stream that ends the unpacking once too much came out of it: headers can be as large as files."""

    def __init__(self, stream: IO[bytes], unpacking: Unpacking):
        self._stream = stream
        self._unpacking = unpacking
        self._left = unpacking.limits.tree_mb * MB * TAR_OVERHEAD

    def read(self, size: int = MB) -> bytes:
        chunk = self._stream.read(size)
        self._left -= len(chunk)
        if self._left < 0:
            raise BadArchive(f"{self._unpacking.what} is larger than {self._unpacking.limits.tree_mb} MB")
        return chunk


def _unpack_tar(stream: _Bounded, unpacking: Unpacking) -> None:
    with tarfile.open(fileobj=stream, mode="r|") as archive:
        for member in archive:
            path = unpacking.place(member.name)
            if member.isdir():
                unpacking.folder(path)
            elif member.issym():
                unpacking.link(path, member.linkname)
            elif member.islnk():  # relative to the archive, and what it names came before
                original = unpacking.into / unpacking.place(member.linkname)
                with open(original, "rb") as content:
                    unpacking.file(path, content, os.access(original, os.X_OK))
            elif member.isfile():
                if member.size > unpacking.limits.tree_mb * MB:
                    unpacking.grow(member.size)
                content_of = archive.extractfile(member)
                assert content_of is not None
                unpacking.file(path, content_of, bool(member.mode & 0o100))
            else:
                raise BadArchive(f"{unpacking.what} holds a device: {member.name!r}")


def _unpack_zip(archive_path: Path, unpacking: Unpacking) -> None:
    with zipfile.ZipFile(archive_path) as archive:
        for member in archive.infolist():
            path = unpacking.place(member.filename)
            mode = member.external_attr >> 16
            if member.flag_bits & 0x1:
                raise BadArchive(f"{unpacking.what} is encrypted")
            if member.is_dir():
                unpacking.folder(path)
                continue
            with archive.open(member) as content:
                if stat.S_ISLNK(mode):
                    unpacking.link(path, content.read(4096).decode(errors="replace"))
                elif mode and stat.S_IFMT(mode) not in (0, stat.S_IFREG):
                    raise BadArchive(f"{unpacking.what} holds a device: {member.filename!r}")
                else:
                    unpacking.file(path, content, bool(mode & 0o100))


def copy_tree(source: Path, into: Path, what: str, limits: SourceLimits, skip: frozenset[str]) -> None:
    """Copy a folder under the same rules as an archive. Names in `skip` are left out at any depth."""
    unpacking = Unpacking(what, into, limits)
    for relative, entry in _walk(source, PurePosixPath(), skip):
        path = unpacking.place(str(relative))
        if entry.is_symlink():
            unpacking.link(path, os.readlink(entry.path))
        elif entry.is_dir():
            unpacking.folder(path)
        elif entry.is_file():
            with open(entry.path, "rb") as content:
                unpacking.file(path, content, os.access(entry.path, os.X_OK))
        else:
            raise BadArchive(f"{what} holds a device: {str(relative)!r}")
    unpacking.make_links()


def _walk(
    folder: Path, relative: PurePosixPath, skip: frozenset[str]
) -> Iterator[tuple[PurePosixPath, os.DirEntry[str]]]:
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            if entry.name in skip or entry.name.endswith((".pyc", ".pyo")):
                continue
            yield relative / entry.name, entry
            if entry.is_dir(follow_symlinks=False):
                yield from _walk(Path(entry.path), relative / entry.name, skip)
