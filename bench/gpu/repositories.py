"""A coding model on real packages, before and after imitation, RL, and RL with hints: docs/results/repositories.md.

    python bench/gpu/repositories.py run TASKS --model 0.5b=FOLDER:0,1,2 --model 1.5b=FOLDER:0 --out OUT --minutes 24
    python bench/gpu/repositories.py report OUT --json FILE

Per model: `offbook stages` up to RL (fit, evaluation, imitation, rejection sampling, imitation, evaluation); then RL
with hints and without, from the same weights, for each seed. Models and arms run side by side. Training stops when
--eval-minutes are left. Folders that are not there yet are waited for; what is done already is not done again.
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

STAGES = ["fit", "eval", "sft", "sample", "sft", "eval"]
ARMS = {"rl": ["--feedback.weight", "0"], "hints": []}
BEGAN = time.monotonic()
Row = dict[str, Any]


def say(line: str) -> None:
    print(f"{time.monotonic() - BEGAN:6.0f} s  {line}", flush=True)


class Bench:
    def __init__(self, options: argparse.Namespace):
        self.options, self.out = options, options.out
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
                process.send_signal(signal.SIGINT)
                try:
                    await asyncio.wait_for(process.wait(), 60)
                except TimeoutError:
                    os.killpg(process.pid, signal.SIGKILL)
                    await process.wait()
        self.seconds[name] = round(time.monotonic() - began, 1)
        (self.out / "times.json").write_text(json.dumps(self.seconds, indent=1) + "\n")
        say(f"{name}: code {process.returncode} after {self.seconds[name]:.0f} s")

    async def model(self, name: str, folder: str, seeds: list[str]) -> None:
        await there(Path(folder))
        options, stages = self.options, self.out / name
        where = ["--tasks.source", options.folder, *self.keys, "--plain"]
        settings = ["--stages.order", json.dumps(STAGES), "--eval.samples", str(options.n)]
        await self.run(
            f"{name}-stages", ["stages", "@", "repository", "--model", folder, "--out", str(stages), *settings, *where]
        )
        fitted = json.loads((stages / "1-fit" / "fit.json").read_text())
        dialect = "auto" if fitted["profile"] == "bash" else fitted["dialect"]
        harness = ["--harness.profile", fitted["profile"], "--harness.dialect", dialect]
        imitated = str(stages / "5-sft")
        parts = [self.run(f"{name}-demos-eval", ["eval", str(stages / "3-sft"), "-n", str(options.n // 2), "--plain"])]
        if options.hybrid:
            parts += [self.on_hybrid(f"{name}-before-hybrid", folder, harness)]
            parts += [self.on_hybrid(f"{name}-sft-hybrid", imitated, harness)]
        for seed in seeds:
            for arm, keys in ARMS.items():
                parts.append(self.arm(f"{name}-{arm}-{seed}", imitated, seed, [*keys, *harness, *where]))
        await asyncio.gather(*parts)

    async def arm(self, name: str, model: str, seed: str, keys: list[str]) -> None:
        out = self.out / name
        command = ["train", "@", "repository", "--model", model, "--out", str(out), "--seed", seed, *keys]
        await self.run(name, command, until=60 * self.options.eval_minutes)
        n = self.options.n if seed == "0" else self.options.n // 2
        await self.run(f"{name}-eval", ["eval", str(out), "-n", str(n), "--plain"])
        if self.options.hybrid and seed == "0":
            await self.on_hybrid(f"{name}-hybrid", str(out), [])

    async def on_hybrid(self, name: str, model: str, keys: list[str]) -> None:
        await there(Path(self.options.hybrid))
        where = ["--model", model, "--suite", self.options.hybrid, "--out", str(self.out / name), "-n", "2"]
        await self.run(name, ["eval", "@", "repository", *where, *self.keys, *keys, "--plain"])

    async def all(self) -> None:
        parts = []
        for one in self.options.model:
            name, given = one.split("=", 1)
            folder, _, seeds = given.partition(":")
            parts.append(self.model(name, folder, seeds.split(",")))
        await asyncio.gather(*parts)
        (self.out / "done").write_text("")


async def there(folder: Path) -> None:
    while not folder.is_dir():
        await asyncio.sleep(1)


def package(rollout: Rollout) -> str:
    return rollout.task.split("-", 1)[0]


def report(out: Path) -> list[Row]:
    """A row per evaluation."""
    rows = []
    for file in sorted(out.rglob("*rollouts.jsonl")):
        name = str(file.relative_to(out).parent)
        if "eval" in name or "hybrid" in name:
            rollouts, _ = load_lines(file, Rollout)
            rows.append({"evaluation": name, **measured(rollouts)})
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
    parser.add_argument("phase", choices=("run", "report"))
    parser.add_argument("folder", help="of tasks; for report: OUT")
    parser.add_argument("--model", action="append", default=[], help="NAME=FOLDER:SEED,SEED")
    parser.add_argument("--out", type=Path, default=Path("runs/repositories"))
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--eval-minutes", type=float, default=4.0)
    parser.add_argument("--n", type=int, default=8, help="rollouts per held-out task; half for seeds other than 0")
    parser.add_argument("--hybrid", default="", help="a folder of hybrid tasks")
    parser.add_argument("--keys", default="", help="more keys of every command")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.phase == "run":
        asyncio.run(Bench(options).all())
        return
    rows = report(Path(options.folder))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    for row in rows:
        print({key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()})


if __name__ == "__main__":
    main()
