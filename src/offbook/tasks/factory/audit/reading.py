"""Everything that can be read below a folder: archives, streams, databases, encodings and git objects opened.

Nothing that is read is ever executed. What cannot be read is named with the reason.
"""

from __future__ import annotations

import base64
import binascii
import io
import lzma
import os
import re
import shutil
import sqlite3
import stat
import struct
import subprocess
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from offbook.tasks.git import plain_environment
from offbook.tasks.unpack import STREAMS

DEPTH = 3  # archives within archives
MOST_BYTES = 64 << 20  # of one file or member
MOST_UNPACKED = 512 << 20  # of all that comes out of one file
MOST_MEMBERS = 50_000
# What the readers of archives raise on broken ones.
BROKEN = (
    *(zipfile.BadZipFile, tarfile.TarError, lzma.LZMAError, zlib.error, sqlite3.Error, struct.error),
    *(EOFError, OSError, RuntimeError, ValueError, OverflowError),
)

UNKNOWN = {
    b"\x28\xb5\x2f\xfd": "zstandard, which this Python cannot unpack",
    b"PACK\x00\x00\x00": "a git pack outside of a repository",
    b"7z\xbc\xaf\x27\x1c": "7-Zip, which this Python cannot unpack",
    b"Rar!\x1a\x07": "RAR, which this Python cannot unpack",
}
_PRINTABLE = re.compile(rb"[\t\n\r\x20-\x7e]{6,}")
_LONG_RUN = re.compile(rb"[!-~]{60}")
_BASE64 = re.compile(rb"(?:[A-Za-z0-9+/_-]{32,}(?:\\+[nr]|[\s\"',]){1,8})*[A-Za-z0-9+/_-]{16,}={0,2}")
_HEX = re.compile(rb"(?:[0-9A-Fa-f]{2}\s{0,2}){60,}")
_DUMP = re.compile(
    rb"(?m)^[0-9A-Fa-f]{6,8}(?::(?: [0-9A-Fa-f]{2,4})+|(?: {1,2}[0-9A-Fa-f]{2})+)"
)  # lines of xxd, hexdump -C and od -t x1
_BASE32 = re.compile(rb"(?:[A-Z2-7]{20,}\s?){3,}[A-Z2-7]*=*")
_BASE85 = re.compile(rb"(?:[!-~]{40,}\n?)+[!-~]*")
GIT_S = 120.0
_ABSOLUTE = re.compile(r"""(?:^|file://|gitdir: |["'])(/[^"'\n,:]+)""", re.MULTILINE)
Noted = Callable[[str, str], None]  # what was not read, and why
Packed = Iterator[tuple[str, IO[bytes]]]  # its name inside, and its content


@dataclass(frozen=True)
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
        head = self.data[:4096]
        control = head.translate(None, b"\t\n\r\x0c\x1b" + bytes(range(32, 256)))
        return b"\x00" in self.data or len(control) > 0.1 * len(head)


@dataclass(slots=True)
class Budget:
    unread: Noted
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


def leaves(path: Path, name: str, unread: Noted) -> Iterator[Leaf]:
    """A file and all that is packed in it; of a git folder every object."""
    if path.is_dir():
        yield from _git_objects(path, name, unread)
        return
    try:
        if path.stat().st_size > MOST_BYTES:
            unread(name, f"larger than {MOST_BYTES} bytes")
            return
        data = path.read_bytes()
    except OSError as error:
        unread(name, error.strerror or "unreadable")
        return
    yield from unpacked(Leaf(name, data), DEPTH, Budget(unread))


