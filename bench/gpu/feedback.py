"""What a hinted teacher costs on top of an RL step, on one GPU: `python bench/gpu/feedback.py --json feedback.json`.

A Qwen3 of 0.6B with random weights in bfloat16. Rollouts of random tokens, every other 400 of them sampled by the
model; targets are sampled messages of 400 tokens spread evenly over the rollout, their hints 60 tokens. A step is
`Trainer.step`: batches, teacher, forward, backward, clipping, AdamW. `naive` encodes prefix + hint + message again for
each target, with the same kernels. The ceiling is a bfloat16 matrix product measured in the same run. Operations
counted: 2 a weight and token forward, 4 backward, what is recomputed once more; causal attention half of the square,
its backward pass 2.5 times the forward one.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from offbook.config import FeedbackConfig, TrainConfig
from offbook.train.batches import Batch, BranchBatch
from offbook.train.teachers import Teacher
from offbook.train.trainer import Trainer
from offbook.types import Branch, Sample

MESSAGE, HEADER, HINT = 400, 3, 60
VOCABULARY = 151_936
ARMS = ("rl", "live", "frozen", "ema", "trust_region", "naive")


@dataclass(frozen=True)
class Shape:
    rollouts: int
    tokens: int
    targets: int

    @property
    def name(self) -> str:
        return f"{self.rollouts} x {self.tokens} tokens, {self.targets} targets"


SHAPES = {"32k": Shape(1, 32_768, 8), "100k": Shape(1, 100_000, 10), "8x4k": Shape(8, 4_096, 2)}


class NaiveTeacher(Teacher):
    """The student's weights, and a forward over prefix + hint + message for each target."""

    def __init__(self, trainer: Trainer):
        super().__init__(trainer.student, FeedbackConfig(teacher="live"))
        self.rides = False
        self.student = trainer.student

    @torch.no_grad()
    def readings(self, batch: Batch, branches: BranchBatch) -> list[tuple[nn.Module, Tensor]]:
        hidden = []
        for row, (_, branch) in zip(branches.rows, batch.branches, strict=True):
            ids = torch.cat([batch.ids_BT[row.trunk_row, : row.insert], branches.ids_1L[0, row.start : row.end]])
            count = branch.target_end - branch.target_start
            hidden.append(self.student.hidden(ids[None])[0][0, -count - 1 : -1])
        return [(self.student.model.get_output_embeddings(), torch.cat(hidden))]


def make_model() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=131_072,
        tie_word_embeddings=True,
    )
    with torch.device("cuda"):
        return Qwen3ForCausalLM(config).to(torch.bfloat16)


def make_samples(shape: Shape, hints: bool, seed: int = 0) -> list[Sample]:
    rng = random.Random(seed)
    samples = []
    for number in range(shape.rollouts):
        sampled = [float(place // MESSAGE % 2) for place in range(shape.tokens)]
        messages = range(MESSAGE, shape.tokens - MESSAGE, 2 * MESSAGE)
        starts = [messages[int((k + 0.5) / shape.targets * len(messages))] for k in range(shape.targets)]
        branches = [
            Branch(start - HEADER, _ids(rng, HINT), start, start + MESSAGE, 1.0, f"{number}/{start}")
            for start in starts
        ]
        samples.append(
            Sample(
                ids=_ids(rng, shape.tokens),
                logprobs=[-12.0] * shape.tokens,
                advantage=[rng.choice((-0.5, 0.5))] * shape.tokens,
                rl_weight=sampled,
                ce_weight=[0.0] * shape.tokens,
                branches=branches if hints else [],
            )
        )
    return samples


def _ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCABULARY) for _ in range(count)]


