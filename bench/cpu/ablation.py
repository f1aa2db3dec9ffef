"""What hints teach, and why: every teacher, direction, weight and control of targeted feedback, on held-out tasks.

    python bench/cpu/ablation.py --seeds 0 1 2 --jobs 2 --json figures.json

Arms of one seed start from the same weights and train on the same tasks in the same order. Some go on for four times
as many steps, to look for collapse. A run that was stopped goes on where it was; what is finished is not run again.
Every job is one process with one thread; with `--json` the figures are written again after each.

    python bench/cpu/ablation.py --balance --steps 80 --short --jobs 16 --out runs/balance --json runs/balance.json

compares what the hints' part of the loss is divided by.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from panels import Lines, figure, mean_curve

from offbook.core.runfolder import write_atomic
from offbook.pocket.demonstrations import LEARNED

COMMON = {"train.groups": "3", "checkpoint.every": "5", "feedback.look": "false"}
HINTS: dict[str, dict[str, str]] = {
    "rl": {"weight": "0"},
    "hints": {},
    "ungated": {"gate": "0"},
    "ema": {"teacher": "ema"},
    "tokens": {"token_gate": "0.02"},
    "live": {"teacher": "live"},
    "reverse": {"direction": "reverse"},
    "jsd": {"direction": "jsd"},
    "weight_0.1": {"weight": "0.1"},
    "weight_0.3": {"weight": "0.3"},
    "weight_1": {"weight": "1"},
    "own_5": {"balance": "own", "weight": "5"},
    "rl_1": {"balance": "rl", "weight": "1"},
    "rl_2": {"balance": "rl", "weight": "2"},
    "rl_5": {"balance": "rl", "weight": "5"},
    "bounded_0.3": {"balance": "bounded", "weight": "5", "bound": "0.3"},
    "bounded_1": {"balance": "bounded", "weight": "5", "bound": "1"},
    "none": {"control": "none"},
    "donor": {"control": "donor"},
    "random_target": {"control": "random_target"},
    "every_turn": {"control": "every_turn"},
    "constant_negative": {"control": "constant_negative"},
}
LABELS = {
    "rl": "RL only",
    "hints": "RL + hints (frozen teacher, forward, gate)",
    "ungated": "without the gate",
    "ema": "teacher ema",
    "tokens": "tokens that the hint moves by 0.02 nats alone",
    "live": "teacher live",
    "reverse": "reverse KL",
    "jsd": "JSD",
    "weight_0.1": "weight 0.1",
    "weight_0.3": "weight 0.3",
    "weight_1": "weight 1",
    "own_5": "hints over their own tokens, weight 5",
    "rl_1": "hints over RL tokens, weight 1",
    "rl_2": "hints over RL tokens, weight 2",
    "rl_5": "hints over RL tokens, weight 5",
    "bounded_0.3": "hints over RL tokens, weight 5, at most 0.3 of RL's gradient",
    "bounded_1": "hints over RL tokens, weight 5, at most RL's gradient",
    "none": "control: no hint",
    "donor": "control: hint of another rule",
    "random_target": "control: another message",
    "every_turn": "control: every message of a faulty rollout",
    "constant_negative": "control: advantage -1, no teacher",
}
BALANCE = ("own_5", "rl_1", "rl_2", "rl_5", "bounded_0.3", "bounded_1")  # beside RL alone, with --balance
LONG = ("rl", "hints", "reverse", "ema", "live", "tokens")
TIMES = 4
CURVES = {"invalid calls per 100": "invalid_per_100", "solved": "solved"}
COLUMNS = {
    "solved": "solved",
    "invalid_per_100": "invalid per 100",
    "turns": "turns",
    "tokens": "tokens",
    "named": "names what it changed",
    "fault": "log p of the first faults",
    "hinted_fault": "the same, hinted",
    "ratio_first": "hints' gradient by RL's, first steps",
    "ratio_last": "last steps",
}
RATIO_ROWS = 5  # of those in which the parts' gradients were taken apart


def settings_of(arm: str, seed: int, steps: int, arguments: argparse.Namespace) -> dict[str, str]:
    feedback = {f"feedback.{key}": value for key, value in HINTS[arm].items()}
    return {
        **COMMON,
        "feedback.rules": json.dumps(LEARNED),  # what the pocket model does wrong
        **dict(option.split("=", 1) for option in arguments.set),
        **feedback,
        "seed": str(seed),
        "model": str(arguments.out / f"model-{seed}"),
        "tasks.source": str(arguments.out / f"tasks-{seed}"),
        "train.steps": str(steps),
        "out": str(arguments.out / arm / f"seed-{seed}"),
    }


def prepare(seed: int, arguments: argparse.Namespace) -> None:
    """The seed's model and tasks, and how the model does before any training."""
    import asyncio

    from offbook.pocket.model import make_pocket
    from offbook.pocket.tasks import make_pocket_tasks

    model, tasks = arguments.out / f"model-{seed}", arguments.out / f"tasks-{seed}"
    if not model.exists():
        made = make_pocket(arguments.out / "models", seed, lambda what, share: None)
        model.symlink_to(made.resolve())
    if not tasks.exists():
        asyncio.run(make_pocket_tasks(tasks, seed, 120, 48, lambda share: None))


