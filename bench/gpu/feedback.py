"""What a hinted teacher costs on top of an RL step, on one GPU: `python bench/gpu/feedback.py --json feedback.json`.

A Qwen3 of 0.6B with random weights in bfloat16 and float32 masters; with `--lora 16` adapters of that rank alone are
trained. Rollouts of random tokens, every other 400 of them sampled by the
model; targets are sampled messages of 400 tokens spread evenly over the rollout, their hints 60 tokens. A step is
`Trainer.step`: batches, teacher, forward, backward, clipping, AdamW. `naive` encodes prefix + hint + message again for
each target, with the same kernels. `sdpo_rl` and `sdpo` are TRL's trainer, where that is installed, without and with
the targets (sdpo.py). `--mixed` takes rollouts of ever different lengths instead.

The ceiling is a bfloat16 matrix product measured in the same run. Operations counted: 2 a weight and token forward,
4 backward (2 where a weight is not trained), what is recomputed once more; causal attention half of the square, its
backward pass 2.5 times the forward one.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import random
import statistics
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from shapes import DEVICE, VOCABULARY, allocated_gib, forget, free_memory, make_model, time_once
from torch.autograd import DeviceType
from transformers import PreTrainedModel

from offbook.core.config import LoraConfig, TrainConfig
from offbook.train.batches import Batch, BranchBatch, BranchGroup, Packed
from offbook.train.forward import Ema, Frozen, Live, make_teachers
from offbook.train.head import Teacher
from offbook.train.trainer import StepResult, Trainer
from offbook.types import Branch, Distill, Sample

HEADER, HINT = 3, 60
MODEL = "0.6B" if DEVICE == "cuda" else "tiny"
KINDS = {"live": Live(), "frozen": Frozen(), "ema": Ema()}
BOUNDED = "frozen_bounded"  # a backward pass for each of the two parts; layers are compiled anew for it, so it is last
OURS = ("rl", *KINDS, "naive", BOUNDED)
THEIRS = ("sdpo_rl", "sdpo")


@dataclass(frozen=True)
class Shape:
    rollouts: int
    tokens: int
    targets: int
    message: int = 400

    @property
    def name(self) -> str:
        return f"{self.rollouts} x {self.tokens} tokens, {self.targets} targets"

    @property
    def is_long(self) -> bool:
        return self.tokens > 50_000


SHAPES = {"32k": Shape(1, 32_768, 8), "8x4k": Shape(8, 4_096, 2), "100k": Shape(1, 100_000, 10)}
SHAPES["turns"] = Shape(32, 1_760, 6, message=40)  # short messages, many of them faulty
TRY = {"tiny": Shape(1, 2_048, 2)}  # where there is no GPU: whether it runs


class NaiveTeacher:
    """The student's weights, and a forward over prefix + hint + message for each target."""

    name, share = "naive", 0.0

    def __init__(self, trainer: Trainer):
        self.decoder = trainer.student

    def follow(self, student: Any) -> None:
        """It is the student."""

    @torch.no_grad()
    def read(self, batch: Batch, groups: list[BranchGroup]) -> list[Teacher]:
        """Its reading without the hint is the student's."""
        found = []
        for group in groups:
            hidden = []
            for number, branch in group.branches:
                sample = batch.samples[number]
                ids = [*sample.ids[: branch.insert], *branch.inserted, *sample.ids[branch.insert : branch.end]]
                states = self.decoder.hidden(Packed.of([ids], torch.device(DEVICE)))[0]
                hidden.append(states[0, len(ids) - branch.num_targets - 1 : len(ids) - 1])
            found.append([(self.decoder.head, torch.cat(hidden))])
        return found


def make_samples(shape: Shape, teacher: str = "", seed: int = 0) -> list[Sample]:
    """Without a teacher there are no hints."""
    bound = 0.3 if teacher == BOUNDED else 0.0
    distill = Distill(teacher, "hint", by_policy=bound > 0, bound=bound, cap=2.0, gate=0.002, top=5)
    rng = random.Random(seed)
    samples = []
    for number in range(shape.rollouts):
        size = shape.message
        sampled = [float(place // size % 2) for place in range(shape.tokens)]
        messages = range(size, shape.tokens - size, 2 * size)
        starts = [messages[int((k + 0.5) / shape.targets * len(messages))] for k in range(shape.targets)]
        branches = [
            Branch(start - HEADER, _ids(rng, HINT), ((start, start + size),), 1.0, distill, f"{number}/{start}")
            for start in starts
        ]
        samples.append(
            Sample(
                ids=_ids(rng, shape.tokens),
                logprobs=[-12.0] * shape.tokens,
                advantage=[rng.choice((-0.5, 0.5))] * shape.tokens,
                rl_weight=sampled,
                branches=branches if teacher else [],
            )
        )
    return samples


def _ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCABULARY) for _ in range(count)]


