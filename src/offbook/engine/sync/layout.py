"""Tensors by name as a few flat arrays of words, the shards, and back.

What is compared, sent and hashed are shards, so that nothing in a patch has to say a tensor's name. A shard has words
of one size; tensors lie in it one after the other, in the order in which they came. Those that share their memory, as
an output layer that is tied to the input's, lie there once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from pydantic import TypeAdapter
from torch import Tensor

from offbook.core.weights import Weights
from offbook.engine.sync.codec import Damaged, Words
from offbook.types import STRICT


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor lies: words from `start` on of a shard."""

    __pydantic_config__ = STRICT

    name: str
    dtype: str
    shape: tuple[int, ...]
    shard: int
    start: int

    @property
    def words(self) -> slice:
        return slice(self.start, self.start + torch.Size(self.shape).numel())


@dataclass(frozen=True, slots=True)
class Layout:
    __pydantic_config__ = STRICT

    places: tuple[Place, ...]
    shards: tuple[tuple[int, int], ...]  # the bytes of a word, and how many there are

    @classmethod
    def of(cls, weights: Weights, shard_bytes: int, matrices: torch.dtype | None = None) -> Layout:
        """A tensor is never cut: one that is larger than a shard has one for itself. `matrices`: what they become."""
        places: list[Place] = []
        shards: list[tuple[int, int]] = []
        open_shard: dict[int, int] = {}  # by the bytes of a word
        seen: dict[str, Place] = {}
        firsts = weights.firsts()
        for name, tensor in weights.like.items():
            rounded = matrices is not None and tensor.ndim >= 2 and tensor.is_floating_point()
            kept = matrices if rounded and matrices is not None else tensor.dtype
            dtype, shape, width = str(kept).removeprefix("torch."), tuple(tensor.shape), kept.itemsize
            if (first := seen.get(firsts[name])) is not None:
                places.append(Place(name, dtype, shape, first.shard, first.start))
                continue
            shard = open_shard.get(width, -1)
            if shard < 0 or (shards[shard][1] and (shards[shard][1] + tensor.numel()) * width > shard_bytes):
                open_shard[width] = shard = len(shards)
                shards.append((width, 0))
            places.append(Place(name, dtype, shape, shard, shards[shard][1]))
            shards[shard] = width, shards[shard][1] + tensor.numel()
            seen[name] = places[-1]
        return cls(tuple(places), tuple(shards))

    def dealt_out(self, ranks: int) -> list[int]:
        """The rank that has each shard; all have about as many bytes."""
        load, found = [0] * ranks, [0] * len(self.shards)
        for shard in sorted(range(len(found)), key=lambda shard: -self._bytes(shard)):
            found[shard] = min(range(ranks), key=load.__getitem__)
            load[found[shard]] += self._bytes(shard)
        return found

    def _bytes(self, shard: int) -> int:
        width, count = self.shards[shard]
        return width * count

    def empty(self, shard: int) -> Words:
        width, count = self.shards[shard]
        return np.zeros(count, f"<u{width}")

    def distinct(self) -> dict[str, int]:
        """The shards that tensors lie in; of those that lie in one place, under the first name."""
        found: dict[tuple[int, int, int], Place] = {}
        for place in self.places:
            found.setdefault((place.shard, place.words.start, place.words.stop), place)
        return {place.name: place.shard for place in found.values()}

    def flatten(self, tensors: Iterable[tuple[str, Tensor]], shards: Collection[int]) -> dict[int, Words]:
        """A copy of them, in this machine's memory: those of some shards."""
        flats = {shard: self.empty(shard) for shard in shards}
        views = self.views(flats)
        for name, tensor in tensors:
            views[name].copy_(tensor)
            del tensor  # before the next is put together
        return flats

    def views(self, flats: Mapping[int, Words]) -> dict[str, Tensor]:
        """The tensors that lie in these shards, in their memory."""
        found = {}
        for place in self.places:
            if place.shard in flats:
                raw = torch.from_numpy(flats[place.shard][place.words].view(np.uint8))
                found[place.name] = raw.view(getattr(torch, place.dtype)).view(place.shape)
        return found

    def within(self, changed: Mapping[int, NDArray[np.int64]]) -> dict[str, Tensor]:
        """Sorted indices of shards as those of flat tensors; what did not change is not named."""
        found = {}
        for place in self.places:
            if place.shard in changed:
                index = changed[place.shard]
                low, high = np.searchsorted(index, [place.words.start, place.words.stop])
                if low < high:
                    found[place.name] = torch.from_numpy(index[low:high] - place.start)
        return found


_LAYOUT: TypeAdapter[Layout] = TypeAdapter(Layout)


def dump_layout(layout: Layout) -> bytes:
    return _LAYOUT.dump_json(layout)


def load_layout(raw: bytes) -> Layout:
    try:
        layout = _LAYOUT.validate_json(raw)
    except ValueError as error:
        raise Damaged(f"a layout of weights cannot be read: {error}") from None
    for place in layout.places:
        dtype = getattr(torch, place.dtype, None)
        fits = 0 <= place.shard < len(layout.shards) and place.start >= 0 and min(place.shape, default=0) >= 0
        if not isinstance(dtype, torch.dtype) or not fits:
            raise Damaged(f"the layout of weights has no room for {place.name}")
        width, count = layout.shards[place.shard]
        if width != dtype.itemsize or place.words.stop > count:
            raise Damaged(f"the layout of weights has no room for {place.name}")
    return layout


def digest(data: bytes | Words) -> str:
    """Tells accidents, not forgers: whoever can write to the store can write weights."""
    return xxhash.xxh3_128_hexdigest(data if isinstance(data, bytes) else data.data)
