"""What a step moves between ranks: `python bench/cpu/traffic.py --json traffic.json`.

First measured, on forked gloo ranks with small models: collectives of one step and the bytes that a rank receives,
beside what the layout has to move at least. Then, labelled as simulated, what a step of a model in the shape of Kimi
K2.5 would take on 64 to 512 GPUs, from the rates given on the command line, and what becomes of it when one of them is
half as good.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import defaultdict
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from offbook.core.config import LoraConfig, TrainConfig
from offbook.train.lora import make_trainable
from offbook.train.optim.newton_schulz import step_flops
from offbook.train.parallel.context import Context
from offbook.train.parallel.dense import make_mesh
from offbook.train.parallel.experts import make_expert_mesh
from offbook.train.parallel.ranks import Ranks
from offbook.train.parallel.traffic import Meshes, Moved, Work, step_traffic
from offbook.train.trainer import Trainer
from offbook.types import Sample

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from ranks import on_ranks

TOKENS, SAMPLES = 64, 2
PARTS = ("rl_weight", "ce_weight")  # of the loss
LAYOUTS = [(1, 4), (2, 2), (1, 8), (1, 4, 1, 1, 4), (1, 8, 1, 2, 4), (2, 4, 1, 1, 8), (2, 4, 2, 1, 4)]


class Traffic(TorchDispatchMode):
    """Calls of collectives, and bytes that come to this rank from others."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, int] = defaultdict(int)
        self.bytes: dict[str, float] = defaultdict(float)

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(operator)
        if name.startswith("c10d."):
            sizes = [leaf.nbytes for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            kind = name.split(".")[1].strip("_").replace("_base", "").replace("allgather_into_tensor", "allgather")
            if kind.startswith("allgather") and len(sizes) == 2:  # of all ranks, and this one's own
                self._add("all-gather", max(sizes) - min(sizes))
            elif kind.startswith("reduce_scatter"):
                self._add("reduce-scatter", max(sizes) - min(sizes))
            elif kind.startswith("allreduce") and max(sizes) > 64:  # norms and counts are smaller
                self._add("all-reduce", 2 * max(sizes))
            elif kind.startswith("alltoall") and max(sizes) > 64:
                self._add("all-to-all", sizes[0])
        return operator(*args, **(kwargs or {}))

    def _add(self, name: str, received: float) -> None:
        self.calls[name] += 1
        self.bytes[name] += received


def make() -> Qwen3MoeForCausalLM:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=8,
        num_experts=8,
        num_experts_per_tok=2,
        tie_word_embeddings=False,
    )
    return Qwen3MoeForCausalLM(config).eval()


