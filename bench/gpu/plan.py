"""What `offbook plan` says against what a step takes, on one GPU: `python bench/gpu/plan.py --json plan.json`.

Qwen3 shapes with random weights in bfloat16: 0.6B, 1.7B and 4B with all weights trained, 8B and 32B with adapters of
rank 16. Two rollouts of 16,384 random tokens with 4 targets each and a frozen teacher, in two micro-batches, so that
gradients add up. The peak is torch's, of the second step: the trainer alone, without an engine, without CUDA's own
memory. `--recompute` fixes the mode; without, the plan chooses for this GPU. `--tiny` is for trying the script.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import time
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from offbook.config import Config, HarnessConfig, LoraConfig, TrainConfig
from offbook.loop.plan import make_plan, meta_shapes, this_device
from offbook.train.lora import make_trainable
from offbook.train.memory import static_parts, step_parts
from offbook.train.teachers import Frozen
from offbook.train.trainer import Trainer
from offbook.types import Branch, Distill, Sample

MESSAGE, HINT = 400, 60
#            width, inner, layers, heads, key heads, tied, rank
MODELS = {
    "0.6B": (1024, 3072, 28, 16, 8, True, 0),
    "1.7B": (2048, 6144, 28, 16, 8, True, 0),
    "4B": (2560, 9728, 36, 32, 8, True, 0),
    "8B LoRA": (4096, 12_288, 36, 32, 8, False, 16),
    "32B LoRA": (5120, 25_600, 64, 64, 8, False, 16),
}
TINY = {"tiny": (128, 384, 4, 8, 4, True, 0), "tiny LoRA": (128, 384, 4, 8, 4, False, 4)}


def shape(model: tuple[Any, ...], is_tiny: bool) -> Qwen3Config:
    width, inner, layers, heads, shared, tied, _ = model
    return Qwen3Config(
        vocab_size=1000 if is_tiny else 151_936,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=shared,
        head_dim=16 if is_tiny else 128,
        max_position_embeddings=131_072,
        tie_word_embeddings=tied,
    )


def sample(length: int, vocabulary: int, targets: int, seed: int) -> Sample:
    """Every other message is sampled; targets are sampled messages, spread evenly."""
    rng, message = random.Random(seed), min(MESSAGE, length // (2 * targets + 2))
    distill = Distill("frozen", "hint", cap=2.0, gate=0.002, top=5)
    starts = [message * (2 * ((k + 1) * (length // message) // (2 * targets + 2)) + 1) for k in range(targets)]
    hints = [[rng.randrange(vocabulary) for _ in range(HINT)] for _ in starts]
    return Sample(
        ids=[rng.randrange(vocabulary) for _ in range(length)],
        logprobs=[-12.0] * length,
        advantage=[rng.choice((-0.5, 0.5))] * length,
        rl_weight=[float(place // message % 2) for place in range(length)],
        branches=[
            Branch(start - 3, hint, ((start, start + message),), 1.0, distill, f"{seed}/{start}")
            for start, hint in zip(starts, hints, strict=True)
        ],
    )


def measure(model: tuple[Any, ...], options: argparse.Namespace) -> dict[str, Any]:
    config, device = shape(model, options.tiny), "cuda" if torch.cuda.is_available() else "cpu"
    settings = TrainConfig(precision="bfloat16", lora=LoraConfig(rank=model[-1]), recompute=options.recompute)
    folder = Path(options.scratch) / f"{model[0]}-{model[-1]}"
    config.save_pretrained(folder)
    harness = HarnessConfig(context=options.tokens, summarize_at=0)
    plan = make_plan(Config(model=str(folder), train=settings, harness=harness), this_device(), engine_apart=True)
    way = plan.way
    settings = settings.settled(way.recompute, way.compile, options.tokens)
    torch.manual_seed(0)
    with torch.device(device):
        network = Qwen3ForCausalLM(config).to(torch.bfloat16).eval()
    make_trainable(network, settings.lora, "", 0)
    trainer = Trainer(network, settings, {"frozen": Frozen()})
    samples = [sample(options.tokens, config.vocab_size, options.targets, seed) for seed in (0, 1)]
    times = []
    for number in range(options.steps):
        if number and device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        started = time.monotonic()
        trainer.step(samples)
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.monotonic() - started)
    shapes = meta_shapes(config, settings)
    parts = {**static_parts(shapes, teachers=1), **step_parts(shapes, way, options.tokens)}
    estimate = sum(parts.values())
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    reserved = torch.cuda.max_memory_reserved() if device == "cuda" else 0
    return {
        "recompute": way.recompute,
        "compile": way.compile,
        "tokens": options.tokens,
        "first_s": times[0],
        "step_s": min(times[1:] or times),
        "peak_gb": peak / 1e9,
        "reserved_gb": reserved / 1e9,
        "estimate_gb": estimate / 1e9,
        "off": estimate / peak - 1 if peak else None,
        "parts_gb": {name: size / 1e9 for name, size in parts.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=None, help="of those above")
    parser.add_argument("--recompute", choices=["auto", "none", "layers", "all"], default="auto")
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--targets", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--scratch", default="/tmp/offbook-plan")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", default="")
    options = parser.parse_args()
    models = TINY if options.tiny else MODELS
    rows: dict[str, Any] = {}
    print(f"{'model':12}{'recompute':>10}{'first s':>9}{'step s':>8}{'peak GB':>9}{'plan GB':>9}{'off':>8}", flush=True)
    for name in options.models or models:
        try:
            row = rows[name] = measure(models[name], options)
            off = "" if row["off"] is None else f"{row['off']:+.1%}"
            figures = f"{row['first_s']:9.1f}{row['step_s']:8.2f}{row['peak_gb']:9.2f}{row['estimate_gb']:9.2f}{off:>8}"
            print(f"{name:12}{row['recompute']:>10}{figures}", flush=True)
            print("            ", {part: round(size, 2) for part, size in row["parts_gb"].items()}, flush=True)
        except Exception as error:  # one that fails must not cost the others their minutes
            rows[name] = {"failed": f"{type(error).__name__}: {error}"}
            print(f"{name:12}{rows[name]['failed'][:300]}", flush=True)
        gc.collect()
        torch._dynamo.reset()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if options.json:
            Path(options.json).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