def run_arm(arm: str, seed: int, steps: int, arguments: argparse.Namespace) -> None:
    """Train up to a step and measure; what has been measured is left as it is."""
    from offbook.core.config import load_config
    from offbook.core.runfolder import RunFolder, latest_checkpoint
    from offbook.rl.train import train

    settings = settings_of(arm, seed, steps, arguments)
    folder = Path(settings["out"])
    result = folder / f"result-{steps}.json"
    if result.exists():
        return
    started = time.monotonic()
    train(load_config([], settings))
    figures, summary, rollouts = measure(latest_checkpoint(RunFolder(folder)), folder, settings)
    figures |= gradient_ratios(folder)
    RunFolder(folder).write_eval("final", summary, rollouts)  # for `offbook compare` and `offbook view`
    result.write_text(json.dumps({**figures, "seconds": time.monotonic() - started}, indent=2) + "\n")


def run_before(seed: int, arguments: argparse.Namespace) -> None:
    """The start itself, on the same held-out tasks, and on the faults of its own first step."""
    folder = arguments.out / "before" / f"seed-{seed}"
    if not (folder / "result-0.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        settings = settings_of("rl", seed, 1, arguments)
        figures, _, _ = measure(Path(settings["model"]), Path(settings["out"]), settings)
        (folder / "result-0.json").write_text(json.dumps(figures, indent=2) + "\n")


def measure(model: Path, run: Path, settings: dict[str, str]) -> tuple[dict[str, float], dict[str, Any], list[Any]]:
    """The numbers of the table, all numbers, and the rollouts."""
    import asyncio

    from offbook.core.config import load_config
    from offbook.rl.collector import Collector
    from offbook.rl.evaluate import PARALLEL
    from offbook.rl.train_step import summarize
    from offbook.tasks import load_tasks

    config, tasks = load_config([], settings), load_tasks(Path(settings["tasks.source"]) / "heldout")
    groups = asyncio.run(Collector(config, model).groups(tasks, config.eval.samples, "eval", parallel=PARALLEL))
    summary, rollouts = {**summarize(groups), "tasks": len(groups)}, [each for group in groups for each in group]
    keys = ("solved", "invalid_per_100", "turns", "tokens")
    figures = {key: summary[key] for key in keys} | {"named": mean(map(names_change, rollouts))}
    return {**figures, **hint_following(model, run, config)}, summary, rollouts


def gradient_ratios(run: Path) -> dict[str, float]:
    """How large the hints' gradient is beside RL's, as it was applied, at both ends of a run."""
    rows = [row for row in read_rows(run / "metrics.jsonl") if row.get("rl/gradient_norm")]
    ratios = [row.get("hint/gradient_norm", 0.0) * row.get("hint/scale", 1.0) / row["rl/gradient_norm"] for row in rows]
    if not ratios:
        return {}
    return {"ratio_first": mean(ratios[:RATIO_ROWS]), "ratio_last": mean(ratios[-RATIO_ROWS:])}


def names_change(rollout: Any) -> bool:
    """Whether it changed something and its last words say what."""
    from offbook.signals.feedback import read_rollout
    from offbook.signals.trajectory import Trajectory

    said = bool(rollout.changed) and bool(Trajectory(rollout).last_words.strip())
    return said and not read_rollout(rollout, 1, rules=["final_names_nothing"])


def hint_following(model: Path, run: Path, config: Any) -> dict[str, float]:
    """How likely a model finds the faults of the run's first step, without and with their hints. The rollouts of the
    first step are the same in every arm. Hinted, a fault should be unlikely; if that goes, no teacher is left."""
    from offbook.core.runfolder import RunFolder
    from offbook.rl.models import chat_of, load_model
    from offbook.signals.feedback import read_rollout, write_hint
    from offbook.train.algorithms import hint_branch, rl_samples
    from offbook.train.forward import Decoder, measure_branches

    rollouts, _ = RunFolder(run).rollouts(1)
    chat = chat_of(model, config)
    samples = []
    for rollout in rollouts:
        (of_segments,) = rl_samples([rollout])  # alone in its group: no advantage
        for target in read_rollout(rollout, 3, None, tuple(config.feedback.rules)):
            hint = write_hint(target.rule, rollout.tools)
            branch = hint_branch(rollout.segments[target.segment], target, hint, chat)
            of_segments[target.segment].branches.append(branch)
        samples += [sample for sample in of_segments if sample.branches]
    decoder = Decoder(load_model(model))
    found = measure_branches(decoder, samples, config.train.settled().micro_tokens)
    measured = [one for of_batch in found for one in of_batch.values()]
    return {
        "fault": mean(sum(one.student) for one in measured),
        "hinted_fault": mean(sum(one.teacher) for one in measured),
    }


def in_process(arguments: argparse.Namespace, *job: str) -> None:
    """One job in a process of its own, with one thread, so that as many run side by side as there are cores."""
    name = "-".join(job)
    options = [part for option in arguments.set for part in ("--set", option)]
    command = [sys.executable, __file__, "--out", str(arguments.out), "--steps", str(arguments.steps), *options]
    log = arguments.out / "logs" / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    with log.open("ab") as stream:
        code = subprocess.run([*command, "--job", *job], stdout=stream, stderr=stream).returncode
    print(f"{name}: {'done' if not code else f'failed, see {log}'} in {time.monotonic() - started:.0f} s", flush=True)
    if arguments.json:
        write_atomic(arguments.json, json.dumps(results(arguments), indent=2) + "\n")


def run_all(arguments: argparse.Namespace) -> None:
    arms = arguments.arms or [arm for arm in HINTS if arm not in BALANCE]
    if arguments.balance:
        arms = ["rl", *BALANCE]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        list(pool.map(lambda seed: in_process(arguments, "prepare", str(seed)), arguments.seeds))
        last = {arm: arguments.steps * (TIMES if arm in LONG and not arguments.short else 1) for arm in arms}
        longest_first = sorted(last, key=lambda arm: -last[arm])
        jobs = [(arm, str(seed), str(last[arm])) for arm in longest_first for seed in arguments.seeds]
        list(pool.map(lambda job: in_process(arguments, *job), jobs))
        list(pool.map(lambda seed: in_process(arguments, "before", str(seed)), arguments.seeds))


def run_job(arguments: argparse.Namespace) -> None:
    import torch

    torch.set_num_threads(1)
    kind, seed = arguments.job[0], int(arguments.job[1])
    if kind == "prepare":
        prepare(seed, arguments)
    elif kind == "before":
        run_before(seed, arguments)
    else:
        last = int(arguments.job[2])
        for steps in sorted({arguments.steps, last}):
            run_arm(kind, seed, steps, arguments)


def results(arguments: argparse.Namespace) -> dict[str, dict[str, dict[str, float]]]:
    """By row, by seed. A row is an arm and its number of steps."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    wanted = [("before", 0), *((arm, steps) for steps in (arguments.steps, TIMES * arguments.steps) for arm in HINTS)]
    for arm, steps in wanted:
        for seed in arguments.seeds:
            path = arguments.out / arm / f"seed-{seed}" / f"result-{steps}.json"
            if path.exists():
                found.setdefault(f"{arm}/{steps}", {})[str(seed)] = json.loads(path.read_text())
    return found


def table(found: dict[str, dict[str, dict[str, float]]]) -> list[str]:
    everything = [one for seeds in found.values() for one in seeds.values()]
    columns = [key for key in COLUMNS if any(one.get(key) for one in everything)]
    lines = ["| | steps | seeds | " + " | ".join(COLUMNS[key] for key in columns) + " |"]
    lines += ["|---|---:|---:|" + "---:|" * len(columns)]
    for row, seeds in found.items():
        arm, steps = row.split("/")
        cells = [cell(key, [one[key] for one in seeds.values() if key in one]) for key in columns]
        lines.append(f"| {LABELS.get(arm, arm)} | {steps} | {len(seeds)} | " + " | ".join(cells) + " |")
    return lines


def drawn(arguments: argparse.Namespace) -> str:
    """What the runs that went on for longer did, step by step, on their training tasks; the mean of the seeds."""
    panels = {title: curves(arguments, key) for title, key in CURVES.items()}
    return figure(panels, percent=("solved",))


def curves(arguments: argparse.Namespace, key: str) -> Lines:
    lines: Lines = {}
    for arm in LONG:
        folders = [arguments.out / arm / f"seed-{seed}" for seed in arguments.seeds]
        rows = [read_rows(folder / "metrics.jsonl") for folder in folders if (folder / "metrics.jsonl").exists()]
        points = mean_curve([[(float(row["step"]), float(row[key])) for row in run] for run in rows])
        if points and points[-1][0] > arguments.steps:
            lines[arm.replace("_", " ")] = points
    return lines


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def cell(key: str, values: list[float]) -> str:
    if not values:
        return ""
    shown = [
        f"{100 * value:.1f}%" if key in ("solved", "named") else f"{value:.1f}"
        for value in (mean(values), spread(values))
    ]
    return f"{shown[0]} ± {shown[1]}" if len(values) > 1 else shown[0]


def spread(values: list[float]) -> float:
    return stdev(values) if len(values) > 1 else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--arms", nargs="+", choices=list(HINTS), help="only these")
    parser.add_argument("--short", action="store_true", help="without the four times longer runs")
    parser.add_argument("--jobs", type=int, default=2, help="runs side by side")
    parser.add_argument("--balance", action="store_true", help="compare what the hints' part is divided by")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="configuration of every run")
    parser.add_argument("--out", type=Path, default=Path("runs/ablation"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path, help="write the tables to this file")
    parser.add_argument("--job", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.out = arguments.out.resolve()
    if arguments.job:
        run_job(arguments)
        return
    run_all(arguments)
    report(arguments)


def report(arguments: argparse.Namespace) -> None:
    found = results(arguments)
    lines = table(found)
    print("\n".join(lines))
    if arguments.markdown:
        arguments.markdown.write_text("\n".join(lines) + "\n")
        if curves(arguments, "solved"):
            arguments.markdown.with_suffix(".svg").write_text(drawn(arguments))


if __name__ == "__main__":
    main()