def _git_objects(folder: Path, name: str, unread: Noted) -> Iterator[Leaf]:
    """Every object, reachable or not: git reads packs and deltas, with none of the repository's own configuration."""
    if shutil.which("git") is None:
        unread(name, "git is not installed")
        return
    with tempfile.TemporaryDirectory() as empty:
        environment = {**plain_environment(Path(empty)), "GIT_NO_LAZY_FETCH": "1"}
        subprocess.run(["git", "init", "-q", "--bare", "--template=", empty], env=environment, check=True)
        environment["GIT_OBJECT_DIRECTORY"] = str((folder / "objects").resolve())
        command = ["git", "--git-dir", empty, "cat-file", "--batch-all-objects", "--batch", "--unordered"]
        with tempfile.TemporaryFile() as errors:
            process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors)
            assert process.stdout is not None
            total = 0
            try:
                while header := process.stdout.readline().split():
                    digest = header[0].decode()
                    kind = header[1].decode()
                    size = int(header[2])
                    total += size
                    if total > MOST_UNPACKED or size > MOST_BYTES:
                        unread(name, "the objects are more than is read")
                        return
                    data = process.stdout.read(size + 1)[:size]
                    if kind != "tree":
                        yield from unpacked(Leaf(f"{name}!{kind} {digest}", data), DEPTH, Budget(unread))
            finally:
                process.stdout.close()
                process.kill()
                process.wait(GIT_S)
            errors.seek(0)
            if said := errors.read(200):
                unread(name, said.decode(errors="replace").strip())


def files_below(root: Path, leave_out: frozenset[Path] = frozenset()) -> Iterator[tuple[Path, str]]:
    """Files and git folders with their paths relative to the root. No symbolic link is followed."""
    pending = [(root, "")] if root.is_dir() else []
    if not pending:
        yield root, root.name
    while pending:
        folder, prefix = pending.pop()
        is_git = (folder / "objects").is_dir() and (folder / "HEAD").is_file()
        if is_git:
            yield folder, prefix.rstrip("/") or folder.name
        with os.scandir(folder) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                if entry.is_dir(follow_symlinks=False):
                    if not (is_git and entry.name == "objects") and Path(entry.path) not in leave_out:
                        pending.append((Path(entry.path), f"{prefix}{entry.name}/"))
                elif stat.S_ISREG(entry.stat(follow_symlinks=False).st_mode):
                    yield Path(entry.path), prefix + entry.name


def links_out(root: Path) -> dict[str, Path]:
    """What leads from below the root to elsewhere: symbolic links, .pth files, editable installs, git worktrees."""
    found: dict[str, Path] = {}
    root = root.resolve()
    for folder, folders, files in os.walk(root):
        for name in [*folders, *files]:
            path = Path(folder) / name
            targets: list[str] = []
            if path.is_symlink():
                targets = [os.path.realpath(path)]
            elif name.endswith((".pth", ".egg-link")) or name.startswith("__editable__"):
                targets = _ABSOLUTE.findall(path.read_text(errors="replace"))
            elif name == "direct_url.json" or (name == ".git" and path.is_file()):
                targets = _ABSOLUTE.findall(path.read_text(errors="replace").replace("\\/", "/"))
            for target in map(Path, targets):
                if target.exists() and not target.resolve().is_relative_to(root):
                    found[f"{path.relative_to(root)} -> {target}"] = target.resolve()
    return found


def unpacked(leaf: Leaf, depth: int, budget: Budget) -> Iterator[Leaf]:
    yield leaf
    for opener in (_zip_members, _tar_members, _stream_content, _sqlite_rows, _encoded_content):
        try:
            for name, stream in opener(leaf, budget.unread):
                grows = opener is not _encoded_content
                if depth == 0:
                    if grows:
                        budget.unread(leaf.name, f"packed more than {DEPTH} deep")
                    break
                data = budget.take(stream, f"{leaf.name}!{name}") if grows else stream.read()
                if data:
                    yield from unpacked(Leaf(f"{leaf.name}!{name}", data), depth - 1, budget)
                if budget.spent:
                    return
        except BROKEN as error:
            budget.unread(leaf.name, f"{type(error).__name__}: {error}")


