"""Everything that can be read below a folder: archives, compressed streams, encodings and git objects opened.

Nothing that is read is ever executed. What cannot be read is named with the reason.
"""

from __future__ import annotations

import base64
import binascii
import io
import os
import re
import stat
import struct
import subprocess
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from offbook.tasks.git import plain_environment
from offbook.tasks.unpack import BROKEN, STREAMS

DEPTH = 3  # archives within archives
MOST_BYTES = 64 << 20  # of one file or member
MOST_UNPACKED = 512 << 20  # of all that comes out of one file
FEWEST_DECODED = 45  # bytes
NOT_UNPACKED = {
    b"\x28\xb5\x2f\xfd": "zstandard",
    b"PACK\x00\x00\x00": "a git pack outside of a repository",
    b"7z\xbc\xaf\x27\x1c": "7-Zip",
    b"Rar!\x1a\x07": "RAR",
}
PRINTABLE = re.compile(rb"[\t\n\r\x20-\x7e]{6,}")
LONG_RUN = re.compile(rb"[!-~]{60}")
BASE64 = re.compile(rb"(?:[A-Za-z0-9+/_-]{32,}(?:\\+[nr]|[\s\"',]){1,8})*[A-Za-z0-9+/_-]{16,}={0,2}")
HEX = re.compile(rb"(?:[0-9A-Fa-f]{2}\s{0,2}){60,}")
BASE32 = re.compile(rb"(?:[A-Z2-7]{20,}\s?){3,}[A-Z2-7]*=*")
BASE85 = re.compile(rb"(?:[!-~]{40,}\n?)+[!-~]*")
# Lines of xxd, hexdump -C and od -t x1.
DUMP = re.compile(rb"(?m)^[0-9A-Fa-f]{6,8}(?::(?: [0-9A-Fa-f]{2,4})+|(?: {1,2}[0-9A-Fa-f]{2})+)")


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
            return b"\n".join(PRINTABLE.findall(self.data)).decode("ascii")
        try:
            return self.data.decode("utf-8")
        except UnicodeDecodeError:
            return self.data.decode("latin-1")

    @property
    def is_binary(self) -> bool:
        head = self.data[:4096]
        control = head.translate(None, b"\t\n\r\x0c\x1b" + bytes(range(32, 256)))
        return b"\x00" in self.data or len(control) > 0.1 * len(head)


def files_below(root: Path, leave_out: frozenset[Path] = frozenset()) -> Iterator[tuple[Path, str]]:
    """Files and git folders with their paths relative to the root. No symbolic link is followed."""
    if not root.is_dir():
        yield root, root.name
    for top, folders, files in os.walk(root):
        folder = Path(top)
        is_git = "objects" in folders and "HEAD" in files
        if is_git:
            yield folder, folder.relative_to(root).as_posix() if folder != root else root.name
            folders.remove("objects")
        folders[:] = sorted(name for name in folders if folder / name not in leave_out)
        for path in sorted(folder / name for name in files):
            if stat.S_ISREG(path.lstat().st_mode):
                yield path, path.relative_to(root).as_posix()


def leaves(path: Path, name: str, unread: dict[str, str]) -> Iterator[Leaf]:
    """A file and all that is packed in it; of a git folder every object. `unread` gets what was not read, and why."""
    if path.is_dir():
        yield from _git_objects(path, name, unread)
        return
    try:
        if path.stat().st_size > MOST_BYTES:
            unread[name] = f"larger than {MOST_BYTES} bytes"
            return
        data = path.read_bytes()
    except OSError as error:
        unread[name] = error.strerror or "unreadable"
        return
    yield from _Unpacker(unread).all_in(Leaf(name, data), DEPTH)


def decoded(text: str) -> list[str]:
    """What is encoded in a text, layer by layer."""
    data = text.encode(errors="replace")
    dumped = b"".join(line.partition(b" ")[2] for line in DUMP.findall(data))
    unpacker = _Unpacker({})
    return [leaf.text for part in (data, dumped) for leaf in unpacker.all_in(Leaf("", part), DEPTH) if leaf.name]


def _git_objects(folder: Path, name: str, unread: dict[str, str]) -> Iterator[Leaf]:
    """Every object, reachable or not: git reads packs and deltas, with none of the repository's own configuration."""
    with tempfile.TemporaryDirectory() as empty, tempfile.TemporaryFile() as errors:
        environment = {**plain_environment(Path(empty)), "GIT_NO_LAZY_FETCH": "1"}
        command = ["git", "--git-dir", empty, "cat-file", "--batch-all-objects", "--batch", "--unordered"]
        try:
            subprocess.run(["git", "init", "-q", "--bare", "--template=", empty], env=environment, check=True)
            environment["GIT_OBJECT_DIRECTORY"] = str((folder / "objects").resolve())
            process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors)
        except FileNotFoundError:
            unread[name] = "git is not installed"
            return
        assert process.stdout is not None
        total = 0
        with process:
            while header := process.stdout.readline().decode().split():
                size = int(header[2])
                total += size
                if total > MOST_UNPACKED or size > MOST_BYTES:
                    unread[name] = "the objects are more than is read"
                    process.kill()
                    return
                data = process.stdout.read(size + 1)[:size]
                if header[1] != "tree":
                    yield from _Unpacker(unread).all_in(Leaf(f"{name}!{header[1]} {header[0]}", data), DEPTH)
        errors.seek(0)
        if said := errors.read(200).decode(errors="replace").strip():
            unread[name] = said


