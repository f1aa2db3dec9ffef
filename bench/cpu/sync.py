"""What a version of the weights costs on its way to an engine: bytes, and seconds of a core.

    python bench/cpu/sync.py --json figures.json                      # a small SmolLM2 shape with random weights
    python bench/cpu/sync.py --model ~/.cache/offbook/models/smollm2-135m --rows adamw-1e-6

Weights are those of real training: bfloat16 with float32 masters (offbook's own optimizers), next-token loss on this
repository's source, each step's serving copy against the one before, after some steps in which the optimizer settles.
Every encoding is decoded again and compared bit by bit. `bound` is what positions and distances cost an ideal coder
that knows the share of changed weights and how often each distance comes. Speeds are of one thread, the best of several
rounds, beside a memcpy of the same weights; MB are of weights, not of patches.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import zstandard
from peft import LoraConfig, inject_adapter_in_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from offbook.core.adapters import adapter_tensors
from offbook.core.weights import Weights
from offbook.engine import LocalEngine
from offbook.engine.sync import FolderStore, Publisher, Reader
from offbook.engine.sync.codec import _ordered, decode, encode
from offbook.engine.sync.layout import Layout, digest
from offbook.train.optim.muon import Muon
from offbook.train.optim.units import units_of

Row = dict[str, Any]
Tensors = dict[str, torch.Tensor]
VOCABULARY, WARM_STEPS = 8192, 8
SOURCE = Path(__file__).parents[2] / "src"


def pack(data: np.ndarray) -> int:
    return len(zstandard.ZstdCompressor(1).compress(np.ascontiguousarray(data).tobytes()))


def small_model() -> PreTrainedModel:
    """SmolLM2-135M with fewer layers and words; 26 million parameters."""
    torch.manual_seed(0)
    shape = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3}
    config = LlamaConfig(vocab_size=VOCABULARY, num_hidden_layers=6, tie_word_embeddings=True, **shape)
    return LlamaForCausalLM(config)


def texts(vocabulary: int, tokens: int) -> Iterator[torch.Tensor]:
    """Words of the source by their hashes, in rows of `tokens`."""
    words = " ".join(path.read_text() for path in sorted(SOURCE.rglob("*.py"))).split(" ")
    ids = torch.tensor([zlib.crc32(word.encode()) % vocabulary for word in words])
    while True:
        yield from ids[: len(ids) // tokens * tokens].view(-1, 1, tokens)


def snapshot(tensors: Tensors) -> list[np.ndarray]:
    layout = Layout.of(Weights(0, tensors), 64 << 20)
    return layout.flatten(tensors)


def training(name: str, options: argparse.Namespace) -> Iterator[Tensors]:
    """The serving copy after each step: bfloat16 but for the row float32, and an adapter's for LoRA. What is computed
    with are its values in float32, which is many times faster on a CPU."""
    method, rate = name.split("-", 1)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32) if options.model else small_model()
    batches = texts(model.config.vocab_size, options.tokens)
    if not options.model:
        first = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for _ in range(WARM_STEPS):
            ids = next(batches)
            model(input_ids=ids, labels=ids).loss.backward()
            first.step()
            first.zero_grad()
    if method == "lora":
        inject_adapter_in_model(LoraConfig(r=16, target_modules="all-linear"), model, "default")
    served = torch.bfloat16 if method in ("adamw", "muon") else torch.float32
    trained = {key: parameter for key, parameter in model.named_parameters() if parameter.requires_grad}
    masters = {key: torch.nn.Parameter(parameter.detach().clone()) for key, parameter in trained.items()}
    settings = {"lr": float(rate), "betas": (0.9, 0.95), "weight_decay": 0.0}
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(masters.values(), **settings)
    if method == "muon":
        optimizer = Muon(masters.items(), units_of(masters.items(), model.config), lr=float(rate))
    while True:
        ids = next(batches)
        model(input_ids=ids, labels=ids).loss.backward()
        for key, master in masters.items():
            master.grad, trained[key].grad = trained[key].grad, None
        optimizer.step()
        with torch.no_grad():
            for key, master in masters.items():
                trained[key].copy_(master.to(served))
        state = adapter_tensors(model) if method == "lora" else model.state_dict()
        copies: dict[int, torch.Tensor] = {}  # a tied output layer stays one
        for tensor in state.values():
            copies.setdefault(tensor.data_ptr(), tensor.to(served, copy=True))
        yield {key: copies[tensor.data_ptr()] for key, tensor in state.items()}


def entropy(counts: np.ndarray) -> float:
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log2(shares)).sum())


def sizes(old: np.ndarray, new: np.ndarray) -> Row:
    """Bytes of the shard's patch in each encoding."""
    index = np.flatnonzero(old != new)
    if not len(index):
        return {"changed": 0, "ours": 0, "gap+value": 0, "index+value": 0, "xor": pack(old ^ new), "bound": 0.0}
    distance = _ordered(new[index]) - _ordered(old[index])
    where = len(old) * entropy(np.array([len(index), len(old) - len(index)]))
    planes = (old ^ new).view(np.uint8).reshape(len(old), -1).T
    return {
        "changed": len(index),
        "ours": len(encode(old, new)),
        "gap+value": pack(np.diff(index, prepend=-1).astype("<u4")) + pack(new[index]),
        "index+value": len(index) * (4 + new.itemsize),
        "xor": sum(map(pack, planes)),
        "bound": (where + len(index) * entropy(np.unique(distance, return_counts=True)[1])) / 8,
    }


