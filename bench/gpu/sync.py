"""Weights through a store into engines that are writing: `python bench/gpu/sync.py --model FOLDER --json sync.json`.

Rows, each by itself, so that one that fails costs the others nothing (`--rows` takes some of them):
  way     publish, fetch and unpack a version of the model's weights in bfloat16, with 1 and with many threads
  local   the local engine on the GPU: how long decoding pauses for all weights and for what changed alone, and a
          message whose tokens are of three versions, each against a forward of its own weights
  vllm    the same message from vLLM, and how long `apply` takes with requests on their way
A version is the one before with one weight in fifty moved by one to four units in the last place, as a step at a small
learning rate does; where versions are to be told apart by their log-probabilities, one in fifty changes its sign.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from vllm_engine import engine as vllm_engine
from vllm_engine import guarded, prompts

from offbook.core.weights import Weights
from offbook.engine import LocalEngine, VllmEngine
from offbook.engine.sync import FolderStore, Publisher, Reader
from offbook.types import Completion, Prompt

Row = dict[str, Any]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def network(options: argparse.Namespace) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16).to(DEVICE).eval()


@torch.no_grad()
def moved(model: PreTrainedModel, signs: bool = False) -> dict[str, Tensor]:
    """In place; and the weights."""
    for parameter in model.parameters():
        where = torch.rand(parameter.shape, device=parameter.device) < 0.02
        if signs:
            parameter[where] *= -1
        else:
            bits = parameter.view(torch.int16)
            bits[where] += torch.randint(1, 5, (int(where.sum()),), device=bits.device, dtype=torch.int16)
    return model.state_dict()


def seconds(job: Callable[[], object], rounds: int = 3) -> float:
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        job()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return min(times)


def way(options: argparse.Namespace) -> Row:
    row: Row = {}
    for threads in (1, options.threads):
        model, store = network(options), FolderStore(tempfile.mkdtemp(dir="/dev/shm"))
        publisher, reader = Publisher(store, threads=threads), Reader(store, threads=threads)
        publisher.publish(Weights(0, model.state_dict()))
        publisher.wait()
        began = time.perf_counter()
        reader.poll()
        found: Row = {"join_s": time.perf_counter() - began}
        tensors = moved(model)
        began = time.perf_counter()
        publisher.publish(Weights(1, tensors))
        found["trainer_waits_s"] = time.perf_counter() - began
        manifest = publisher.wait()
        assert manifest is not None
        found["publish_s"] = time.perf_counter() - began
        began = time.perf_counter()
        got = reader.poll()
        found["poll_s"] = time.perf_counter() - began
        assert got is not None
        assert all(torch.equal(tensors[name].cpu(), tensor) for name, tensor in got.tensors.items())
        full = sum(parameter.numel() * parameter.itemsize for parameter in model.parameters())
        found |= {"MB": full / 1e6, "times smaller": full / manifest.bytes}
        row[f"{threads} threads"] = found
    return row


@torch.no_grad()
def errors(states: list[dict[str, Tensor]], model: PreTrainedModel, prompt: list[int], completion: Completion) -> Row:
    """|log-probability - a forward of the weights of the token's own version|, and of the first version."""
    ids = torch.tensor([[*prompt, *completion.ids]], device=model.device)
    sampled = torch.tensor(completion.ids, device=model.device)[:, None]
    given, versions = torch.tensor(completion.logprobs), torch.tensor(completion.versions)
    apart = []
    for state in states:
        model.load_state_dict(state)
        logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
        apart.append((logits.log_softmax(-1).gather(1, sampled)[:, 0].cpu() - given).abs())
    own = torch.stack(apart)[versions, torch.arange(len(versions))]
    later = versions > 0
    return {
        "tokens by version": [int((versions == version).sum()) for version in range(len(states))],
        "of its own version": {"mean": own.mean().item(), "max": own.max().item()},
        "of version 0, later tokens": apart[0][later].mean().item() if later.any() else None,
    }


def in_flight(engine: LocalEngine | VllmEngine, options: argparse.Namespace) -> Row:
    """One message of three versions, which come through a store while it is written."""
    model, store = network(options), FolderStore(tempfile.mkdtemp(dir="/dev/shm"))
    publisher, reader = Publisher(store, threads=options.threads), Reader(store, threads=options.threads)
    states = [{name: tensor.clone() for name, tensor in model.state_dict().items()}]
    states += [{name: tensor.clone() for name, tensor in moved(model, signs=True).items()} for _ in range(2)]
    prompt = prompts(options, 1, seed=1)[0][: options.length // 2]
    applied: list[float] = []

    async def bring(version: int) -> None:
        publisher.publish(Weights(version, states[version]))
        publisher.wait()
        weights = await asyncio.to_thread(reader.poll)
        assert weights is not None
        began = time.perf_counter()
        await asyncio.to_thread(engine.apply, weights)
        applied.append(time.perf_counter() - began)

    async def main() -> Completion:
        await bring(0)
        await engine.open("warm").complete(Prompt(prompt), 64)
        writing = asyncio.create_task(engine.open("a").complete(Prompt(prompt), options.length // 2))
        for version in (1, 2):
            await asyncio.sleep(options.wait)
            await bring(version)
        return await writing

    completion = asyncio.run(main())
    return {"apply_s": applied, **errors(states, model, prompt, completion)}


def local(options: argparse.Namespace) -> Row:
    model, store = network(options), FolderStore(tempfile.mkdtemp(dir="/dev/shm"))
    publisher, reader = Publisher(store, threads=options.threads), Reader(store, threads=options.threads)
    engine = LocalEngine(network(options), frozenset(), mode="continuous")
    publisher.publish(Weights(0, model.state_dict()))
    publisher.wait()
    first = reader.poll()
    assert first is not None
    engine.apply(first)
    publisher.publish(Weights(1, moved(model)))
    publisher.wait()
    second = reader.poll()
    assert second is not None
    own = engine.model.state_dict()
    row: Row = {"pause_s": seconds(lambda: engine._swap(own, second))}
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in own.items())
    row["in flight"] = in_flight(engine, options)
    return row


def by_vllm(options: argparse.Namespace) -> Row:
    with vllm_engine(options) as engine:
        return in_flight(engine, options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a folder")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rows", nargs="+", default=["way", "local", "vllm"])
    parser.add_argument("--length", type=int, default=1024, help="of a prompt and a message together")
    parser.add_argument("--wait", type=float, default=0.5, help="seconds of writing before a version comes")
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--share", type=float, default=0.4, help="of the GPU, for vLLM")
    options = parser.parse_args()
    jobs = {"way": way, "local": local, "vllm": by_vllm}
    rows = {name: guarded(name, lambda name=name: jobs[name](options)) for name in options.rows}
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
