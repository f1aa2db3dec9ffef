"""Where patches lie: objects by key. A folder by default, memory for tests, S3 and others through obstore.

All that is asked of a store: a whole object or none, a create that only one of two writers can win (`create`), and a
replacement that only who has seen the present object can do (`swap`). S3, GCS and Azure have both.
"""

from __future__ import annotations

import fcntl
import os
import re
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import xxhash

from offbook.core.runfolder import writing
from offbook.types import OffbookError

if TYPE_CHECKING:
    from obstore.store import ObjectStore


class Missing(OffbookError):
    """There is no such object."""


class Store(Protocol):
    def get(self, key: str) -> bytes:
        """Raises Missing."""

    def read(self, key: str) -> tuple[bytes, str]:
        """The same, with a tag of the present content, for `swap`."""

    def put(self, key: str, data: bytes) -> None: ...

    def create(self, key: str, data: bytes) -> bool:
        """False if there is one already; it stays as it is."""

    def swap(self, key: str, data: bytes, tag: str) -> bool:
        """False if the object has another tag by now; it stays as it is."""

    def delete(self, key: str) -> None:
        """No error if it is gone already."""

    def keys(self, prefix: str) -> list[str]: ...

    def sweep(self) -> None:
        """What writers that were killed left behind goes, where anything can be."""


PART = ".tmp"
ABANDONED_S = 3600.0  # since the last byte of a file that was being written


class MemoryStore:
    """For threads of one process."""

    def __init__(self) -> None:
        self._objects: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def __str__(self) -> str:
        return "memory"

    def get(self, key: str) -> bytes:
        return self.read(key)[0]

    def read(self, key: str) -> tuple[bytes, str]:
        if key not in self._objects:
            raise Missing(f"there is no {key} in memory")
        data = self._objects[key]
        return data, _tag(data)

    def put(self, key: str, data: bytes) -> None:
        self._objects[key] = bytes(data)

    def create(self, key: str, data: bytes) -> bool:
        with self._lock:
            if key in self._objects:
                return False
            self._objects[key] = data
            return True

    def swap(self, key: str, data: bytes, tag: str) -> bool:
        with self._lock:
            if key not in self._objects or _tag(self._objects[key]) != tag:
                return False
            self._objects[key] = data
            return True

    def delete(self, key: str) -> None:
        self._objects.pop(key, None)

    def keys(self, prefix: str) -> list[str]:
        return sorted(key for key in list(self._objects) if key.startswith(prefix))

    def sweep(self) -> None:
        """Nothing is here in part."""


class FolderStore:
    """Files of one machine, or of a file system that many share, if it has links and locks (NFS 4 has)."""

    def __init__(self, folder: Path | str):
        self.folder = Path(folder)

    def __str__(self) -> str:
        return str(self.folder)

    def get(self, key: str) -> bytes:
        try:
            return (self.folder / key).read_bytes()
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            raise Missing(f"there is no {key} in {self.folder}") from None

    def read(self, key: str) -> tuple[bytes, str]:
        data = self.get(key)
        return data, _tag(data)

    def put(self, key: str, data: bytes) -> None:
        os.replace(self._aside(key, data), self.folder / key)

    def create(self, key: str, data: bytes) -> bool:
        aside = self._aside(key, data)
        try:
            os.link(aside, self.folder / key)  # whole, or not at all; and never over another
        except FileExistsError:
            return False
        finally:
            aside.unlink()
        return True

    def _aside(self, key: str, data: bytes) -> Path:
        """A file of its own beside it: two may write the same key at once."""
        path = self.folder / key
        with writing(path):
            descriptor, name = tempfile.mkstemp(prefix=".", suffix=PART, dir=path.parent)
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        return Path(name)

    def swap(self, key: str, data: bytes, tag: str) -> bool:
        with (self.folder / ".lock").open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                if self.read(key)[1] != tag:
                    return False
            except Missing:
                return False
            self.put(key, data)
            return True

    def delete(self, key: str) -> None:
        path = self.folder / key
        path.unlink(missing_ok=True)
        with suppress(OSError):  # others are in there still
            path.parent.rmdir()

    def keys(self, prefix: str) -> list[str]:
        """`prefix` is a folder, as all are that are asked for. What is being written begins with a dot."""
        files = [path for path in (self.folder / prefix).rglob("*") if not path.name.startswith(".")]
        return sorted(str(path.relative_to(self.folder)) for path in files if path.is_file())

    def sweep(self) -> None:
        for path in [*self.folder.rglob(f".*{PART}")]:
            with suppress(OSError):  # it is whole by now, or others are in its folder still
                if time.time() - path.stat().st_mtime > ABANDONED_S:
                    self.delete(str(path.relative_to(self.folder)))


class BucketStore:
    """Whatever obstore opens. It asks again by itself where a server does not answer."""

    def __init__(self, bucket: ObjectStore, name: str):
        import obstore

        self.bucket, self.name, self._api = bucket, name, obstore

    def __str__(self) -> str:
        return self.name

    def get(self, key: str) -> bytes:
        return self.read(key)[0]

    def read(self, key: str) -> tuple[bytes, str]:
        with self._telling("read", key):
            found = self._api.get(self.bucket, key)
            return found.bytes().to_bytes(), found.meta["e_tag"] or ""

    def put(self, key: str, data: bytes) -> None:
        with self._telling("write", key):
            self._api.put(self.bucket, key, data)

    def create(self, key: str, data: bytes) -> bool:
        return self._put_if(key, data, "create")

    def swap(self, key: str, data: bytes, tag: str) -> bool:
        return self._put_if(key, data, {"e_tag": tag})

    def _put_if(self, key: str, data: bytes, mode: Any) -> bool:
        refused = self._api.exceptions.AlreadyExistsError, self._api.exceptions.PreconditionError, FileNotFoundError
        with self._telling("write", key):
            try:
                self._api.put(self.bucket, key, data, mode=mode, use_multipart=False)
            except refused:
                return False
            return True

    def delete(self, key: str) -> None:
        with suppress(Missing), self._telling("delete", key):
            self._api.delete(self.bucket, key)

    def keys(self, prefix: str) -> list[str]:
        with self._telling("list", prefix):
            pages = self._api.list(self.bucket, prefix.rstrip("/"))
            return sorted(found["path"] for page in pages for found in page)

    def sweep(self) -> None:
        """An object is there when it is whole."""

    @contextmanager
    def _telling(self, what: str, key: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise Missing(f"there is no {key} in {self.name}") from None
        except self._api.exceptions.BaseError as error:
            said = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
            raise OffbookError(f"cannot {what} {key} of {self.name}: {said}") from None


def open_store(where: str) -> Store:
    """A folder, or a URL that obstore knows: s3://bucket/prefix, gs://, az://; its keys come from the environment."""
    if re.match(r"[a-z0-9]+:/[^/]", where):
        raise OffbookError(f"{where} is neither a folder nor a URL, which has two slashes: s3://bucket/prefix")
    if "://" not in where:
        return FolderStore(where)
    try:
        from obstore.store import from_url
    except ImportError:
        raise OffbookError(f"{where} needs obstore; install offbook[store], or give a folder") from None
    try:
        return BucketStore(from_url(where), where)
    except Exception as error:  # of several kinds, none of which says more than its text
        raise OffbookError(f"cannot open {where}: {str(error).splitlines()[0]}") from None


def _tag(data: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(data)
