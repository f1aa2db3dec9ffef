"""Does a lower loss after imitation predict a higher reward after RL? Starts of one pocket base, each with the same RL.

    python bench/cpu/starts.py --out runs/starts --seeds 0 1 2 --json docs/results/starts.json
    python bench/cpu/starts.py --out runs/starts --seeds 0 --starts 3 4     # some; several processes at once
    python bench/cpu/starts.py --out runs/starts-tiny --tiny                # a minute or two on a CPU

The base has imitated few episodes. A start imitates more of them, others than the base has seen: how many, how often
and at which learning rate differs. The loss is measured for all of them on the same demonstrations, which none has
seen. Then RL alone on the same tasks for as many steps, and held-out tasks before and after. What is done already is
not done again, and a call with all starts reports. Correlations are Spearman's, a mean over seeds; p is the share of
random orders within seeds that are at least as far from 0. Losses on demonstrations include the faults that the script
makes on purpose, which RL has to take away: the lowest loss is not the best agent.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import json
import random
import time
from collections import Counter
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

from methods import kept

from offbook.api import rollouts
from offbook.core.config import Config, load_config
from offbook.core.runfolder import latest_checkpoint, write_atomic
from offbook.pocket.model import Recipe, make_pocket
from offbook.pocket.tasks import make_pocket_tasks
from offbook.rl.models import model_to_train
from offbook.rl.train import train
from offbook.rl.train_step import summarize
from offbook.stages.sft import make_lessons, sft
from offbook.tasks import load_tasks
from offbook.train.forward import Decoder, imitation_loss

# Episodes, epochs, the highest learning rate.
STARTS = [
    (100, 1, 2e-3),
    (200, 1, 2e-3),
    (400, 1, 2e-3),
    (800, 1, 2e-3),
    (1600, 1, 2e-3),
    (3200, 1, 2e-3),
    (6400, 1, 2e-3),
    (200, 16, 2e-3),  # as many tokens as 3200, by heart
    (1600, 1, 3e-4),
    (3200, 2, 4e-3),
]
COLUMNS = ("loss", "before", "after", "gain", "solved_before", "solved_after", "invalid_before", "invalid_after")
CLAIMS = {  # of which two columns; the claim is that the first two are below 0
    "loss and reward after RL": ("loss", "after"),
    "loss and reward before RL": ("loss", "before"),
    "loss and gain": ("loss", "gain"),
    "reward before and after RL": ("before", "after"),
}
ORDERS = 20_000


class Bench:
    """Of one seed."""

    def __init__(self, seed: int, arguments: argparse.Namespace):
        self.seed, self.arguments = seed, arguments
        self.root: Path = arguments.out / f"seed-{seed}"
        self.tasks = self.root / "tasks"

    def config(self, seed: int, **keys: str) -> Config:
        """Keys with two underscores for a dot."""
        given = {key.replace("__", "."): value for key, value in keys.items()}
        common = {"feedback.weight": "0", "sft.reminders": "0", "sft.batch_tokens": "1024"}
        common |= {"sft.validation_share": "0", "checkpoint.every": "100", "seed": str(seed)}
        common |= {"tasks.source": str(self.tasks), "threads": str(self.arguments.threads)}
        return load_config(["pocket"], {**common, **dict(one.split("=", 1) for one in self.arguments.set), **given})

    def prepare(self) -> None:
        """By whoever comes first; the others wait."""
        self.root.mkdir(parents=True, exist_ok=True)
        with (self.root / "preparing").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if not self.tasks.is_dir():
                asyncio.run(make_pocket_tasks(self.tasks, self.seed, *self.arguments.tasks, lambda share: None))
            recipe = Recipe(episodes=self.arguments.episodes)
            self.base = make_pocket(self.arguments.out / "models", self.seed, lambda what, share: None, recipe)

    def loss(self, model: Path) -> float:
        """On demonstrations of a seed that nothing is learned from."""
        config = self.config(self.seed + 2000, model=str(model), sft__data=f'["pocket:{self.arguments.apart}"]')
        lessons = make_lessons(config, model, lambda what, share: None, lambda line: None)
        samples = lessons.samples(1, lessons.learned, Counter())
        return imitation_loss(Decoder(model_to_train(config, model)), samples, config.train.settled().micro_tokens)

    def measured(self, model: Path) -> dict[str, float]:
        heldout = load_tasks(self.tasks / "heldout")
        return summarize([rollouts(self.config(self.seed, model=str(model)), heldout, self.arguments.samples)])

    def start(self, number: int) -> dict[str, Any]:
        began, (episodes, epochs, rate) = time.monotonic(), STARTS[number]
        episodes = max(8, round(episodes * self.arguments.scale))
        keys = {"sft.data": f'["pocket:{episodes}"]', "sft.epochs": str(epochs), "sft.learning_rate": str(rate)}
        out = self.root / f"start-{number}"
        imitated = sft(self.config(self.seed + 1000, model=str(self.base), out=str(out / "sft"), **keys))
        model = latest_checkpoint(imitated)
        row = {"episodes": episodes, "epochs": epochs, "rate": rate, "loss": self.loss(model)}
        steps = {"train.steps": str(self.arguments.steps), "train.groups": str(self.arguments.groups)}
        trained = train(self.config(self.seed, model=str(model), out=str(out / "rl"), **steps))
        before, after = self.measured(model), self.measured(latest_checkpoint(trained))
        row |= {"before": before["reward"], "after": after["reward"], "gain": after["reward"] - before["reward"]}
        row |= {"solved_before": before["solved"], "solved_after": after["solved"]}
        row |= {"invalid_before": before["invalid_per_100"], "invalid_after": after["invalid_per_100"]}
        return {**row, "rollouts": after["rollouts"], "seconds": time.monotonic() - began}


def ranks(values: list[float]) -> list[float]:
    """Equal ones share the mean of their places."""
    return [(sum(other < one for other in values) + sum(other <= one for other in values) + 1) / 2 for one in values]


def correlation(left: list[float], right: list[float]) -> float:
    """Pearson's, which of ranks is Spearman's. 0 where all of one side are equal: they predict nothing."""
    x, y = ([one - mean(side) for one in side] for side in (left, right))
    size = (sum(a * a for a in x) * sum(b * b for b in y)) ** 0.5
    return sum(a * b for a, b in zip(x, y, strict=True)) / size if size else 0.0


def predicts(seeds: list[list[dict[str, float]]], cause: str, effect: str) -> dict[str, Any]:
    """Spearman's correlation by seed, their mean, and the share of orders within seeds that give one as far from 0."""
    sides = [(ranks([row[cause] for row in rows]), ranks([row[effect] for row in rows])) for rows in seeds]
    found, rng = [correlation(*side) for side in sides], random.Random(0)
    drawn = (mean(correlation(left, rng.sample(right, len(right))) for left, right in sides) for _ in range(ORDERS))
    as_far = sum(abs(one) >= abs(mean(found)) - 1e-9 for one in drawn)
    return {"rho": mean(found), "p": (as_far + 1) / (ORDERS + 1), "by_seed": found}


