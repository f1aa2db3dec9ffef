"""What low precision does to RL: linear layers of each kind in trainer and engine, of the pocket model or of --model.

    python bench/cpu/precision.py --seeds 0 1 --steps 20 --json figures.json

Runs of one seed start from the same weights and take the same tasks in the same order. RL alone, no hints. The mismatch
is |log pi - log mu| of sampled tokens, the trainer's before its step against the engine's when it drew them: both have
the same weights, so that all of it is arithmetic. A ratio is pi / mu. `first` is of the first step, in which all runs
have the weights they start from; other columns are of all steps, or of five at either end. A finished run is not
run again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from offbook.core.config import Config, load_config
from offbook.core.runfolder import RunFolder, latest_checkpoint, write_atomic
from offbook.rl.collector import Collector
from offbook.rl.evaluate import PARALLEL
from offbook.rl.tasks import task_sets
from offbook.rl.train import train
from offbook.rl.train_step import summarize
from offbook.train.trainer import NotFinite, WeightsLost

ARMS: dict[str, dict[str, str]] = {
    "plain": {},
    "fp8": {"train.linear.kind": "fp8"},
}
COMMON = {"feedback.weight": "0", "feedback.look": "false", "train.groups": "3", "checkpoint.every": "5"}
ENDS = 5  # steps at either end of a run
COLLAPSED = 0.5  # of what was solved at first


def config_of(arm: str, seed: int, arguments: argparse.Namespace) -> Config:
    out = arguments.out / arm.replace("; ", "-").replace(", ", "-").replace(" ", "_") / f"seed-{seed}"
    given = {"seed": str(seed), "train.steps": str(arguments.steps), "model": arguments.model, "out": str(out)}
    more = dict(option.split("=", 1) for option in arguments.set)
    return load_config(["pocket"], {**COMMON, **ARMS[arm], **given, **more})


def run(config: Config) -> dict[str, Any]:
    result = Path(config.out) / f"result-{config.train.steps}.json"
    if result.exists():
        return json.loads(result.read_text())
    ended = ""
    try:
        train(config)
    except (NotFinite, WeightsLost) as error:
        ended = str(error)
    figures = {**of_steps(RunFolder(config.out)), "ended": ended, "heldout": measure(config)}
    write_atomic(result, json.dumps(figures, indent=2) + "\n")
    return figures


def of_steps(folder: RunFolder) -> dict[str, Any]:
    rows = [json.loads(line) for line in (folder.path / "metrics.jsonl").read_text().splitlines()]
    trained = [row for row in rows if "rl/mismatch" in row]
    solved = [row["solved"] for row in rows]
    return {
        "first": trained[0]["rl/mismatch"],
        "mismatch": mean(row["rl/mismatch"] for row in trained),
        "last": mean(row["rl/mismatch"] for row in trained[-ENDS:]),
        "gradient_norm": max(row["gradient_norm"] for row in trained),
        "solved_first": mean(solved[:ENDS]),
        "solved_last": mean(solved[-ENDS:]),
    }


def measure(config: Config) -> float:
    """Of held-out tasks, the share that is solved, sampled by the engine that the run had."""
    tasks = task_sets(config, lambda what, share: None).heldout
    collector = Collector(config, latest_checkpoint(RunFolder(config.out)))
    groups = asyncio.run(collector.groups(tasks, config.eval.samples, "eval", parallel=PARALLEL))
    return summarize(groups)["solved"]


def table(found: dict[str, dict[str, dict[str, Any]]]) -> list[str]:
    lines = ["| trainer and engine | seeds | mismatch, first | all | last "]
    lines[0] += "| largest gradient | solved, first | last | held out | diverged |"
    lines += ["|---|" + "---:|" * 9]
    for arm, seeds in found.items():
        runs = list(seeds.values())

        def of(key: str, runs: list[dict[str, Any]] = runs) -> float:
            return mean(one[key] for one in runs)

        nats = " | ".join(f"{of(key):.2g}" for key in ("first", "mismatch", "last"))
        solved = " | ".join(f"{of(key):.0%}" for key in ("solved_first", "solved_last", "heldout"))
        diverged = sum(has_diverged(one) for one in runs)
        gradient = max(one["gradient_norm"] for one in runs)
        lines.append(f"| {arm} | {len(runs)} | {nats} | {gradient:.2g} | {solved} | {diverged} |")
    return lines


def has_diverged(figures: dict[str, Any]) -> bool:
    return bool(figures["ended"]) or figures["solved_last"] < COLLAPSED * figures["solved_first"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS), help="only these")
    parser.add_argument("--model", default="pocket", help="`pocket`, `smollm2-135m`, a folder")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="configuration of every run")
    parser.add_argument("--out", type=Path, default=Path("runs/precision"))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for seed in arguments.seeds:
        for arm in arguments.arms:
            found.setdefault(arm, {})[str(seed)] = figures = run(config_of(arm, seed, arguments))
            print(
                f"seed {seed}, {arm}: mismatch {figures['mismatch']:.2g}, held out {figures['heldout']:.0%}", flush=True
            )
            if arguments.json:
                write_atomic(arguments.json, json.dumps(found, indent=2) + "\n")
    print("\n".join(table(found)))


if __name__ == "__main__":
    main()
