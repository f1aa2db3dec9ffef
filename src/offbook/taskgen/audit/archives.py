"""What is packed in a file: archives, compressed streams, databases, base64. Nothing that is read is ever executed."""

from __future__ import annotations

import base64
import bz2
import gzip
import io
import lzma
import re
import sqlite3
import struct
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

DEPTH = 3  # archives within archives
MOST_BYTES = 64 << 20  # of one file or member
MOST_UNPACKED = 512 << 20  # of all that comes out of one file
MOST_MEMBERS = 50_000
# What the readers of archives raise on broken ones.
BROKEN = (
    *(zipfile.BadZipFile, tarfile.TarError, lzma.LZMAError, zlib.error, sqlite3.Error, struct.error),
    *(EOFError, OSError, RuntimeError, ValueError, OverflowError),
)

STREAMS: dict[bytes, Callable[[IO[bytes]], Any]] = {  # something to read from
    b"\x1f\x8b": lambda stream: gzip.GzipFile(fileobj=stream),
    b"BZh": bz2.BZ2File,
    b"\xfd7zXZ\x00": lzma.LZMAFile,
}
UNKNOWN = {
    b"\x28\xb5\x2f\xfd": "zstandard, which this Python cannot unpack",
    b"PACK\x00\x00\x00": "a git pack outside of a repository",
    b"7z\xbc\xaf\x27\x1c": "7-Zip, which this Python cannot unpack",
    b"Rar!\x1a\x07": "RAR, which this Python cannot unpack",
}
_PRINTABLE = re.compile(rb"[\t\n\r\x20-\x7e]{6,}")
_BASE64_LINE = re.compile(rb"[A-Za-z0-9+/_-]{60}")
_BASE64 = re.compile(rb"(?:[A-Za-z0-9+/_-]{32,}(?:\\+[nr]|[\s\"',]){1,8})*[A-Za-z0-9+/_-]{16,}={0,2}")


@dataclass(frozen=True, slots=True)
class Leaf:
    """Something with content. Archive members are named outer.zip!inner/path."""

    name: str
    data: bytes

    @property
    def text(self) -> str:
        """What a reader sees: of binary data the printable runs, as `strings` prints them."""
        if self.data[:2] in (b"\xff\xfe", b"\xfe\xff"):
            return self.data.decode("utf-16", errors="replace")
        if self.is_binary:
            return b"\n".join(_PRINTABLE.findall(self.data)).decode("ascii")
        try:
            return self.data.decode("utf-8")
        except UnicodeDecodeError:
            return self.data.decode("latin-1")

    @property
    def is_binary(self) -> bool:
        return b"\x00" in self.data or _control_share(self.data[:4096]) > 0.1


def _control_share(head: bytes) -> float:
    rest = head.translate(None, b"\t\n\r\x0c\x1b" + bytes(range(32, 256)))
    return len(rest) / max(1, len(head))


@dataclass(slots=True)
class Budget:
    unread: Callable[[str, str], None]
    unpacked: int = 0
    members: int = 0
    spent: bool = False

    def take(self, stream: IO[bytes], name: str) -> bytes | None:
        """The stream's content, or None if it is more than may be held: a small archive can unpack to terabytes."""
        self.members += 1
        left = min(MOST_BYTES, MOST_UNPACKED - self.unpacked)
        if self.members > MOST_MEMBERS or left <= 0:
            self.spent = True
            self.unread(name, "the archive holds more than is unpacked")
            return None
        data = stream.read(left + 1)
        if len(data) > left:
            self.unpacked += left
            self.unread(name, f"unpacks to more than {left} bytes")
            return None
        self.unpacked += len(data)
        return data


def unpacked(leaf: Leaf, depth: int, budget: Budget) -> Iterator[Leaf]:
    yield leaf
    for opener in (_zip_members, _tar_members, _stream_content, _sqlite_rows, _base64_content):
        try:
            for inner in opener(leaf, budget, depth):
                yield from unpacked(inner, depth - 1, budget)
        except BROKEN as error:
            budget.unread(leaf.name, f"{type(error).__name__}: {error}")


