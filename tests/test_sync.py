"""Weights through a store: whatever happens to the writes, a reader has exactly the bits of some published version."""

from __future__ import annotations

import multiprocessing
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from torch import Tensor

from offbook.core.weights import Weights
from offbook.engine.sync import Damaged, FolderStore, Missing, Publisher, Reader, Store, open_store
from offbook.engine.sync.codec import decode, encode
from offbook.engine.sync.layout import Layout
from offbook.engine.sync.manifest import dump, load, manifest_key, number_in
from offbook.types import OffbookError

Tensors = dict[str, Tensor]
WORDS = [np.uint8, np.uint16, np.uint32, np.uint64]


def applied(patch: bytes, old: np.ndarray) -> np.ndarray:
    if not patch:
        return old
    index, words = decode(patch, old)
    new = old.copy()
    new[index] = words
    new[index] = words  # twice does no harm
    return new


# The codec


@st.composite
def pairs(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Any bits (NaN, -0, subnormal), any share of them changed, by anything."""
    dtype, size = draw(st.sampled_from(WORDS)), draw(st.integers(0, 3000))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    top = np.iinfo(dtype).max
    old = rng.integers(0, top, size, dtype, endpoint=True)
    new = old.copy()
    where = rng.random(size) < draw(st.sampled_from([0, 0.001, 0.02, 0.5, 1]))
    if draw(st.booleans()):
        new[where] = rng.integers(0, top, int(where.sum()), dtype, endpoint=True)
    else:
        new[where] += np.asarray(rng.integers(-20, 21, int(where.sum())), dtype="i8").astype(dtype)
    return old, new


@given(pairs())
@example((np.zeros(70_000, np.uint16), np.append(np.zeros(69_999, np.uint16), np.uint16(1))))  # one gap of many bytes
@example((np.array([0x8000, 0], np.uint16), np.array([0, 0x8000], np.uint16)))  # -0 and 0 are not the same bits
def test_a_patch_makes_the_old_bits_the_new_ones(pair: tuple[np.ndarray, np.ndarray]) -> None:
    old, new = pair
    assert np.array_equal(applied(encode(old, new), old), new)


@given(npst.arrays(np.uint32, st.integers(1, 500)))
def test_an_anchor_is_a_patch_on_zeros(new: np.ndarray) -> None:
    assert np.array_equal(applied(encode(np.zeros_like(new), new), np.zeros_like(new)), new)


def test_a_step_to_the_next_number_takes_four_bits_at_most() -> None:
    """By hand: of 1,000 bfloat16 every tenth moves by one unit; half a byte for each distance, none for the gaps."""
    old = torch.linspace(-2, 2, 1000).bfloat16().view(torch.uint16).numpy().copy()
    new = old.copy()
    new[::10] += 1
    assert len(encode(old, new)) < 18 + 32 + 4 * 16 + 50


@given(st.data())
@settings(max_examples=200)
def test_a_damaged_patch_is_refused_or_decoded_within_bounds(data: st.DataObject) -> None:
    old, new = data.draw(pairs().filter(lambda pair: not np.array_equal(*pair)))
    patch = bytearray(encode(old, new))
    cut = data.draw(st.integers(0, len(patch)))
    if data.draw(st.booleans()):
        patch = patch[:cut]
    else:
        patch[min(cut, len(patch) - 1)] ^= data.draw(st.integers(1, 255))
    try:
        index, words = decode(bytes(patch), old)
    except Damaged:
        return
    old.copy()[index] = words


# Tensors and shards


def tensors(seed: int = 0) -> Tensors:
    rng = torch.Generator().manual_seed(seed)
    embedding = torch.randn(30, 8, generator=rng).bfloat16()
    return {
        "embed.weight": embedding,
        "layer.weight": torch.randn(8, 8, generator=rng).bfloat16(),
        "layer.turned": torch.randn(6, 4, generator=rng).bfloat16().T,
        "norm.weight": torch.randn(8, generator=rng),
        "scale": torch.tensor(float(seed)),
        "counts": torch.arange(5) + seed,
        "flags": torch.tensor([True, False, bool(seed % 2)]),
        "nothing": torch.empty(0, 3),
        "head.weight": embedding,
    }


def nudged(old: Tensors, seed: int, share: float = 0.05) -> Tensors:
    """As a step does: some words move a little. A third of all times a float is no number, or a zero has a sign."""
    rng = random.Random(seed)
    new = {name: tensor.clone() for name, tensor in old.items()}
    for name, tensor in new.items():
        if tensor.is_floating_point() and tensor.numel():
            flat = tensor.view(-1) if tensor.is_contiguous() else tensor.T.view(-1)
            for place in rng.sample(range(len(flat)), max(1, int(share * len(flat)))):
                odd = rng.choice([float("nan"), -0.0, float("inf")])
                flat[place] = odd if rng.random() < 0.3 else flat[place] * (1 + 2**-7)
        assert name in old
    new["head.weight"] = new["embed.weight"]
    return new


def bits(made: Tensors) -> dict[str, bytes]:
    return {name: tensor.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes() for name, tensor in made.items()}


@pytest.mark.parametrize("shard_bytes", [1, 200, 1 << 20])
def test_tensors_come_back_from_shards(shard_bytes: int) -> None:
    made = tensors()
    layout = Layout.of(Weights(0, made), shard_bytes)
    back = layout.views(layout.flatten(made))
    assert bits(back) == bits(made)
    assert {name: (t.dtype, t.shape) for name, t in back.items()} == {n: (t.dtype, t.shape) for n, t in made.items()}
    assert back["head.weight"].data_ptr() == back["embed.weight"].data_ptr()  # tied: sent once
    assert sum(count for _, count in layout.shards) == sum(t.numel() for n, t in made.items() if n != "head.weight")


# Stores


@pytest.fixture(params=["folder", "bucket"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "folder":
        return FolderStore(tmp_path)
    pytest.importorskip("obstore", reason="obstore is not installed (offbook[store])")
    return open_store("memory:///")


@pytest.fixture
def folder(tmp_path: Path) -> Store:
    return FolderStore(tmp_path)


def check_store(store: Store) -> None:
    """What the rest relies on."""
    with pytest.raises(Missing):
        store.get("a/b")
    assert store.create("a/b", b"1")
    assert not store.create("a/b", b"1")
    assert not store.create("a/b", b"2")
    assert store.get("a/b") == b"1"
    store.put("a/b", b"5")
    assert store.get("a/b") == b"5"
    store.put("a/c/d", b"6" * 100_000)
    assert store.keys("a") == ["a/b", "a/c/d"]
    store.delete("a/b")
    store.delete("a/b")
    assert store.keys("a") == ["a/c/d"]
    assert store.keys("nothing") == []
    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(lambda number: store.create("race", b"%d" % number), range(8)))
    assert sum(won) == 1
    assert store.get("race") == b"%d" % won.index(True)


def test_a_store_does_what_is_asked_of_it(store: Store) -> None:
    check_store(store)


# Publishing and reading


def published(publisher: Publisher, version: int, made: Tensors) -> None:
    publisher.publish(Weights(version, made))
    publisher.wait()


def polled(store: Store) -> Weights:
    """By a reader that has nothing yet."""
    got = Reader(store).poll()
    assert got is not None
    return got


def test_a_reader_has_the_bits_of_every_version(store: Store) -> None:
    publisher, reader = Publisher(store, anchor_every=4, shard_bytes=300), Reader(store)
    assert reader.poll() is None
    made = tensors()
    for version in range(10):
        published(publisher, version, made)
        got = reader.poll()
        assert got is not None
        for each in (got, polled(store)):
            assert (each.version, bits(each.tensors)) == (version, bits(made))
        assert reader.poll() is None
        made = nudged(made, version)
    publisher.close()


def test_what_was_handed_out_is_not_written_to(folder: Store) -> None:
    publisher, reader = Publisher(folder), Reader(folder)
    first, second = tensors(), nudged(tensors(), 1)
    published(publisher, 0, first)
    old = reader.poll()
    published(publisher, 1, second)
    new = reader.poll()
    assert old is not None
    assert new is not None
    assert bits(old.tensors) == bits(first)
    assert bits(new.tensors) == bits(second)


def test_weights_may_change_as_soon_as_they_are_handed_over(folder: Store) -> None:
    made = tensors()
    publisher = Publisher(folder)
    expected = bits(made)
    publisher.publish(Weights(0, made))
    made["layer.weight"].zero_()
    publisher.wait()
    assert bits(polled(folder).tensors) == expected


def test_matrices_are_rounded_as_the_engine_keeps_them(folder: Store) -> None:
    matrix = torch.randn(4, 4)
    made = {"matrix": matrix, "norm": torch.randn(4), "tied": matrix}
    published(Publisher(folder, dtype=torch.bfloat16), 0, made)
    got = polled(folder)
    assert torch.equal(got.tensors["matrix"], made["matrix"].bfloat16())
    assert torch.equal(got.tensors["norm"], made["norm"])
    assert got.tensors["tied"].data_ptr() == got.tensors["matrix"].data_ptr()


def test_an_adapter_travels_with_its_configuration(folder: Store) -> None:
    """And between weights of another layout, which need an anchor."""
    publisher, reader = Publisher(folder), Reader(folder)
    adapter = {"r": 4, "target_modules": {"q_proj", "v_proj"}}
    for version, (made, about) in enumerate([(tensors(), None), ({"a.lora_A.weight": torch.randn(4, 8)}, adapter)] * 2):
        publisher.publish(Weights(version, made, about))
        publisher.wait()
        got = reader.poll()
        assert got is not None
        assert bits(got.tensors) == bits(made)
        assert (got.adapter is None) == (about is None)
        if got.adapter is not None:
            assert got.adapter["r"] == 4
            assert set(got.adapter["target_modules"]) == adapter["target_modules"]


def numbers(store: Store) -> set[int | None]:
    return {number_in(key) for key in [*store.keys("patches"), *store.keys("manifests")]}


def test_two_anchors_and_what_follows_them_are_kept(folder: Store) -> None:
    made = tensors()
    publisher, slow = Publisher(folder, anchor_every=3), Reader(folder)

    def publish_more(count: int) -> None:
        nonlocal made
        for _ in range(count):
            made = nudged(made, random.randrange(1000))
            published(publisher, 0, made)

    publish_more(2)
    slow.poll()
    left = folder.folder / "patches" / "000000002" / ".killed"  # by a writer that was killed
    left.write_bytes(b"half")
    publish_more(9)
    assert numbers(folder) == set(range(7, 12))  # the anchors are 7 and 10
    assert not left.exists()
    for got in (slow.poll(), polled(folder)):  # its patches are gone: by an anchor
        assert got is not None
        assert bits(got.tensors) == bits(made)


def test_a_publisher_that_is_killed_leaves_whole_versions(tmp_path: Path) -> None:
    """Again and again, at any moment, in a folder; the policy's version says what the weights are."""
    store, rng = FolderStore(tmp_path), random.Random(0)
    reader, seen = Reader(store), []

    def numbered(version: int) -> Tensors:
        return {"w": torch.arange(5000).bfloat16() + version, "v": torch.tensor(version)}

    def publish_on(first: int) -> None:
        publisher = Publisher(FolderStore(tmp_path), anchor_every=5, shard_bytes=4000)
        for version in range(first, first + 10_000):
            publisher.publish(Weights(version, numbered(version)))

    for life in range(8):
        process = multiprocessing.get_context("fork").Process(target=publish_on, args=(1000 * life,))
        process.start()
        time.sleep(0.1 + rng.random() * 0.2)
        process.kill()
        process.join()
        for each in (reader, Reader(store)):
            got = each.poll()
            if got is not None:
                assert bits(got.tensors) == bits(numbered(got.version))
                seen.append(got.version // 1000)
    assert len(set(seen)) > 4


def test_the_publisher_that_began_later_goes_on_and_readers_stay_with_it(folder: Store) -> None:
    first, reader = Publisher(folder), Reader(folder)
    published(first, 1, tensors(1))
    second = Publisher(folder)
    second.look()
    for version in range(101, 104):
        published(second, version, tensors(version))
        with pytest.raises(OffbookError, match=r"another process publishes weights to .*; end it, or"):
            published(first, 2, tensors(2))
        got = reader.poll()
        assert got is not None
        assert (got.version, bits(got.tensors)) == (version, bits(tensors(version)))


def test_a_publisher_that_comes_after_another_goes_on_with_its_numbers(folder: Store) -> None:
    """The policy versions of a run that is resumed go back; what is read does not."""
    reader = Reader(folder)
    published(Publisher(folder), 5, tensors(0))
    reader.poll()
    published(Publisher(folder), 3, tensors(1))
    got = reader.poll()
    assert got is not None
    assert (got.version, bits(got.tensors)) == (3, bits(tensors(1)))


@pytest.mark.parametrize("what", ["patches", "manifests"])
def test_a_damaged_object_is_refused_and_the_next_anchor_heals_it(folder: Store, what: str) -> None:
    made = tensors()
    publisher, reader = Publisher(folder, anchor_every=3), Reader(folder)
    published(publisher, 0, made)
    old = reader.poll()
    published(publisher, 1, nudged(made, 1))
    key = next(key for key in folder.keys(what) if number_in(key) == 2)
    folder.put(key, folder.get(key)[:-1] + b"?")
    with pytest.raises(Damaged, match=f"{key} in .* is (not what was written there|damaged)"):
        reader.poll()
    assert old is not None
    assert bits(old.tensors) == bits(made)
    for version in (2, 3):
        published(publisher, version, nudged(made, version))
    got = reader.poll()
    assert got is not None
    assert bits(got.tensors) == bits(nudged(made, 3))


def test_a_patch_that_leads_elsewhere_is_refused(folder: Store) -> None:
    """It is what was written, and on the right base; but what was published is something else."""
    made = tensors()
    publisher, reader = Publisher(folder), Reader(folder)
    published(publisher, 0, made)
    reader.poll()
    published(publisher, 1, nudged(made, 1))
    manifest = load(folder, 2)
    folder.put(manifest_key(2), dump(replace(manifest, shards=("0" * 32, *manifest.shards[1:]))))
    with pytest.raises(OffbookError, match="does not lead to the weights that were published"):
        reader.poll()


def test_what_cannot_be_a_store_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for where in (str(tmp_path / "file"), "s3:/bucket"):
        with pytest.raises(OffbookError) as refused:
            Publisher(open_store(where)).look()
        assert "\n" not in str(refused.value)


# Faults


class Lost(Exception):
    """The connection: the write may have happened or not."""


class Crash(BaseException):
    """The process is gone."""


class Memory:
    """A store for hundreds of examples."""

    def __init__(self) -> None:
        self._objects: dict[str, bytes] = {}

    def get(self, key: str) -> bytes:
        if key not in self._objects:
            raise Missing(key)
        return self._objects[key]

    def put(self, key: str, data: bytes) -> None:
        self._objects[key] = bytes(data)

    def create(self, key: str, data: bytes) -> bool:
        return self._objects.setdefault(key, data) is data

    def delete(self, key: str) -> None:
        self._objects.pop(key, None)

    def keys(self, folder: str) -> list[str]:
        return sorted(key for key in list(self._objects) if key.startswith(folder + "/"))


@dataclass
class Faulty:
    """A store behind a network that loses requests, answers and the process, and repeats or delays writes."""

    inner: Store
    faults: list[str]  # by operation
    rng: random.Random
    earlier: list[Callable[[], object]] = field(default_factory=list)
    late: list[tuple[int, Callable[[], object]]] = field(default_factory=list)

    def __str__(self) -> str:
        return "a store with faults"

    def _do(self, job: Callable[[], object], writes: bool = False) -> object:
        fault = self.faults.pop(0) if self.faults else "none"
        due = [late for wait, late in self.late if not wait]
        self.late = [(wait - 1, late) for wait, late in self.late if wait]
        for each in due:
            each()
        if fault.endswith("late") and writes:
            self.late.append((self.rng.randrange(12), job))
            raise Crash if fault == "crash late" else Lost
        if fault == "crash before":
            raise Crash
        if fault == "lost before":
            raise Lost
        done = job()
        if writes:
            self.earlier.append(job)
            if fault == "twice":
                job()
            if fault == "earlier":
                self.rng.choice(self.earlier)()
        if fault == "crash after":
            raise Crash
        if fault == "lost after":
            raise Lost
        return done

    def get(self, key):
        return self._do(lambda: self.inner.get(key))

    def put(self, key, data):
        return self._do(lambda: self.inner.put(key, data), writes=True)

    def create(self, key, data):
        return self._do(lambda: self.inner.create(key, data), writes=True)

    def delete(self, key):
        return self._do(lambda: self.inner.delete(key), writes=True)

    def keys(self, prefix):
        return self._do(lambda: self.inner.keys(prefix))


FAULTS = ["lost before", "lost after", "lost late", "crash before", "crash after", "crash late", "twice", "earlier"]


@given(st.integers(0, 2**32), st.sampled_from([0.01, 0.03, 0.1]))
@settings(max_examples=150)
def test_whatever_happens_to_writes_a_reader_has_a_version_that_was_published(seed: int, share: float) -> None:
    rng = random.Random(seed)

    def faults() -> list[str]:
        return [rng.choice(FAULTS) if rng.random() < share else "none" for _ in range(400)]

    store, made = Memory(), {"w": torch.zeros(40, 2).bfloat16(), "n": torch.zeros(3)}
    behind = Faulty(store, faults(), rng)

    def start() -> Publisher:
        return Publisher(behind, anchor_every=4, shard_bytes=64, threads=1)

    publisher, handed_over = start(), {}
    watching = Faulty(store, faults(), rng)
    reader = Reader(watching, threads=1)

    def check(poll: Callable[[], Weights | None]) -> int | None:
        got = poll()
        if got is not None:
            assert bits(got.tensors) == handed_over[got.version]
        return got.version if got is not None else None

    last = -1
    for version in range(12):
        made = {name: tensor.clone() for name, tensor in made.items()}
        made["w"].view(-1)[version * 3 % 70 : version * 3 % 70 + 5] += 1 + version
        made["n"][version % 3] -= version
        handed_over[version] = bits(made)
        try:
            published(publisher, version, made)
            last = version
        except Lost:
            pass
        except Crash:
            publisher = start()
        try:
            check(reader.poll)
        except Lost:
            pass
        except Crash:
            reader = Reader(watching, threads=1)
        fresh = check(Reader(store, threads=1).poll)
        assert (fresh if fresh is not None else -1) >= last  # what was published stays
    behind.faults.clear()
    watching.faults.clear()
    published(publisher, 99, made)
    handed_over[99] = bits(made)
    assert check(reader.poll) == 99
    assert check(Reader(store, threads=1).poll) == 99