def matrix_ceiling(size: int = 8192, repeats: int = 20) -> float:
    """Operations a second of a bfloat16 product of random matrices, the median of single products."""
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    times = []
    for _ in range(repeats + 5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        a @ b
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return 2 * size**3 / statistics.median(times[5:])


def operations(model: Qwen3ForCausalLM, shape: Shape, recompute: str) -> float:
    """Of an RL step alone."""
    config = model.config
    tokens = shape.rollouts * shape.tokens
    weights = sum(p.numel() for name, p in model.named_parameters() if "layers" in name and p.ndim == 2)
    heads = config.num_attention_heads * config.head_dim * config.num_hidden_layers
    attention = 2 * shape.rollouts * shape.tokens**2 * heads
    sampled = sum(weight != 0 for sample in make_samples(shape, False) for weight in sample.rl_weight)
    again = {"none": (0, 0), "layers": (1, 0), "all": (1, 1)}[recompute]
    return (
        2 * tokens * weights * (3 + again[0])
        + attention * (3.5 + again[1])
        + 2 * sampled * config.hidden_size * config.vocab_size * 3
    )


def time_arm(trainer: Trainer, arm: str, shape: Shape, repeats: int) -> dict[str, float]:
    """Seconds of a step, the median, and the peak of allocated memory."""
    gc.collect()
    torch.cuda.empty_cache()
    kind = "live" if arm in ("rl", "naive") else arm
    trainer.teacher = (
        NaiveTeacher(trainer) if arm == "naive" else Teacher(trainer.student, FeedbackConfig(teacher=kind))
    )
    samples = make_samples(shape, hints=arm != "rl")
    started = time.monotonic()
    trainer.step(samples)
    torch.cuda.synchronize()
    warm_s = time.monotonic() - started
    if shape.tokens < 50_000:
        trainer.step(samples)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        started = time.monotonic()
        result = trainer.step(samples)
        torch.cuda.synchronize()
        times.append(time.monotonic() - started)
    return {
        "step_s": statistics.median(times),
        "spread_s": max(times) - min(times),
        "first_s": warm_s,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "tokens_per_s": shape.rollouts * shape.tokens / statistics.median(times),
        "hint_kl": result.metrics.get("hint/kl", 0.0),
    }


def bench(shape: Shape, arms: list[str], settings: TrainConfig, repeats: int, ceiling: float) -> dict[str, Any]:
    torch._dynamo.reset()
    trainer = Trainer(make_model(), settings, FeedbackConfig(teacher="live"))
    rows = {}
    for arm in [*arms, "rl again"]:
        rows[arm] = time_arm(trainer, arm.removesuffix(" again"), shape, repeats)
        print(f"  {arm}: {rows[arm]['step_s']:.3f} s, the first {rows[arm]['first_s']:.0f} s", flush=True)
    work = operations(trainer.model, shape, settings.recompute)
    if "rl" in rows:
        base = rows["rl"]
        base["ceiling_share"] = work / base["step_s"] / ceiling
        for row in rows.values():
            row["overhead"] = row["step_s"] / base["step_s"] - 1
            row["extra_memory"] = row["peak_gib"] / base["peak_gib"] - 1
    return {"shape": asdict(shape), "recompute": settings.recompute, "rl_tflop": work / 1e12, "arms": rows}


def profile(shape: Shape, settings: TrainConfig) -> None:
    """Where the time of the hinted step goes: kernels by how much longer they take than in the RL step, in ms."""
    trainer = Trainer(make_model(), settings, FeedbackConfig(teacher="live"))
    spent: dict[str, list[float]] = {}
    for column, hints in enumerate((False, True)):
        samples = make_samples(shape, hints)
        for _ in range(2):
            trainer.step(samples)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
            trainer.step(samples)
            torch.cuda.synchronize()
        for event in trace.key_averages():
            spent.setdefault(event.key, [0.0, 0.0])[column] += event.self_device_time_total / 1e3
    print(
        f"\n{'rl':>9}{'live':>9}  all kernels: {[round(sum(column)) for column in zip(*spent.values(), strict=True)]}"
    )
    for name, (alone, hinted) in sorted(spent.items(), key=lambda item: item[1][0] - item[1][1])[:20]:
        print(f"{alone:9.2f}{hinted:9.2f}  {name[:90]}")


def show(entry: dict[str, Any]) -> None:
    shape = Shape(**entry["shape"])
    print(f"\n{shape.name}, recompute {entry['recompute']}, RL step {entry['rl_tflop']:.0f} TFLOP")
    print(
        f"{'':14}{'step s':>9}{'spread':>8}{'overhead':>10}{'tokens/s':>10}{'peak GiB':>10}{'memory':>8}{'ceiling':>9}"
    )
    for arm, row in entry["arms"].items():
        share = f"{row['ceiling_share']:.1%}" if "ceiling_share" in row else ""
        print(
            f"{arm:14}{row['step_s']:9.3f}{row['spread_s']:8.3f}{row.get('overhead', 0):10.1%}"
            f"{row['tokens_per_s']:10,.0f}{row['peak_gib']:10.1f}{row.get('extra_memory', 0):8.1%}{share:>9}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--recompute", choices=("none", "layers", "all"), default="layers")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--profile", action="store_true", help="instead: which kernels the first shape's hints cost")
    options = parser.parse_args()
    ceiling = matrix_ceiling()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: {ceiling / 1e12:.0f} TFLOP/s in bf16 products")
    settings = TrainConfig(micro_tokens=131_072, recompute=options.recompute, compile=True, learning_rate=1e-6)
    if options.profile:
        profile(SHAPES[options.shapes[0]], settings)
    entries = []
    for name in [] if options.profile else options.shapes:
        repeats = options.repeats if SHAPES[name].tokens < 50_000 else max(2, options.repeats // 2)
        entry = bench(SHAPES[name], options.arms, settings, repeats, ceiling)
        entries.append({"ceiling_tflops": ceiling / 1e12, "gpu": torch.cuda.get_device_name(), **entry})
        show(entry)
        if options.json:
            options.json.write_text(json.dumps(entries, indent=2) + "\n")


if __name__ == "__main__":
    main()
