"""Follows what is published: `poll` fetches, unpacks and checks while the last version is served.

It returns new memory, shared with the last version where nothing changed; nothing that was returned before is written
to. If anything fails, the served version stays valid and the next poll starts from it again. Loading the new version is
the engine's part (`engine.apply`).
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from offbook.core.weights import Weights
from offbook.engine.sync.codec import Damaged, Words, decode
from offbook.engine.sync.layout import Layout, digest
from offbook.engine.sync.manifest import Manifest, Part, load, newest
from offbook.engine.sync.stores import Missing, Store
from offbook.types import OffbookError

TRIES = 3  # in a poll: what it was about to read may just have been deleted


@dataclass(frozen=True, slots=True)
class _State:
    number: int
    layout: Layout
    flats: Sequence[Words]


class Reader:
    def __init__(self, store: Store, threads: int = 2):
        self.store = store
        self._state: _State | None = None
        self._pool = ThreadPoolExecutor(threads, "shards")

    def poll(self) -> Weights | None:
        """The newest version, or None if it was returned last or there is none.

        It is reached by patches from the version that was returned last; if that fails, from an anchor.
        """
        problem: OffbookError | None = None
        for attempt in range(TRIES):
            number = newest(self.store)
            if number == (self._state.number if self._state else 0):
                return None
            try:
                return self._go_to(number, None if attempt else self._state)
            except (Missing, Damaged) as error:
                problem = error
        assert problem is not None
        raise problem

    def close(self) -> None:
        self._pool.shutdown()

    def _go_to(self, number: int, state: _State | None) -> Weights:
        newest_first = [load(self.store, number)]
        while True:
            first = newest_first[-1]
            if first.patches is not None and state is not None and first.number == state.number + 1:
                break
            if state is None and first.anchor is not None:
                break
            if first.patches is None:
                raise Missing(f"no patches in {self.store} lead to version {number} of the weights")
            newest_first.append(load(self.store, first.number - 1))
        for manifest in reversed(newest_first):
            state = self._follow(state, manifest)
        assert state is not None
        self._state = state
        latest = newest_first[0]
        return Weights(latest.version, state.layout.views(state.flats), latest.adapter)

    def _follow(self, state: _State | None, manifest: Manifest) -> _State:
        if state is not None:
            layout = state.layout
            olds = state.flats
            parts = manifest.patches
        else:
            assert manifest.layout is not None
            layout = manifest.layout
            olds = layout.empty()
            parts = manifest.anchor
        if parts is None or not len(parts) == len(manifest.shards) == len(olds):
            raise Damaged(f"the manifest of version {manifest.number} in {self.store} contradicts itself")
        return _State(manifest.number, layout, list(self._pool.map(self._shard, olds, parts, manifest.shards)))

    def _shard(self, old: Words, part: Part, expected: str) -> Words:
        new = old
        if part.key:
            patch = self.store.get(part.key)
            if digest(patch) != part.key.rpartition("/")[2]:
                raise Damaged(f"{part.key} in {self.store} is not what was written there")
            index, words = decode(patch, old)
            new = old.copy()
            new[index] = words
        if digest(new) != expected:
            raise Damaged(f"{part.key} in {self.store} does not lead to the weights that were published")
        return new
