"""A mixture of experts in training: `python bench/gpu/moe.py --json moe.json`.

In the shape of Qwen3-30B-A3B, random weights, bfloat16, as many layers as `--layers` says, with an adapter on
attention, experts and router fixed, on one sample of `--length` tokens per micro-batch with hints along. Given are the
seconds of a step, the peak of memory, and the floating-point operations of the layers that a step needs (products with
fixed weights forward and back, attention forward and twice back, recomputation not counted) by the fastest plain
product measured here. `replay` rows follow recorded routes. Without a GPU the shape is small, for trying whether it
runs.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

import torch
from shapes import DEVICE, VOCABULARY, allocated_gib, free_memory, time_once
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3MoeConfig

from offbook.core.config import LoraConfig, TrainConfig
from offbook.core.routers import routers_of
from offbook.train.forward import Live
from offbook.train.lora import make_trainable
from offbook.train.trainer import Trainer
from offbook.types import Branch, Routes, Sample

HINTS, HINT_TOKENS, TARGET_TOKENS = 8, 40, 120


def make_model(layers: int, rank: int) -> PreTrainedModel:
    torch.manual_seed(0)
    large = DEVICE == "cuda"
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=2048 if large else 64,
        intermediate_size=6144 if large else 128,
        moe_intermediate_size=768 if large else 32,
        num_hidden_layers=layers,
        num_attention_heads=32 if large else 4,
        num_key_value_heads=4 if large else 2,
        head_dim=128 if large else 16,
        num_experts=128 if large else 8,
        num_experts_per_tok=8 if large else 2,
        norm_topk_prob=True,
        max_position_embeddings=131_072,
    )
    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    make_trainable(model, LoraConfig(rank=rank, targets=["q_proj", "k_proj", "v_proj", "o_proj"]), "", seed=0)
    return model


def sample_of(length: int, model: PreTrainedModel, replay: bool) -> Sample:
    rng = random.Random(0)
    ids = [rng.randrange(VOCABULARY) for _ in range(length)]
    inserted = [rng.randrange(VOCABULARY) for _ in range(HINT_TOKENS)]
    targets = max(2, min(TARGET_TOKENS, length // (2 * HINTS)))
    places = [length * (number + 1) // (HINTS + 1) for number in range(HINTS)]
    sample = Sample(
        ids,
        logprobs=[-1.0] * length,
        advantage=[1.0] * length,
        rl_weight=[1.0] * length,
        branches=[Branch(place, inserted, ((place + 1, place + targets),)) for place in places],
    )
    if replay:
        layers, config = len(routers_of(model)), model.config
        chosen = torch.rand(length, layers, config.num_experts).topk(config.num_experts_per_tok).indices
        data = chosen.to(torch.int16).numpy().tobytes()
        sample.routes = Routes.pack(layers, config.num_experts_per_tok, data)
    return sample


def needed_flops(model: PreTrainedModel, length: int) -> float:
    """Products with fixed weights forward and back, causal attention forward and twice back."""
    config = model.config
    attention = config.num_attention_heads + config.num_key_value_heads
    projections = 2 * config.hidden_size * config.head_dim * attention
    experts = 3 * config.hidden_size * config.moe_intermediate_size * config.num_experts_per_tok
    scores = 2 * config.num_attention_heads * config.head_dim * length / 2
    layers = config.num_hidden_layers * (2 * (projections + experts) * 2 + 2 * scores * 3)
    return length * (layers + 2 * 2 * config.hidden_size * config.vocab_size)


def ceiling() -> float:
    size = 8192 if DEVICE == "cuda" else 256
    a, b = (torch.randn(size, size, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    return max(2 * size**3 / time_once(lambda: a @ b) for _ in range(10))


def measure(options: argparse.Namespace, recompute: Any, replay: bool, peak: float) -> dict[str, Any]:
    free_memory()
    model = make_model(options.layers, options.rank)
    settings = TrainConfig(
        precision="bfloat16", recompute=recompute, compile=options.compile, micro_tokens=options.length
    )
    trainer = Trainer(model, settings, {"live": Live()})
    sample = sample_of(options.length, model, replay)
    trainer.step([sample])
    seconds = min(time_once(lambda: trainer.step([sample])) for _ in range(3))
    flops = needed_flops(model, options.length)
    metrics = trainer.step([sample]).metrics
    return {
        "s": seconds,
        "gib": allocated_gib(peak=True),
        "tflops": flops / seconds / 1e12,
        "share": flops / seconds / peak,
        "replayed": metrics["moe/replayed"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--layers", type=int, default=48 if DEVICE == "cuda" else 2)
    parser.add_argument("--length", type=int, default=16_384 if DEVICE == "cuda" else 256)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    peak = ceiling()
    print(f"{DEVICE}, torch {torch.__version__}, {options.layers} layers, {options.length} tokens, {HINTS} hints")
    print(f"{'recompute':12}{'replay':>8}{'s':>9}{'GiB':>8}{'TFLOP/s':>9}{'share':>8}")
    rows = []
    for recompute in ("layers", "all"):
        for replay in (False, True):
            row: dict[str, Any] = {"recompute": recompute, "replay": replay}
            try:
                row |= measure(options, recompute, replay, peak)
                told = f"{row['s']:9.3f}{row['gib']:8.1f}{row['tflops']:9.0f}{row['share']:8.0%}"
            except Exception as error:  # the other rows are worth their minutes
                row["failed"] = told = f"  {type(error).__name__}: {str(error).splitlines()[:1]}"
            print(f"{recompute:12}{'yes' if replay else '':>8}{told}", flush=True)
            rows.append(row)
    if options.json:
        found = {"layers": options.layers, "length": options.length, "ceiling_tflops": peak / 1e12, "rows": rows}
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
