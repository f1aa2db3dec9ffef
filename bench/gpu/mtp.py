"""Draft heads: what they keep and what they save. `python bench/gpu/mtp.py --model FOLDER --json mtp.json`

1. Rollouts of the model on pocket tasks, at temperature 1. --sft N lets it imitate N demonstrations first: a model that
   solves nothing has nothing to learn by RL.
2. A head, trained on these rollouts: seconds, and what sampling keeps by depth on rollouts kept
   apart.
3. Tokens a second of vLLM at batch 1, 8 and 64, without drafts, with the head drafting the likeliest token and
   with drawn drafts: messages behind the beginnings of real rollouts, one after the other, each to its own end, prompts
   included.

--parts takes some of them; what they need of earlier ones has to be in --place. --tiny is for a CPU, to try the script
itself. Each part goes on without the ones that failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import httpx2
import torch

from offbook.core.config import Config, EngineConfig, VllmConfig, load_config
from offbook.core.runfolder import RunFolder, dump_lines, latest_checkpoint
from offbook.engine import VllmEngine
from offbook.engine.vllm import Server
from offbook.rl.collector import Collector, with_drafts
from offbook.rl.models import chat_of, model_folder
from offbook.rl.tasks import task_sets
from offbook.stages.mtp import mtp, read_samples
from offbook.stages.sft import sft
from offbook.types import Prompt, Rollout

ON_GPU = torch.cuda.is_available()
PARTS = ("rollouts", "heads", "vllm")
CACHE_BYTES = 8_000_000_000  # for the keys and values of a vLLM server
Row = dict[str, Any]


class Report:
    def __init__(self, file: Path | None):
        self.file, self.rows = file, list[Row]()

    def row(self, part: str, work: Callable[[], Row]) -> Row | None:
        """One more, unless it fails: the others are worth having."""
        began = time.monotonic()
        try:
            found = {"part": part, **work()}
        except Exception:
            traceback.print_exc()
            print(f"{part}: failed after {time.monotonic() - began:.1f} s", flush=True)
            return None
        self.rows.append(found)
        told = (f"{key} {value:.3f}" if isinstance(value, float) else f"{key} {value}" for key, value in found.items())
        print("  ".join(told), flush=True)
        self.write()
        return found

    def write(self) -> None:
        if self.file:
            self.file.write_text(json.dumps(self.rows, indent=1) + "\n")


def settings(options: argparse.Namespace, **given: Any) -> Config:
    """Of every part."""
    precision = "bfloat16" if ON_GPU and options.precision == "auto" else options.precision.replace("auto", "float32")
    tree = {
        "model": options.model,
        "engine.kind": "continuous" if ON_GPU else "lockstep",
        "train.precision": precision,
        "engine.precision": precision,
        "train.group_size": options.group_size,
        "feedback.weight": 0,
        "tasks.num_train": options.tasks,
        "tasks.num_heldout": 1,
        "mtp.steps": options.head_steps,
        "mtp.batch_tokens": options.batch_tokens,
        "mtp.depth": options.depth,
        **{key.replace("__", "."): value for key, value in given.items()},
    }
    given = {key: value if isinstance(value, str) else json.dumps(value) for key, value in tree.items()}
    return load_config(["pocket"], given | dict(option.split("=", 1) for option in options.set))


def rollouts_of(config: Config, count: int, size: int) -> list[Rollout]:
    tasks = task_sets(config, lambda what, share: None).train[:count]

    async def collect() -> list[Rollout]:
        collector = Collector(config, model_folder(config.model, config.seed))
        try:
            return [one for group in await collector.groups(tasks, size, "bench") for one in group]
        finally:
            await collector.aclose()

    return asyncio.run(collect())


def collected(options: argparse.Namespace, place: Path) -> Row:
    began = time.monotonic()
    found = rollouts_of(settings(options), options.tasks, options.group_size)
    (place / "rollouts.jsonl").write_bytes(dump_lines(found))
    sampled = sum(sum(segment.sampled) for one in found for segment in one.segments)
    solved = sum(one.reward.parts.get("outcome", 0.0) for one in found) / len(found)
    return {"rollouts": len(found), "tokens": sampled, "solved": solved, "seconds": time.monotonic() - began}


def head(options: argparse.Namespace, place: Path) -> Row:
    out = place / "head"
    shutil.rmtree(out, ignore_errors=True)
    data = {"sft__data": [str(place / "rollouts.jsonl")]}
    rows: list[Row] = []
    found = mtp(settings(options, out=str(out), **data), rows.append)
    kept = {key.removeprefix("validation/"): value for key, value in found.items() if "kept" in key}
    return {**kept, "seconds": sum(row["step_s"] for row in rows)}


def beginnings(options: argparse.Namespace, place: Path, count: int) -> list[list[int]]:
    """Of real rollouts, up to where a message begins."""
    data = {"sft__data": [str(place / "rollouts.jsonl")]}
    samples, rng = read_samples(settings(options, **data), tell=lambda line: None), random.Random(0)
    found: list[list[int]] = []
    while len(found) < count:
        one = rng.choice(samples)
        starts = [at for at in range(1, len(one.ids)) if one.ce_weight[at] and not one.ce_weight[at - 1]]
        if starts:
            found.append(one.ids[: rng.choice(starts)])
    return found


async def written(engine: VllmEngine, prompts: list[list[int]], batch: int, new: int, key: str) -> float:
    """Tokens a second: as many at once as the batch has; each writes messages until it has written `new` tokens."""

    async def one(number: int) -> int:
        count, turn = 0, 0
        while count < new:
            session = engine.open(f"{key}/{number}/{turn}")
            prompt = Prompt(prompts[(number + turn * batch) % len(prompts)])
            count += len((await session.complete(prompt, new)).ids)
            session.close()
            turn += 1
        return count

    began = time.perf_counter()
    count = sum(await asyncio.gather(*map(one, range(batch))))
    return count / (time.perf_counter() - began)


async def fastest(options: argparse.Namespace, engine: VllmEngine, place: Path, batch: int) -> Row:
    """Tokens a second."""
    prompts = beginnings(options, place, 4 * batch)
    for warm in ("compiles", "captures"):
        await written(engine, prompts, batch, options.new, f"{warm}/{batch}")
    rates = [await written(engine, prompts, batch, options.new, str(number)) for number in range(options.repeat)]
    return {"tokens/s": max(rates)}


def vllm_speeds(options: argparse.Namespace, place: Path, report: Report) -> None:
    """Servers come up at the same time, and are asked one after the other."""
    folder = model_folder(options.model, 0)
    drafts = EngineConfig(kind="vllm", draft=str(place / "head"))
    drawn = with_drafts(drafts).options
    likeliest = [drawn[0], json.dumps({**json.loads(drawn[1]), "draft_sample_method": "greedy"})]
    arms = {"plain": [], "drawn drafts": drawn, "likeliest drafts": likeliest}
    longest = max(len(prompt) for batch in options.batches for prompt in beginnings(options, place, 4 * batch))
    context = longest + options.new
    logs = {name: place / f"vllm-{name.split()[0]}.log" for name in arms}
    servers = {
        name: vllm_server(folder, more, max(options.batches), context, logs[name]) for name, more in arms.items()
    }
    with ThreadPoolExecutor(len(servers)) as pool:
        up = {name: pool.submit(server.start) for name, server in servers.items()}
        wait(up.values())
    plain: dict[int, float] = {}

    async def measure(name: str, server: Server) -> None:
        running = Server(folder, VllmConfig(url=server.url), context, server.log, server.progress)
        engine = VllmEngine(running, chat_of(folder, load_config(["pocket"], {})).stop_ids)
        for batch in options.batches:
            before = [] if name == "plain" else counted(server)
            rate = (await fastest(options, engine, place, batch))["tokens/s"]
            faster = {"speedup": rate / plain[batch]} if batch in plain else {}
            plain.setdefault(batch, rate)
            found = {"policy": name, "batch": batch, "tokens/s": rate, **faster}
            if before:
                steps, *kept = (now - then for now, then in zip_longest(counted(server), before, fillvalue=0.0))
                found |= {f"accepted_{depth}": count / steps for depth, count in enumerate(kept, 1)}
            report.row("vllm", partial(dict, found))
        await engine.aclose()

    for name, server in servers.items():
        try:
            up[name].result()
            asyncio.run(measure(name, server))
        except Exception:  # the others are worth having
            traceback.print_exc()
        server.stop()


def vllm_server(folder: Path, more: list[str], rows: int, context: int, log: Path) -> Server:
    """Its memory is said: with others beside it vLLM takes what they allocate meanwhile for its own."""
    given = ["--max-num-seqs", str(rows), *more]  # fewer graphs to record
    if ON_GPU:
        given += ["--kv-cache-memory-bytes", str(CACHE_BYTES)]
    return Server(folder, VllmConfig(gpu_share=0.05, options=given), context, log, lambda what, share: None)


def counted(server: Server) -> list[float]:
    """Since the server came up: steps with drafts, and how many were kept at each depth."""
    lines = [line for line in httpx2.get(f"{server.url}/metrics").text.splitlines() if line.startswith("vllm:spec")]
    found = {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines}
    drafts = sum(value for name, value in found.items() if "num_drafts_total" in name)
    depths = [value for name, value in sorted(found.items()) if "accepted_tokens_per_pos_total" in name]
    return [drafts, *depths]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="pocket", help="`pocket`, `smollm2-135m`, a folder")
    parser.add_argument("--sft", type=int, default=0, help="demonstrations that the model imitates first")
    parser.add_argument("--precision", default="auto", choices=["auto", "float32", "bfloat16"])
    parser.add_argument("--tasks", type=int, default=64, help="that rollouts are collected on")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--head-steps", type=int, default=400)
    parser.add_argument("--batch-tokens", type=int, default=16_384)
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--new", type=int, default=256, help="tokens that a row writes, at least")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--place", type=Path, help="a folder that is kept; parts that are there are not done again")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="configuration of every part")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.tiny:
        options.tasks, options.group_size, options.head_steps = 3, 2, 8
        options.batch_tokens, options.batches, options.new, options.repeat = 1024, [1, 2], 16, 1
        options.depth = 2
    report = Report(options.json)
    with tempfile.TemporaryDirectory() as scratch:
        place = options.place or Path(scratch)
        place.mkdir(parents=True, exist_ok=True)
        if options.sft:
            data = {"out": str(place / "sft"), "sft__data": [f"pocket:{options.sft}"], "sft__learning_rate": 2e-4}
            if not (place / "sft" / "ckpt").is_dir():
                report.row("sft", lambda: {"steps": len(sft(settings(options, **data)).metrics()[0])})
            options.model = str(latest_checkpoint(RunFolder(place / "sft")))
        if "rollouts" in options.parts and not (place / "rollouts.jsonl").is_file():
            report.row("rollouts", lambda: collected(options, place))
        if "heads" in options.parts and not (place / "head" / "draft").is_dir():
            report.row("head", partial(head, options, place))
        if "vllm" in options.parts:
            vllm_speeds(options, place, report)


if __name__ == "__main__":
    main()
