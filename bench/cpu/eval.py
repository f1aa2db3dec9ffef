"""What an evaluation of the pocket model takes and says: before and after training, on the embedded held-out tasks.

    python bench/cpu/eval.py --out runs/eval-bench --json figures.json

Model, tasks and training are made once and kept in the folder; what is timed is two evaluations side by side, each a
process of its own, and the comparison.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from offbook.pocket.model import make_pocket
from offbook.pocket.tasks import make_pocket_tasks

SHOWN = ("solved", "pass@2", "pass@4", "invalid_per_100", "turns", "tokens", "edit_rate", "test_edits", "flagged")


def prepare(out: Path, seed: int, steps: int) -> tuple[Path, Path, Path]:
    """The model before, the tasks, and the run that it is trained in."""
    model = make_pocket(out / "models", seed, progress)
    tasks = out / "tasks"
    if not tasks.is_dir():
        asyncio.run(make_pocket_tasks(tasks, seed, 120, 48, lambda share: None))
    settings = ["--seed", str(seed), "--model", str(model), "--tasks.source", str(tasks), "--train.steps", str(steps)]
    offbook("train", *settings, "--out", str(out / "run"))
    return model, tasks, out / "run"


def progress(what: str, share: float) -> None:
    if share in (0.0, 1.0):
        print(f"{what}: {share:.0%}", file=sys.stderr)


def offbook(*arguments: str) -> str:
    command = [sys.executable, "-m", "offbook", *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def measure(out: Path, model: Path, tasks: Path, run: Path, seed: int, samples: int) -> float:
    """Both at once, one thread each. Seconds by the clock."""
    started = time.monotonic()
    common = ["--suite", str(tasks), "-n", str(samples), "--train", str(tasks)]
    running = []
    for name, subject in (("before", model), ("after", run)):
        shutil.rmtree(out / name, ignore_errors=True)
        settings = ["@", str(run / "config.toml"), "--seed", str(seed)]
        arguments = ["eval", str(subject), "--out", str(out / name), *common, *settings]
        running.append(subprocess.Popen([sys.executable, "-m", "offbook", *arguments], stdout=subprocess.DEVNULL))
    codes = [process.wait() for process in running]
    if any(codes):
        sys.exit("an evaluation failed; see above")
    return time.monotonic() - started


def cpu_seconds() -> float:
    """Of all processes that are over; on a busy machine this says more than the clock."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def lines_of(figures: dict[str, Any]) -> list[str]:
    lines = ["| | before | after | difference | 95% interval | p |", "|---|---:|---:|---:|---:|---:|"]
    for key in SHOWN:
        metric = figures["metrics"].get(key)
        if metric is None:
            continue
        before, after = metric["values"].values()
        (difference,) = metric["differences"].values()
        cells = [f"{before:.3f}", f"{after:.3f}", f"{difference['value']:+.3f}"]
        around = difference["interval"]
        lines.append(
            f"| {key} | {' | '.join(cells)} | {around[0]:.3f} to {around[1]:.3f} | {difference['p']:.4f} |"
            if around
            else f"| {key} | {' | '.join(cells)} | | |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--out", type=Path, default=Path("runs/eval-bench"))
    parser.add_argument("--given", type=Path, nargs=3, metavar=("MODEL", "TASKS", "RUN"), help="made before")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    out = arguments.out
    made = arguments.given or prepare(out, arguments.seed, arguments.steps)
    before_s = cpu_seconds()
    eval_s = measure(out, *made, arguments.seed, arguments.samples)
    cpu_s = cpu_seconds() - before_s
    started = time.monotonic()
    pages = ["--markdown", str(out / "compare.md"), "--figure", str(out / "effort.svg")]
    figures = json.loads(offbook("compare", str(out / "before"), str(out / "after"), "--json", "-", *pages))
    figures |= {"eval_s": eval_s, "eval_cpu_s": cpu_s, "compare_s": time.monotonic() - started}
    print("\n".join(lines_of(figures)))
    (tasks,) = figures["paired_tasks"].values()
    rollouts = tasks * arguments.samples
    seconds = (
        f"{eval_s:.0f} s ({cpu_s:.0f} s of processor time) for two evaluations of {rollouts} rollouts side by side"
    )
    print(f"\nn = {tasks} tasks; {seconds}, {figures['compare_s']:.1f} s to compare.")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