def _zip_members(leaf: Leaf, budget: Budget, depth: int) -> Iterator[Leaf]:
    """Also a zip with something before it: a self-extracting one, the body in pip's cache of downloads."""
    if b"PK\x03\x04" not in leaf.data or b"PK\x05\x06" not in leaf.data[-(1 << 16) - 22 :]:
        return
    if not leaf.data.startswith(b"PK") and not zipfile.is_zipfile(io.BytesIO(leaf.data)):
        return
    if depth == 0:
        budget.unread(leaf.name, f"packed more than {DEPTH} deep")
        return
    with zipfile.ZipFile(io.BytesIO(leaf.data)) as archive:
        for member in archive.infolist():
            if member.is_dir():
                continue
            name = f"{leaf.name}!{member.filename}"
            if member.flag_bits & 1:
                budget.unread(name, "encrypted")
                continue
            with archive.open(member) as stream:
                data = budget.take(stream, name)
            if data is not None:
                yield Leaf(name, data)
            if budget.spent:
                return


def _tar_members(leaf: Leaf, budget: Budget, depth: int) -> Iterator[Leaf]:
    if leaf.data[257:262] != b"ustar":
        return
    if depth == 0:
        budget.unread(leaf.name, f"packed more than {DEPTH} deep")
        return
    with tarfile.open(fileobj=io.BytesIO(leaf.data), mode="r:") as archive:
        for member in archive:
            stream = archive.extractfile(member) if member.isfile() else None
            data = budget.take(stream, f"{leaf.name}!{member.name}") if stream else None
            if data is not None:
                yield Leaf(f"{leaf.name}!{member.name}", data)
            if budget.spent:
                return


def _stream_content(leaf: Leaf, budget: Budget, depth: int) -> Iterator[Leaf]:
    """One compressed stream. zlib is what git keeps its loose objects in."""
    name = f"{leaf.name}!content"
    opener = next((opener for magic, opener in STREAMS.items() if leaf.data.startswith(magic)), None)
    if opener is not None:
        content = opener(io.BytesIO(leaf.data))
    elif reason := next((why for magic, why in UNKNOWN.items() if leaf.data.startswith(magic)), None):
        budget.unread(leaf.name, reason)
        return
    elif leaf.data[:2] in (b"\x78\x01", b"\x78\x9c", b"\x78\xda", b"\x78\x5e") and leaf.is_binary:
        try:
            content = io.BytesIO(zlib.decompressobj().decompress(leaf.data, MOST_BYTES + 1))
        except zlib.error:
            return  # two bytes that look like zlib's prove nothing
    else:
        return
    if depth == 0:
        budget.unread(leaf.name, f"packed more than {DEPTH} deep")
        return
    with content:
        data = budget.take(content, name)
    if data is not None:
        yield Leaf(name, data)


def _sqlite_rows(leaf: Leaf, budget: Budget, depth: int) -> Iterator[Leaf]:
    """Each row on its own: in mypy's cache a row's path says which module its blob is about."""
    if not leaf.data.startswith(b"SQLite format 3\x00"):
        return
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy.sqlite"
        copy.write_bytes(leaf.data)
        with closing(sqlite3.connect(f"file:{copy}?mode=ro&immutable=1", uri=True)) as database:
            database.text_factory = bytes
            query = "SELECT name FROM sqlite_master WHERE type = 'table' AND sql NOT LIKE 'CREATE VIRTUAL%'"
            for (table,) in database.execute(query).fetchall():
                quoted = table.decode().replace('"', '""')
                for number, row in enumerate(database.execute(f'SELECT * FROM "{quoted}"')):
                    cells = [cell for cell in row if isinstance(cell, bytes)]
                    name = f"{leaf.name}!{table.decode()}/{number}"
                    data = budget.take(io.BytesIO(b"\n".join(cells)), name)
                    if data:
                        yield Leaf(name, data)
                    if budget.spent:
                        return


def _base64_content(leaf: Leaf, budget: Budget, depth: int) -> Iterator[Leaf]:
    if depth == 0 or leaf.is_binary or not _BASE64_LINE.search(leaf.data):
        return
    for match in _BASE64.finditer(leaf.data):
        letters = re.sub(rb"\\+[nr]|[^A-Za-z0-9+/_-]", b"", match[0]).translate(bytes.maketrans(b"-_", b"+/"))
        if len(letters) < 60:
            continue
        usable = letters[: len(letters) // 4 * 4 + (len(letters) % 4 if len(letters) % 4 > 1 else 0)]
        inner = Leaf(f"{leaf.name}!base64@{match.start()}", base64.b64decode(usable + b"=" * (-len(usable) % 4)))
        # Pictures and random words decode to noise, which is no content.
        if not inner.is_binary or inner.data[:2] in (b"PK", b"\x1f\x8b", b"BZ", b"\xfd7", b"\x78\x9c"):
            yield inner
