"""The records of a store.

manifests/000000012      what version 12 is and its patches; written last, once
patches/000000012/HASH   a patch of a shard, named by its content
writers/000000003        one per publisher: the last one is the present one

Numbers count what was published and only grow. The policy version of the weights is another number: it decreases when a
run is resumed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from offbook.engine.sync.codec import Damaged
from offbook.engine.sync.layout import Layout, digest
from offbook.engine.sync.stores import Store
from offbook.types import STRICT

MANIFESTS = "manifests"
PATCHES = "patches"
WRITERS = "writers"


@dataclass(frozen=True, slots=True)
class Part:
    """A shard's patch. Without a key the shard is equal to its base."""

    __pydantic_config__ = STRICT

    key: str = ""
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class Manifest:
    """`patches` are on the version before; `anchor` and `layout` are there in an anchor: patches on zeros. At least one
    of the two is there, and both result in shards with the digests `shards`."""

    __pydantic_config__ = STRICT

    number: int
    version: int  # of the policy
    writer: int
    shards: tuple[str, ...]
    patches: tuple[Part, ...] | None
    anchor: tuple[Part, ...] | None
    layout: Layout | None
    adapter: dict[str, Any] | None = None  # PEFT's configuration, if the tensors are an adapter's

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in (*(self.patches or ()), *(self.anchor or ())))


_ADAPTER: TypeAdapter[Manifest] = TypeAdapter(Manifest)


def dump(manifest: Manifest) -> bytes:
    raw = _ADAPTER.dump_json(manifest)
    return digest(raw).encode() + b"\n" + raw


def load(store: Store, number: int) -> Manifest:
    """Raises Missing or Damaged."""
    expected, _, raw = store.get(manifest_key(number)).partition(b"\n")
    if digest(raw).encode() != expected:
        raise Damaged(f"{manifest_key(number)} in {store} is damaged")
    return _ADAPTER.validate_json(raw)


def manifest_key(number: int) -> str:
    return f"{MANIFESTS}/{number:09d}"


def patch_key(number: int, name: str) -> str:
    return f"{PATCHES}/{number:09d}/{name}"


def number_in(key: str) -> int | None:
    """The number of the version that an object belongs to; None for foreign objects."""
    found = re.fullmatch(r"\w+/(\d{9,})(/[^/]+)?", key)
    return int(found[1]) if found else None


def newest(store: Store, folder: str = MANIFESTS) -> int:
    """The highest number of a version or a writer; 0 if there is none."""
    return max((number_in(key) or 0 for key in store.keys(folder)), default=0)
