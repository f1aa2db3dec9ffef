"""Publishes weights: what changed since the last version, and now and then all of them.

`publish` copies the weights and returns; comparing, packing and writing go on during the next training step. A version
exists when its manifest does, which is written last. After a crash in between, its patches are garbage that is deleted
later. Nothing is overwritten. Of several ranks, rank 0 publishes and has all weights in its machine's memory twice.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch

from offbook.core.weights import Weights
from offbook.engine.sync.codec import Words, encode
from offbook.engine.sync.layout import Layout, digest
from offbook.engine.sync.manifest import (
    MANIFESTS,
    PATCHES,
    WRITERS,
    Manifest,
    Part,
    dump,
    manifest_key,
    newest,
    number_in,
    patch_key,
)
from offbook.engine.sync.stores import Store
from offbook.types import OffbookError

SHARD_BYTES = 64 << 20
ANCHOR_EVERY = 32  # versions


class Publisher:
    """The only one of its store: if another one begins later, this one raises.

    Every `anchor_every` versions there is an anchor, which can be read without the versions before it; the first
    version of a publisher is one. Versions older than the last two anchors are deleted. `dtype` is what matrices are
    rounded to, as the engines that read them do anyway; small tensors stay as they are.
    """

    def __init__(
        self,
        store: Store,
        *,
        anchor_every: int = ANCHOR_EVERY,
        dtype: torch.dtype | None = None,
        shard_bytes: int = SHARD_BYTES,
        threads: int = 2,
    ):
        self.store = store
        self.dtype = dtype
        self.shard_bytes = shard_bytes
        self.anchor_every = anchor_every
        self._writer = 0  # its number
        self._last: tuple[int, Layout, list[Words]] | None = None  # the version that patches can be made on
        self._anchors = [0, 0]
        self._pool = ThreadPoolExecutor(1, "publish")
        self._workers = ThreadPoolExecutor(threads, "shards")
        self._running: Future[Manifest] | None = None

    def look(self) -> None:
        """Raise if the store cannot be written to. From here on this is its publisher."""
        while not self._writer:
            number = newest(self.store, WRITERS) + 1
            if self.store.create(f"{WRITERS}/{number:09d}", b""):
                self._writer = number

    def publish(self, weights: Weights) -> None:
        """After the last one has finished. The weights may change as soon as this returns."""
        self.wait()
        layout = Layout.of(weights, self.shard_bytes, self.dtype)
        self._running = self._pool.submit(self._publish, weights, layout, layout.flatten(weights.tensors))

    def wait(self) -> Manifest | None:
        """Wait for the last `publish` and raise its error, once: the next one starts afresh."""
        running = self._running
        self._running = None
        return None if running is None else running.result()

    def close(self) -> None:
        self._pool.shutdown()
        self._workers.shutdown()
        self.wait()

    def _publish(self, weights: Weights, layout: Layout, shards: list[Words]) -> Manifest:
        self.look()
        if newest(self.store, WRITERS) > self._writer:
            mend = "end it, or give each run a store of its own"
            raise OffbookError(f"another process publishes weights to {self.store}; {mend}")
        number = newest(self.store) + 1
        last = self._last
        self._last = None  # what an error leaves is unknown: an anchor follows
        has_base = last is not None and last[:2] == (number - 1, layout)
        is_anchor = not has_base or number - self._anchors[-1] >= self.anchor_every
        manifest = Manifest(
            number,
            weights.version,
            self._writer,
            tuple(self._workers.map(digest, shards)),
            self._parts(number, shards, last[2]) if last and has_base else None,
            self._parts(number, shards, [None] * len(shards)) if is_anchor else None,
            layout if is_anchor else None,
            json.loads(json.dumps(weights.adapter and dict(weights.adapter), default=sorted)),  # it has sets in it
        )
        raw = dump(manifest)
        if not self.store.create(manifest_key(number), raw) and self.store.get(manifest_key(number)) != raw:
            return self._publish(weights, layout, shards)  # taken by a late write of an earlier attempt
        self._last = number, layout, shards
        if is_anchor:
            self._anchors = [self._anchors[-1], number]
            # Manifests first: a reader that finds one finds its patches, or starts again from the newest.
            for key in [*self.store.keys(MANIFESTS), *self.store.keys(PATCHES)]:
                found = number_in(key)
                if found is not None and found < self._anchors[0]:
                    self.store.delete(key)
        return manifest

    def _parts(self, number: int, news: list[Words], olds: Sequence[Words | None]) -> tuple[Part, ...]:
        """Write the patches of a version, on zeros where there is no old shard."""

        def part(new: Words, old: Words | None) -> Part:
            patch = encode(np.zeros_like(new) if old is None else old, new)
            if not patch:
                return Part()
            key = patch_key(number, digest(patch))
            self.store.put(key, patch)
            return Part(key, len(patch))

        return tuple(self._workers.map(part, news, olds))
