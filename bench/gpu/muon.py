"""Muon on one GPU: `python bench/gpu/muon.py --json muon.json`.

First the orthogonalisation alone, for the units of a model in the shape of Kimi K2.5: ours with the symmetric kernel
and without, ours with a step less, what torch.optim.Muon does, and a compiled batch of classic Newton-Schulz. TFLOP/s
are given for the products really computed and, as `classic`, for those that the classic way would need in that time;
the share is of the fastest plain product measured here. Then the step of what one of 256 ranks would own of the
experts, 270 matrices, alone and while a second stream copies as many bytes as an all-to-all there and back would move.
Without a GPU the shapes are small, for trying whether it runs. `--profile` says instead which kernels take how long in
the orthogonalisation of the first shape and in a step.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim._muon import _zeropower_via_newtonschulz

from offbook.train.optim import newton_schulz
from offbook.train.optim.muon import Muon, _batch_size
from offbook.train.optim.newton_schulz import HOPPER, JORDAN, OURS, YOU, Method, orthogonalize

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHRINK = 1 if DEVICE == "cuda" else 64
SHAPES = [  # how many at a time, rows, columns
    (16, 2048, 7168),
    (16, 7168, 2048),
    (256, 128, 7168),
    (1024, 192, 1536),
    (1, 7168, 8192),
]
FOUR_STEPS = replace(OURS, coefficients=YOU[1:])


def wait() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def timed(run: Callable[[], Any], repeats: int = 5) -> float:
    """Seconds, the best of a few: the first is the warm-up."""
    best = float("inf")
    for _ in range(repeats):
        wait()
        began = time.perf_counter()
        run()
        wait()
        best = min(best, time.perf_counter() - began)
    return best


def ceiling() -> float:
    """TFLOP/s of the fastest large product in half precision."""
    size, best = 8192 // SHRINK, 0.0
    for dtype in (torch.float16, torch.bfloat16):
        a, b = (torch.randn(size, size, device=DEVICE, dtype=dtype) for _ in range(2))
        best = max(best, 2 * size**3 / timed(lambda a=a, b=b: a @ b, 10) / 1e12)
    return best


def classic_bfloat16(matrices_NRC: Tensor) -> Tensor:
    wide = matrices_NRC.shape[-2] <= matrices_NRC.shape[-1]
    x = (matrices_NRC if wide else matrices_NRC.mT).bfloat16()
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for a, b, c in JORDAN:
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if wide else x.mT


def has_kernel() -> bool:
    return DEVICE == "cuda" and torch.cuda.get_device_capability() >= HOPPER


def step_flops(rows: int, columns: int, method: Method = OURS) -> dict[str, float]:
    """Floating-point operations for one matrix: the classic way, the Gram way, and the Gram way with half products."""
    rows, columns = min(rows, columns), max(rows, columns)
    steps = len(method.coefficients)
    wide, square = 2.0 * rows * rows * columns, 2.0 * rows**3
    products = 4 * steps - 6
    return {
        "classic": steps * (2 * wide + square),
        "gram": 4 * wide + products * square,
        "symmetric": 3 * wide + products * square / 2,
    }


@contextmanager
def without_kernel() -> Iterator[None]:
    usual, newton_schulz.SMALLEST = newton_schulz.SMALLEST, 1 << 30
    try:
        yield
    finally:
        newton_schulz.SMALLEST = usual


def ways(shape: tuple[int, int]) -> dict[str, tuple[Callable[[Tensor], Tensor], float]]:
    """What each computes, and its floating-point operations for one matrix."""
    flops, fewer = step_flops(*shape), step_flops(*shape, FOUR_STEPS)
    done = "symmetric" if has_kernel() and min(shape) >= newton_schulz.SMALLEST else "gram"

    def plain(matrices: Tensor) -> Tensor:
        with without_kernel():
            return orthogonalize(matrices)

    compiled = torch.compile(classic_bfloat16) if DEVICE == "cuda" else classic_bfloat16
    return {
        "ours": (lambda matrices: orthogonalize(matrices), flops[done]),
        "ours, plain products": (plain, flops["gram"]),
        "ours, 4 steps": (lambda matrices: orthogonalize(matrices, FOUR_STEPS), fewer[done]),
        "classic, compiled": (compiled, flops["classic"]),
        "torch.optim.Muon": (
            lambda matrices: torch.stack(
                [_zeropower_via_newtonschulz(one, JORDAN[0], 5, 1e-7) for one in matrices.unbind()]
            ),
            flops["classic"],
        ),
    }


def measure(way: Callable[[Tensor], Tensor], flops: float, matrices: Tensor, peak: float) -> dict[str, Any]:
    count, rows, columns = matrices.shape
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if DEVICE == "cuda" else 0
    out = way(matrices)
    wait()
    workspace = torch.cuda.max_memory_allocated() - before if DEVICE == "cuda" else 0
    wide = out[0].double() if rows <= columns else out[0].double().mT
    values = torch.linalg.eigvalsh(wide @ wide.mT).clamp(min=0).sqrt()  # many times faster than their decomposition
    seconds = timed(lambda: way(matrices))
    return {
        "ms": 1e3 * seconds,
        "tflops": count * flops / seconds / 1e12,
        "classic_tflops": count * step_flops(rows, columns)["classic"] / seconds / 1e12,
        "share": count * flops / seconds / 1e12 / peak,
        "workspace_gib": workspace / 2**30,
        "smallest": float(values.min()),
        "largest": float(values.max()),
    }


def orthogonalisations(peak: float) -> Iterator[dict[str, Any]]:
    print(f"\n{'matrices':18}{'way':24}{'ms':>9}{'TFLOP/s':>9}{'classic':>9}{'share':>7}{'GiB':>7}{'values':>14}")
    for count, rows, columns in SHAPES:
        shape = max(8, rows // SHRINK), max(8, columns // SHRINK)
        torch.manual_seed(0)
        matrices = torch.randn(min(count, 256 // SHRINK or 1) if DEVICE == "cpu" else count, *shape, device=DEVICE)
        for name, (way, flops) in ways(shape).items():
            row: dict[str, Any] = {"count": len(matrices), "rows": shape[0], "columns": shape[1], "way": name}
            try:
                row |= measure(way, flops, matrices, peak)
                told = f"{row['ms']:9.2f}{row['tflops']:9.0f}{row['classic_tflops']:9.0f}{row['share']:7.0%}"
                told += f"{row['workspace_gib']:7.2f}{row['smallest']:7.2f}{row['largest']:7.2f}"
            except Exception as error:  # the other rows are worth their minutes
                row["failed"] = told = f"  {type(error).__name__}: {str(error).splitlines()[:1]}"
            print(f"{len(matrices)}x{shape[0]}x{shape[1]:<8}  {name:24}{told}", flush=True)
            yield row
        del matrices


def expert_shard(pairs: int) -> tuple[list[tuple[str, torch.nn.Parameter]], dict[str, tuple[int, int]]]:
    """Two experts per parameter, as fused gate and up, and down: six matrices per pair."""
    inner, width = max(8, 2048 // SHRINK), max(8, 7168 // SHRINK)
    named, units = [], {}
    for number in range(pairs):
        for name, shape, block in (
            ("gate_up", (2, 2 * inner, width), (inner, width)),
            ("down", (2, width, inner), (width, inner)),
        ):
            parameter = torch.nn.Parameter(torch.randn(*shape, device=DEVICE))
            parameter.grad = torch.randn_like(parameter)
            named.append((f"{number}.{name}", parameter))
            units[f"{number}.{name}"] = block
    return named, units


def shard_steps(pairs: int, peak: float) -> Iterator[dict[str, Any]]:
    named, units = expert_shard(pairs)
    block = units["0.gate_up"]
    entries = sum(parameter.numel() for _, parameter in named)
    side = torch.cuda.Stream() if DEVICE == "cuda" else None
    source = torch.empty(2**28 // SHRINK, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    moved = 4 * entries  # bfloat16 there, float16 back

    def copies() -> None:
        for _ in range(-(-moved // len(source))):
            target.copy_(source)

    print(f"\n{6 * pairs} matrices of {block[0]}x{block[1]}, batches of {_batch_size(block)}")
    print(f"{'way':28}{'traffic':>10}{'s':>9}{'TFLOP/s':>9}{'share':>7}{'GiB on top':>12}")
    for name, method in (("ours", OURS), ("ours, 4 steps", FOUR_STEPS)):
        for traffic in ("none", "copies"):
            row: dict[str, Any] = {"way": name, "traffic": traffic, "matrices": 6 * pairs}
            try:
                optimizer = Muon(named, units, lr=1e-6, method=method)
                optimizer.step()
                if DEVICE == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated() if DEVICE == "cuda" else 0

                def step(optimizer: Muon = optimizer, traffic: str = traffic) -> None:
                    if side is not None and traffic == "copies":
                        side.wait_stream(torch.cuda.current_stream())
                        with torch.cuda.stream(side):
                            copies()
                    optimizer.step()

                row["s"] = timed(step, 4)
                peak_bytes = torch.cuda.max_memory_allocated() - before if DEVICE == "cuda" else 0
                kind = "symmetric" if has_kernel() else "gram"
                row["tflops"] = 6 * pairs * step_flops(*block, method)[kind] / row["s"] / 1e12
                row |= {"share": row["tflops"] / peak, "gib": peak_bytes / 2**30}
                told = f"{row['s']:9.4f}{row['tflops']:9.0f}{row['share']:7.0%}{row['gib']:12.2f}"
            except Exception as error:
                row["failed"] = told = f"  {type(error).__name__}: {str(error).splitlines()[:1]}"
            print(f"{name:28}{traffic:>10}{told}", flush=True)
            yield row
            optimizer = None  # its momenta are a third of the memory


def profile(pairs: int) -> None:
    count, rows, columns = SHAPES[0]
    matrices = torch.randn(count // SHRINK or 1, rows // SHRINK, columns // SHRINK, device=DEVICE)
    optimizer = Muon(*expert_shard(pairs), lr=1e-6, method=OURS)
    on = torch.profiler.ProfilerActivity.CUDA if DEVICE == "cuda" else torch.profiler.ProfilerActivity.CPU
    for name, run in {"orthogonalisation": lambda: orthogonalize(matrices), "step": optimizer.step}.items():
        for _ in range(2):
            run()
        with torch.profiler.profile(activities=[on]) as trace:
            run()
            wait()
        by_time = "self_cuda_time_total" if DEVICE == "cuda" else "self_cpu_time_total"
        print(f"\n{name}\n{trace.key_averages().table(sort_by=by_time, row_limit=16, max_name_column_width=90)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--profile", action="store_true", help="instead: which kernels take how long")
    parser.add_argument("--pairs", type=int, default=45 if DEVICE == "cuda" else 2, help="of experts in the shard")
    options = parser.parse_args()
    if options.profile:
        return profile(options.pairs)
    device = torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu"
    kernel = has_kernel()
    peak = ceiling()
    print(f"{device}, torch {torch.__version__}, fastest product {peak:.0f} TFLOP/s, symmetric kernel: {kernel}")
    found: dict[str, Any] = {"device": device, "torch": torch.__version__, "ceiling_tflops": peak, "kernel": kernel}
    found["orthogonalisations"], found["steps"] = [], []
    try:
        for row in orthogonalisations(peak):
            found["orthogonalisations"].append(row)
        for row in shard_steps(options.pairs, peak):
            found["steps"].append(row)
    finally:
        if options.json:
            options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
