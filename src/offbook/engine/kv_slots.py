"""KV slots: keys and values of many rows, each row in its own slot, and the plan of what a prefill has to compute.

A layer's keys are one tensor [slots, KV heads, length, head width], its values another. A row writes after its own last
token, so nothing is padded, and a session keeps its slot from turn to turn. All slots are as long as the longest row
needs: the budget is slots x length. The last position of a slot is scratch, where steps write for slots without a row.

Axes: N new tokens, K experts of each.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import Tensor

from offbook.engine.kernels import kernel_for

SHORTEST = 256
ROUTES = -1  # and below: "layers" that hold the experts of each token, one per router; they move as keys do
MIN_SHARED = 16  # tokens; a shorter prefix is computed sooner than copied


@dataclass
class KvSlots:
    """The slots, their owners, and the ids whose keys and values they hold."""

    budget: int  # tokens
    count: int = 0
    length: int = 0
    owners: list[Hashable | None] = field(default_factory=list)
    ids: list[list[int]] = field(default_factory=list)
    evicted: dict[Hashable, list[int]] = field(default_factory=dict)  # what owners lost because the budget is too small
    layers: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def rounded(self, length: int) -> int:
        """Lengths grow by a third or a half, so that slots are seldom resized."""
        return min(bucket(max(length, SHORTEST)), self.budget)

    def has_room(self, rows: int, length: int) -> bool:
        return rows <= self.count and length <= self.length

    def resize(self, rows: int, wished: int, length: int) -> None:
        """At least `rows` slots, `wished` if the budget allows, of at least `length`.

        Owners of slots after the last one, or with more tokens than the new length, are evicted.
        """
        length = self.rounded(length)
        if rows * self.length <= self.budget:  # it may be more, from longer rows
            length = max(length, self.length)
        count = min(self.budget // length, max(rows, bucket(wished), self.count))
        kept, upto = min(count, self.count), min(length, self.length)
        for layer, pair in list(self.layers.items()):
            keys, values = (old.new_zeros(count, old.shape[1], length, old.shape[3]) for old in pair)
            for new, old in zip((keys, values), pair, strict=True):
                new[:kept, :, :upto] = old[:kept, :, :upto]
            self.layers[layer] = keys, values
        for slot, ids in enumerate(self.ids):
            if slot >= kept or len(ids) >= length:
                self._evict(slot)
        self.owners = [*self.owners[:kept], *[None] * (count - kept)]
        self.ids = [*(ids if len(ids) < length else [] for ids in self.ids[:kept]), *([] for _ in range(count - kept))]
        self.count, self.length = count, length

    def keep_routes(self, layer: int, experts_NK: Tensor, where_N: Tensor) -> None:
        """`layer` counts the layers with a router."""
        new = experts_NK.to(torch.int16)[None, None]
        kept, _ = self.layer(ROUTES - layer, new, new[..., :0])
        kept.view(-1, kept.shape[3]).index_copy_(0, where_N, new[0, 0])

    def layer(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Zeros at first: what is masked is still multiplied."""
        if layer not in self.layers:
            keys, values = (new.new_zeros(self.count, new.shape[1], self.length, new.shape[3]) for new in (key, value))
            self.layers[layer] = keys, values
        return self.layers[layer]

    @property
    def own_keys(self) -> bool:
        """Whether the kernel reads each slot up to its own token: then one CUDA graph serves all lengths."""
        kept = [pair for layer, pair in self.layers.items() if layer > ROUTES]
        return bool(kept) and all(kernel_for(*pair) is not None for pair in kept)

    def assign(self, owners: list[Hashable], busy: set[int]) -> list[int]:
        """A slot for each owner: the one it has, or the cheapest to evict among those that are not `busy`."""
        by_owner = {owner: slot for slot, owner in enumerate(self.owners) if owner is not None}
        taken = busy | {by_owner[owner] for owner in owners if owner in by_owner}

        def price(slot: int) -> tuple[bool, int, int]:
            return self.owners[slot] is not None, len(self.ids[slot]), slot

        for owner in owners:
            if owner not in by_owner:
                by_owner[owner] = slot = min((slot for slot in range(self.count) if slot not in taken), key=price)
                self._evict(slot)
                self.owners[slot] = owner
                self.ids[slot] = []
                taken.add(slot)
        return [by_owner[owner] for owner in owners]

    def _evict(self, slot: int) -> None:
        owner = self.owners[slot]
        if owner is not None and self.ids[slot]:
            self.evicted[owner] = self.ids[slot]

    def swap(self, ones: list[int], others: list[int]) -> None:
        """Swap owners, ids, keys and values of slots pairwise."""
        upto = max((len(self.ids[slot]) for slot in [*ones, *others]), default=0)
        both, turned = self._index([*ones, *others]), self._index([*others, *ones])
        for tensor in self._tensors() if upto else ():
            tensor[both, :, :upto] = tensor[turned, :, :upto]
        for one, other in zip(ones, others, strict=True):
            self.owners[one], self.owners[other] = self.owners[other], self.owners[one]
            self.ids[one], self.ids[other] = self.ids[other], self.ids[one]

    def copy(self, source: int, targets: list[int], count: int) -> None:
        """Copy the first `count` tokens of a slot to others."""
        index = self._index(targets)
        for tensor in self._tensors():
            tensor[index, :, :count] = tensor[source : source + 1, :, :count]

    def free(self, owners: Iterable[Hashable]) -> None:
        gone = set(owners)
        for owner in gone:
            self.evicted.pop(owner, None)
        for slot, owner in enumerate(self.owners):
            if owner in gone:
                self.owners[slot] = None
                self.ids[slot] = []

    def zero_tail(self, slot: int) -> None:
        """Zero what follows the kept tokens: NaNs there would leak through the mask."""
        for tensor in self._tensors():
            tensor[slot, :, len(self.ids[slot]) :] = 0

    def _index(self, slots: list[int]) -> Tensor:
        """Made once for all layers: a list would be copied to the device for each."""
        device = next((tensor.device for tensor in self._tensors()), None)
        return torch.tensor(slots, dtype=torch.long, device=device)

    def _tensors(self) -> Iterable[Tensor]:
        return chain.from_iterable(self.layers.values())


