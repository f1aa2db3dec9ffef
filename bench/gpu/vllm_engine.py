"""vLLM as offbook's engine, on one GPU: `python bench/gpu/vllm_engine.py --model FOLDER --json vllm.json`.

Rows, each by itself, so that one that fails costs the others nothing (`--rows` takes some of them):
  own      vLLM's own `LLM.generate` in a process of its own: random prompts, 128 new tokens each, with and without
           log-probabilities; the better of the two is what the next row is compared with
  ours     the same prompts through `VllmEngine.complete`, log-probabilities and versions included
  update   `VllmEngine.apply` of a float32 model on the same GPU, and what |log-probability - float32 forward| is before
           and after; the same through a mapped file, and with requests on their way
  train    `offbook train --engine.kind vllm` on pocket tasks: 4 x 8 rollouts of 6 turns, in real sandboxes where the
           machine has them; seconds of each step, without the first, in which the server starts
Every repetition has prompts of its own: nothing comes out of a prefix cache.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedModel

from offbook.core.config import VllmConfig
from offbook.core.weights import Weights
from offbook.engine import VllmEngine
from offbook.engine.vllm import Server
from offbook.engine.vllm.weights import Sender
from offbook.rl.models import load_model
from offbook.types import Completion, Prompt

Row = dict[str, Any]
NEW, CHECKED = 128, 16  # tokens sampled; prompts whose log-probabilities are compared


def prompts(options: argparse.Namespace, count: int, seed: int) -> list[list[int]]:
    rng, vocabulary = random.Random(seed), AutoConfig.from_pretrained(options.model).vocab_size
    return [[rng.randrange(vocabulary) for _ in range(options.length)] for _ in range(count)]


def own(options: argparse.Namespace) -> Row:
    """In another process: vLLM keeps the GPU until its process ends."""
    command = [sys.executable, __file__, "--model", options.model, "--inner", "--length", str(options.length)]
    command += ["--counts", *map(str, options.counts), "--share", str(options.share)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=240, check=True)
    (said,) = [line for line in done.stdout.splitlines() if line.startswith('{"start_s"')]  # among vLLM's own
    row: Row = json.loads(said)
    return row


def own_inside(options: argparse.Namespace) -> None:
    from vllm import LLM, SamplingParams

    started = time.monotonic()
    model = LLM(
        model=options.model,
        dtype="bfloat16" if torch.cuda.is_available() else "float32",
        max_model_len=options.length + NEW,
        gpu_memory_utilization=options.share,
        skip_tokenizer_init=True,
        logprobs_mode="processed_logprobs",
        disable_log_stats=True,
        enforce_eager=not torch.cuda.is_available(),
    )
    row: Row = {"start_s": time.monotonic() - started}
    for count in options.counts:
        for logprobs in (0, None):
            params = SamplingParams(max_tokens=NEW, ignore_eos=True, detokenize=False, logprobs=logprobs)
            speeds = []
            for seed in range(4):
                asked = [{"prompt_token_ids": ids} for ids in prompts(options, count, seed)]
                began = time.monotonic()
                answers = model.generate(asked, params, use_tqdm=False)
                speeds.append(sum(len(each.outputs[0].token_ids) for each in answers) / (time.monotonic() - began))
            row[f"{count}{'' if logprobs is None else '+logprobs'}"] = max(speeds[1:])
    print(json.dumps(row))


@contextmanager
def engine(options: argparse.Namespace) -> Iterator[VllmEngine]:
    more = [] if torch.cuda.is_available() else ["--enforce-eager"]
    with TemporaryDirectory() as folder:
        settings = VllmConfig(gpu_share=options.share, start_s=200, options=more)
        log = Path(folder) / "vllm.log"
        server = Server(Path(options.model), settings, options.length + NEW, log, lambda what, share: None)
        made = VllmEngine(server, frozenset())
        try:
            yield made
        except Exception:
            print(log.read_text()[-4000:] if log.is_file() else "vLLM has said nothing", file=sys.stderr)
            raise
        finally:
            asyncio.run(made.aclose())


async def complete(engine: VllmEngine, asked: list[list[int]]) -> list[Completion]:
    sessions = [engine.open(str(number)) for number in range(len(asked))]
    jobs = (session.complete(Prompt(ids), NEW) for session, ids in zip(sessions, asked, strict=True))
    return await asyncio.gather(*jobs)


def ours(options: argparse.Namespace, with_engine: VllmEngine) -> Row:
    async def measure() -> Row:
        began = time.monotonic()
        await complete(with_engine, prompts(options, 2, 99))
        row: Row = {"start_s": time.monotonic() - began}
        for count in options.counts:
            speeds = []
            for seed in range(4):
                asked = prompts(options, count, seed)
                began = time.monotonic()
                answers = await complete(with_engine, asked)
                speeds.append(sum(len(each.ids) for each in answers) / (time.monotonic() - began))
                assert all(len(each.logprobs) == len(each.versions) == NEW for each in answers)
            row[str(count)] = max(speeds[1:])
        return row

    return asyncio.run(measure())


@torch.no_grad()
def differences(network: PreTrainedModel, asked: list[list[int]], answers: list[Completion]) -> Row:
    """|engine's log-probability - the float32 forward's| over all sampled tokens."""
    found = []
    for ids, answer in zip(asked, answers, strict=True):
        logits = network(torch.tensor([ids + answer.ids], device=network.device)).logits[0, len(ids) - 1 : -1]
        logp = logits.float().log_softmax(-1).gather(1, torch.tensor(answer.ids, device=logits.device)[:, None])[:, 0]
        found.append((logp.cpu() - torch.tensor(answer.logprobs)).abs())
    every = torch.cat(found)
    return {"mean": every.mean().item(), "p99": every.quantile(0.99).item(), "max": every.max().item()}


def seconds(job: Callable[[], object], repeats: int = 3) -> list[float]:
    """After a first, which opens buffers."""
    times = []
    for _ in range(repeats + 1):
        began = time.monotonic()
        job()
        times.append(time.monotonic() - began)
    return times


def update(options: argparse.Namespace, with_engine: VllmEngine) -> Row:
    network = load_model(Path(options.model))
    asked = prompts(options, CHECKED, 7)
    row: Row = {"before": differences(network, asked, asyncio.run(complete(with_engine, asked)))}
    old = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.ndim == 2:
                parameter.mul_(1 + 0.05 * torch.randn_like(parameter))
    row["apply_s"] = seconds(lambda: with_engine.apply(Weights(1, network.state_dict())))
    answers = asyncio.run(complete(with_engine, asked))
    assert {version for answer in answers for version in answer.versions} == {1}
    row["after"] = differences(network, asked, answers)
    sender = with_engine._shared.sender
    assert sender is not None
    row["by"] = "CUDA IPC" if sender._flat is not None and sender._flat.is_cuda else "a mapped file"

    async def in_flight() -> float:
        writing = asyncio.create_task(complete(with_engine, asked))
        await asyncio.sleep(0.1)
        began = time.monotonic()
        await asyncio.to_thread(with_engine.apply, Weights(2, network.state_dict()))
        took = time.monotonic() - began
        row["versions in flight"] = sorted({v for answer in await writing for v in answer.versions})
        return took

    row["apply_in_flight_s"] = asyncio.run(in_flight())
    network.load_state_dict(old)
    row["against the old weights"] = differences(network, asked, answers)  # large: the new ones did arrive
    Sender._on_gpu = lambda *_: None  # type: ignore[method-assign]
    sender.forget()
    row["by_file_s"] = seconds(lambda: with_engine.apply(Weights(3, network.state_dict())))
    row["after by file"] = differences(network, asked, asyncio.run(complete(with_engine, asked)))
    return row


def train(options: argparse.Namespace) -> Row:
    doctor = subprocess.run([sys.executable, "-m", "offbook", "doctor", "--json"], stdout=subprocess.PIPE, text=True)
    sandboxes = next(each for each in json.loads(doctor.stdout.splitlines()[-1]) if each["name"] == "sandbox")
    backend = "bwrap" if sandboxes["ok"] else "process"
    with TemporaryDirectory() as folder:
        settings = {
            "model": options.model,
            "out": f"{folder}/run",
            "tasks.source": "pocket",
            "tasks.num_train": 24,
            "tasks.num_heldout": 1,
            "harness.turns": 6,
            "sandbox.backend": backend,
            "engine.kind": "vllm",
            "engine.vllm.gpu_share": options.share,
            "train.steps": options.steps,
            "train.groups": 4,
            "train.group_size": 8,
            "checkpoint.every": 100,
        } | dict(pair.split("=", 1) for pair in options.set)
        words = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
        command = [sys.executable, "-m", "offbook", "train", "@", options.recipe, *words]
        done = subprocess.run(command, stderr=subprocess.STDOUT, stdout=subprocess.PIPE, text=True, timeout=300)
        log = Path(folder) / "run" / "logs" / "vllm.log"
        if done.returncode:
            tail = log.read_text()[-3000:] if log.is_file() else ""
            raise RuntimeError(f"{done.stdout[-3000:]}\n{tail}")
        rows = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]
    steady = rows[1:]
    kept = (
        "rollout_s",
        "train_s",
        *(f"slowest/{part}_s" for part in ("model", "tools", "scoring")),
        "turns",
        "tokens",
        "train_tokens",
        "rl/mismatch",
        "solved",
    )
    each = [{key: row.get(key) for key in kept} for row in steady]
    step_s = [row["rollout_s"] + row["train_s"] for row in steady]
    why = "" if sandboxes["ok"] else sandboxes["detail"]
    return {"sandboxes": backend, "why no sandboxes": why, "step_s": statistics.median(step_s), "steps": each}


def guarded(name: str, job: Callable[[], Row]) -> Row:
    began = time.monotonic()
    try:
        row = job()
    except Exception as error:
        traceback.print_exc()
        row = {"error": f"{type(error).__name__}: {str(error)[-2000:]}"}
    row["took_s"] = time.monotonic() - began
    print(f"\n== {name}\n{json.dumps(row, indent=1)}", flush=True)
    return row


def compared(rows: dict[str, Row], counts: list[int]) -> None:
    theirs, mine = rows.get("own", {}), rows.get("ours", {})
    print("\nprompts   vLLM's own   with log-probabilities   ours   share")
    for count in map(str, counts):
        if count in theirs and count in mine:
            best = max(theirs[count], theirs[f"{count}+logprobs"])
            rows.setdefault("share", {})[count] = mine[count] / best
            numbers = theirs[count], theirs[f"{count}+logprobs"], mine[count], mine[count] / best
            print(f"{count:>7} {numbers[0]:12.0f} {numbers[1]:24.0f} {numbers[2]:6.0f} {numbers[3]:7.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a folder")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rows", nargs="+", default=["own", "ours", "update", "train"])
    parser.add_argument("--counts", nargs="+", type=int, default=[64, 256])
    parser.add_argument("--length", type=int, default=1000)
    parser.add_argument("--share", type=float, default=0.4)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--recipe", default="small", help="of the row `train`")
    parser.add_argument("--set", nargs="*", default=[], help="more settings of the row `train`, as KEY=VALUE")
    parser.add_argument("--inner", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inner:
        own_inside(options)
        return
    rows: dict[str, Row] = {}
    if "own" in options.rows:
        rows["own"] = guarded("own", lambda: own(options))
    if {"ours", "update"} & set(options.rows):

        def both() -> Row:
            with engine(options) as made:
                for name, job in (("ours", ours), ("update", update)):
                    if name in options.rows:
                        rows[name] = guarded(name, lambda job=job: job(options, made))
            return {}

        guarded("the server", both)
    if "train" in options.rows:
        rows["train"] = guarded("train", lambda: train(options))
    compared(rows, options.counts)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