def counted(
    dense: tuple[int, int],
    experts: tuple[int, int, int] | None = None,
    rows: int = 1,
    options: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """On a rank: calls and bytes of a second step, and what the layout has to move. `lora` is an adapter's rank,
    and `on` the experts' matrices that have one too."""
    given = dict(options or {})
    lora = LoraConfig(rank=given.pop("lora", 0), parameters=given.pop("on", []))
    settings = TrainConfig(optimizer="muon", lora=lora, **given).settled()
    meshes, model = Meshes(dense, experts, rows), make()
    make_trainable(model, settings.lora, "", 0)
    context = Context(rows, "cpu") if rows > 1 else None
    ranks = Ranks(make_mesh(*dense, "cpu"), make_expert_mesh(*experts, "cpu") if experts else None, context)
    config, named = model.config, dict(model.named_parameters())
    keys = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    moved = Moved.of(named, config, keys, meshes)
    trainer = Trainer(model, settings, {}, ranks)
    rng = random.Random(dist.get_rank() // rows)
    samples = [_sample([rng.randrange(320) for _ in range(TOKENS)]) for _ in range(SAMPLES)]
    trainer.step(samples)
    counter = Traffic()
    with counter:
        trainer.step(samples)
    work = Work(
        tokens=SAMPLES * TOKENS // rows,
        micro_batches=SAMPLES if rows > 1 else -(-SAMPLES * TOKENS // settings.micro_tokens),
        backwards=len(PARTS) if settings.log_parts else 1,
        recomputes=settings.recompute != "none",
    )
    needed = step_traffic(moved, meshes, work, muon=True)
    return {"calls": dict(counter.calls), "bytes": dict(counter.bytes), "needed": needed}


def _sample(ids: list[int]) -> Sample:
    streams = {"logprobs": [-1.0] * TOKENS, "advantage": [1.0] * TOKENS}
    return Sample(ids, **streams, **{part: [1.0] * TOKENS for part in PARTS})


def show_measured() -> list[dict[str, Any]]:
    print("measured: bytes that a rank receives in one step, mean over ranks, float32, and what the layout needs")
    print(f"{'layout':22}{'collective':16}{'calls':>7}{'bytes':>12}{'needed':>12}{'by':>7}")
    rows = []
    for layout in LAYOUTS:
        try:
            answers = on_ranks(layout[0] * layout[1], counted, layout[:2], layout[2:] or None)
        except AssertionError as error:  # the other layouts are worth their seconds
            print(f"{layout!s:22}failed: {str(error).splitlines()[-1]}")
            continue
        for name in ("all-gather", "reduce-scatter", "all-reduce", "all-to-all"):
            got = sum(answer["bytes"].get(name, 0.0) for answer in answers) / len(answers)
            needed = sum(answers[0]["needed"][name].values())
            calls = answers[0]["calls"].get(name, 0)
            row = {"layout": layout, "collective": name, "calls": calls, "bytes": got, "needed": needed}
            rows.append(row)
            by = f"{got / needed:7.3f}" if needed else ""
            print(f"{layout!s:22}{name:16}{calls:7}{got:12.0f}{needed:12.0f}{by}", flush=True)
    return rows


@dataclass(frozen=True, slots=True)
class Rates:
    """Of one GPU. TFLOP/s of training and of Muon's products, as one H200 had them (docs/results/scale.md); GB/s
    between nodes and the share of traffic that is hidden are assumed."""

    training: float = 185.0
    muon: float = 332.0
    network: float = 45.0
    hidden: float = 0.8


@dataclass(frozen=True, slots=True)
class Large:
    """A mixture in the shape of Kimi K2.5."""

    layers: int = 60
    experts: int = 384
    top: int = 8
    width: int = 7168
    inner: int = 2048
    dense: float = 12e9  # parameters that are no experts
    active: float = 32e9

    @property
    def matrices(self) -> int:
        return 3 * self.layers * self.experts


def simulated(gpus: int, rates: Rates, tokens: float = 8e6) -> dict[str, float]:
    """Seconds of a step of `tokens`: experts over 64 ranks, dense weights sharded over 64, the rest are replicas."""
    model = Large()
    ep = min(64, gpus)
    mine = tokens / gpus
    compute = 6 * model.active * mine / (rates.training * 1e12)
    dispatch = 4 * model.layers * mine * model.top * model.width * 2 * (ep - 1) / ep
    gathers = 2 * 3 * model.dense * 63 / 64  # bfloat16: twice gathered, once reduced
    shards = max(1, gpus // ep)
    held = model.matrices * model.width * model.inner / ep * 2
    experts = 3 * held * (shards - 1) / shards
    traffic = (dispatch + gathers + experts) / (rates.network * 1e9)
    flops = step_flops(model.inner, model.width)["symmetric"]
    muon = model.matrices / gpus * flops / (rates.muon * 1e12)
    exposed = max(traffic - compute * rates.hidden, (1 - rates.hidden) * traffic)
    return {"compute": compute, "traffic": traffic, "exposed": exposed, "muon": muon, "step": compute + exposed + muon}


def show_simulated(rates: Rates) -> list[dict[str, Any]]:
    print("\nSIMULATED, not measured: seconds of a step of 8 M tokens, Kimi-K2.5-shaped, 64-way expert parallelism")
    print(f"rates: {rates}")
    print(f"{'GPUs':>6}{'compute':>10}{'traffic':>10}{'exposed':>10}{'muon':>8}{'step':>9}   step if a rate is half")
    rows = []
    for gpus in (64, 128, 256, 512):
        found = simulated(gpus, rates)
        worse = {
            name: simulated(gpus, replace(rates, **{name: getattr(rates, name) / 2}))["step"] / found["step"] - 1
            for name in ("training", "muon", "network", "hidden")
        }
        rows.append({"gpus": gpus, **found, "worse": worse})
        told = ", ".join(f"{name} {share:+.0%}" for name, share in worse.items())
        print(
            f"{gpus:6}{found['compute']:10.2f}{found['traffic']:10.2f}{found['exposed']:10.2f}{found['muon']:8.3f}"
            f"{found['step']:9.2f}   {told}"
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    for rate in fields(Rates):
        parser.add_argument(f"--{rate.name}", type=float, default=rate.default)
    options = parser.parse_args()
    rates = Rates(options.training, options.muon, options.network, options.hidden)
    found = {"measured": show_measured(), "simulated": show_simulated(rates)}
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
