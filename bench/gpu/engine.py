"""The local engine's speed and exactness: python bench/gpu/engine.py [--model FOLDER] [--json FILE]

Many prompts at once, as a step of training asks them: tokens per second end to end (prefill, decoding, event loop),
with CUDA graphs and without, in both modes; what one prefill and one decode step take; log-probabilities against a
plain float32 forward; and conversations of several turns, in which tools add 20 to 180 tokens, with keys and values
kept, against reading all of it every turn, each with its seconds of prefill and of decoding (which are waited for, so
that the sum is a little more than without a clock); `a row at a time` is without rows side by side in attention,
and GPU_CALL (engine/attention.py) is what decides which ones are. `agents` are half as many rows in the continuous
mode, whose messages end by themselves after about 43 tokens and whose tools take 30 to 250 ms: as rollouts of SmolLM2
on pocket-long tasks are, 17 turns each, the second time that they run. `torch's attention` is without the kernel of
engine/attention.py, as it was before there was one.
Without --model the weights are random, in SmolLM2-135M's shape. --tiny is a shape for a CPU, to try the script itself.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import random
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from offbook.engine import LocalEngine, attention
from offbook.engine.decode import Decoder, Row
from offbook.engine.local import uniforms
from offbook.types import Completion, Prompt

SMOLLM2 = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "rope_theta": 100_000,
}
TINY = SMOLLM2 | {"vocab_size": 500, "hidden_size": 72, "intermediate_size": 96, "num_hidden_layers": 2}


def make_model(args: argparse.Namespace, dtype: torch.dtype) -> PreTrainedModel:
    torch.manual_seed(0)
    if args.model:
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    else:
        model = LlamaForCausalLM(LlamaConfig(**(TINY if args.tiny else SMOLLM2)))
    return model.to(args.device, dtype).eval()


def make_prompts(args: argparse.Namespace, vocabulary: int) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(vocabulary) for _ in range(args.prompt)] for _ in range(args.rows)]


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def single_turn(engine: LocalEngine, prompts: list[list[int]], new: int) -> tuple[float, list[Completion]]:
    async def one(number: int) -> Completion:
        session = sessions[number]
        try:
            return await session.complete(Prompt(prompts[number]), new)
        finally:
            session.close()

    async def main() -> list[Completion]:
        return await asyncio.gather(*map(one, range(len(prompts))))

    sessions = [engine.open(str(number)) for number in range(len(prompts))]
    synchronize()
    started = time.perf_counter()
    completions = asyncio.run(main())
    return time.perf_counter() - started, completions


def many_turns(engine: LocalEngine, prompts: list[list[int]], new: int, turns: int, keep: bool) -> float:
    """`keep` or not: a session of its own for each turn has nothing kept."""

    async def one(number: int) -> None:
        rng, ids, session = random.Random(number), prompts[number], sessions[number]
        for turn in range(turns):
            completion = await session.complete(Prompt(ids), new)
            ids = [*ids, *completion.ids, *(rng.randrange(400) for _ in range(rng.randrange(20, 181)))]
            if not keep and turn < turns - 1:
                following = engine.open(session.key)
                session.close()
                session = following
        session.close()

    async def main() -> None:
        await asyncio.gather(*map(one, range(len(prompts))))

    sessions = [engine.open(str(number)) for number in range(len(prompts))]
    synchronize()
    started = time.perf_counter()
    asyncio.run(main())
    return time.perf_counter() - started


def tokens_a_second(args: argparse.Namespace, model: PreTrainedModel, graphs: bool, mode: str) -> dict[str, float]:
    engine = LocalEngine(model, frozenset(), kv_tokens=args.kv_tokens, mode=mode, static=True)
    assert isinstance(engine.decoder, Decoder)
    engine.decoder.use_graphs &= graphs
    prompts = make_prompts(args, model.config.vocab_size)
    first, _ = single_turn(engine, prompts, args.new)  # captures, allocates
    best = min(single_turn(engine, prompts, args.new)[0] for _ in range(args.repeat))
    sampled = args.rows * args.new
    return {"tokens/s": sampled / best, "seconds": best, "first time, seconds": first}


def parts(args: argparse.Namespace, model: PreTrainedModel, graphs: bool) -> dict[str, float]:
    """One prefill of all rows, and one decode step, without the event loop."""
    decoder = Decoder(model, frozenset(), 1.0, args.rows * 8192, static=True)
    decoder.use_graphs &= graphs
    times: list[tuple[float, float]] = []
    for _ in range(3):
        prompts = make_prompts(args, model.config.vocab_size)
        rows = [Row(number, ids, args.new, uniforms(0, "", number, args.new)) for number, ids in enumerate(prompts)]
        decoder.slots.free(range(args.rows))
        synchronize()
        started = time.perf_counter()
        decoder.admit(rows, args.rows)
        synchronize()
        prefilled = time.perf_counter()
        while decoder.running:
            decoder.step()
        synchronize()
        times.append((prefilled - started, (time.perf_counter() - prefilled) / max(1, args.new - 1)))
    prefill, step = min(times)
    count = args.rows * args.prompt
    return {"prefill, ms": prefill * 1e3, "prefill tokens/s": count / prefill, "decode step, ms": step * 1e3}


def exactness(args: argparse.Namespace, model: PreTrainedModel, dtype: torch.dtype) -> dict[str, float]:
    """Of the first rows. In bfloat16 the difference is that of the weights' and activations' rounding."""
    engine = LocalEngine(model, frozenset(), kv_tokens=args.kv_tokens, static=True)
    prompts = make_prompts(args, model.config.vocab_size)
    for _ in range(2):  # the second time from graphs
        _, completions = single_turn(engine, prompts, args.new)
    reference = copy.deepcopy(model).float()
    reference.set_attn_implementation("sdpa")
    found = []
    for prompt, completion in list(zip(prompts, completions, strict=True))[:4]:
        ids = torch.tensor([[*prompt, *completion.ids]], device=args.device)
        with torch.no_grad():
            logp = reference(ids).logits[0, len(prompt) - 1 : -1].double().log_softmax(-1)
        expected = logp.gather(1, ids[0, len(prompt) :, None])[:, 0].cpu()
        found.append((torch.tensor(completion.logprobs) - expected).abs())
    errors = torch.cat(found)
    return {"mean": errors.mean().item(), "p99": errors.quantile(0.99).item(), "max": errors.max().item()}


def conversations(args: argparse.Namespace, model: PreTrainedModel, keep: bool) -> dict[str, float]:
    engine = LocalEngine(model, frozenset(), kv_tokens=args.kv_tokens, static=True)
    assert isinstance(engine.decoder, Decoder)
    prompts = make_prompts(args, model.config.vocab_size)
    new = max(1, args.new // 2)
    seconds = min(many_turns(engine, prompts, new, args.turns, keep) for _ in range(2))
    prefilled = engine.decoder.tokens_prefilled / 2
    clocks = {"prefill s": Clock(engine.decoder.admit), "decode s": Clock(engine.decoder.step)}
    engine.decoder.admit, engine.decoder.step = clocks.values()  # type: ignore[method-assign]
    clocked = many_turns(engine, prompts, new, args.turns, keep)
    split = {name: clock.seconds for name, clock in clocks.items()}
    return {
        "tokens/s": args.rows * new * args.turns / seconds,
        "seconds": seconds,
        "prefilled": prefilled,
        **split,
        "else s": clocked - sum(split.values()),
    }


def agents(args: argparse.Namespace, model: PreTrainedModel) -> dict[str, float]:
    vocabulary, count, turns = model.config.vocab_size, args.rows // 2, args.agent_turns
    stops = frozenset(range(0, vocabulary, 43))  # random weights draw any token, nearly
    engine = LocalEngine(model, stops, kv_tokens=args.kv_tokens, mode="continuous", static=True, context=6144)
    assert isinstance(engine.decoder, Decoder)

    async def one(number: int) -> None:
        rng, session = random.Random(number), engine.open(str(number))
        ids = [rng.randrange(vocabulary) for _ in range(600)]
        for _ in range(turns):
            completion = await session.complete(Prompt(ids), 192)
            ids = [*ids, *completion.ids, *(rng.randrange(vocabulary) for _ in range(rng.randrange(20, 120)))]
            await asyncio.sleep(rng.uniform(0.03, 0.25))
        session.close()

    async def all_of_them() -> None:
        await asyncio.gather(*map(one, range(count)))

    asyncio.run(all_of_them())  # compiles, captures
    began, sampled, work = time.perf_counter(), engine.decoder.tokens_sampled, engine.counters
    asyncio.run(all_of_them())
    seconds = time.perf_counter() - began
    split = {key.removeprefix("engine/"): engine.counters[key] - work[key] for key in work if key.startswith("engine")}
    return {"tokens/s": (engine.decoder.tokens_sampled - sampled) / seconds, "seconds": seconds, **split}


def grouped(args: argparse.Namespace, model: PreTrainedModel, constant: str, value: int) -> dict[str, float]:
    """With another idea of which rows go side by side."""
    before = getattr(attention, constant)
    setattr(attention, constant, value)
    try:
        return conversations(args, model, True)
    finally:
        setattr(attention, constant, before)


def by_torch(measure: Callable[[], dict[str, float]]) -> dict[str, float]:
    """Without the kernel."""
    before = attention.kernel_for
    attention.kernel_for = lambda keys, values: None
    try:
        return measure()
    finally:
        attention.kernel_for = before


class Clock:
    """Seconds that a function takes, until the device has done it."""

    def __init__(self, call: Callable[..., None]):
        self.call, self.seconds = call, 0.0

    def __call__(self, *given: object) -> None:
        synchronize()
        started = time.perf_counter()
        self.call(*given)
        synchronize()
        self.seconds += time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a model's folder")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=1000)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--agent-turns", type=int, default=17)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--kv-tokens", type=int, default=0)
    parser.add_argument("--only", default="", help="rows with this in their name, as in: turns")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.device = "cuda" if torch.cuda.is_available() else "cpu"
    low = torch.bfloat16 if args.device == "cuda" else torch.float32
    model = make_model(args, low)
    every: dict[str, Callable[[], dict[str, float]]] = {
        "lockstep, graphs": lambda: tokens_a_second(args, model, True, "lockstep"),
        "lockstep, no graphs": lambda: tokens_a_second(args, model, False, "lockstep"),
        "continuous, graphs": lambda: tokens_a_second(args, model, True, "continuous"),
        "parts, graphs": lambda: parts(args, model, True),
        "parts, graphs, torch's attention": lambda: by_torch(lambda: parts(args, model, True)),
        "parts, no graphs": lambda: parts(args, model, False),
        f"{args.turns} turns, kept": lambda: conversations(args, model, True),
        f"{args.turns} turns, kept, a row at a time": lambda: grouped(args, model, "KEY_ENTRIES", 0),
        f"{args.turns} turns, kept, GPU_CALL 2^17": lambda: grouped(args, model, "GPU_CALL", 2**17),
        f"{args.turns} turns, kept, GPU_CALL 2^23": lambda: grouped(args, model, "GPU_CALL", 2**23),
        "agents": lambda: agents(args, model),
        "agents, torch's attention": lambda: by_torch(lambda: agents(args, model)),
        f"{args.turns} turns, read again": lambda: conversations(args, model, False),
        f"|logprob - float32 forward|, {low}": lambda: exactness(args, model, low),
        "|logprob - float32 forward|, float32": lambda: exactness(args, make_model(args, torch.float32), torch.float32),
    }
    runs = {name: measure for name, measure in every.items() if args.only in name}
    about = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    print(f"{about}, torch {torch.__version__}: {args.rows} x {args.prompt} + {args.new}")
    results: dict[str, dict[str, float] | str] = {}
    for name, measure in runs.items():
        try:
            found = measure()
            results[name] = found
            print(f"{name:40}", "  ".join(f"{key} {value:.4g}" for key, value in found.items()), flush=True)
        except Exception as error:  # the other rows are worth having
            results[name] = repr(error)
            print(f"{name:40} failed: {error!r}", flush=True)
            traceback.print_exc()
        if args.device == "cuda":
            print(f"{'':40} peak {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB", flush=True)
            torch.cuda.reset_peak_memory_stats()
    if args.json:
        args.json.write_text(
            json.dumps(
                {"machine": about, "args": vars(args) | {"json": None}, "results": results}, default=str, indent=2
            )
            + "\n"
        )


if __name__ == "__main__":
    main()
