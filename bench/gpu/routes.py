"""Router replay with real engines: `python bench/gpu/routes.py --json routes.json`.

A mixture of experts in Qwen3's shape with random weights samples conversations of two messages, in bfloat16: through
the local engine and, where it is installed, through vLLM, which returns the experts it has sent tokens to. Of each: the
share of these that a forward of the same weights chooses too, and how far the trainer's log-probabilities are from the
engine's, with routers that choose anew and with the recorded experts replayed. The trainer is in float32, and in the
engine's own precision. Routers of random weights are undecided, so that rounding changes what they choose.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from offbook.core.config import TrainConfig, VllmConfig
from offbook.core.routers import mixture_of, routers_of
from offbook.engine import LocalEngine, VllmEngine
from offbook.engine.vllm import Server
from offbook.rl.models import load_model
from offbook.train.trainer import Trainer
from offbook.types import Prompt, Routes, Sample

ON_GPU = torch.cuda.is_available()
LOW = "bfloat16" if ON_GPU else "float32"
SHAPE = {"hidden_size": 512, "intermediate_size": 1024, "moe_intermediate_size": 256, "num_hidden_layers": 8}
SHAPE |= {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 8192}
SHAPE |= {"num_experts": 32, "num_experts_per_tok": 4, "max_position_embeddings": 4096}
TINY = SHAPE | {"hidden_size": 64, "num_hidden_layers": 2, "num_experts": 8, "vocab_size": 300, "head_dim": 16}
Row = dict[str, Any]


def write_model(folder: Path) -> None:
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**(SHAPE if ON_GPU else TINY), norm_topk_prob=True))
    model.to(getattr(torch, LOW)).save_pretrained(folder)  # what both read is the same to the bit


async def conversations(engine: LocalEngine | VllmEngine, options: argparse.Namespace) -> list[Sample]:
    """Two messages each, with other tokens between them."""
    vocabulary = (SHAPE if ON_GPU else TINY)["vocab_size"]

    async def one(number: int) -> Sample:
        rng, ids, logprobs, sampled = random.Random(number), list[int](), list[float](), list[float]()
        session = sessions[number]
        for count in (options.prompt, options.prompt // 4):
            given = [rng.randrange(vocabulary) for _ in range(count)]
            completion = await session.complete(Prompt([*ids, *given]), options.new)
            ids += [*given, *completion.ids]
            logprobs += [0.0] * count + completion.logprobs
            sampled += [0.0] * count + [1.0] * len(completion.ids)
        session.close()
        return Sample(ids, logprobs, [1.0] * len(ids), rl_weight=sampled, routes=completion.routes)

    sessions = [engine.open(str(number)) for number in range(options.rollouts)]
    return await asyncio.gather(*map(one, range(options.rollouts)))


def compared(folder: Path, samples: list[Sample]) -> Row:
    assert all(sample.routes is not None for sample in samples), "the engine has recorded no experts"
    row: Row = {"tokens": int(sum(sum(sample.rl_weight) for sample in samples))}
    for precision in dict.fromkeys(("float32", LOW)):
        model = load_model(folder, precision)
        row[f"chosen by {precision} too"] = agreement(model, samples)
        trainer = Trainer(model, TrainConfig(precision=precision, learning_rate=1e-12))
        for name, given in {"free": [replace(one, routes=None) for one in samples], "replayed": samples}.items():
            metrics = trainer.step(given).metrics
            kept = ("rl/mismatch", "moe/replayed", "moe/implausible")
            row[f"{precision}, {name}"] = {key: metrics[key] for key in kept}
    return row


@torch.no_grad()
def agreement(model: PreTrainedModel, samples: list[Sample]) -> float:
    """Of the recorded experts, whichever place among a token's they have."""
    shares = []
    for sample in samples:
        recorded_TLK = unpacked(sample.routes)
        own_TLK = chosen_by(model, sample.ids)[: len(recorded_TLK)]
        shares.append((recorded_TLK[..., None] == own_TLK[..., None, :]).any(-1).float().mean().item())
    return sum(shares) / len(shares)


def chosen_by(model: PreTrainedModel, ids: list[int]) -> Tensor:
    found: list[Tensor] = []
    hooks = [one.register_forward_hook(lambda _m, _i, out: found.append(out[2])) for one in routers_of(model)]
    model(torch.tensor([ids], device=model.device), use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.stack(found, dim=1).cpu()


def unpacked(routes: Routes) -> Tensor:
    return torch.frombuffer(bytearray(routes.unpack()), dtype=torch.int16).view(-1, routes.layers, routes.top).long()


def local(folder: Path, options: argparse.Namespace) -> Row:
    engine = LocalEngine(load_model(folder, LOW), frozenset(), kv_tokens=options.rollouts * 4096, mode="continuous")
    return compared(folder, asyncio.run(conversations(engine, options)))


def vllm(folder: Path, options: argparse.Namespace) -> Row:
    settings, log = VllmConfig(gpu_share=options.share, options=options.vllm), folder / "vllm.log"
    config = load_model(folder, LOW).config
    server = Server(folder, settings, 4096, log, lambda what, share: None, mixture_of(config))
    engine = VllmEngine(server, frozenset())

    async def sample() -> list[Sample]:
        try:
            return await conversations(engine, options)
        except Exception:
            print(log.read_text()[-3000:] if log.is_file() else "vLLM has said nothing")
            raise
        finally:
            await engine.aclose()

    return compared(folder, asyncio.run(sample()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=16 if ON_GPU else 3)
    parser.add_argument("--prompt", type=int, default=400 if ON_GPU else 24)
    parser.add_argument("--new", type=int, default=128 if ON_GPU else 8)
    parser.add_argument("--share", type=float, default=0.1, help="of the GPU, for vLLM")
    parser.add_argument("--vllm", nargs="*", default=[], help="more options of vLLM's")
    parser.add_argument("--engines", nargs="+", choices=("local", "vllm"), default=["local", "vllm"])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    ways: dict[str, Callable[[Path, argparse.Namespace], Row]] = {"local": local, "vllm": vllm}
    found: dict[str, Row] = {}
    with tempfile.TemporaryDirectory() as scratch:
        write_model(Path(scratch))
        for name in options.engines:
            try:
                found[name] = ways[name](Path(scratch), options)
            except Exception as error:  # the other engine's rows are worth having
                traceback.print_exc()
                found[name] = {"error": f"{type(error).__name__}: {error}"[:600]}
            print(f"{name}: {json.dumps(found[name], indent=1)}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