@dataclass(frozen=True, slots=True)
class Fill:
    """The first `shared` tokens of a slot are there or are copied from slot `source`; the others are computed.

    If all are shared, the source ends with the same token and has the logits already.
    """

    slot: int
    ids: list[int]
    shared: int
    source: int | None
    wave: int  # sources are filled in earlier waves


def plan_fills(wanted: Mapping[int, list[int]], kept: Mapping[int, list[int]]) -> list[Fill]:
    """From the ids wanted by slot, and those that slots hold now; in the order of the waves.

    The last token of a row is always computed, or shared as in Fill, since the next one is sampled from its logits.
    Among rows in lexical order the longest prefix that a row shares with any before it is that with the last.
    """
    others = [(ids, slot) for slot, ids in kept.items() if slot not in wanted and ids]
    fills: dict[int, Fill] = {}
    last: Fill | None = None
    for ids, slot in sorted((ids, slot) for slot, ids in wanted.items()):
        shared = min(common_prefix(ids, kept.get(slot, [])), len(ids) - 1)
        source, wave = None, 0
        for other, at in others:
            count = min(common_prefix(ids, other), len(ids) - 1)
            if count >= shared + MIN_SHARED:
                shared, source = count, at
        if last is not None:
            count = common_prefix(ids, last.ids)
            if count >= shared + MIN_SHARED or count == len(ids):
                root = last
                while count <= root.shared and root.source in fills:  # the root itself copies these tokens
                    root = fills[root.source]
                shared, source, wave = count, root.slot, root.wave + 1
        last = fills[slot] = Fill(slot, ids, shared, source, wave)
    return sorted(fills.values(), key=lambda fill: (fill.wave, fill.slot))


def common_prefix(one: list[int], other: list[int]) -> int:
    """Slices are compared in C: bisection is faster than token by token."""
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    while high - low > 1:  # one[:low] is common, one[:high] is not
        middle = (low + high) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low


def bucket(number: int) -> int:
    """The next number with at most two bits: 1, 2, 3, 4, 6, 8, 12, 16, 24 ..."""
    power = 1 << max(0, number - 1).bit_length()
    return power * 3 // 4 if power >= 4 and number <= power * 3 // 4 else power
