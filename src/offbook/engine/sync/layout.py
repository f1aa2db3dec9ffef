"""Tensors by name as a few flat arrays of words, the shards, and back.

Shards are compared, sent and hashed, so a patch needs no tensor names. A shard has words of one size; its tensors
follow each other in their original order. Tensors that share memory, as tied output layers do, are stored once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
import xxhash
from torch import Tensor

from offbook.core.weights import Weights
from offbook.engine.sync.codec import Words
from offbook.types import STRICT


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor's place: the words of a shard from `start`."""

    __pydantic_config__ = STRICT

    name: str
    dtype: str
    shape: tuple[int, ...]
    shard: int
    start: int


@dataclass(frozen=True, slots=True)
class Layout:
    __pydantic_config__ = STRICT

    places: tuple[Place, ...]
    shards: tuple[tuple[int, int], ...]  # bytes per word, number of words

    @classmethod
    def of(cls, weights: Weights, shard_bytes: int, matrices: torch.dtype | None = None) -> Layout:
        """A tensor larger than a shard has one for itself. `matrices` is the dtype that matrices are rounded to."""
        places: dict[str, Place] = {}
        shards: list[tuple[int, int]] = []
        open_shard: dict[int, int] = {}  # by bytes per word
        firsts = weights.firsts()
        for name, tensor in weights.like.items():
            is_rounded = matrices is not None and tensor.ndim >= 2 and tensor.is_floating_point()
            kept = matrices if is_rounded and matrices is not None else tensor.dtype
            dtype = str(kept).removeprefix("torch.")
            shape = tuple(tensor.shape)
            if first := places.get(firsts[name]):
                places[name] = Place(name, dtype, shape, first.shard, first.start)
                continue
            width = kept.itemsize
            shard = open_shard.get(width, -1)
            if shard < 0 or (shards[shard][1] and (shards[shard][1] + tensor.numel()) * width > shard_bytes):
                shard = len(shards)
                open_shard[width] = shard
                shards.append((width, 0))
            start = shards[shard][1]
            places[name] = Place(name, dtype, shape, shard, start)
            shards[shard] = width, start + tensor.numel()
        return cls(tuple(places.values()), tuple(shards))

    def dealt_out(self, ranks: int) -> list[int]:
        """The rank of each shard; all ranks have about as many bytes."""
        load = [0] * ranks
        found = [0] * len(self.shards)
        sizes = [width * count for width, count in self.shards]
        for shard in sorted(range(len(found)), key=lambda shard: -sizes[shard]):
            found[shard] = load.index(min(load))
            load[found[shard]] += sizes[shard]
        return found

    def empty(self, shard: int) -> Words:
        width, count = self.shards[shard]
        return np.zeros(count, f"<u{width}")

    def distinct(self) -> dict[str, int]:
        """The shard of each tensor, of those that share memory under the first name only."""
        found: dict[tuple[int, int, tuple[int, ...]], Place] = {}
        for place in self.places:
            found.setdefault((place.shard, place.start, place.shape), place)
        return {place.name: place.shard for place in found.values()}

    def flatten(self, tensors: Iterable[tuple[str, Tensor]], shards: Collection[int]) -> dict[int, Words]:
        """A copy of the tensors of some shards, in this machine's memory."""
        flats = {shard: self.empty(shard) for shard in shards}
        views = self.views(flats)
        for name, tensor in tensors:
            views[name].copy_(tensor)
            del tensor  # before the next is gathered
        return flats

    def views(self, flats: Mapping[int, Words]) -> dict[str, Tensor]:
        """The tensors of these shards, in their memory."""
        found = {}
        for place in self.places:
            if place.shard in flats:
                words = flats[place.shard][place.start : place.start + torch.Size(place.shape).numel()]
                raw = torch.from_numpy(words.view(np.uint8))
                found[place.name] = raw.view(getattr(torch, place.dtype)).view(place.shape)
        return found


def digest(data: bytes | Words) -> str:
    """Detects accidents, not forgery: anyone who may write to the store may write weights."""
    return xxhash.xxh3_128_hexdigest(data if isinstance(data, bytes) else data.data)
