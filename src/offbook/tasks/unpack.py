"""Archives from strangers, unpacked so that nothing lands outside, nothing is followed and nothing grows without bound.

tarfile's data filter has had holes where files are behind links. So links must be plain, and nothing is behind one.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable
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

    tree_mb: int = 256  # as it is downloaded, and unpacked
    files: int = 20_000
    seconds: float = 180.0  # for a download or a clone


@dataclass(slots=True)
class _Budget:
    """What an unpacking has taken in, and what it may."""

    what: str
    limits: SourceLimits
    num_bytes: int = 0
    num_files: int = 0
    links: set[PurePosixPath] = field(default_factory=set)

    def take(self, name: str, num_bytes: int, target: str | None = None) -> None:
        """One more file, or a link to `target`. Nothing is behind a link, so that each lies where its name says."""
        path = PurePosixPath(name)
        if _leads_out(name):
            raise BadArchive(f"{self.what} holds a file that would land outside of it: {name!r}")
        if not self.links.isdisjoint(path.parents):
            raise BadArchive(f"{self.what} holds a file behind a link: {name!r}")
        if target is not None and not stays_inside(path, target):
            raise BadArchive(f"{self.what} holds a link that leaves it: {name!r}")
        self.links |= {path} if target is not None else set()
        self.num_files += 1
        if self.num_files > self.limits.files:
            raise BadArchive(f"{self.what} holds more than {self.limits.files} files")
        self.grow(num_bytes)

    def grow(self, num_bytes: int, factor: int = 1) -> None:
        self.num_bytes += num_bytes
        if self.num_bytes > self.limits.tree_mb * MB * factor:
            raise BadArchive(f"{self.what} is larger than {self.limits.tree_mb} MB")

    def filter(self, member: tarfile.TarInfo, into: str) -> tarfile.TarInfo:
        self.take(member.name, member.size, member.linkname if member.issym() else None)
        if member.islnk():
            self.take(member.linkname, 0)
        if member.issym() and os.path.lexists(os.path.join(into, member.name)):
            raise BadArchive(f"{self.what} holds a link in the place of a file or folder: {member.name!r}")
        if member.isdev():
            raise BadArchive(f"{self.what} holds a device: {member.name!r}")
        return tarfile.data_filter(member, into)


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
    """Into an empty folder. Links in zip files are not made."""
    budget = _Budget(what, limits)
    try:
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as zipped:
                for each in zipped.infolist():
                    budget.take(each.filename, each.file_size)
                    if each.flag_bits & 0x1:
                        raise BadArchive(f"{what} is encrypted")
                    place = Path(zipped.extract(each, into))
                    place.chmod(0o755 if place.is_dir() or each.external_attr >> 16 & 0o100 else 0o644)
            return
        with open(archive, "rb") as file:
            start = file.read(6)
        opened = next((opener for magic, opener in STREAMS.items() if start.startswith(magic)), open)
        with (
            opened(archive, "rb") as stream,
            tarfile.open(fileobj=_Bounded(stream, _Budget(what, limits)), mode="r|") as tar,
        ):
            tar.extractall(into, filter=budget.filter)
    except BROKEN as error:
        raise BadArchive(f"{what} is no archive that can be unpacked ({error or type(error).__name__})") from None


class _Bounded(io.RawIOBase):
    """A stream that ends the unpacking once too much came out of it: headers can be as large as files."""

    def __init__(self, stream: IO[bytes], budget: _Budget):
        self._stream = stream
        self._budget = budget

    def read(self, size: int = MB) -> bytes:
        chunk = self._stream.read(size)
        self._budget.grow(len(chunk), TAR_OVERHEAD)
        return chunk


def copy_tree(source: Path, into: Path, what: str, limits: SourceLimits, skip: frozenset[str]) -> None:
    """Copy a folder under the same rules as an archive. Names in `skip` are left out at any depth."""
    budget = _Budget(what, limits)
    into.mkdir(parents=True, exist_ok=True)

    def kept(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        path = PurePosixPath(member.name)
        if path.suffix in (".pyc", ".pyo") or path.name in skip:
            return None
        if path.parts:
            budget.filter(member, str(into))  # raises what is not taken in
        return member

    with tempfile.TemporaryFile() as file:
        with tarfile.open(fileobj=file, mode="w") as archive:
            archive.add(source, "", filter=kept)
        if not budget.num_files:
            raise BadArchive(f"{what} is empty")
        file.seek(0)
        with tarfile.open(fileobj=file) as archive:
            archive.extractall(into, filter="data")