def _zip_members(leaf: Leaf, unread: Noted) -> Packed:
    """Also a zip with something before it: a self-extracting one, the body in pip's cache of downloads."""
    if b"PK\x03\x04" not in leaf.data or b"PK\x05\x06" not in leaf.data[-(1 << 16) - 22 :]:
        return
    if not leaf.data.startswith(b"PK") and not zipfile.is_zipfile(io.BytesIO(leaf.data)):
        return
    with zipfile.ZipFile(io.BytesIO(leaf.data)) as archive:
        for member in archive.infolist():
            if member.flag_bits & 1:
                unread(f"{leaf.name}!{member.filename}", "encrypted")
            elif not member.is_dir():
                with archive.open(member) as stream:
                    yield member.filename, stream


def _tar_members(leaf: Leaf, unread: Noted) -> Packed:
    if leaf.data[257:262] != b"ustar":
        return
    with tarfile.open(fileobj=io.BytesIO(leaf.data), mode="r:") as archive:
        for member in archive:
            if stream := archive.extractfile(member) if member.isfile() else None:
                yield member.name, stream


def _stream_content(leaf: Leaf, unread: Noted) -> Packed:
    """One compressed stream. zlib is what git keeps its loose objects in."""
    if opener := next((opener for magic, opener in STREAMS.items() if leaf.data.startswith(magic)), None):
        with opener(io.BytesIO(leaf.data)) as content:
            yield "content", content
    elif reason := next((why for magic, why in UNKNOWN.items() if leaf.data.startswith(magic)), None):
        unread(leaf.name, reason)
    elif leaf.data[:2] in (b"\x78\x01", b"\x78\x9c", b"\x78\xda", b"\x78\x5e") and leaf.is_binary:
        with suppress(zlib.error):  # two bytes that look like zlib's prove nothing
            yield "content", io.BytesIO(zlib.decompressobj().decompress(leaf.data, MOST_BYTES + 1))


def _sqlite_rows(leaf: Leaf, unread: Noted) -> Packed:
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
                    yield f"{table.decode()}/{number}", io.BytesIO(b"\n".join(cells))


def decoded(text: str) -> list[str]:
    """What is encoded in a text, layer by layer."""
    dumped = b"".join(line.partition(b" ")[2] for line in _DUMP.findall(text.encode(errors="replace")))
    found = []
    for data in (text.encode(errors="replace"), dumped):
        found += [leaf.text for leaf in unpacked(Leaf("", data), DEPTH, Budget(lambda *_: None)) if leaf.name]
    return found


def _encoded_content(leaf: Leaf, unread: Noted) -> Packed:
    """Pictures and random words decode to noise, which is no content."""
    if leaf.is_binary or not (_LONG_RUN.search(leaf.data) or _HEX.search(leaf.data)):
        return
    for name, pattern, decode in DECODERS:
        for match in pattern.finditer(leaf.data):
            with suppress(ValueError, OverflowError, struct.error):
                inner = Leaf("", decode(b"".join(match[0].split())))
                packed = inner.data[:2] in (b"PK", b"\x1f\x8b", b"BZ", b"\xfd7", b"\x78\x9c")
                if len(inner.data) >= FEWEST_DECODED and (packed or not inner.is_binary):
                    yield f"{name}@{match.start()}", io.BytesIO(inner.data)


def _from_base64(run: bytes) -> bytes:
    letters = re.sub(rb"\\+[nr]|[^A-Za-z0-9+/_-]", b"", run).translate(bytes.maketrans(b"-_", b"+/"))
    usable = letters[: len(letters) // 4 * 4 + (len(letters) % 4 if len(letters) % 4 > 1 else 0)]
    return base64.b64decode(usable + b"=" * (-len(usable) % 4))


FEWEST_DECODED = 45  # bytes
DECODERS: tuple[tuple[str, re.Pattern[bytes], Callable[[bytes], bytes]], ...] = (
    ("base64", _BASE64, _from_base64),
    ("hex", _HEX, binascii.unhexlify),
    ("base32", _BASE32, lambda run: base64.b32decode(run[: len(run) // 8 * 8])),
    ("base85", _BASE85, base64.b85decode),
    ("ascii85", _BASE85, base64.a85decode),
)
