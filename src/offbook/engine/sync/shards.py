"""Shards of weights in memory: as they were handed over, as the versions before were that patches go on from, and what
is written of them.

Where weights lie over ranks, each has some of the shards, whole, and writes their patches. Rank 0 publishes: it asks
all ranks for theirs, who answer in a thread beside training.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, TypeVar

import numpy as np
import torch.distributed as dist

from offbook.core.weights import Weights
from offbook.engine.sync.codec import Words, encode
from offbook.engine.sync.layout import Layout, digest
from offbook.engine.sync.manifest import Part, folder
from offbook.engine.sync.stores import Store
from offbook.types import OffbookError

Base = Literal["last", "anchor"]
T = TypeVar("T")


class Shards:
    """By their numbers in the layout."""

    def __init__(self, store: Store, threads: int = 2):
        self.store = store
        self.new: dict[int, Words] = {}
        self.kept: dict[Base, dict[int, Words]] = {}
        self._pool = ThreadPoolExecutor(threads, "shards")

    def take(self, layout: Layout, weights: Weights) -> None:
        """A copy of them: they may change as soon as this returns."""
        tensors = ((name, weights.tensors[name]) for name in layout.distinct())
        self.new = layout.flatten(tensors, range(len(layout.shards)))

    def digests(self) -> dict[int, str]:
        return dict(zip(self.new, self._pool.map(digest, self.new.values()), strict=True))

    def parts(self, number: int, base: Base | None) -> dict[int, Part]:
        """Writes patches on what is kept as `base`, or on nothing, for a version."""

        def part(shard: int) -> Part:
            new = self.new[shard]
            patch = encode(np.zeros_like(new) if base is None else self.kept[base][shard], new)
            if not patch:
                return Part()
            name = digest(patch)
            self.store.put(folder(number) + name, patch)
            return Part(folder(number) + name, len(patch), name)

        return dict(zip(self.new, self._pool.map(part, self.new), strict=True))

    def keep(self, bases: Collection[Base]) -> None:
        """What was handed over last."""
        self.kept |= dict.fromkeys(bases, self.new)

    def close(self) -> None:
        self._pool.shutdown()


class LedShards(Shards):
    """Rank 0's, which stand for those of all ranks. `hand_over` has all of them take what a layout says is theirs;
    `group` is of nothing else."""

    def __init__(self, store: Store, group: Any, hand_over: Callable[[Layout], None]):
        super().__init__(store)
        self.group, self._hand_over = group, hand_over

    def take(self, layout: Layout, weights: Weights) -> None:
        self._hand_over(layout)

    def digests(self) -> dict[int, str]:
        return _merged(self._asked(Shards.digests))

    def parts(self, number: int, base: Base | None) -> dict[int, Part]:
        return _merged(self._asked(Shards.parts, number, base))

    def keep(self, bases: Collection[Base]) -> None:
        self._asked(Shards.keep, bases)

    def close(self) -> None:
        dist.broadcast_object_list([None], 0, self.group)
        super().close()

    def _asked(self, work: Callable[..., T], *arguments: Any) -> list[T]:
        dist.broadcast_object_list([(work, arguments)], 0, self.group)
        return _answered(self, work, arguments, self.group)


def answer(shards: Shards, group: Any) -> None:
    """What rank 0 asks of another rank's, until it asks no more."""
    asked: list[Any] = [None]
    while True:
        dist.broadcast_object_list(asked, 0, group)
        if asked[0] is None:
            return shards.close()
        work, arguments = asked[0]
        _answered(shards, work, arguments, group)


def _answered(shards: Shards, work: Callable[..., T], arguments: tuple[Any, ...], group: Any) -> list[T]:
    """By all ranks, on rank 0. A fault of any of them is raised there."""
    found, problem = None, ""
    try:
        found = work(shards, *arguments)
    except Exception as error:  # of any store: rank 0 has to know, and says it
        problem = f"rank {dist.get_rank()}: {error}"
    answers: list[Any] = [None] * dist.get_world_size()
    is_first = dist.get_rank() == 0
    dist.gather_object((found, problem), answers if is_first else None, group=group)
    if is_first and (problems := [told for _, told in answers if told]):
        raise OffbookError(problems[0])
    return [one for one, _ in answers] if is_first else []


def _merged(answers: list[dict[int, T]]) -> dict[int, T]:
    return {shard: value for one in answers for shard, value in one.items()}
