"""A coding model on real packages, before and after imitation, RL, and RL with hints: docs/results/repositories.md.

    python bench/gpu/repositories.py run TASKS --model 0.5b=FOLDER:0,1,2 --model 1.5b=FOLDER: --out OUT --minutes 24
    python bench/gpu/repositories.py report OUT --json FILE

Per model: `offbook fit` (unless --harness says the profile and dialect), an evaluation, imitation of demonstrations,
an evaluation; then RL with hints and without, from the imitated weights, for each seed. Models and arms run side by
side. Training stops when --eval-minutes are left. Folders that are not there yet are waited for; what is done already
is not done again.
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
import tomllib
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from offbook.core.runfolder import load_lines
from offbook.evals.statistics import pass_at_k
from offbook.signals.trajectory import Trajectory
from offbook.types import Rollout

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
        """One command of offbook, its output in OUT/NAME.log. It is killed when `until` seconds are left."""
        began = time.monotonic()
        say(f"{name}: offbook {' '.join(command)}")
        with (self.out / f"{name}.log").open("ab") as log:
            arguments = (sys.executable, "-m", "offbook", *command)
            process = await asyncio.create_subprocess_exec(*arguments, stdout=log, stderr=log, start_new_session=True)
            try:
                await asyncio.wait_for(process.wait(), max(1.0, self.left() - until))
            except TimeoutError:
                say(f"{name}: ended")  # a run may be killed at any time: it resumes from its last step
                os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        self.seconds[name] = round(time.monotonic() - began, 1)
        (self.out / "times.json").write_text(json.dumps(self.seconds, indent=1) + "\n")
        say(f"{name}: code {process.returncode} after {self.seconds[name]:.0f} s")

    async def model(self, name: str, folder: str, seeds: list[str]) -> None:
        """What needs nothing of each other runs side by side: one evaluation before, and the imitation."""
        await there(Path(folder))
        options, out = self.options, self.out
        where = ["--tasks.source", options.folder, *self.keys]
        harness = options.harness.split() or await self.fitted(name, folder, where)
        keys = [*where, *harness]
        before = ["eval", folder, "@", "repository", *keys, "-n", str(options.n)]
        parts = [self.run(f"{name}-before-eval", [*before, "--out", str(out / f"{name}-before-eval")])]
        parts.append(self.after(name, folder, str(out / f"{name}-sft"), seeds, keys))
        if options.hybrid:
            parts.append(self.on_hybrid(f"{name}-before-hybrid", folder, harness))
        await asyncio.gather(*parts)

    async def fitted(self, name: str, folder: str, where: list[str]) -> list[str]:
        recipe = self.out / f"{name}-fit.toml"
        await self.run(f"{name}-fit", ["fit", folder, "@", "repository", *where, "--out", str(recipe)])
        found = tomllib.loads(recipe.read_text())["harness"]
        return [word for key, value in found.items() for word in (f"--harness.{key}", value)]

    async def after(self, name: str, folder: str, imitated: str, seeds: list[str], keys: list[str]) -> None:
        """Imitation, then its evaluation beside the arms."""
        await self.run(f"{name}-sft", ["sft", "@", "repository", "--model", folder, "--out", imitated, *keys])
        parts = [self.run(f"{name}-sft-eval", ["eval", imitated, "-n", str(self.options.n)])]
        if self.options.hybrid:
            parts.append(self.on_hybrid(f"{name}-sft-hybrid", imitated, keys))
        for seed in seeds:
            parts += [self.arm(f"{name}-{arm}-{seed}", imitated, seed, [*own, *keys]) for arm, own in ARMS.items()]
        await asyncio.gather(*parts)

    async def arm(self, name: str, model: str, seed: str, keys: list[str]) -> None:
        out = self.out / name
        command = ["train", "@", "repository", "--model", model, "--out", str(out), "--seed", seed, *keys]
        await self.run(name, command, until=60 * self.options.eval_minutes)
        n = self.options.n if seed == "0" else self.options.n // 2
        await self.run(f"{name}-eval", ["eval", str(out), "-n", str(n)])
        if self.options.hybrid and seed == "0":
            await self.on_hybrid(f"{name}-hybrid", str(out), [])

    async def on_hybrid(self, name: str, model: str, keys: list[str]) -> None:
        await there(Path(self.options.hybrid))
        where = ["--suite", self.options.hybrid, "--out", str(self.out / name), "-n", "2"]
        recipe = [] if (Path(model) / "config.toml").is_file() else ["@", "repository"]
        await self.run(name, ["eval", model, *recipe, *where, *self.keys, *keys])

    async def all(self) -> None:
        parts = []
        for one in self.options.model:
            name, given = one.split("=", 1)
            folder, _, seeds = given.partition(":")
            parts.append(self.model(name, folder, [seed for seed in seeds.split(",") if seed]))
        await asyncio.gather(*parts)
        (self.out / "done").write_text("")


async def there(folder: Path) -> None:
    while not folder.is_dir():
        await asyncio.sleep(1)


def package(rollout: Rollout) -> str:
    return rollout.task.split("-", 1)[0]


def report(out: Path) -> list[Row]:
    """A row per evaluation."""
    found = {file: file.parent.parent.name for file in out.rglob("eval/*.rollouts.jsonl")}
    found |= {file: file.parents[1].name for file in out.glob("*/rollouts/*.jsonl")}
    rows = []
    for file, name in sorted(found.items()):
        if "eval" in file.parts or (file.parents[1] / "results.json").is_file():
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
    parser.add_argument("--harness", default="", help="keys instead of `offbook fit`, as in: --harness.dialect json")
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
