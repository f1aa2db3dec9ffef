"""Follows what is published: `poll` fetches, unpacks and checks beside whatever is being served.

What it returns is new memory or shared with what has not changed; nothing that was handed out before is written to. So
whatever fails on the way, the version that is served stays whole, and the next poll begins again from it. Putting the
new one in, between two steps of a model that is writing, is the engine's part (`engine.apply`).
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf

import numpy as np
from numpy.typing import NDArray

from offbook.core.weights import Changes, Weights
from offbook.engine.sync.codec import Damaged, Words, decode
from offbook.engine.sync.layout import Layout, digest, load_layout
from offbook.engine.sync.manifest import (
    HEAD,
    READERS,
    Head,
    Lease,
    Manifest,
    Part,
    Way,
    dump,
    layout_key,
    load,
    manifest_key,
    newest,
)
from offbook.engine.sync.stores import Missing, Store
from offbook.types import OffbookError

TRIES = 3  # in a poll; what it was about to read may just have been deleted, and there is a newer version
BEAT_S = 60.0
FEW = 0.1  # the share of changed words up to which an engine is told which they are

Index = NDArray[np.int64]
Step = tuple[Manifest, Way]


@dataclass(frozen=True, slots=True)
class _State:
    manifest: Manifest
    layout: Layout
    flats: Sequence[Words]
    changed: tuple[Index | None, ...]  # by shard, since where the poll began; None: anywhere


class Reader:
    """`name` is its own among the readers of a store: by it the publisher knows what is still needed."""

    def __init__(self, store: Store, name: str, threads: int = 2):
        if not re.fullmatch(r"[\w-]+", name):
            raise OffbookError(f"{name!r} cannot name a reader; use letters, digits, - and _")
        self.store, self._key = store, READERS + name
        self._state: _State | None = None
        self._lease = Lease(-1, int.from_bytes(os.urandom(4)))  # one that is started again is not taken for the old one
        self._beaten = -inf
        self._shards = ThreadPoolExecutor(threads, "shards")

    def poll(self) -> Weights | None:
        """The newest version, unless it is the one that was returned last or there is none."""
        problem: OffbookError | None = None
        for attempt in range(TRIES):
            number = self._head()
            if not number or (self._state is not None and number == self._state.manifest.number):
                self._hold(number)
                return None
            try:
                return self._go_to(number, self._state if attempt < TRIES - 1 else None)
            except (Missing, Damaged) as error:
                problem = error
        assert problem is not None
        raise problem

    def close(self) -> None:
        self._shards.shutdown()
        self.store.delete(self._key)

    def _head(self) -> int:
        """Where HEAD is junk or gone, the manifests tell: the publisher writes HEAD again with its next version."""
        try:
            return load(self.store.get(HEAD), Head).number
        except (Missing, Damaged):
            return newest(self.store)

    def _hold(self, number: int) -> None:
        """Nothing that a reader with this version needs is deleted."""
        now = time.monotonic()
        if number != self._lease.number or now - self._beaten > BEAT_S:
            self._lease, self._beaten = Lease(number, self._lease.beat + 1), now
            self.store.put(self._key, dump(self._lease))

    def _go_to(self, number: int, start: _State | None) -> Weights:
        route = self._route(number, start.manifest if start else None)
        manifest, way = route[0]
        self._hold(manifest.number if way.base is None else way.base)
        state = start and replace(start, changed=tuple(np.empty(0, np.int64) for _ in start.flats))
        for manifest, way in route:
            state = self._follow(state if way.base is not None else None, manifest, way)
        assert state is not None
        self._hold(number)
        self._state = state
        manifest, tensors = state.manifest, state.layout.views(dict(enumerate(state.flats)))
        told = manifest.adapter, manifest.digest, _changes(start, state)
        return Weights(manifest.version, tensors, *told)

    def _route(self, number: int, own: Manifest | None) -> list[Step]:
        """The fewest bytes to a version: from the one that is there already, or from an anchor."""
        floor = 0 if own is None else own.number
        manifests: dict[int, Manifest] = {}
        wanted = [number]
        while wanted:
            with suppress(Missing, Damaged):  # then nothing leads through it
                found = load(self.store.get(manifest_key(wanted.pop())), Manifest)
                manifests[found.number] = found
                bases = {way.base for way in found.ways if way.base is not None and way.base > floor}
                wanted += bases - manifests.keys() if own is not None or not found.is_anchor else ()
        cost: dict[tuple[int, str], float] = {} if own is None else {(own.number, own.digest): 0}
        steps: dict[int, Way] = {}
        for each in sorted(manifests):
            found = manifests[each]
            costs = [
                way.bytes + (0 if way.base is None else cost.get((way.base, way.base_digest), inf))
                for way in found.ways
            ]
            cost[each, found.digest] = min(costs, default=inf)
            steps[each] = found.ways[costs.index(min(costs))]
        if number not in steps or cost[number, manifests[number].digest] == inf:
            raise Missing(f"no patches in {self.store} lead to what was published last; publish it again as an anchor")
        route = [(manifests[number], steps[number])]
        while (base := route[0][1].base) is not None and base in steps:
            route.insert(0, (manifests[base], steps[base]))
        return route

    def _follow(self, state: _State | None, manifest: Manifest, way: Way) -> _State:
        if state is not None and state.manifest.layout == manifest.layout:
            layout, olds = state.layout, state.flats
        else:
            raw = self.store.get(layout_key(manifest.layout))
            if digest(raw) != manifest.layout or way.base is not None:
                raise Damaged(f"the layout of weights in {self.store} is not the one that was published")
            layout = load_layout(raw)
            olds = [layout.empty(shard) for shard in range(len(layout.shards))]
        if not len(way.parts) == len(manifest.shards) == len(olds):
            raise Damaged(f"the manifest of version {manifest.number} in {self.store} contradicts itself")
        made = list(self._shards.map(self._shard, olds, way.parts, manifest.shards))
        before = [None] * len(made) if state is None else state.changed
        changed = (_union(one, index) for one, (_, index) in zip(before, made, strict=True))
        return _State(manifest, layout, [new for new, _ in made], tuple(changed))

    def _shard(self, old: Words, part: Part, expected: str) -> tuple[Words, Index | None]:
        new = old
        changed: Index | None = np.empty(0, np.int64)
        if part.key:
            patch = self.store.get(part.key)
            if digest(patch) != part.sum:
                raise Damaged(f"{part.key} in {self.store} is not what was written there")
            index, words = decode(patch, old)
            if isinstance(index, slice):
                new, changed = words, None
            else:
                new, changed = old.copy(), index
                new[index] = words
        if digest(new) != expected:
            raise Damaged(f"{part.key} in {self.store} does not lead to the weights that were published")
        return new, changed


def _union(one: Index | None, other: Index | None) -> Index | None:
    if one is None or other is None:
        return None
    return np.union1d(one, other) if len(one) else other


def _changes(start: _State | None, state: _State) -> Changes | None:
    """For an engine that has the weights of `start`, if it is worth its while."""
    if start is None:
        return None
    changed = {shard: index for shard, index in enumerate(state.changed) if index is not None}
    words = sum(map(len, state.flats))
    if len(changed) < len(state.changed) or sum(map(len, changed.values())) > FEW * words:
        return None
    return Changes(start.manifest.digest, state.layout.within(changed))