def matrix_ceiling(size: int = 8192, repeats: int = 20) -> float:
    """Operations a second of a bfloat16 product of random matrices, the median of single products."""
    a, b = (torch.randn(size, size, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    times = []
    for _ in range(repeats + 5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        a @ b
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return 2 * size**3 / statistics.median(times[5:])


def operations(model: PreTrainedModel, shape: Shape, recompute: str) -> float:
    """Of an RL step alone."""
    config = model.config
    tokens = shape.rollouts * shape.tokens
    matrices = [p for name, p in model.named_parameters() if "layers" in name and p.ndim == 2]
    weights = [sum(p.numel() for p in matrices if p.requires_grad == trained) for trained in (False, True)]
    heads = config.num_attention_heads * config.head_dim * config.num_hidden_layers
    attention = 2 * shape.rollouts * shape.tokens**2 * heads
    sampled = sum(weight != 0 for sample in make_samples(shape) for weight in sample.rl_weight)
    again = {"none": (0, 0), "layers": (1, 0), "all": (1, 1)}[recompute]
    return (
        2 * tokens * (weights[0] * (2 + again[0]) + weights[1] * (3 + again[0]))
        + attention * (3.5 + again[1])
        + 2
        * sampled
        * config.hidden_size
        * config.vocab_size
        * (2 + model.get_output_embeddings().weight.requires_grad)
    )


def make_trainer(settings: TrainConfig) -> Trainer:
    return Trainer(make_model(MODEL, settings.precision, settings.lora.rank), settings, {"live": Live()})


def time_ours(trainer: Trainer, arm: str, shape: Shape, repeats: int) -> dict[str, Any]:
    free_memory()
    trainer.teachers = {"naive": NaiveTeacher(trainer)}
    forget(trainer.model, trainer.masters.named)
    if kind := {**KINDS, BOUNDED: Frozen()}.get(arm):
        trainer.teachers = make_teachers(trainer.student, {arm: kind})
    samples = make_samples(shape, "" if arm == "rl" else arm)
    results: list[StepResult] = []
    row = time_steps(lambda: results.append(trainer.step(samples)), shape, repeats)
    return {**row, "hint_kl": results[-1].metrics.get("hint/kl", 0.0)}


def time_theirs(arm: str, shape: Shape, repeats: int) -> dict[str, Any]:
    from sdpo import DidNotFit, SdpoStep

    free_memory()
    try:
        step = SdpoStep(make_model(MODEL), make_samples(shape, "live"), with_targets=arm == "sdpo").step
        return time_steps(step, shape, 0 if shape.is_long else repeats)
    except DidNotFit as trouble:
        return {"failed": str(trouble)}


def time_steps(step: Callable[[], Any], shape: Shape, repeats: int) -> dict[str, Any]:
    """Seconds of a step, the median, and the peak of allocated memory. Without repeats the first step is taken."""
    free_memory()
    warm_s = time_once(step)
    if not shape.is_long:
        step()
    if repeats:
        free_memory()
    times = [time_once(step) for _ in range(repeats)] or [warm_s]
    return {
        "step_s": statistics.median(times),
        "spread_s": max(times) - min(times),
        "first_s": warm_s,
        "peak_gib": allocated_gib(peak=True),
        "tokens_per_s": shape.rollouts * shape.tokens / statistics.median(times),
    }


def bench(shape: Shape, arms: list[str], settings: TrainConfig, repeats: int, ceiling: float) -> dict[str, Any]:
    torch._dynamo.reset()
    trainer = make_trainer(settings)
    work = operations(trainer.model, shape, settings.recompute)
    rows = {}
    again = [] if shape.is_long else ["rl again"]  # how much the clock drifts
    for arm in [*(arm for arm in arms if arm in OURS), *again]:
        try:
            rows[arm] = time_ours(trainer, arm.removesuffix(" again"), shape, repeats)
        except torch.OutOfMemoryError as error:  # the other arms are worth their minutes
            rows[arm] = {"failed": str(error).split(". GPU")[0]}
            trainer.optimizer.zero_grad()
            print(f"  {arm}: {rows[arm]['failed']}", flush=True)
            continue
        print(f"  {arm}: {rows[arm]['step_s']:.3f} s, the first {rows[arm]['first_s']:.0f} s", flush=True)
    apart = difference(trainer, shape) if shape.rollouts > 1 else None
    del trainer
    for arm in (arm for arm in arms if arm in THEIRS):
        rows[arm] = time_theirs(arm, shape, max(2, repeats // 2))
        print(f"  {arm}: {rows[arm].get('step_s', rows[arm].get('failed'))}", flush=True)
    compare(rows, "rl", (*OURS, "rl again"))
    compare(rows, "sdpo_rl", THEIRS)
    if "step_s" in rows.get("rl", {}):
        rows["rl"]["ceiling_share"] = work / rows["rl"]["step_s"] / ceiling
    return {
        "shape": asdict(shape),
        "recompute": settings.recompute,
        "rl_tflop": work / 1e12,
        "apart": apart,
        "arms": rows,
    }


@torch.no_grad()
def difference(trainer: Trainer, shape: Shape) -> float:
    """How far the hidden states of hinted targets are from those of re-encoding, as a share of their norm."""
    batch = Batch.collate(make_samples(shape, "live"), torch.device(DEVICE))
    _, found = trainer.student.hidden(batch.row, BranchBatch.collate(batch, batch.branches))
    wanted = torch.cat([reading.hinted[1] for reading in NaiveTeacher(trainer).read(batch, batch.groups)])
    assert found is not None
    return float((found - wanted).float().norm() / wanted.float().norm())


def compare(rows: dict[str, dict[str, Any]], base: str, arms: Iterable[str]) -> None:
    """Fill in what each arm takes more than the base."""
    finished = {arm: row for arm, row in rows.items() if "step_s" in row}
    for arm in arms if base in finished else ():
        if arm in finished:
            rows[arm]["overhead"] = rows[arm]["step_s"] / rows[base]["step_s"] - 1
            rows[arm]["extra_memory"] = rows[arm]["peak_gib"] / rows[base]["peak_gib"] - 1


def mixed(settings: TrainConfig, longest: int = 32_768, count: int = 8) -> dict[str, Any]:
    """Rollouts whose lengths differ from step to step, as real ones do: tokens per second when a length is met for the
    first time, and when all have been met. Two steps of other lengths come first, so that compiling is not counted."""
    trainer = make_trainer(settings)
    rng = random.Random(0)
    lengths = [rng.randrange(longest * 3 // 4, longest) for _ in range(count + 2)]
    rows = {}
    for arm in ("rl", "live"):
        steps = [make_samples(Shape(1, length, 8), "live" if arm == "live" else "") for length in lengths]
        for samples in steps[:2]:
            trainer.step(samples)
        rates = [
            sum(lengths[2:]) / sum(time_once(lambda taken=taken: trainer.step(taken)) for taken in steps[2:])
            for _ in range(2)
        ]
        print(f"{arm}: {rates[0]:,.0f} tokens/s at new lengths, {rates[1]:,.0f} at known ones", flush=True)
        rows[arm] = {"new_tokens_per_s": rates[0], "tokens_per_s": rates[1]}
    return {"lengths": lengths, "arms": rows}


def profile(shape: Shape, settings: TrainConfig) -> dict[str, Any]:
    """Where the time of the hinted step goes: kernels by how much longer they take than in the RL step, in ms; and
    where the GPU waits for the processor."""
    trainer = make_trainer(settings)
    spent: dict[str, list[float]] = {}
    for column, teacher in enumerate(("", "live")):
        samples = make_samples(shape, teacher)
        for _ in range(2):
            trainer.step(samples)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
            trainer.step(samples)
            torch.cuda.synchronize()
        for event in trace.key_averages():
            spent.setdefault(event.key, [0.0, 0.0])[column] += event.self_device_time_total / 1e3
        show_waits(teacher or "rl", trace)
    print(
        f"\n{'rl':>9}{'live':>9}  all kernels: {[round(sum(column)) for column in zip(*spent.values(), strict=True)]}"
    )
    for name, (alone, hinted) in sorted(spent.items(), key=lambda item: item[1][0] - item[1][1])[:20]:
        print(f"{alone:9.2f}{hinted:9.2f}  {name[:90]}")
    return {"kernels_ms": spent}


def show_waits(arm: str, trace: torch.profiler.profile, least_ms: float = 0.3) -> None:
    """The stretches in which no kernel runs, the longest first, and between which kernels they lie."""
    kernels = sorted((event for event in trace.events() if event.device_type == DeviceType.CUDA), key=_start_of)
    waits, last = [], kernels[0]
    for kernel in kernels[1:]:
        waits.append(((_start_of(kernel) - last.time_range.end) / 1e3, last.name, kernel.name))
        last = max(last, kernel, key=lambda event: event.time_range.end)
    long = sorted((wait for wait in waits if wait[0] > least_ms), reverse=True)
    total, told = (sum(wait[0] for wait in some) for some in (waits, long))
    print(f"\n{arm}: no kernel runs for {total:.1f} ms in all, {told:.1f} of it in {len(long)} long waits")
    for wait, before, after in long[:15]:
        print(f"{wait:9.2f}  {before[:60]} ... {after[:60]}")


def _start_of(event: Any) -> float:
    return event.time_range.start


def show(entry: dict[str, Any]) -> None:
    shape = Shape(**entry["shape"])
    print(f"\n{shape.name}, recompute {entry['recompute']}, RL step {entry['rl_tflop']:.0f} TFLOP")
    print(
        f"{'':14}{'step s':>9}{'spread':>8}{'overhead':>10}{'tokens/s':>10}{'peak GiB':>10}{'memory':>8}{'ceiling':>9}"
    )
    if entry["apart"] is not None:
        print(f"hidden states of targets differ from re-encoding by {entry['apart']:.2%} of their norm")
    for arm, row in entry["arms"].items():
        if "failed" in row:
            print(f"{arm:14}{row['failed']}")
            continue
        share = f"{row['ceiling_share']:.1%}" if "ceiling_share" in row else ""
        print(
            f"{arm:14}{row['step_s']:9.3f}{row['spread_s']:8.3f}{row.get('overhead', 0):10.1%}"
            f"{row['tokens_per_s']:10,.0f}{row['peak_gib']:10.1f}{row.get('extra_memory', 0):8.1%}{share:>9}",
            flush=True,
        )


def settings_of(options: argparse.Namespace, **more: Any) -> TrainConfig:
    return TrainConfig(
        micro_tokens=131_072,
        recompute=options.recompute,
        compile=DEVICE == "cuda" and not options.eager,
        learning_rate=1e-6,
        precision=options.precision,
        lora=LoraConfig(rank=options.lora),
        **more,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    shapes = SHAPES if DEVICE == "cuda" else TRY
    parser.add_argument("--shapes", nargs="+", choices=shapes, default=list(shapes))
    installed = THEIRS if importlib.util.find_spec("trl") else ()
    parser.add_argument("--arms", nargs="+", choices=(*OURS, *THEIRS), default=[*OURS, *installed])
    parser.add_argument("--recompute", choices=("none", "layers", "all"), default="layers")
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--lora", type=int, default=0, metavar="RANK", help="train adapters of this rank alone")
    parser.add_argument("--eager", action="store_true", help="layers that are not compiled")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--profile", action="store_true", help="instead: which kernels the first shape's hints cost")
    parser.add_argument("--mixed", action="store_true", help="instead: rollouts of different lengths")
    options = parser.parse_args()
    gpu = torch.cuda.get_device_name() if DEVICE == "cuda" else "no GPU"
    ceiling = matrix_ceiling() if DEVICE == "cuda" else math.inf
    print(f"{gpu}, torch {torch.__version__}: {ceiling / 1e12:.0f} TFLOP/s in bf16 products")
    print(f"Qwen3-{MODEL}, {options.precision}, " + (f"LoRA of rank {options.lora}" if options.lora else "all weights"))
    settings = settings_of(options)
    if options.profile or options.mixed:
        figures = mixed(settings) if options.mixed else profile(shapes[options.shapes[0]], settings)
        if options.json:
            options.json.write_text(json.dumps(figures, indent=2) + "\n")
        return
    entries = []
    for name in options.shapes:
        repeats = max(2, options.repeats // 2) if shapes[name].is_long else options.repeats
        entry = bench(shapes[name], options.arms, settings, repeats, ceiling)
        trained = {"precision": options.precision, "lora": options.lora, "eager": options.eager}
        entries.append({"ceiling_tflops": ceiling / 1e12, "gpu": gpu, **trained, **entry})
        show(entry)
        if options.json:
            options.json.write_text(json.dumps(entries, indent=2) + "\n")


if __name__ == "__main__":
    main()
