"""FP8 linear layers against bfloat16 ones, on one GPU: `python bench/gpu/precision.py --json precision.json`.

Step: `Trainer.step` on models of Qwen3's shapes with random weights, all of them trained in bfloat16 with float32
masters, eight rollouts of 4,096 random tokens (feedback.py), with `--hints` two hinted messages each, for which layers
are compiled three times instead of once: seconds, the median; peak memory; and how far the gradient of each layer is
from that of plain layers. Product, with `--products`: one layer forward and backward, compiled, in microseconds; and of
what it gives and of its two gradients, how far they are from a plain layer's, compiled and not.
With `--model FOLDER` also vLLM, in bfloat16 and with its own FP8 (`--quantization fp8`): |its log-probabilities - a
forward in bfloat16 whose linear layers are plain or FP8| over what it has sampled after random prompts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from feedback import SHAPES, TRY, Shape, make_samples, settings_of, time_steps
from shapes import DEVICE, QWEN3, free_memory, make_model, time_once
from torch import Tensor, nn
from vllm_engine import CHECKED, NEW, complete, differences, prompts

from offbook.core.config import LinearConfig, VllmConfig
from offbook.engine import VllmEngine
from offbook.engine.vllm import Server
from offbook.rl.models import load_model
from offbook.train.forward import Frozen
from offbook.train.precision import LowLinear, compute_linears, fp8_product
from offbook.train.trainer import Trainer

KINDS = ("plain", "fp8")
EAGER = "--enforce-eager"  # graphs change no number, and take a minute to capture
ENGINES = {"bfloat16": [EAGER], "fp8": [EAGER, "--quantization", "fp8"]}
TOKENS = 32_768 if DEVICE == "cuda" else 64
Row = dict[str, Any]


def step_rows(model: str, shape: Shape, options: argparse.Namespace) -> Iterator[tuple[str, Row]]:
    wanted: dict[str, Tensor] = {}
    for kind in options.kinds:
        torch._dynamo.reset()
        free_memory()
        settings = settings_of(options, linear=LinearConfig(kind=kind))
        teachers = {"frozen": Frozen()} if options.hints else {}
        trainer = Trainer(make_model(model, options.precision, options.lora), settings, teachers)
        samples = make_samples(shape, "frozen" if options.hints else "")
        began = time.monotonic()
        trainer.gradients(samples)
        compiled_s = time.monotonic() - began
        found = gradients_of(trainer)
        wanted = wanted or found
        trainer.optimizer.zero_grad()
        apart = {name: float((found[name] - wanted[name]).norm() / wanted[name].norm()) for name in wanted}
        norms = {name: float(found[name].norm()) for name in wanted}
        row = time_steps(lambda trainer=trainer, samples=samples: trainer.step(samples), shape, options.repeats)
        yield kind, {**row, "compiled_s": compiled_s, "gradient_apart": apart, "gradient": norms}
        del trainer


def gradients_of(trainer: Trainer) -> dict[str, Tensor]:
    """Of the first layer, where what happens in all others arrives, and of the last."""
    last = trainer.model.config.num_hidden_layers - 1
    found = {}
    for number in (0, last):
        named = (master for name, master in trainer.masters.named.items() if f".layers.{number}." in name)
        found[str(number)] = torch.cat([master.grad.flatten().cpu() for master in named if master.grad is not None])
    return found


def product_rows(model: str, kinds: list[str], repeats: int) -> dict[str, Row]:
    """Of each kind, the layers of the feed-forward: they are most of a model's products."""
    width, inner = QWEN3[model][:2]
    rows: dict[str, Row] = {}
    for name, (into, out) in {"up": (width, inner), "down": (inner, width)}.items():
        x_ND = torch.randn(TOKENS, into, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
        layer = nn.Linear(into, out, bias=False, device=DEVICE, dtype=torch.bfloat16)
        right = one_pass(layer, layer, x_ND)
        for kind in kinds:
            if kind != "plain":
                layer.__class__, layer.product = LowLinear, fp8_product()
            run = torch.compile(layer) if DEVICE == "cuda" else layer
            row = rows.setdefault(name, {})[kind] = {}
            for way, of in {"eager": layer, "compiled": run}.items():
                row[way] = [
                    float((a - b).norm() / b.norm()) for a, b in zip(one_pass(of, layer, x_ND), right, strict=True)
                ]

            def both(run: Any = run, x_ND: Tensor = x_ND) -> None:
                run(x_ND).sum().backward()

            times = [time_once(both) for _ in range(repeats + 3)][3:]
            row["us"] = 1e6 * statistics.median(times)
    return rows


def one_pass(run: nn.Module, layer: nn.Linear, x_ND: Tensor) -> list[Tensor]:
    """What it gives, and the gradients of its input and its weight."""
    x_ND.grad = layer.weight.grad = None
    out_NM = run(x_ND)
    (out_NM.float() * torch.linspace(-1, 1, out_NM.shape[1], device=out_NM.device)).sum().backward()
    return [one.detach().float() for one in (out_NM, x_ND.grad, layer.weight.grad)]


def engine_rows(options: argparse.Namespace) -> dict[str, Row]:
    asked = prompts(options, CHECKED, 7)
    rows: dict[str, Row] = {}
    for name, more in ENGINES.items():
        with TemporaryDirectory() as folder:
            settings = VllmConfig(gpu_share=options.share, options=more)
            log = Path(folder) / "vllm.log"
            server = Server(Path(options.model), settings, options.length + NEW, log, lambda what, share: None)
            try:
                answers = asyncio.run(answered(VllmEngine(server, frozenset()), asked))
            except Exception:  # the other engine's rows are worth having
                traceback.print_exc()
                print(log.read_text()[-3000:] if log.is_file() else "vLLM has said nothing")
                continue
        for kind in options.kinds:
            network = load_model(Path(options.model), options.precision)
            compute_linears(network, LinearConfig(kind=kind))
            rows[f"engine {name}, trainer {kind}"] = differences(network, asked, answers)
    return rows


async def answered(engine: VllmEngine, asked: list[list[int]]) -> list[Any]:
    try:
        return await complete(engine, asked)
    finally:
        await engine.aclose()


def show(figures: dict[str, Any]) -> None:
    for model, rows in figures["step"].items():
        base = next(iter(rows.values()))
        for kind, row in rows.items():
            faster, memory = base["step_s"] / row["step_s"], row["peak_gib"]
            layers = ", ".join(
                f"{one} {row['gradient'][one]:.2g} ({row['gradient_apart'][one]:.1%} apart)" for one in row["gradient"]
            )
            print(
                f"{model:6}{kind:7}{row['step_s']:9.3f} s ({faster:.2f}x){memory:8.1f} GiB, gradient of layer {layers}"
            )
    for model, rows in figures["product"].items():
        for name, kinds in rows.items():
            for kind, row in kinds.items():
                apart = "; ".join(
                    f"{way} {' '.join(f'{one:.1%}' for one in row[way])}" for way in ("eager", "compiled")
                )
                print(f"{model:6}{name:6}{kind:7}{row['us']:9,.0f} us; output and gradients apart: {apart}")
    for name, row in figures.get("engine", {}).items():
        print(f"{name:40} mean {row['mean']:.2g}, p99 {row['p99']:.2g}, largest {row['max']:.2g} nats")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    on_gpu = DEVICE == "cuda"
    parser.add_argument("--models", nargs="*", default=["0.6B", "4B"] if on_gpu else ["tiny"], help=", ".join(QWEN3))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--recompute", choices=("none", "layers", "all"), default="layers")
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--lora", type=int, default=0, metavar="RANK", help="train adapters of this rank alone")
    parser.add_argument("--eager", action="store_true", help="layers that are not compiled")
    parser.add_argument("--hints", action="store_true", help="two hinted messages per rollout, of a frozen teacher")
    parser.add_argument("--products", action="store_true", help="single layers, too")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--model", default="", help="a folder, for vLLM")
    parser.add_argument("--length", type=int, default=512, help="of prompts for vLLM")
    parser.add_argument("--share", type=float, default=0.4, help="of the GPU, for vLLM")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print(f"{torch.cuda.get_device_name() if on_gpu else 'no GPU'}, torch {torch.__version__}, {options.recompute}")
    shape = SHAPES["8x4k"] if on_gpu else TRY["tiny"]
    figures: dict[str, Any] = {"step": {}, "product": {}}
    for model in options.models:
        rows = figures["step"][model] = {}
        for kind, row in step_rows(model, shape, options):
            rows[kind] = row
            print(f"{model} {kind}: {row['step_s']:.3f} s per step, the first {row['compiled_s']:.0f} s", flush=True)
            write(figures, options.json)
        if options.products:
            figures["product"][model] = product_rows(model, options.kinds, options.repeats)
        write(figures, options.json)
    if options.model:
        figures["engine"] = engine_rows(options)
    show(figures)
    write(figures, options.json)


def write(figures: dict[str, Any], file: Path | None) -> None:
    if file:
        file.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
