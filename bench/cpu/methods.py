"""The methods of docs/methods.md side by side, on pocket or another --model: held-out tasks, and what each cost.

    python bench/cpu/methods.py --seeds 0 1 2 --json docs/results/methods.json
    python bench/cpu/methods.py --seeds 0 1 2 --mode continual --steps 8 --json docs/results/continual.json
    python bench/cpu/methods.py --seeds 0 --mode continual --own-words --steps 8 --arms sft sdft rl
    python bench/cpu/methods.py --seeds 0 1 2 --mode leak --json docs/results/leak.json
    python bench/cpu/methods.py --seeds 0 1 2 --mode heed

Tasks have a word whose meaning only solutions and tests know (terms.py), so that whoever is shown one knows more than
the student. Arms of one seed have the same start. It has imitated episodes in which the word means something else every
time, some of them shown their solution or a demonstration: it guesses by itself, and reads what it is shown. Those that
sample rollouts train for as many steps; those that imitate get as many tokens as RL trained on, of an expert's
episodes, which are SDFT's demonstrations as well. The teacher of OPD has four times the parameters, and imitated the
expert; with --model it is the start itself after that. With `continual` methods learn three families one after the
other, and all are measured after each, and ordinary tasks with them; with --own-words each has a word of its own, so
that no two contradict. With `leak` each task has a meaning of its own: what is learned of it holds for no other. `heed`
trains nothing: what models make of what is shown. What is done already is not done again. An arm that fails is a row
with its error. Processes with other --arms may run at once; they wait for the first of them to prepare a seed.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import itertools
import json
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

from terms import EXPERT, FAMILIES, drafts_of, make_named_tasks, named_drafts, of_family, of_task, write_episodes

from offbook.agent.chat import chat_for
from offbook.core.config import Config, load_config
from offbook.core.runfolder import RunFolder, dump_lines, latest_checkpoint, load_lines, whole_folder, write_atomic
from offbook.pocket.model import POCKET, Recipe, make_pocket
from offbook.pocket.repos import PACKAGES
from offbook.pocket.tasks import make_pocket_tasks
from offbook.rl.collector import Collector
from offbook.rl.evaluate import PARALLEL
from offbook.rl.models import load_model, model_folder
from offbook.rl.train import train
from offbook.rl.train_step import summarize
from offbook.stages.sft import sft
from offbook.tasks import load_tasks
from offbook.train.algorithms import opsd_branches, sdft_branches
from offbook.train.forward import Decoder, measure_branches
from offbook.types import Distill, Rollout, Sample, Task

ALONE = {"train.rl_weight": "0", "feedback.weight": "0"}
TEACHERS = {
    "opd": {"teachers.weights.opd": "1", "teachers.model": "{larger}"},
    "opsd": {"teachers.weights.opsd": "1"},
    "sdft": {"teachers.weights.sdft": "1"},
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
IMITATION = ("sft",)
ARMS_OF = {
    "arms": ["before", "opd-teacher", *ARMS, *IMITATION],
    "continual": ["sft", "sdft", "rl"],
    "leak": ["before", "rl", "opsd", "sdft", "sft"],
    "heed": ["base", "start"],
}
KEYS = ("solved", "invalid_per_100", "turns")
PLAIN = {"sft.reminders": "0"}


class Bench:
    """Of one seed."""

    def __init__(self, seed: int, arguments: argparse.Namespace):
        self.seed, self.arguments = seed, arguments
        self.root: Path = arguments.out / (f"seed-{seed}" + ("-own-words" if arguments.own_words else ""))
        self.leaks = arguments.mode == "leak"
        self.place = self.root / ("own" if self.leaks else "family")  # of what differs with the meaning of the word
        self.tasks, self.expert = self.place / "tasks", self.place / "expert.jsonl"
        self.results = self.root / (
            arguments.mode if arguments.mode == "heed" else f"{arguments.mode}-{arguments.steps}"
        )

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
        amount = of_task if self.leaks else of_family(self.seed)
        if not self.tasks.is_dir():
            make_named_tasks(self.tasks, self.seed, *self.arguments.tasks, amount, self.arguments.own_words)
        self.ordinary = self.root / "ordinary"
        if self.arguments.mode == "continual" and not self.ordinary.is_dir():
            sizes = 3, self.arguments.tasks[1]
            asyncio.run(make_pocket_tasks(self.ordinary, self.seed, *sizes, lambda share: None))
        self.base = self.made()
        self.start = self.shown(self.base, self.root / "start")
        if not self.expert.is_file():
            drafts = drafts_of(self.tasks, self.seed, amount, self.arguments.own_words)
            write_episodes(self.expert, chat_for(self.start), drafts, self.seed, EXPERT)
        if self.arguments.mode == "arms" and any("opd" in arm for arm in self.arguments.arms or ARMS):
            larger = self.start
            if self.arguments.model == "pocket":
                larger = self.shown(self.made(2 * POCKET.width), self.root / "larger")
            self.larger = self.imitated(self.root / "larger-expert", larger, self.expert, epochs=4)

    def made(self, width: int = POCKET.width) -> Path:
        if self.arguments.model != "pocket":
            return model_folder(self.arguments.model, self.seed)
        recipe = Recipe(width=width, episodes=self.arguments.episodes)
        return make_pocket(self.arguments.out / "models", self.seed, lambda what, share: None, recipe)

    def shown(self, model: Path, out: Path) -> Path:
        """After episodes in which the word means something else every time, some shown their solution."""
        data = self.root / "shown.jsonl"
        if not data.is_file():
            drafts = named_drafts(self.seed + 1000, "train", PACKAGES, of_task, self.arguments.own_words)
            episodes = list(itertools.islice(drafts, self.arguments.shown))
            write_episodes(data, chat_for(model), episodes, self.seed + 1000)
        keys = {"sft.teachers.opsd": "0.3", "sft.teachers.sdft": "0.3", "sft.learning_rate": self.arguments.start_rate}
        if self.arguments.model == "pocket":
            keys |= {"harness.context": "1500", "harness.tokens": "1500"}  # room to show them
        return self.imitated(out, model, data, **keys)

    def imitated(self, out: Path, model: Path, data: Path, epochs: int = 1, **keys: str) -> Path:
        keys = {**PLAIN, "sft.data": json.dumps([str(data)]), "sft.epochs": str(epochs), **keys}
        keys = {"sft.learning_rate": self.arguments.sft_rate, "tasks.source": "pocket", **keys}
        return latest_checkpoint(sft(self.config(out=str(out), model=str(model), **keys)))

    def measured(self, model: Path, tasks: list[Task], keys: tuple[str, ...] = KEYS) -> dict[str, float]:
        collector = Collector(self.config(), model)
        found = summarize(asyncio.run(collector.groups(tasks, self.arguments.samples, "eval", parallel=PARALLEL)))
        return {key: found[key] for key in keys}

    def job(self, name: str) -> dict[str, Any]:
        if self.arguments.mode == "heed":
            return self.heeds(self.base if name == "base" else self.start)
        if self.arguments.mode == "continual":
            return self.continual(name)
        began = time.monotonic()
        model, cost = self.start, dict[str, float]()
        if name != "before":
            model, cost = (self.larger, cost) if name == "opd-teacher" else self.arm(name)
        found = {**self.measured(model, load_tasks(self.tasks / "heldout")), **cost}
        if self.leaks:
            found["solved_train"] = self.measured(model, load_tasks(self.tasks / "train"))["solved"]
        return {**found, "seconds": time.monotonic() - began}

    def arm(self, name: str) -> tuple[Path, dict[str, float]]:
        out, steps = self.place / f"{name}-{self.arguments.steps}", self.arguments.steps
        if name in IMITATION:
            rl = self.results / "rl.json"
            if not rl.is_file():
                raise SystemExit(f"{name} gets as many tokens as rl trained on: give --arms rl first")
            self.imitate(name, out, self.start, self.expert, json.loads(rl.read_text())["trained"], steps)
        else:
            places = {"expert": self.expert, "larger": self.larger if "opd" in name else ""}
            keys = {key: value.format(**places) for key, value in ARMS[name].items()}
            train(self.config(out=str(out), model=str(self.start), train__steps=str(steps), **keys))
        return latest_checkpoint(RunFolder(out)), self.cost(name, RunFolder(out))

    def imitate(self, name: str, out: Path, model: Path, data: Path, budget: int, steps: int) -> Path:
        """For as many tokens, in as many steps."""
        known, _ = load_lines(data, Rollout)
        size = sum(len(segment.ids) for one in known for segment in one.segments)
        keys = {"sft.batch_tokens": str(int(budget / steps)), "sft.validation_share": "0"}
        return self.imitated(out, model, data, max(1, round(budget / size)), **keys)

    def cost(self, name: str, folder: RunFolder) -> dict[str, float]:
        """2 floating-point operations a parameter and token forward, 4 more backward; a cached token is read once."""
        rows, _ = folder.metrics()
        trained = sum(row.get("train_tokens", 0) for row in rows)
        sampled = sum(len(s.ids) for step in folder.steps() for one in folder.rollouts(step)[0] for s in one.segments)
        size = _parameters(self.start)
        of_teacher = _parameters(self.larger) if "opd" in name else size
        taught = trained if any(part in name for part in ("opd", "opsd", "sdft", "sdpo", "hints")) else 0
        flops = size * (6 * trained + 2 * sampled) + 2 * of_teacher * taught
        leaks = {key: sum(row.get(key, 0) for row in rows) for key in ("leaks/opsd", "leaks/sdft") if key[6:] in name}
        return {"trained": trained, "sampled": sampled, "teacher": taught, "gflops": flops / 1e9, **leaks}

    def continual(self, method: str) -> dict[str, Any]:
        """Solved on every family, and of ordinary tasks, after each."""
        model, rows, steps = self.start, {"start": self.by_family(self.start)}, self.arguments.steps
        known, _ = load_lines(self.expert, Rollout)
        for number, family in enumerate(FAMILIES):
            place, out = self.place / f"tasks-{family}", self.place / f"{method}-{steps}-{number}-{family}"
            if not place.is_dir():
                with whole_folder(place) as part:
                    for split in ("train", "heldout"):
                        (part / split).mkdir()
                        for task in of(family, load_tasks(self.tasks / split)):
                            (part / split / task.folder.name).symlink_to(task.folder.resolve())
            own = [one for one in known if one.task.startswith(f"{family}-")]
            expert = self.place / f"expert-{family}.jsonl"
            write_atomic(expert, dump_lines(own))
            if method in IMITATION:
                budget = steps * 24 * sum(len(s.ids) for one in own for s in one.segments) // len(own)
                model = self.imitate(method, out, model, expert, budget, steps)
            else:
                keys = {key: value.format(expert=expert) for key, value in ARMS[method].items()}
                keys |= {"tasks.source": str(place), "train.steps": str(steps)}
                model = latest_checkpoint(train(self.config(out=str(out), model=str(model), **keys)))
            rows[f"after {family}"] = self.by_family(model)
        *earlier, last = FAMILIES
        lost = [rows[f"after {family}"][family] - rows[f"after {last}"][family] for family in earlier]
        learned = [rows[f"after {family}"][family] - rows["start"][family] for family in FAMILIES]
        return {**rows, "learned": mean(learned), "forgotten": mean(lost)}

    def by_family(self, model: Path) -> dict[str, float]:
        heldout = load_tasks(self.tasks / "heldout")
        found = {family: self.measured(model, of(family, heldout))["solved"] for family in FAMILIES}
        return {**found, "ordinary": self.measured(model, load_tasks(self.ordinary / "heldout"))["solved"]}

    def heeds(self, model: Path) -> dict[str, float]:
        """By how many nats its solution, or another rollout that solved the task, makes an expert's response likelier:
        below 0 it is a teacher that knows less than its student."""
        known, _ = load_lines(self.expert, Rollout)
        decoder, chat, samples = Decoder(load_model(model)), chat_for(model), []
        for number, one in enumerate(known):
            shown = {
                "opsd": opsd_branches(one, one.diff, chat, 1.0, Distill())[0],
                "sdft": sdft_branches(one, one, chat, 1.0, Distill())[0],
            }
            branches = [replace(branch, key=f"{kind}/{number}") for kind, branch in shown.items()]
            samples.append(Sample(one.segments[0].ids, branches=branches))
        found: dict[str, list[float]] = {"opsd": [], "sdft": []}
        for measured in measure_branches(decoder, samples, 4096):
            for key, values in measured.items():
                found[key.partition("/")[0]].append(sum(values.teacher) - sum(values.student))
        return {"responses": len(known), **{kind: mean(nats) for kind, nats in found.items()}}


def of(family: str, tasks: list[Task]) -> list[Task]:
    return [task for task in tasks if task.id.startswith(f"{family}-")]


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
        for name in (name for name in ARMS_OF[arguments.mode] if name in (arguments.arms or ARMS_OF[arguments.mode])):
            row = found.setdefault(name, {})[str(seed)] = kept(bench.results / f"{name}.json", partial(bench.job, name))
            print(f"seed {seed} {name}: {json.dumps(row)}", flush=True)
            if arguments.json:
                write_atomic(arguments.json, json.dumps(found, indent=1) + "\n")
    return found


def table(found: dict[str, dict[str, dict[str, Any]]]) -> list[str]:
    """Means over seeds, and solved by seed."""
    every = [row for by_seed in found.values() for row in by_seed.values()]
    columns = [name for name in dict.fromkeys(key for row in every for key in row) if name != "error"]
    columns = [name for name in columns if all(isinstance(row.get(name, 0), int | float) for row in every)]
    lines = ["| | " + " | ".join(columns) + " | by seed |", "|---" * (len(columns) + 2) + "|"]
    for name, by_seed in found.items():
        rows = [row for row in by_seed.values() if "error" not in row]
        cells = [f"{mean(values):.3g}" if (values := [row[c] for row in rows if c in row]) else "" for c in columns]
        seeds = ", ".join(f"{row[columns[0]]:.2g}" for row in rows) if columns else ""
        lines.append(f"| {name} | " + " | ".join([*cells, seeds]) + " |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/methods"))
    parser.add_argument("--model", default="pocket", help="another one has to be told its context by --set, too")
    parser.add_argument("--mode", choices=list(ARMS_OF), default="arms")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--arms", nargs="+", choices=sorted({name for names in ARMS_OF.values() for name in names}))
    parser.add_argument("--tasks", type=int, nargs=2, default=[90, 60], metavar=("TRAIN", "HELDOUT"))
    parser.add_argument("--samples", type=int, default=2, help="rollouts of a held-out task")
    parser.add_argument("--shown", type=int, default=6000, help="episodes of the start")
    parser.add_argument("--episodes", type=int, default=POCKET.episodes, help="of pocket, and of OPD's teacher")
    parser.add_argument("--own-words", action="store_true", help="each family has a word of its own")
    parser.add_argument("--start-rate", default="2e-3", help="learning rate of what the start imitates")
    parser.add_argument("--sft-rate", default="2e-4", help="of what is imitated after that")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="configuration of all arms")
    parser.add_argument("--json", type=Path)
    print("\n".join(table(run(parser.parse_args()))))


if __name__ == "__main__":
    main()
