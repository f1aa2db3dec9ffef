"""What `offbook plan` says against what a step takes, on one GPU: `python bench/gpu/plan.py --json plan.json`.

Shipped configurations of Qwen3 with random weights in bfloat16: 0.6B, 1.7B and 4B with all weights trained, 8B and 32B
with adapters of rank 16. Two rollouts of 16,384 random tokens with 4 targets each and a frozen teacher, in two
micro-batches, so that gradients add up; `--hinted 1`: one of them has none. Each with hints that are bounded and with
hints that are not (`--balance`). A recipe is computed as it is on the GPU that it is documented for, another model as
the plan chooses for this one, unless `--recompute` says how. The peak is torch's, of the second step: the trainer
alone, without an engine, without CUDA's own memory. `--tiny` is for trying the script.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from offbook.core.config import load_config
from offbook.rl.models import described
from offbook.rl.plan import make_plan, this_device
from offbook.rl.train_step import distill_of
from offbook.train.forward import Frozen
from offbook.train.lora import make_trainable
from offbook.train.trainer import Trainer
from offbook.types import Branch, Distill, Sample

MESSAGE, HINT = 400, 60
#       model, recipe, GB of the GPU that it is documented for (0: this one)
MODELS = {
    "0.6B": ("Qwen/Qwen3-0.6B", "qwen3-0.6b", 24),
    "1.7B": ("Qwen/Qwen3-1.7B", "qwen3-4b", 0),
    "4B": ("Qwen/Qwen3-4B", "qwen3-4b", 141),
    "8B LoRA": ("Qwen/Qwen3-8B", "qwen3-8b-lora", 48),
    "32B LoRA": ("Qwen/Qwen3-32B", "qwen3-8b-lora", 0),
}
TINY = {"tiny": ("", "qwen3-4b", 0), "tiny LoRA": ("", "qwen3-8b-lora", 0)}


def tiny(folder: Path) -> str:
    shape = {"vocab_size": 1000, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "head_dim": 16}
    Qwen3Config(num_attention_heads=8, num_key_value_heads=4, **shape).save_pretrained(folder)
    return str(folder)


def sample(length: int, vocabulary: int, targets: int, seed: int, distill: Distill) -> Sample:
    """Every other message is sampled; targets are sampled messages, spread evenly."""
    rng, message = random.Random(seed), min(MESSAGE, length // (2 * targets + 2))
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


def measure(model: tuple[str, str, int], balance: str, options: argparse.Namespace) -> dict[str, Any]:
    name, recipe, gb = model
    given = {"model": name or tiny(Path(options.scratch)), "feedback.balance": balance}
    given |= {"harness.context": str(options.tokens), "harness.summarize_at": "0"}
    given |= {"train.micro_tokens": str(options.tokens), "train.recompute": options.recompute}
    config, device = load_config([recipe], given), "cuda" if torch.cuda.is_available() else "cpu"
    plan = make_plan(config, this_device(gb))
    settings = config.train.settled(plan.way.recompute, plan.way.compile, options.tokens)
    torch.manual_seed(0)
    with torch.device(device):
        network = AutoModelForCausalLM.from_config(described(config.model), dtype=torch.bfloat16).eval()
    make_trainable(network, settings.lora, "", 0)
    trainer = Trainer(network, settings, {"frozen": Frozen()})
    vocabulary, how = network.config.vocab_size, distill_of(config.feedback)
    targets = [options.targets if number < options.hinted else 0 for number in range(2)]
    samples = [sample(options.tokens, vocabulary, count, seed, how) for seed, count in enumerate(targets)]
    times = []
    for number in range(options.steps):
        if number and device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        started = time.monotonic()
        trainer.step(samples)
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.monotonic() - started)
    parts = {part: size for part, size in plan.parts.items() if not part.startswith("engine")}
    estimate = sum(parts.values())
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    reserved = torch.cuda.max_memory_reserved() if device == "cuda" else 0
    return {
        "gpu_gb": gb,
        "recompute": plan.way.recompute,
        "compile": plan.way.compile,
        "tokens": options.tokens,
        "first_s": times[0],
        "step_s": min(times[1:] or times),
        "peak_gb": peak / 1e9,
        "reserved_gb": reserved / 1e9,
        "estimate_gb": estimate / 1e9,
        "off": estimate / peak - 1 if peak else None,
        "parts_gb": {part: size / 1e9 for part, size in parts.items()},
        "with_engine_gb": plan.need / 1e9,
        "room_gb": plan.device.room / 1e9,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=None, help="of those above")
    parser.add_argument("--balance", nargs="*", choices=["bounded", "rl"], default=["bounded", "rl"])
    parser.add_argument("--hinted", type=int, choices=[0, 1, 2], default=2, help="rollouts with targets")
    parser.add_argument("--recompute", choices=["auto", "none", "layers", "all"], default="auto")
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--targets", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--scratch", default="/tmp/offbook-plan")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", default="")
    parser.add_argument("--row", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    models = TINY if options.tiny else MODELS
    rows: dict[str, Any] = {}
    if not options.row:
        print(
            f"{'model':20}{'recompute':>10}{'first s':>9}{'step s':>8}{'peak GB':>9}{'plan GB':>9}{'off':>8}",
            flush=True,
        )
    every = list(product(options.models or models, options.balance))
    for name, balance in every:
        label = f"{name}, {balance}"
        if len(every) > 1:  # in a process of its own: compiled code keeps the model before in memory
            with tempfile.NamedTemporaryFile(suffix=".json") as file:
                given = [*sys.argv[1:], "--models", name, "--balance", balance, "--json", file.name, "--row"]
                subprocess.run([sys.executable, __file__, *given], check=False)
                rows |= json.loads(Path(file.name).read_text() or "{}")
        else:
            row = rows[label] = measure(models[name], balance, options)
            off = "" if row["off"] is None else f"{row['off']:+.1%}"
            figures = f"{row['first_s']:9.1f}{row['step_s']:8.2f}{row['peak_gb']:9.2f}{row['estimate_gb']:9.2f}{off:>8}"
            print(f"{label:20}{row['recompute']:>10}{figures}", flush=True)
            print(" " * 20, {part: round(size, 2) for part, size in row["parts_gb"].items()}, flush=True)
        if options.json:
            Path(options.json).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
