"""What lies in a store, and what of it says that a version is there.

HEAD                              the number of the newest version; moved by compare-and-swap
versions/000000012/manifest       what version 12 is and how to get there; written last, once, by one
versions/000000012/HASH           a patch of a shard, named by its content
layouts/HASH                      names, dtypes and shapes of the tensors
readers/NAME                      the number a reader has, so that what it still needs is kept

Numbers count what was published and never go back. The policy version that a trainer gives its weights is another
thing: it goes back where a run is resumed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from offbook.engine.sync.codec import Damaged
from offbook.engine.sync.layout import digest
from offbook.engine.sync.stores import Store
from offbook.types import STRICT

T = TypeVar("T")
HEAD = "HEAD"
VERSIONS, READERS = "versions/", "readers/"


@dataclass(frozen=True, slots=True)
class Part:
    """A shard's patch. No key: the shard is the same as in the base."""

    __pydantic_config__ = STRICT

    key: str = ""
    bytes: int = 0
    sum: str = ""


@dataclass(frozen=True, slots=True)
class Way:
    """To a version: patches on the one numbered `base`, whose digest is given; without one on zeros, an anchor."""

    __pydantic_config__ = STRICT

    parts: tuple[Part, ...]  # by shard
    base: int | None = None
    base_digest: str = ""

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.parts)


@dataclass(frozen=True, slots=True)
class Manifest:
    """All ways lead to the same bits, whose digest is that of the layout and of each shard."""

    __pydantic_config__ = STRICT

    number: int
    version: int  # of the policy
    writer: str  # tells two writers apart that publish the same
    layout: str  # both by their digests
    shards: tuple[str, ...]
    ways: tuple[Way, ...]
    adapter: dict[str, Any] | None = None  # PEFT's configuration, where the tensors are those of an adapter

    @property
    def digest(self) -> str:
        return digest_all(self.layout, self.shards)

    @property
    def is_anchor(self) -> bool:
        return any(way.base is None for way in self.ways)


@dataclass(frozen=True, slots=True)
class Head:
    __pydantic_config__ = STRICT

    number: int


@dataclass(frozen=True, slots=True)
class Lease:
    """`beat` changes while the reader lives: how long ago is told by whoever looks, on one clock."""

    __pydantic_config__ = STRICT

    number: int
    beat: int


_ADAPTERS: dict[type, TypeAdapter[Any]] = {kind: TypeAdapter(kind) for kind in (Manifest, Head, Lease)}


def dump(record: Manifest | Head | Lease) -> bytes:
    return _ADAPTERS[type(record)].dump_json(record)


def load(raw: bytes, kind: type[T]) -> T:
    try:
        return _ADAPTERS[kind].validate_json(raw)
    except ValueError as error:
        why = "; ".join(one["msg"] for one in error.errors()) if isinstance(error, ValidationError) else error
        raise Damaged(f"a {kind.__name__.lower()} in the store cannot be read: {why}") from None


def digest_all(layout: str, shards: Sequence[str]) -> str:
    return digest("".join([layout, *shards]).encode())


def folder(number: int) -> str:
    return f"{VERSIONS}{number:09d}/"


def manifest_key(number: int) -> str:
    return f"{folder(number)}manifest"


def newest(store: Store) -> int:
    """By what lies there: HEAD may be behind, or junk. 0 where there is none."""
    found = {key: number_in(key) for key in store.keys(VERSIONS)}
    return max((number for key, number in found.items() if number and key == manifest_key(number)), default=0)


def number_in(key: str) -> int | None:
    """Of the version that an object belongs to; None for what is none of ours."""
    found = re.fullmatch(rf"{VERSIONS}(\d{{9,}})/[^/]+", key)
    return int(found[1]) if found else None


def layout_key(name: str) -> str:
    return f"layouts/{name}"
