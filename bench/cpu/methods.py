"""The methods of docs/methods.md side by side on pocket: held-out tasks, and what each of them cost.

    python bench/cpu/methods.py --out runs/methods --seeds 0 1 2 --steps 20 --json docs/results/methods.json
    python bench/cpu/methods.py --out runs/methods --continual --seeds 0 --steps 8
    python bench/cpu/methods.py --out runs/methods --heed

Arms of one seed start from the same model, which was shown references and demonstrations in imitation, so that a
teacher can make something of them. Those that sample rollouts train for as many steps; those that imitate get as many
tokens as RL trained on, from rollouts of the start that solved their task. Demonstrations are the same rollouts. The
teacher of OPD has about four times the parameters. With --continual SFT and SDFT learn three families of tasks one
after the other, and all three are measured after each. What is done already is not done again. An arm that fails is a
row with its error. Processes with other --arms may run at once; they wait for the first of them to prepare a seed.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import json
import math
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

from offbook.algo import opsd_branches, sdft_branches
from offbook.config import Config, load_config
from offbook.loop.collector import Collector
from offbook.loop.evaluate import PARALLEL, summarize
from offbook.loop.models import load_model
from offbook.loop.train import train
from offbook.pocket.model import POCKET, Recipe, make_pocket
from offbook.pocket.tasks import make_pocket_tasks
from offbook.runfolder import RunFolder, dump_lines, latest_checkpoint, load_lines, whole_folder, write_atomic
from offbook.stages.sft import sft
from offbook.tasks import load_tasks
from offbook.tokens import chat_for
from offbook.train.forward import Decoder
from offbook.train.measure import measure_branches
from offbook.types import Distill, Rollout, Sample, Task

ALONE = {"train.rl_weight": "0", "feedback.weight": "0"}
TEACHERS = {
    "opd": {"teachers.opd.weight": "1", "teachers.opd.model": "{larger}"},
    "opsd": {"teachers.opsd.weight": "1"},
    "sdft": {"teachers.sdft.weight": "1", "teachers.sdft.data": '["{demonstrations}"]'},
    "corrections": {"feedback.corrections.weight": "1"},
}
ARMS: dict[str, dict[str, str]] = {
    "rl": {"feedback.weight": "0"},
    "hints": {"train.rl_weight": "0"},
    "rl+hints": {},
    "sdpo": {"train.rl_weight": "0", "feedback.method": "sdpo", "feedback.gate": "0"},
    **{name: {**ALONE, **keys} for name, keys in TEACHERS.items()},
    **{f"rl+{name}": {"feedback.weight": "0", **keys} for name, keys in TEACHERS.items()},
    "rl+hints+sdft": TEACHERS["sdft"],
}
IMITATION = ("sft", "dft")
FAMILIES: dict[str, Callable[[Task], bool]] = {
    "read_file": lambda task: "run_command" not in task.tools,
    "run_command": lambda task: "read_file" not in task.tools,
    "both": lambda task: {"read_file", "run_command"} <= {*task.tools},
}
KEYS = ("solved", "invalid_per_100", "turns")


class Bench:
    """Of one seed."""

    def __init__(self, seed: int, arguments: argparse.Namespace):
        self.seed, self.arguments = seed, arguments
        self.root: Path = arguments.out / f"seed-{seed}"
        self.tasks, self.demonstrations = self.root / "tasks", self.root / "demonstrations.jsonl"

    def config(self, **keys: str) -> Config:
        """Keys with two underscores for a dot."""
        given = {key.replace("__", "."): value for key, value in keys.items()}
        common = {"train.groups": "3", "checkpoint.every": "50", "feedback.look": "false", "seed": str(self.seed)}
        common |= {"tasks.source": str(self.tasks), "threads": str(self.arguments.threads)}
        return load_config(["pocket"], {**common, **dict(o.split("=", 1) for o in self.arguments.set), **given})

    def prepare(self) -> None:
        """By whoever comes first; other processes wait."""
        self.root.mkdir(parents=True, exist_ok=True)
        with (self.root / "preparing").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            self._prepare()

    def _prepare(self) -> None:
        quiet = lambda what, share: None  # noqa: E731
        if not self.tasks.is_dir():
            asyncio.run(make_pocket_tasks(self.tasks, self.seed, *self.arguments.tasks, lambda share: None))
        recipe = Recipe(episodes=self.arguments.episodes)
        self.pocket = make_pocket(self.arguments.out / "models", self.seed, quiet, recipe)
        shown = {"sft.references": "0.3", "sft.demonstrations": "0.3", "sft.learning_rate": "1e-3"}
        shown |= {"harness.context": "1500", "harness.tokens": "1500"}  # room to show them
        data = {"model": str(self.pocket), "sft.data": f'["pocket:{self.arguments.shown}"]'}
        out = self.root / "start"
        if not self.demonstrations.is_file():  # the last that is made here; until then the start may not be over
            sft(self.config(out=str(out), **shown, **data))
        self.start = latest_checkpoint(RunFolder(out))
        if not (self.arguments.continual or self.arguments.heed):
            self.larger()
        if not self.demonstrations.is_file():
            groups = self.rollouts(self.start, load_tasks(self.tasks / "train"), samples=2)
            solved = [one for group in groups for one in group if one.solved]
            if not solved:
                raise SystemExit(f"seed {self.seed}: the start solves nothing, so there is nothing to demonstrate")
            write_atomic(self.demonstrations, dump_lines(solved))

    def larger(self) -> Path:
        recipe = Recipe(width=2 * POCKET.width, episodes=self.arguments.episodes)
        return make_pocket(self.arguments.out / "models", self.seed, lambda what, share: None, recipe)

    def rollouts(self, model: Path, tasks: list[Task], samples: int) -> list[list[Rollout]]:
        return asyncio.run(Collector(self.config(), model).groups(tasks, samples, "eval", parallel=PARALLEL))

    def measured(self, model: Path, tasks: list[Task] | None = None) -> dict[str, float]:
        groups = self.rollouts(model, tasks or load_tasks(self.tasks / "heldout"), self.arguments.samples)
        return {key: summarize(groups)[key] for key in KEYS}

    def job(self, name: str) -> dict[str, Any]:
        if self.arguments.heed:
            return self.heeds(self.pocket if name == "pocket" else self.start)
        if self.arguments.continual:
            return self.continual(name)
        return self.measured(self.start) if name == "before" else self.arm(name)

    def arm(self, name: str) -> dict[str, Any]:
        out, began, steps = self.root / name, time.monotonic(), self.arguments.steps
        if name in IMITATION:
            rl = self.root / f"steps-{steps}" / "rl.json"
            if not rl.is_file():
                raise SystemExit(f"{name} gets as many tokens as rl trained on: give --arms rl first")
            budget = json.loads(rl.read_text())["trained"]
            known, _ = load_lines(self.demonstrations, Rollout)
            size = sum(len(segment.ids) for one in known for segment in one.segments)
            keys = {"sft.loss": "nll" if name == "sft" else "dft", "sft.data": json.dumps([str(self.demonstrations)])}
            keys |= {"sft.epochs": str(max(1, round(budget / size))), "sft.learning_rate": self.arguments.sft_rate}
            keys |= {"sft.reminders": "0", "sft.pairs": "0"}
            keys["sft.batch_tokens"] = str(int(budget / steps))
            folder = sft(self.config(out=str(out), model=str(self.start), **keys))
        else:
            places = {"demonstrations": self.demonstrations, "larger": self.larger() if "opd" in name else ""}
            keys = {key: value.format(**places) for key, value in ARMS[name].items()}
            keys["train.steps"] = str(steps)
            folder = train(self.config(out=str(out), model=str(self.start), **keys))
        found = {**self.measured(latest_checkpoint(folder)), **self.cost(name, folder)}
        return {**found, "seconds": time.monotonic() - began}

    def cost(self, name: str, folder: RunFolder) -> dict[str, float]:
        """2 floating-point operations a parameter and token forward, 4 more backward; a cached token is read once."""
        rows, _ = folder.metrics()
        trained = sum(row.get("train_tokens", 0) for row in rows)
        sampled = sum(len(s.ids) for step in folder.steps() for one in folder.rollouts(step)[0] for s in one.segments)
        sampled += sum(row.get("corrections/tokens", 0) for row in rows)
        size = _parameters(self.start)
        of_teacher = _parameters(self.larger()) if "opd" in name else size
        taught = trained if any(part in name for part in ("opd", "opsd", "sdft", "sdpo", "hints")) else 0
        flops = size * (6 * trained + 2 * sampled) + 2 * of_teacher * taught
        return {"trained": trained, "sampled": sampled, "teacher": taught, "gflops": flops / 1e9}

    def continual(self, method: str) -> dict[str, Any]:
        """Solved on every family after each, and the mean loss on those that were learned before."""
        tasks = {split: load_tasks(self.tasks / split) for split in ("train", "heldout")}
        model, rows = self.start, {"start": self.by_family(self.start, tasks["heldout"])}
        known, _ = load_lines(self.demonstrations, Rollout)
        for number, family in enumerate(FAMILIES):
            chosen = [task for task in tasks["train"] if FAMILIES[family](task)]
            place, out = self.root / f"family-{family}", self.root / f"continual-{method}-{number}-{family}"
            if not place.is_dir():
                with whole_folder(place) as part:
                    for split in ("train", "heldout"):
                        (part / split).mkdir()
                        for task in (one for one in tasks[split] if FAMILIES[family](one)):
                            (part / split / task.folder.name).symlink_to(task.folder.resolve())
            own = [one for one in known if one.task in {task.id for task in chosen}]
            file = self.root / f"demonstrations-{family}.jsonl"
            write_atomic(file, dump_lines(own))
            size = sum(len(segment.ids) for one in own for segment in one.segments)
            steps = self.arguments.steps
            if method == "sdft":
                keys = {**ALONE, **TEACHERS["sdft"], "teachers.sdft.data": json.dumps([str(file)])}
                keys |= {"tasks.source": str(place), "train.steps": str(steps)}
                folder = train(self.config(out=str(out), model=str(model), **keys))
            else:
                budget = steps * 24 * (size / max(1, len(own)))
                keys = {"sft.data": json.dumps([str(file)]), "sft.epochs": str(max(1, round(budget / size)))}
                keys |= {"sft.learning_rate": self.arguments.sft_rate, "sft.batch_tokens": str(int(budget / steps))}
                folder = sft(self.config(out=str(out), model=str(model), sft__reminders="0", sft__pairs="0", **keys))
            model = latest_checkpoint(folder)
            rows[f"after {family}"] = self.by_family(model, tasks["heldout"])
        learned = list(FAMILIES)
        rows["forgotten"] = mean(
            rows[f"after {family}"][family] - rows[f"after {learned[-1]}"][family] for family in learned[:-1]
        )
        return rows

    def heeds(self, model: Path) -> dict[str, dict[str, float]]:
        """By how many nats a solution, or another rollout that solved the task, makes responses likelier that did so:
        below 0 it is a teacher that knows less than its student."""
        known, _ = load_lines(self.demonstrations, Rollout)
        decoder, chat, samples = Decoder(load_model(model)), chat_for(model), []
        for number, one in enumerate(known):
            shown = opsd_branches(one, one.diff, chat, 1.0, Distill())[0]
            sample = Sample(one.segments[0].ids, branches=[replace(shown, key=f"opsd/{number}")])
            others = [other for other in known if other.task == one.task and other.id != one.id]
            for other in others[:1]:
                shown = sdft_branches(one, other, chat, 1.0, Distill())[0]
                sample.branches.append(replace(shown, key=f"sdft/{number}"))
            samples.append(sample)
        found: dict[str, list[float]] = {"opsd": [], "sdft": []}
        for measured in measure_branches(decoder, samples, 4096):
            for key, values in measured.items():
                found[key.partition("/")[0]].append(sum(values.teacher) - sum(values.student))
        return {kind: {"responses": len(nats), "nats": mean(nats)} for kind, nats in found.items() if nats}

    def by_family(self, model: Path, tasks: list[Task]) -> dict[str, float]:
        chosen = {family: [task for task in tasks if fits(task)] for family, fits in FAMILIES.items()}
        return {family: self.measured(model, of)["solved"] if of else math.nan for family, of in chosen.items()}


def _parameters(model: Path) -> int:
    return sum(parameter.numel() for parameter in load_model(model).parameters())


def kept(path: Path, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    if not path.is_file():
        try:
            found = make()
        except Exception as error:
            traceback.print_exc()
            return {"error": f"{type(error).__name__}: {error}"}
        write_atomic(path, json.dumps(found, indent=1) + "\n")
    return json.loads(path.read_text())


def run(arguments: argparse.Namespace) -> dict[str, dict[str, dict[str, Any]]]:
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for seed in arguments.seeds:
        bench = Bench(seed, arguments)
        bench.prepare()
        part, names = f"steps-{arguments.steps}", ["before", *ARMS, *IMITATION]
        if arguments.continual or arguments.heed:
            part, names = ("continual", ["sft", "sdft"]) if arguments.continual else ("heed", ["pocket", "start"])
        names = [name for name in names if name in (arguments.arms or names)]
        for name in names:
            path = bench.root / part / f"{name}.json"
            row = found.setdefault(name, {})[str(seed)] = kept(path, partial(bench.job, name))
            print(f"seed {seed} {name}: {json.dumps(row)}", flush=True)
            if arguments.json:
                write_atomic(arguments.json, json.dumps(found, indent=1) + "\n")
    return found


def table(found: dict[str, dict[str, dict[str, Any]]]) -> list[str]:
    columns = [*KEYS, "trained", "sampled", "teacher", "gflops", "seconds"]
    lines = ["| method | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for name, by_seed in found.items():
        rows = [row for row in by_seed.values() if "error" not in row]
        cells = [f"{mean(values):.3g}" if (values := [row[c] for row in rows if c in row]) else "" for c in columns]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/methods"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--arms", nargs="+", choices=["before", *ARMS, *IMITATION], default=[])
    parser.add_argument("--tasks", type=int, nargs=2, default=[90, 48], metavar=("TRAIN", "HELDOUT"))
    parser.add_argument("--samples", type=int, default=2, help="rollouts of a held-out task")
    parser.add_argument("--shown", type=int, default=2000, help="episodes of the start")
    parser.add_argument("--episodes", type=int, default=POCKET.episodes, help="of pocket, and of OPD's teacher")
    parser.add_argument("--sft-rate", default="2e-4")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="configuration of all arms")
    parser.add_argument("--continual", action="store_true")
    parser.add_argument("--heed", action="store_true", help="no training: what models make of what is shown")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found = run(arguments)
    plain = arguments.continual or arguments.heed
    print(json.dumps(found, indent=1) if plain else "\n".join(table(found)))


if __name__ == "__main__":
    main()
