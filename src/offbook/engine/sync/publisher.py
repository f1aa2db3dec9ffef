"""Publishes weights: what changed since the last time, now and then all of them.

`publish` copies the weights and returns; comparing, packing and writing go on beside the next training step. A version
is there when its manifest is, which is written last and by one writer only; HEAD follows. A crash in between leaves
objects that nobody reads, or a whole version that the next publisher moves HEAD to. Nothing is ever written over.

A publisher that starts does not have what was published before it, so its first version is an anchor.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import torch

from offbook.core.weights import Weights
from offbook.engine.sync.codec import Damaged
from offbook.engine.sync.layout import Layout, digest, dump_layout
from offbook.engine.sync.manifest import (
    HEAD,
    READERS,
    VERSIONS,
    Head,
    Lease,
    Manifest,
    Way,
    digest_all,
    dump,
    layout_key,
    load,
    manifest_key,
    newest,
    number_in,
)
from offbook.engine.sync.shards import Shards
from offbook.engine.sync.stores import Missing, Store
from offbook.types import OffbookError

SHARD_BYTES = 64 << 20
ANCHOR_EVERY = 32  # versions
TRIES = 3
T = TypeVar("T")
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Copy:
    """Weights as they were handed over."""

    layout: bytes
    shards: tuple[str, ...]  # their digests

    @property
    def digest(self) -> str:
        return digest_all(digest(self.layout), self.shards)


class Publisher:
    """The only one of its store: where another begins to publish after it, it ends.

    An anchor comes every `anchor_every` versions, and every `catch_up_every` a patch on the last anchor: who joins
    reads the two and a few patches more. What is older than both the last anchor and the slowest reader is deleted; a
    reader that has not shown itself for `lease_s` is not waited for. `dtype` is what matrices are rounded to, as the
    engines that read them do anyway; small tensors stay as they are.
    """

    def __init__(
        self,
        store: Store,
        *,
        anchor_every: int = ANCHOR_EVERY,
        catch_up_every: int = 8,
        lease_s: float = 600.0,
        dtype: torch.dtype | None = None,
        shard_bytes: int = SHARD_BYTES,
        threads: int = 2,
    ):
        self.store, self.dtype, self.shard_bytes, self.lease_s = store, dtype, shard_bytes, lease_s
        self.anchor_every, self.catch_up_every = anchor_every, catch_up_every
        self._writer = os.urandom(8).hex()
        self._head: tuple[int, str] | None = None  # number and tag; None: to be looked up
        self._last: _Copy | None = None  # what HEAD is, if it is ours
        self._anchor: tuple[int, _Copy | None] = (0, None)
        self._seen: dict[str, tuple[bytes, float]] = {}  # leases, and since when they are as they are
        self._number = 0  # that it published last
        self._is_over = False  # another one is there now
        self._strays: set[str] = set()
        self._is_doubtful = False  # something damaged the store: what else may have been?
        self._beside = ThreadPoolExecutor(1, "publish")
        self.shards = Shards(store, threads)
        self._running: Future[Manifest] | None = None

    def look(self) -> None:
        """Whether the store can be written to, and where it stands. Raises if not; `publish` looks by itself."""
        self._head = self._adopt()

    def publish(self, weights: Weights) -> None:
        """After the one before. The weights may change as soon as this returns."""
        self.wait()
        if self._is_over:
            raise self._another()
        layout = Layout.of(weights, self.shard_bytes, self.dtype)
        self.shards.take(layout, weights)
        self._running = self._beside.submit(self._publish, weights, layout)

    def wait(self) -> Manifest | None:
        """Until what was handed over last is there. Raises what it died of, once: the next may fare better."""
        running, self._running = self._running, None
        return None if running is None else running.result()

    def close(self) -> None:
        self._beside.shutdown()
        self.shards.close()
        self.wait()

    def _publish(self, weights: Weights, layout: Layout) -> Manifest:
        new = _Copy(dump_layout(layout), _in_order(self.shards.digests()))
        for _ in range(TRIES):
            number, tag = self._head or self._adopt()
            self._head = None  # until this is done: how far it came is looked up by the next
            manifest = self._write(weights, new, number + 1, tag)
            if manifest is not None:
                self._collect()
                return manifest
        raise self._another()

    def _adopt(self) -> tuple[int, str]:
        """HEAD, moved to the last version that is whole: a publisher that crashed may not have come to that."""
        self.store.create(HEAD, dump(Head(0)))  # it may be there
        start, tag = self._read_head()
        number = max(start, newest(self.store))
        found = self._manifest(number)
        self._refuse_later(found)
        if number > start:
            tag = self._move_head(number, tag)
        if found is None or self._last is None or found.digest != self._last.digest:
            self._last, self._anchor = None, (0, None)
        return number, tag

    def _manifest(self, number: int) -> Manifest | None:
        """None also where it cannot be read: then nothing builds on it."""
        try:
            return load(self.store.get(manifest_key(number)), Manifest)
        except (Missing, Damaged):
            return None

    def _read_head(self) -> tuple[int, str]:
        """Its number, and its tag. One that was deleted or cannot be read stands nowhere, and is written anew."""
        try:
            raw, tag = self.store.read(HEAD)
        except Missing:
            self.store.create(HEAD, b"")
            raw, tag = self.store.read(HEAD)
        try:
            return load(raw, Head).number, tag
        except Damaged:
            log.warning(
                "HEAD in %s is gone or cannot be read; it is written anew, and the next version is an anchor",
                self.store,
            )
            self._is_doubtful = True
            return -1, tag

    def _write(self, weights: Weights, new: _Copy, number: int, tag: str) -> Manifest | None:
        """None if the number is taken: by a write of a process that has ended, or of our own, that arrived late."""
        last, (anchored, anchor) = self._last, self._anchor
        layout, ways = digest(new.layout), []
        if last is not None and last.layout == new.layout:
            ways.append(Way(_in_order(self.shards.parts(number, "last")), number - 1, last.digest))
        self.store.put(layout_key(layout), new.layout)  # each time, for all versions need it: it may have been lost
        if not ways or anchor is None or number - anchored >= self.anchor_every:
            anchored, anchor = number, new
            ways.append(Way(_in_order(self.shards.parts(number, None))))
        elif number > anchored + 1 and (number - anchored) % self.catch_up_every == 0:
            ways.append(Way(_in_order(self.shards.parts(number, "anchor")), anchored, anchor.digest))
        adapter = json.loads(json.dumps(weights.adapter and dict(weights.adapter), default=sorted))  # it has sets in it
        manifest = Manifest(number, weights.version, self._writer, layout, new.shards, tuple(ways), adapter)
        if not self.store.create(manifest_key(number), dump(manifest)):
            found = self._manifest(number)
            self._refuse_later(found)
            if found != manifest:
                return None
        self._number = number
        self._head = number, self._move_head(number, tag)
        self.shards.keep(["last", "anchor"] if anchored == number else ["last"])
        self._last, self._anchor = new, (0, None) if self._is_doubtful else (anchored, anchor)
        self._is_doubtful = False
        return manifest

    def _move_head(self, number: int, tag: str) -> str:
        """Returns its new tag. An answer that was lost is no failure: what counts is where HEAD is."""
        for _ in range(TRIES):
            self.store.swap(HEAD, dump(Head(number)), tag)
            found, tag = self._read_head()
            if found == number:
                return tag
            if found > number:
                break
        raise self._another()

    def _refuse_later(self, found: Manifest | None) -> None:
        """Of another writer, behind a version of ours: that one began after us, and goes on. What a dead one wrote that
        arrives late has no number that is taken already, so it is never behind ours."""
        if found is not None and 0 < self._number < found.number and found.writer != self._writer:
            self._is_over = True
            raise self._another()

    def _another(self) -> OffbookError:
        mend = "end it, or give each run a store of its own"
        return OffbookError(f"another process publishes weights to {self.store}; {mend}")

    def _collect(self) -> None:
        """Manifests first: whoever finds one finds its patches, or was too slow and begins again at HEAD."""
        needed = [self._anchor[0], *self._leases()]
        numbers = {key: number_in(key) for key in self.store.keys(VERSIONS)}
        self._pass_over([key for key, number in numbers.items() if number is None])
        keys = [key for key, number in numbers.items() if number is not None and number < min(needed)]
        for key in sorted(keys, key=lambda key: not key.endswith("manifest")):
            self.store.delete(key)
        self.store.sweep()

    def _leases(self) -> list[int]:
        """The numbers that readers have who are alive."""
        now, found, numbers = time.monotonic(), {}, dict[str, int]()
        for key in self.store.keys(READERS):
            try:
                raw = self.store.get(key)
                numbers[key] = load(raw, Lease).number
            except Missing:
                continue  # it has just left
            except Damaged:
                self._pass_over([key])
                continue
            known, since = self._seen.get(key, (b"", now))
            found[key] = raw, since if raw == known else now
        self._seen = found
        for key in [key for key, (_, since) in found.items() if now - since > self.lease_s]:
            self.store.delete(key)
            del found[key], numbers[key]
        return [*numbers.values()]

    def _pass_over(self, strays: Collection[str]) -> None:
        """What is none of ours stays where it is, and is named once."""
        if new := set(strays) - self._strays:
            log.warning("passed over in %s, which is no place for it: %s", self.store, ", ".join(sorted(new)))
            self._strays |= new


def _in_order(of_shards: Mapping[int, T]) -> tuple[T, ...]:
    return tuple(of_shards[shard] for shard in range(len(of_shards)))
