"""Does effort calibrate, by reward or by hint? RL with the part `effort`, with a hint that says to do no more than is
needed, with both and with neither, on tasks that need a search and tasks that do not; and two controls of the hint.

    python bench/cpu/effort.py --seeds 0 1 2 --json figures.json
    python bench/cpu/effort.py --seeds 0 --steps 8 --episodes 2000 --tasks 60 --out runs/effort-short     # a short one

A task is normal if its instruction says where the function is, and hard if it does not: then the agent has to search
for it first. The pocket model of this bench has learned from a script that searches half of the time when it need not,
and reads files twice. That should go; the search should stay where nothing is found without it.

A hint teaches nothing to a model that does not heed it. So all arms begin at the same model after a short imitation of
its own rollouts, in which reminders of the rule stand before messages that keep it (`offbook sft`, docs/sft.md). The
rule is `more_than_needed` at another factor (effort_rules.py): three times as many tokens is more than such tasks have
room for.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import tomli_w
from panels import figure, mean_curve

from offbook.api import rollouts, sft
from offbook.core.config import load_config
from offbook.core.runfolder import RunFolder, dump_lines, latest_checkpoint, whole_folder, write_atomic
from offbook.pocket.demonstrations import without_path
from offbook.pocket.model import Recipe, make_pocket
from offbook.pocket.script import Habits
from offbook.pocket.tasks import make_pocket_tasks
from offbook.tasks import load_task, load_tasks
from offbook.types import Rollout
from offbook.view.scales import Points

HABITS = Habits(unknown_tool=0.03, malformed=0.0, reread=0.25, edit_tests=0.0, explore=0.5, pathless=0.5)
COMMON = {
    "harness.turns": "6",
    "feedback.weight": "0",
    "train.groups": "8",
    "train.learning_rate": "8e-4",
    "eval.samples": "4",
}
EFFORT = {
    "rewards.effort.bound": "0.9",  # not 0.2, so that a short run shows it; failing pays all of it
    "rewards.effort.weights.turns": "1.0",
}
HINT = {
    "feedback.weight": "2",
    "feedback.balance": "rl",
    "feedback.files": json.dumps([str(Path(__file__).resolve().with_name("effort_rules.py"))]),
    "feedback.rules": '["more_than_siblings"]',
    "feedback.look": "false",  # a hint that is heeded little is an answer, too, and `hint/gain` says how little
}
REMINDED = {
    "feedback.rules": '["more_than_needed"]',
    "sft.reminders": "0.5",
    "sft.epochs": "4",
    "sft.learning_rate": "1e-3",
    "sft.batch_tokens": "4096",
}
ARMS: dict[str, dict[str, str]] = {
    "rl": {},
    "rl_effort": EFFORT,
    "rl_hint": HINT,
    "rl_effort_hint": EFFORT | HINT,
    "rl_negative": HINT | {"feedback.control": "constant_negative"},
    "rl_other": HINT | {"feedback.control": "donor"},
}
ROWS = {
    "before": "before",
    "rl": "RL only",
    "rl_effort": "RL + effort",
    "rl_hint": "RL + hint",
    "rl_effort_hint": "RL + effort + hint",
    "rl_negative": "RL + advantage -1 on the same message",
    "rl_other": "RL + hint of another rule",
}
DIFFICULTIES = ("normal", "hard")
COLUMNS = {"solved": "solved", "tokens": "sampled tokens", "turns": "turns", "searched": "searched"}
FINDERS = ("search_codebase", "list_dir")


def make_tasks(root: Path, seed: int, num_train: int, num_heldout: int) -> None:
    """Pocket tasks of one step that can be searched; every second one loses the path in its instruction."""
    if root.is_dir():
        return
    everything = root.with_name(f"{root.name}-all")
    shutil.rmtree(everything, ignore_errors=True)
    asyncio.run(make_pocket_tasks(everything, seed, num_train, num_heldout, lambda share: None))
    with whole_folder(root) as part:
        for split in ("train", "heldout"):
            folders = sorted(path for path in (everything / split).iterdir() if (path / "task.toml").is_file())
            tasks = [load_task(folder) for folder in folders]
            usable = [task for task in tasks if "search_codebase" in task.tools and task.difficulty == "normal"]
            for number, task in enumerate(usable):
                folder = part / split / task.id
                shutil.copytree(task.folder, folder)
                if number % 2:
                    make_hard(folder, task.instruction)


def make_hard(folder: Path, instruction: str) -> None:
    path = re.search(r" in (\S+\.py)", instruction)
    assert path, instruction
    (folder / "instruction.md").write_text(without_path(instruction, path[1]))
    table = tomllib.loads((folder / "task.toml").read_text())
    table["offbook"]["difficulty"] = table["metadata"]["difficulty"] = "hard"
    (folder / "task.toml").write_text(tomli_w.dumps(table))


def run_seed(seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Model and tasks, the arms two by two, and what each spends on held-out tasks."""
    started = time.monotonic()
    out = arguments.out / f"seed-{seed}"
    recipe = Recipe(habits=HABITS, episodes=arguments.episodes)
    model = make_pocket(arguments.out / "models", seed, progress, recipe)
    tasks = arguments.out / f"tasks-{seed}"
    make_tasks(tasks, seed, arguments.tasks, arguments.tasks // 3)
    common = {**COMMON, "seed": str(seed), "model": str(model), "tasks.source": str(tasks)}
    common |= {"train.steps": str(arguments.steps), **dict(option.split("=", 1) for option in arguments.set)}
    model = reminded(out, common)
    common["model"] = str(model)
    for pair in (("rl", "rl_effort"), ("rl_hint", "rl_effort_hint"), ("rl_negative", "rl_other")):
        train_arms(out, common, pair)
    heldout = load_tasks(tasks / "heldout")
    difficulty = {task.id: task.difficulty for split in ("train", "heldout") for task in load_tasks(tasks / split)}
    folders = {"before": model, **{arm: latest_checkpoint(RunFolder(out / arm)) for arm in ARMS}}
    result: dict[str, Any] = {}
    for name, folder in folders.items():
        measured = rollouts(load_config([], {**common, "model": str(folder)}), heldout, int(common["eval.samples"]))
        result[name] = {kind: figures(measured, difficulty, kind) for kind in DIFFICULTIES}
    result["curves"] = {arm: {kind: curve(out / arm, difficulty, kind) for kind in DIFFICULTIES} for arm in ARMS}
    return {**result, "seconds": time.monotonic() - started}


def progress(what: str, share: float) -> None:
    if share in (0.0, 1.0):
        print(f"{what}: {share:.0%}", file=sys.stderr)


def reminded(out: Path, common: dict[str, str]) -> Path:
    """The model after imitating its own rollouts on the training tasks, reminders in them: what it does without one
    stays as it is."""
    own = out / "own.jsonl"
    if not own.is_file():
        config = load_config([], common)
        tasks = load_tasks(Path(config.tasks.source) / "train")
        write_atomic(own, dump_lines(rollouts(config, tasks, config.train.group_size)))
    settings = {**common, **REMINDED, "sft.data": json.dumps([str(own)]), "out": str(out / "reminded")}
    return latest_checkpoint(sft(load_config([], settings)))


def train_arms(out: Path, common: dict[str, str], arms: tuple[str, ...]) -> None:
    running = {}
    for arm in arms:
        settings = {**common, **ARMS[arm], "out": str(out / arm)}
        options = [part for key, value in settings.items() for part in (f"--{key}", value)]
        (out / arm).mkdir(parents=True, exist_ok=True)
        log = (out / arm / "train.log").open("ab")
        command = [sys.executable, "-m", "offbook", "train", *options]
        running[arm] = subprocess.Popen(command, stdout=log, stderr=log)
    for arm, process in running.items():
        if process.wait():
            sys.exit(f"{arm} failed; see {out / arm / 'train.log'}")


def figures(found: list[Rollout], difficulty: dict[str, str], kind: str) -> dict[str, float]:
    ours = [rollout for rollout in found if difficulty[rollout.task] == kind]
    return {
        "rollouts": len(ours),
        "solved": mean(rollout.solved for rollout in ours),
        "tokens": mean(rollout.usage.sampled_tokens for rollout in ours),
        "turns": mean(rollout.usage.turns for rollout in ours),
        "searched": mean(searched(rollout) for rollout in ours),
    }


def searched(rollout: Rollout) -> bool:
    messages = [message for segment in rollout.segments for message in segment.messages]
    return any(call.name in FINDERS for message in messages for call in message.calls)


def curve(run: Path, difficulty: dict[str, str], kind: str) -> Points:
    """Sampled tokens of the training rollouts, step by step; a step without such a task has no point."""
    points = []
    for step in RunFolder(run).steps():
        found, _ = RunFolder(run).rollouts(step)
        tokens = [rollout.usage.sampled_tokens for rollout in found if difficulty[rollout.task] == kind]
        points += [(float(step), mean(tokens))] if tokens else []
    return points


def table(results: dict[int, dict[str, Any]]) -> list[str]:
    lines = ["| | tasks | seed | " + " | ".join(COLUMNS.values()) + " |", "|---|---|---|" + "---:|" * len(COLUMNS)]
    for kind in DIFFICULTIES:
        for row, label in ROWS.items():
            cells = {key: [result[row][kind][key] for result in results.values()] for key in COLUMNS}
            for place, seed in enumerate(results):
                shown = " | ".join(show(key, values[place]) for key, values in cells.items())
                lines.append(f"| {label} | {kind} | {seed} | {shown} |")
            means = " | ".join(f"**{show(key, mean(values))}**{spread(key, values)}" for key, values in cells.items())
            lines.append(f"| **{label}** | **{kind}** | mean | {means} |")
    return lines


def show(key: str, value: float) -> str:
    return f"{value:.1%}" if key in ("solved", "searched") else f"{value:.1f}" if key == "tokens" else f"{value:.2f}"


def spread(key: str, values: list[float]) -> str:
    return f" ± {show(key, stdev(values))}" if len(values) > 1 else ""


def drawn(results: dict[int, dict[str, Any]]) -> str:
    """Tokens by step, a panel per difficulty, both on one scale; the mean of the seeds."""
    panels = {
        f"{kind} tasks: sampled tokens": {
            ROWS[arm]: mean_curve([result["curves"][arm][kind] for result in results.values()]) for arm in ARMS
        }
        for kind in DIFFICULTIES
    }
    return figure(panels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--episodes", type=int, default=10_000, help="demonstrations that the model is made from")
    parser.add_argument("--tasks", type=int, default=360, help="made before choosing; about half can be searched")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="configuration of every run")
    parser.add_argument("--out", type=Path, default=Path("runs/effort"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path, help="write the tables to this file")
    arguments = parser.parse_args()
    results = {seed: run_seed(seed, arguments) for seed in arguments.seeds}
    lines = table(results)
    seconds = ", ".join(f"{result['seconds']:.0f}" for result in results.values())
    lines += ["", f"Seconds, with the making of what was not there yet: {seconds}."]
    print("\n".join(lines))
    (arguments.out / "effort.svg").write_text(drawn(results))
    if arguments.json:
        arguments.json.write_text(json.dumps({str(seed): result for seed, result in results.items()}, indent=2) + "\n")
    if arguments.markdown:
        arguments.markdown.write_text("\n".join(lines) + "\n")
        arguments.markdown.with_suffix(".svg").write_text(drawn(results))


if __name__ == "__main__":
    main()
