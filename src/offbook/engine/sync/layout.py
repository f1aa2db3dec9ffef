"""Tensors by name as a few flat arrays of words, the shards, and back.

Shards are compared, sent and hashed, so a patch needs no tensor names. A shard has words of one size; its tensors
follow each other in their original order. Tensors that share memory, as tied output layers do, are stored once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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

    def empty(self) -> list[Words]:
        return [np.zeros(count, f"<u{width}") for width, count in self.shards]

    def flatten(self, tensors: Mapping[str, Tensor]) -> list[Words]:
        """A copy of the tensors, in this machine's memory. Those that share memory are read once."""
        flats = self.empty()
        copied = set()
        for place, (name, view) in zip(self.places, self.views(flats).items(), strict=True):
            key = place.shard, place.start, place.shape
            if key not in copied:
                view.copy_(tensors[name])
                copied.add(key)
        return flats

    def views(self, flats: Sequence[Words]) -> dict[str, Tensor]:
        """The tensors, in the memory of these shards."""
        found = {}
        for place in self.places:
            words = flats[place.shard][place.start : place.start + torch.Size(place.shape).numel()]
            raw = torch.from_numpy(words.view(np.uint8))
            found[place.name] = raw.view(getattr(torch, place.dtype)).view(place.shape)
        return found


def digest(data: bytes | Words) -> str:
    """Detects accidents, not forgery: anyone who may write to the store may write weights."""
    return xxhash.xxh3_128_hexdigest(data if isinstance(data, bytes) else data.data)