def table(found: dict[str, dict[str, dict[str, Any]]]) -> list[str]:
    lines = ["| seed | episodes x epochs, rate | " + " | ".join(COLUMNS) + " |", "|---" * (len(COLUMNS) + 2) + "|"]
    for seed, rows in found.items():
        for row in sorted((row for row in rows.values() if "error" not in row), key=lambda row: -row["loss"]):
            made = f"{row['episodes']} x {row['epochs']}, {row['rate']:g}"
            lines.append(f"| {seed} | {made} | " + " | ".join(f"{row[column]:.3g}" for column in COLUMNS) + " |")
    return lines


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for seed in arguments.seeds:
        bench = Bench(seed, arguments)
        bench.prepare()
        for number in arguments.starts:
            path = bench.root / f"start-{number}.json"
            row = found.setdefault(str(seed), {})[str(number)] = kept(path, partial(bench.start, number))
            print(f"seed {seed} start {number}: {json.dumps(row)}", flush=True)
    seeds = [[row for row in rows.values() if "error" not in row] for rows in found.values()]
    seeds = [rows for rows in seeds if len(rows) > 2]
    claims = {name: predicts(seeds, *pair) for name, pair in CLAIMS.items()} if seeds else {}
    return {"starts": found, "claims": claims}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, default=Path("runs/starts"))
    add("--seeds", type=int, nargs="+", default=[0])
    every = list(range(len(STARTS)))
    add("--starts", type=int, nargs="+", choices=every, default=every, help="by number; without, all of them")
    add("--steps", type=int, default=20, help="of RL")
    add("--groups", type=int, default=6, help="tasks of a step of RL, with 8 rollouts each")
    add("--tasks", type=int, nargs=2, default=[120, 64], metavar=("TRAIN", "HELDOUT"))
    add("--samples", type=int, default=4, help="rollouts of a held-out task")
    add("--apart", type=int, default=250, help="demonstrations that the loss is measured on")
    add("--episodes", type=int, default=3000, help="of the base")
    add("--threads", type=int, default=1)
    add("--set", nargs="+", default=[], metavar="KEY=VALUE", help="configuration of all runs")
    add("--json", type=Path)
    add("--tiny", action="store_true", help="a few seconds a start: that it runs, and nothing else")
    parser.set_defaults(scale=1.0)
    arguments = parser.parse_args()
    if arguments.tiny:
        tiny = {"scale": 0.01, "steps": 1, "groups": 1, "tasks": [4, 2], "samples": 1, "apart": 8, "episodes": 40}
        parser.set_defaults(**tiny)
        arguments = parser.parse_args()
    found = run(arguments)
    print("\n".join(table(found["starts"])))
    for name, claim in found["claims"].items():
        print(f"{name}: rho {claim['rho']:+.2f}, p {claim['p']:.4f}, by seed {[round(r, 2) for r in claim['by_seed']]}")
    if arguments.json:
        write_atomic(arguments.json, json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
