"""Objects by key: in a folder by default, in S3 and others through obstore.

A store reads and writes objects atomically, and its `create` succeeds for one of two writers only.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from offbook.core.runfolder import writing
from offbook.types import OffbookError

if TYPE_CHECKING:
    from obstore.store import ObjectStore


class Missing(OffbookError):
    """There is no such object."""


class Store(Protocol):
    def get(self, key: str) -> bytes:
        """Raises Missing."""

    def put(self, key: str, data: bytes) -> None: ...

    def create(self, key: str, data: bytes) -> bool:
        """False if the object exists already; it stays as it is."""

    def delete(self, key: str) -> None:
        """No error if the object is gone already."""

    def keys(self, folder: str) -> list[str]:
        """The sorted keys below a folder."""


class FolderStore:
    """Files of one machine, or of a file system that many share, if it has hard links (NFS 4 has)."""

    def __init__(self, folder: Path | str):
        self.folder = Path(folder)

    def __str__(self) -> str:
        return str(self.folder)

    def get(self, key: str) -> bytes:
        try:
            return (self.folder / key).read_bytes()
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            raise Missing(f"there is no {key} in {self.folder}") from None

    def put(self, key: str, data: bytes) -> None:
        os.replace(self._temporary(key, data), self.folder / key)

    def create(self, key: str, data: bytes) -> bool:
        temporary = self._temporary(key, data)
        try:
            os.link(temporary, self.folder / key)
        except FileExistsError:
            return False
        finally:
            temporary.unlink()
        return True

    def _temporary(self, key: str, data: bytes) -> Path:
        """A new file in the key's folder. One that a killed writer left is deleted with its version."""
        path = self.folder / key
        with writing(path):
            descriptor, name = tempfile.mkstemp(prefix=".", dir=path.parent)
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        return Path(name)

    def delete(self, key: str) -> None:
        path = self.folder / key
        path.unlink(missing_ok=True)
        with suppress(OSError):  # not empty yet
            path.parent.rmdir()

    def keys(self, folder: str) -> list[str]:
        paths = [path for path in (self.folder / folder).rglob("*") if path.is_file()]
        return sorted(str(path.relative_to(self.folder)) for path in paths)


class BucketStore:
    """Whatever obstore opens. It retries by itself."""

    def __init__(self, bucket: ObjectStore, name: str):
        import obstore

        self.bucket = bucket
        self.name = name
        self._api = obstore

    def __str__(self) -> str:
        return self.name

    def get(self, key: str) -> bytes:
        with self._one_sentence("read", key):
            return self._api.get(self.bucket, key).bytes().to_bytes()

    def put(self, key: str, data: bytes) -> None:
        with self._one_sentence("write", key):
            self._api.put(self.bucket, key, data)

    def create(self, key: str, data: bytes) -> bool:
        with self._one_sentence("write", key):
            try:
                self._api.put(self.bucket, key, data, mode="create", use_multipart=False)
            except (self._api.exceptions.AlreadyExistsError, self._api.exceptions.PreconditionError):
                return False
            return True

    def delete(self, key: str) -> None:
        with suppress(Missing), self._one_sentence("delete", key):
            self._api.delete(self.bucket, key)

    def keys(self, folder: str) -> list[str]:
        with self._one_sentence("list", folder):
            return sorted(found["path"] for page in self._api.list(self.bucket, folder) for found in page)

    @contextmanager
    def _one_sentence(self, what: str, key: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise Missing(f"there is no {key} in {self.name}") from None
        except self._api.exceptions.BaseError as error:
            said = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
            raise OffbookError(f"cannot {what} {key} of {self.name}: {said}") from None


def open_store(where: str) -> Store:
    """A folder, or a URL for obstore: s3://bucket/prefix, gs://, az://; its keys come from the environment."""
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
    except Exception as error:  # of several types, none of which says more than its text
        raise OffbookError(f"cannot open {where}: {str(error).splitlines()[0]}") from None
