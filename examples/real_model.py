"""Targeted hints on a pretrained model (bench/gpu/proof.py, small): one GPU, 12 minutes of an H200.

    python examples/real_model.py                              # SmolLM2-135M
    python examples/real_model.py --engine vllm                # where it is installed: docs/engines.md
    python examples/real_model.py --model Qwen/Qwen3-0.6B --steps 12
    python examples/real_model.py --tiny                       # every stage once, on a CPU; too little to learn from

  1. imitate:  scripted episodes with an agent's bad habits, so that the model can drive the tools at all. Before half
               of the messages stands a reminder of a rule that they keep: a model that imitates without stops following
               hints.
  2. look:     are messages under a hint better than without one? A model that does not heed hints has nothing to teach.
  3. train:    twice from that start, on the same tasks in the same order: RL with hints on the messages that broke a
               rule, and RL alone.
  4. compare:  all three on tasks that none has seen.

All work goes through offbook.api. What is there already in --out is not done again, so the same command goes on where
it stopped. One seed, few steps and few tasks: the intervals are wide. The experiment itself is bench/gpu/proof.py.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from offbook.api import configure, evaluate, sft, train
from offbook.core.config import Config
from offbook.core.runfolder import RunFolder
from offbook.rl.hint_probe import NoHintHelps
from offbook.types import OffbookError

# The rules that are taught: what scripted episodes get wrong often enough to be seen in ten steps.
RULES = ["unknown_tool", "malformed_arguments", "repeated_call", "edited_tests", "edit_not_applied"]
ARMS: dict[str, dict[str, Any]] = {
    "RL + hints": {
        "weight": 1.0,  # lambda, beside an RL loss of weight 1 ...
        "bound": 0.3,  # ... and at most so much of its gradient: hints are not to hold RL back
        "rules": RULES,
        "max_targets": 6,  # a rollout: long ones have several faults
    },
    "RL": {"weight": 0.0},
}
COLUMNS = {
    "solved": ("solved", "{:.0%}"),
    "invalid_per_100": ("invalid calls per 100", "{:.1f}"),
    "turns": ("turns", "{:.1f}"),
    "tokens": ("sampled tokens", "{:.0f}"),
}


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """What all stages have in common."""
    shared: dict[str, Any] = {
        "seed": options.seed,
        "harness": {
            "profile": "pocket", "turns": options.turns, "context": options.context, "tokens": options.context,
            "message_tokens": 192, "summarize_at": 0, "command_s": 20, "wall_s": 600,
        },
        "tasks": {
            "source": options.tasks, "num_train": options.train_tasks, "num_heldout": options.eval_tasks,
        },
        "train": {
            "groups": 4, "group_size": options.group_size, "steps": options.steps,
            "learning_rate": 1e-4, "lora": {"rank": 12},
        },
        "checkpoint": {"every": 2, "keep": 1},
        "eval": {"samples": options.samples},
    }  # fmt: skip
    if torch.cuda.is_available():
        shared["train"] |= {"precision": "bfloat16", "compile": False}  # it takes longer than it saves in so few steps
        shared["engine"] = {"kind": options.engine}
    return shared


def imitate(options: argparse.Namespace, shared: dict[str, Any]) -> Path:
    title("1. Imitation, with reminders")
    config = configure(
        "standard",
        **{**shared, "checkpoint": {"every": 200, "keep": 1}},  # short steps, and many of them
        model=options.model,
        out=options.out / "start",
        feedback={"rules": RULES},
        sft={
            "data": [f"{options.tasks}:{options.episodes}"],
            "epochs": options.epochs,
            "batch_tokens": 8192,
            "reminders": 0.5,
            "learning_rate": 1e-3,
        },
    )
    run = sft(config, every(20, "ce/loss", "reminded", "validation/loss"))
    return run.path


def learn(name: str, start: Path, options: argparse.Namespace, shared: dict[str, Any]) -> tuple[Config, RunFolder]:
    """With hints, `train` looks first: what it finds is in the run folder before step 1 is over."""
    title(f"2. A look at the hints, 3. {name}" if ARMS[name]["weight"] else f"3. {name}")
    out = options.out / name.lower().replace(" + ", "-")
    config = configure("standard", **shared, model=start, out=out, feedback=ARMS[name])
    say = every(1, "solved", "invalid_per_100", "turns", "hinted_targets", "hint/gain")

    def on_step(row: dict[str, Any]) -> None:
        if row["step"] == 1:
            show_look(RunFolder(config.out))
        say(row)

    return config, train(config, on_step)


def show_look(run: RunFolder) -> None:
    """What `train` found out before step 1: faults without and with the hint, at places where they were made."""
    for row in run.looks(1):
        judged = f"{row['faults']}/{row['samples']} faulty, with the hint {row['hinted_faults']}/{row['samples']}"
        nats = "" if row["nats"] is None else f", {row['nats']:+.1f} nats"
        print(f"  {row['rule']:<22}{judged}{nats}: {'left out, ' + row['why_not'] if row['why_not'] else 'taught'}")


def measure(name: str, config: Config, model: Path, options: argparse.Namespace) -> dict[str, Any]:
    path = options.out / f"{name.lower().replace(' + ', '-')}-{options.steps}.json"
    if not path.is_file():
        print(f"  measuring {name} on {options.eval_tasks} held-out tasks, {options.samples} rollouts each", flush=True)
        path.write_text(json.dumps(evaluate(config, model)) + "\n")
    return json.loads(path.read_text())


def table(results: dict[str, dict[str, Any]]) -> list[str]:
    lines = [f"{'':<12}" + "".join(f"{label:>28}" for label, _ in COLUMNS.values())]
    for name, numbers in results.items():
        cells = [shown(form, numbers[key], numbers["intervals"][key]) for key, (_, form) in COLUMNS.items()]
        lines.append(f"{name:<12}" + "".join(f"{cell:>28}" for cell in cells))
    return lines


def shown(form: str, value: float | None, interval: tuple[float, float] | None) -> str:
    """There is none of what there was nothing to divide by: invalid calls where there were no calls."""
    if value is None:
        return "-"
    return form.format(value) + (f" ({form.format(interval[0])} to {form.format(interval[1])})" if interval else "")


def title(text: str) -> None:
    print(f"\n=== {text}", flush=True)


def every(count: int, *keys: str) -> Callable[[dict[str, Any]], None]:
    """Prints these numbers of every so many steps."""

    def on_step(row: dict[str, Any]) -> None:
        if row["step"] % count == 0 or row["step"] == row.get("steps"):
            numbers = "  ".join(f"{key} {row[key]:.3g}" for key in keys if row.get(key) is not None)
            print(f"  step {row['step']:3}  {numbers}", flush=True)

    return on_step


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", default="smollm2-135m", help="a name, a hub id or a folder")
    parser.add_argument("--tasks", default="pocket-long-3", help="tasks that lack three functions, about 20 turns each")
    parser.add_argument("--engine", choices=("continuous", "vllm"), default="continuous", help="what samples, on a GPU")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/real-model"))
    parser.add_argument("--tiny", action="store_true", help="the smallest of everything; --model pocket unless given")
    options = parser.parse_args()
    sizes = {"episodes": 2500, "epochs": 3, "train_tasks": 48, "eval_tasks": 24, "samples": 4, "group_size": 8}
    sizes |= {"turns": 28, "context": 6144}
    if options.tiny:
        sizes = {"episodes": 12, "epochs": 1, "train_tasks": 4, "eval_tasks": 2, "samples": 1, "group_size": 2}
        sizes |= {"turns": 6, "context": 2048}
        options.steps = min(options.steps, 1)
        options.tasks = "pocket-long-2"
        options.model = "pocket" if options.model == parser.get_default("model") else options.model
    vars(options).update(sizes)
    return options


def main() -> None:
    options, began = parsed(), time.monotonic()
    shared = settings(options)
    start = imitate(options, shared)
    results = {}
    for name in ARMS:
        try:
            config, run = learn(name, start, options, shared)
        except NoHintHelps as reason:  # then that is the result, and RL goes on alone
            show_look(RunFolder(options.out / "rl-hints"))
            print(f"  {name} ends: {reason}")
            continue
        if "before" not in results:
            results["before"] = measure("before", config, start, options)
        results[name] = measure(name, config, run.path, options)
    if not results:
        raise SystemExit("no arm could be trained; what stopped them stands above")
    title(f"4. Held-out tasks, with 95% intervals over tasks; {(time.monotonic() - began) / 60:.1f} minutes")
    print("\n".join(table(results)))


if __name__ == "__main__":
    try:
        main()
    except OffbookError as error:  # as another --seed in the same --out
        raise SystemExit(str(error)) from None
