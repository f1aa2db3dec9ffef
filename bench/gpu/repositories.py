"""A coding model on real packages, before and after imitation, RL, and RL with hints: docs/results/repositories.md.

    python bench/gpu/repositories.py start TASKS --model 0.5b=FOLDER --model 1.5b=FOLDER --out OUT --minutes 9
    python bench/gpu/repositories.py arms TASKS --model 0.5b=FOLDER:0,1,2 --model 1.5b=FOLDER:0 --out OUT --minutes 16
    python bench/gpu/repositories.py report OUT [OUT ...] --json FILE

`start` is `offbook stages` without RL, for all models side by side. `arms` trains each model with each seed twice from
the same weights (a run, or an adapter's folder), with hints and without, until the minutes left are needed for the
evaluations. A model whose folder is not there yet is waited for. What is done already is not done again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from offbook.core.runfolder import load_lines
from offbook.evals.statistics import pass_at_k
from offbook.signals.trajectory import Trajectory
from offbook.types import Rollout

START = ["fit", "eval", "sft", "eval", "sample", "sft", "eval"]
ARMS = {"rl": ["--feedback.weight", "0"], "hints": []}
BEGAN = time.monotonic()
Row = dict[str, Any]


def say(line: str) -> None:
    print(f"{time.monotonic() - BEGAN:6.0f} s  {line}", flush=True)


class Bench:
    def __init__(self, options: argparse.Namespace):
        self.options, self.out = options, Path(options.out)
        self.out.mkdir(parents=True, exist_ok=True)
        self.keys = options.keys.split()
        self.seconds: dict[str, float] = {}

    def left(self) -> float:
        return 60 * self.options.minutes - (time.monotonic() - BEGAN)

    async def run(self, name: str, command: Sequence[str], until: float = 0.0) -> None:
        """One command of offbook, its output in OUT/NAME.log. It is interrupted when `until` seconds are left."""
        began = time.monotonic()
        say(f"{name}: offbook {' '.join(command)}")
        with (self.out / f"{name}.log").open("ab") as log:
            arguments = (sys.executable, "-m", "offbook", *command)
            process = await asyncio.create_subprocess_exec(*arguments, stdout=log, stderr=log, start_new_session=True)
            try:
                await asyncio.wait_for(process.wait(), max(1.0, self.left() - until))
            except TimeoutError:
                say(f"{name}: interrupted")
                os.killpg(process.pid, signal.SIGINT)
                try:
                    await asyncio.wait_for(process.wait(), 60)
                except TimeoutError:
                    os.killpg(process.pid, signal.SIGKILL)
                    await process.wait()
        self.seconds[name] = round(time.monotonic() - began, 1)
        (self.out / "times.json").write_text(json.dumps(self.seconds, indent=1) + "\n")
        say(f"{name}: code {process.returncode} after {self.seconds[name]:.0f} s")

    async def started(self, name: str, folder: str) -> None:
        await there(Path(folder))
        order = json.dumps(self.options.order.split() if self.options.order else START)
        where = ["--model", folder, "--tasks.source", self.options.tasks, "--out", str(self.out / name)]
        settings = ["--stages.order", order, "--eval.samples", str(self.options.n), *self.keys, "--plain"]
        await self.run(f"{name}-start", ["stages", "@", "repository", *where, *settings])

    async def arm(self, name: str, folder: str, arm: str, seed: str) -> None:
        await there(Path(folder))
        run = self.out / f"{name}-{arm}-{seed}"
        where = ["--model", folder, "--tasks.source", self.options.tasks, "--out", str(run), "--seed", seed]
        command = ["train", "@", "repository", *where, *ARMS[arm], *self.keys, "--plain"]
        await self.run(run.name, command, until=60 * self.options.eval_minutes)
        n = self.options.n if seed == "0" else self.options.n // 2
        await self.run(f"{run.name}-eval", ["eval", str(run), "-n", str(n), "--plain"])
        if self.options.hybrid and seed == "0":
            await self.on_hybrid(f"{run.name}-hybrid", str(run))

    async def on_hybrid(self, name: str, model: str) -> None:
        where = ["--model", model, "--suite", self.options.hybrid, "--out", str(self.out / name)]
        await self.run(name, ["eval", "@", "repository", *where, *self.keys, "-n", "2", "--plain"])

    async def all(self) -> None:
        models = dict(one.split("=", 1) for one in self.options.model)
        parts = []
        for name, given in models.items():
            folder, _, seeds = given.partition(":")
            if self.options.phase == "start":
                parts.append(self.started(name, folder))
                continue
            parts += [self.arm(name, folder, arm, seed) for seed in seeds.split(",") for arm in ARMS]
        await asyncio.gather(*parts)
        (self.out / "done").write_text("")


async def there(folder: Path) -> None:
    while not folder.is_dir():
        await asyncio.sleep(1)


def package(rollout: Rollout) -> str:
    return rollout.task.split("-", 1)[0]


def report(folders: list[Path]) -> list[Row]:
    """A row per evaluation found."""
    rows = []
    for folder in folders:
        for file in sorted(folder.rglob("*rollouts.jsonl")):
            rollouts, _ = load_lines(file, Rollout)
            if (rollouts and "eval" in str(file.relative_to(folder))) or "hybrid" in str(file):
                rows.append({"evaluation": str(file.relative_to(folder).parent), **measured(rollouts)})
    return rows


def measured(rollouts: list[Rollout]) -> Row:
    calls = sum(one.usage.calls for one in rollouts)
    uses = [use for one in rollouts for use in Trajectory(one, None).uses if use.kind == "edit"]
    tasks: dict[str, list[Rollout]] = {}
    for one in rollouts:
        tasks.setdefault(one.task, []).append(one)
    n = min(len(group) for group in tasks.values())
    solved = [mean(one.solved for one in group) for group in tasks.values()]
    row: Row = {
        "rollouts": len(rollouts),
        "tasks": len(tasks),
        "solved": mean(solved),
        "solved_ci": interval(tasks),
        "by_package": {name: mean(one.solved for one in rollouts if package(one) == name) for name in packages(tasks)},
        "handed_in": mean(one.stop in ("finish", "answer") and one.has_acted for one in rollouts),
        "invalid_per_100": 100 * sum(one.usage.invalid_calls for one in rollouts) / max(1, calls),
        "edits_applied": mean(use.went_well for use in uses) if uses else None,
        "edits": len(uses),
        "turns": mean(one.usage.turns for one in rollouts),
        "tokens": mean(one.usage.sampled_tokens for one in rollouts),
        "flagged": mean(bool(one.flags) for one in rollouts),
        "crashed": mean(one.stop == "crash" for one in rollouts),
    }
    for k in (2, 4, 8):
        if k <= n:
            row[f"pass@{k}"] = mean(
                pass_at_k(len(group), sum(one.solved for one in group), k) for group in tasks.values()
            )
    return row


def packages(tasks: dict[str, list[Rollout]]) -> list[str]:
    return sorted({package(group[0]) for group in tasks.values()})


def interval(tasks: dict[str, list[Rollout]], draws: int = 2000) -> tuple[float, float]:
    """95%, by drawing packages, then their tasks."""
    rng = random.Random(0)
    of: dict[str, list[float]] = {}
    for group in tasks.values():
        of.setdefault(package(group[0]), []).append(mean(one.solved for one in group))
    names, means = list(of), []
    for _ in range(draws):
        drawn = [rng.choices(of[name], k=len(of[name])) for name in rng.choices(names, k=len(names))]
        means.append(mean(value for values in drawn for value in values))
    means.sort()
    return means[int(0.025 * draws)], means[int(0.975 * draws)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("phase", choices=("start", "arms", "report"))
    parser.add_argument("tasks", nargs="+", help="a folder of tasks; for report: folders OUT")
    parser.add_argument("--model", action="append", default=[], help="NAME=FOLDER, or for arms NAME=FOLDER:SEED,SEED")
    parser.add_argument("--out", default="runs/repositories")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--eval-minutes", type=float, default=4.0)
    parser.add_argument("--n", type=int, default=8, help="rollouts a held-out task; half for seeds but 0")
    parser.add_argument("--order", default="", help="other stages of `start`")
    parser.add_argument("--hybrid", default="", help="a folder of hybrid tasks")
    parser.add_argument("--keys", default="", help="more keys of every command")
    parser.add_argument("--json", default="")
    options = parser.parse_args()
    if options.phase == "report":
        rows = report([Path(folder) for folder in options.tasks])
        if options.json:
            Path(options.json).write_text(json.dumps(rows, indent=1) + "\n")
        for row in rows:
            print({key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()})
        return
    options.tasks = options.tasks[0]
    asyncio.run(Bench(options).all())


if __name__ == "__main__":
    main()
