"""Shards of weights in memory: those that were handed over, and the version before, which patches are made on.

Over several ranks, each has some of the shards and writes their patches. Rank 0 publishes: it calls all ranks, which
answer in a thread.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import torch.distributed as dist

from offbook.core.weights import Weights
from offbook.engine.sync.codec import Words, encode
from offbook.engine.sync.layout import Layout, digest
from offbook.engine.sync.manifest import Part, patch_key
from offbook.engine.sync.stores import Store
from offbook.types import OffbookError

T = TypeVar("T")


class Shards:
    """By their numbers in the layout."""

    def __init__(self, store: Store, threads: int = 2):
        self.store = store
        self.new: dict[int, Words] = {}
        self.last: dict[int, Words] = {}
        self._pool = ThreadPoolExecutor(threads, "shards")

    def take(self, layout: Layout, weights: Weights) -> None:
        """Copy the weights: they may change as soon as this returns."""
        tensors = ((name, weights.tensors[name]) for name in layout.distinct())
        self.new = layout.flatten(tensors, range(len(layout.shards)))

    def digests(self) -> dict[int, str]:
        return dict(zip(self.new, self._pool.map(digest, self.new.values()), strict=True))

    def parts(self, number: int, is_anchor: bool) -> dict[int, Part]:
        """Write the patches of a version, on zeros or on the version before."""

        def part(shard: int) -> Part:
            new = self.new[shard]
            patch = encode(np.zeros_like(new) if is_anchor else self.last[shard], new)
            if not patch:
                return Part()
            key = patch_key(number, digest(patch))
            self.store.put(key, patch)
            return Part(key, len(patch))

        return dict(zip(self.new, self._pool.map(part, self.new), strict=True))

    def keep(self) -> None:
        """The next patches are on these shards."""
        self.last = self.new

    def close(self) -> None:
        self._pool.shutdown()


class LedShards(Shards):
    """Rank 0's shards, which stand for those of all ranks. `hand_over` makes each rank take its share of a layout;
    `group` is used for nothing else."""

    def __init__(self, store: Store, group: Any, hand_over: Callable[[Layout], None]):
        super().__init__(store)
        self.group = group
        self._hand_over = hand_over

    def take(self, layout: Layout, weights: Weights) -> None:
        self._hand_over(layout)

    def digests(self) -> dict[int, str]:
        return self._from_all(Shards.digests)

    def parts(self, number: int, is_anchor: bool) -> dict[int, Part]:
        return self._from_all(Shards.parts, number, is_anchor)

    def keep(self) -> None:
        self._from_all(_keep)

    def close(self) -> None:
        dist.broadcast_object_list([None], 0, self.group)
        super().close()

    def _from_all(self, work: Callable[..., dict[int, T]], *arguments: Any) -> dict[int, T]:
        dist.broadcast_object_list([(work, arguments)], 0, self.group)
        answers = _together(self, work, arguments, self.group)
        return {shard: value for answer in answers for shard, value in answer.items()}


def _keep(shards: Shards) -> dict[int, None]:
    Shards.keep(shards)
    return {}


def answer(shards: Shards, group: Any) -> None:
    """Do what rank 0 asks another rank for, until it closes."""
    while True:
        asked: list[Any] = [None]
        dist.broadcast_object_list(asked, 0, group)
        if asked[0] is None:
            return shards.close()
        work, arguments = asked[0]
        _together(shards, work, arguments, group)


def _together(shards: Shards, work: Callable[..., T], arguments: tuple[Any, ...], group: Any) -> list[T]:
    """The results of all ranks, on rank 0. An error of any rank is raised there."""
    found = None
    problem = ""
    try:
        found = work(shards, *arguments)
    except Exception as error:  # of any store; rank 0 raises it
        problem = f"rank {dist.get_rank()}: {error}"
    is_first = dist.get_rank() == 0
    answers: list[Any] = [None] * dist.get_world_size()
    dist.gather_object((found, problem), answers if is_first else None, group=group)
    if not is_first:
        return []
    for _, problem in answers:
        if problem:
            raise OffbookError(problem)
    return [one for one, _ in answers]