class _Unpacker:
    """Opens what is packed in one file, up to a limit: a small archive can unpack to terabytes."""

    def __init__(self, unread: dict[str, str]):
        self.unread = unread
        self.left = MOST_UNPACKED

    def all_in(self, leaf: Leaf, depth: int) -> Iterator[Leaf]:
        yield leaf
        try:
            for name, stream in self._members(leaf):
                inner = f"{leaf.name}!{name}"
                if depth == 0:
                    self.unread[leaf.name] = f"packed more than {DEPTH} deep"
                    break
                limit = min(MOST_BYTES, self.left)
                data = stream.read(limit + 1)
                self.left -= min(len(data), limit)
                if len(data) <= limit:
                    yield from self.all_in(Leaf(inner, data), depth - 1)
                    continue
                self.unread[inner] = f"unpacks to more than {limit} bytes"
                if limit < MOST_BYTES:
                    return  # the file has used up its limit
        except (*BROKEN, RuntimeError, ValueError, struct.error) as error:
            self.unread[leaf.name] = f"{type(error).__name__}: {error}"
        if depth and not leaf.is_binary and (LONG_RUN.search(leaf.data) or HEX.search(leaf.data)):
            for name, data in _encoded(leaf.data):
                yield from self.all_in(Leaf(f"{leaf.name}!{name}", data), depth - 1)

    def _members(self, leaf: Leaf) -> Iterator[tuple[str, IO[bytes]]]:
        data = leaf.data
        if data[257:262] == b"ustar":
            with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as tar:
                for entry in tar:
                    content = tar.extractfile(entry) if entry.isfile() else None
                    if content:
                        yield entry.name, content
        elif b"PK\x03\x04" in data and zipfile.is_zipfile(io.BytesIO(data)):  # also with something before it
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                for member in archive.infolist():
                    if member.flag_bits & 1:
                        self.unread[f"{leaf.name}!{member.filename}"] = "encrypted"
                    elif not member.is_dir():
                        with archive.open(member) as stream:
                            yield member.filename, stream
        for magic, opener in STREAMS.items():
            if data.startswith(magic):
                with opener(io.BytesIO(data)) as stream:
                    yield "content", stream
        for magic, kind in NOT_UNPACKED.items():
            if data.startswith(magic):
                self.unread[leaf.name] = f"{kind}, which is not unpacked"
        if data[:2] in (b"\x78\x01", b"\x78\x9c", b"\x78\xda", b"\x78\x5e") and leaf.is_binary:
            with suppress(zlib.error):  # two bytes that look like zlib's prove nothing
                yield "content", io.BytesIO(zlib.decompressobj().decompress(data, MOST_BYTES + 1))


def _encoded(text: bytes) -> Iterator[tuple[str, bytes]]:
    """Pictures and random words decode to noise, which is no content."""
    for name, pattern, decode in DECODERS:
        for match in pattern.finditer(text):
            with suppress(ValueError, OverflowError, struct.error):
                data = decode(b"".join(match[0].split()))
                is_packed = data.startswith((b"PK", b"\x1f\x8b", b"BZ", b"\xfd7", b"\x78\x9c"))
                if len(data) >= FEWEST_DECODED and (is_packed or not Leaf("", data).is_binary):
                    yield f"{name}@{match.start()}", data


def _from_base64(run: bytes) -> bytes:
    letters = re.sub(rb"\\+[nr]|[^A-Za-z0-9+/_-]", b"", run).translate(bytes.maketrans(b"-_", b"+/"))
    usable = letters[: len(letters) - (len(letters) % 4 == 1)]
    return base64.b64decode(usable + b"=" * (-len(usable) % 4))


DECODERS: tuple[tuple[str, re.Pattern[bytes], Callable[[bytes], bytes]], ...] = (
    ("base64", BASE64, _from_base64),
    ("hex", HEX, binascii.unhexlify),
    ("base32", BASE32, lambda run: base64.b32decode(run[: len(run) // 8 * 8])),
    ("base85", BASE85, base64.b85decode),
    ("ascii85", BASE85, base64.a85decode),
)