def applied(patch: bytes, old: np.ndarray) -> np.ndarray:
    index, words = decode(patch, old)
    if isinstance(index, slice):
        return words
    new = old.copy()
    new[index] = words
    return new


def best(job: Callable[[], object], rounds: int = 5) -> float:
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        job()
        times.append(time.perf_counter() - began)
    return min(times)


def speeds(olds: list[np.ndarray], news: list[np.ndarray]) -> Row:
    """MB/s of one thread, over all shards."""
    patches = [encode(old, new) for old, new in zip(olds, news, strict=True)]
    room = [np.empty_like(old) for old in olds]
    jobs: dict[str, Callable[[], object]] = {
        "memcpy": lambda: [np.copyto(target, old) for target, old in zip(room, olds, strict=True)],
        "encode": lambda: [encode(old, new) for old, new in zip(olds, news, strict=True)],
        "apply": lambda: [applied(patch, old) for patch, old in zip(patches, olds, strict=True) if patch],
        "digest": lambda: [digest(new) for new in news],
    }
    megabytes = sum(old.nbytes for old in olds) / 1e6
    return {name: megabytes / best(job) for name, job in jobs.items()}


def whole_way(before: Tensors, after: Tensors, model: PreTrainedModel | None) -> Row:
    """Through a publisher, a folder in memory and a reader, one thread each, into an engine."""
    store = FolderStore(tempfile.mkdtemp(dir="/dev/shm"))
    publisher, reader = Publisher(store, threads=1), Reader(store, threads=1)
    publisher.publish(Weights(0, before))
    publisher.wait()
    began = time.perf_counter()
    first = reader.poll()
    assert first is not None
    join_s = time.perf_counter() - began
    began = time.perf_counter()
    publisher.publish(Weights(1, after))
    copied_s = time.perf_counter() - began
    manifest = publisher.wait()
    assert manifest is not None
    publish_s = time.perf_counter() - began
    began = time.perf_counter()
    second = reader.poll()
    poll_s = time.perf_counter() - began
    assert second is not None
    assert all(torch.equal(second.tensors[name], tensor) for name, tensor in after.items())
    row = {"trainer waits": copied_s, "publish": publish_s, "poll": poll_s, "join": join_s}
    row["bytes"] = manifest.bytes
    row["anchor bytes"] = sum(len(store.get(key)) for key in store.keys("patches/000000001"))
    shutil.rmtree(store.folder)
    if model is not None:
        engine = LocalEngine(model.to(torch.bfloat16), frozenset())
        engine.apply(first)
        own = engine.model.state_dict()
        row["pause"] = best(lambda: engine._swap(own, second))
        assert all(torch.equal(tensor, second.tensors[name]) for name, tensor in own.items())
    return row


def measure(name: str, options: argparse.Namespace) -> Row:
    torch.set_num_threads(options.threads)
    began, rows = time.perf_counter(), []
    steps = training(name, options)
    for _ in range(options.settle):
        last = next(steps)
    for _ in range(options.versions):
        now = next(steps)
        olds, news = snapshot(last), snapshot(now)
        for old, new in zip(olds, news, strict=True):
            patch = encode(old, new)
            assert not patch or np.array_equal(applied(patch, old), new)
        each = [sizes(old, new) for old, new in zip(olds, news, strict=True)]
        rows.append({key: sum(row[key] for row in each) for key in each[0]})
        before, last = last, now
    words, full = sum(map(len, news)), sum(new.nbytes for new in news)
    row: Row = {"MB": full / 1e6, "changed": median(each["changed"] for each in rows) / words}
    row |= {key: full / median(each[key] for each in rows) for key in rows[0] if key != "changed"}
    torch.set_num_threads(1)
    row["MB/s"] = speeds(olds, news)
    served = name.startswith("adamw") and not options.model
    row["seconds"] = whole_way(before, last, small_model() if served else None)
    row["took_s"] = time.perf_counter() - began
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    rows = ["adamw-1e-6", "adamw-3e-6", "muon-1e-6", "lora-1e-4", "float32-1e-6"]
    parser.add_argument("--rows", nargs="+", default=rows, help="METHOD-LEARNING_RATE")
    parser.add_argument("--model", help="a folder, instead of random weights")
    parser.add_argument("--settle", type=int, default=10, help="steps before the first that is measured")
    parser.add_argument("--versions", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=128, help="of a step")
    parser.add_argument("--threads", type=int, default=1, help="for training; more collapse on a busy machine")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found: dict[str, Row] = {}
    keys = ["bound", "ours", "gap+value", "xor", "index+value"]
    print(f"{'times smaller':15}{'MB':>7}{'changed':>9}" + "".join(f"{key:>13}" for key in keys), flush=True)
    for name in options.rows:
        row = found[name] = measure(name, options)
        print(f"{name:15}{row['MB']:7.1f}{row['changed']:9.2%}" + "".join(f"{row[key]:13.1f}" for key in keys))
        for part in ("MB/s", "seconds"):
            numbers = (f"{key} {value:.4g}" for key, value in row[part].items())
            print(f"    {part}: " + ", ".join(numbers), flush=True)
        print(f"    took {row['took_s']:.0f} s", flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
