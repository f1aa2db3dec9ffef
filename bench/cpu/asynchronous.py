"""What sampling beside training saves, and what the bookkeeping of it costs.

    python bench/cpu/asynchronous.py wall --seeds 0 1 2 --steps 20 --json wall.json
    python bench/cpu/asynchronous.py slots --rollouts 10000 --json slots.json

`wall`: the same steps of the pocket model four ways, each in a process of its own: synchronous in lockstep,
synchronous with the continuous engine, asynchronous with either. Seconds, also those of processors by part, are from
the first request to the end of the last step; models are not loaded in them. `floor` is the seconds in which this
machine's cores can do as much. No way finds the grades of another: all would be there for the second. `slots`:
rollouts that are there already go through the scheduler, its files and its journal, and no model, sandbox or trainer
is in the way.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

LOOK_S = 0.1
WAYS = {
    "lockstep": {"engine.kind": "lockstep"},
    "continuous": {"engine.kind": "continuous"},
    "ahead": {"engine.kind": "lockstep", "loop.max_staleness": "1"},
    "asynchronous": {"engine.kind": "continuous", "loop.max_staleness": "1"},
}


def one_run(settings: dict[str, str], evaluated: bool) -> dict[str, Any]:
    from offbook.core.config import load_config
    from offbook.core.runfolder import latest_checkpoint
    from offbook.evals.run import Subject, load_suites, run_eval
    from offbook.rl.resume import RolloutFiles
    from offbook.rl.scheduler import read_journal
    from offbook.rl.train import train

    config = load_config(["pocket"], settings)
    times: list[float] = []
    used: list[dict[str, float]] = []

    def at_first_request() -> None:
        while not any(line["state"] == "requested" for line in read_journal(Path(config.out))):
            time.sleep(LOOK_S)
        used.append(_cpu_s())

    def on_step(row: dict[str, Any]) -> None:
        times.append(time.time())
        used.append(_cpu_s())

    threading.Thread(target=at_first_request, daemon=True).start()
    folder = train(config, on_step)
    began = next(line["at"] for line in read_journal(folder.path) if line["state"] == "requested")
    rows, _ = folder.metrics()
    found = {
        "seconds": times[-1] - began,
        "rollout_s": sum(row["rollout_s"] for row in rows),
        "train_s": sum(row["train_s"] for row in rows),
        "floor": (sum(used[-1].values()) - sum(used[0].values())) / (os.cpu_count() or 1),
        **{f"cpu_s/{part}": seconds - used[0][part] for part, seconds in used[-1].items()},
        "probe_s": sum(row.get("probe_s", 0.0) for row in rows),
        "staleness": sum(row["staleness"] for row in rows) / len(rows),
        "too_old": sum(row["staleness/too_old"] for row in rows),
        "mismatch": sum(row["rl/mismatch"] for row in rows) / len(rows),
        "truncated": sum(row["rl/truncated"] for row in rows) / len(rows),
    }
    if evaluated:
        subject = Subject("run", config, latest_checkpoint(folder))
        result = run_eval(
            subject, load_suites([config.tasks.source], config), RolloutFiles.in_run(folder.path, "final")
        )
        found |= {key: result[key] for key in ("solved", "invalid_per_100")}
    return found


def _cpu_s() -> dict[str, float]:
    """So far: of this process, of sandboxes and gradings that are over, and of processes that go on beside it."""
    own = Path("/proc/self")
    now = {"run": _times(own / "stat", 11), "sandboxes": _times(own / "stat", 13), "judge": 0.0}
    for task in own.glob("task/*/children"):
        for child in task.read_text().split():
            with contextlib.suppress(OSError):  # gone
                command = Path(f"/proc/{child}/cmdline").read_text()
                now["judge"] += (
                    _times(Path(f"/proc/{child}/stat"), 11) if "offbook.signals.monitors" in command else 0.0
                )
    return now


def _times(stat: Path, first: int) -> float:
    """Of user and system, by their place behind the name of the command."""
    fields = stat.read_text().rpartition(")")[2].split()
    return (int(fields[first]) + int(fields[first + 1])) / os.sysconf("SC_CLK_TCK")


def wall(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    from offbook.core.config import load_config
    from offbook.rl.models import model_folder
    from offbook.rl.tasks import task_sets

    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for seed in arguments.seeds:
            made = load_config(["pocket"], {"seed": str(seed)})
            model_folder(made.model, seed)
            task_sets(made)
            for way, settings in WAYS.items():
                own = {"out": f"{scratch}/{way}-{seed}", "seed": str(seed), "train.steps": str(arguments.steps)}
                order = json.dumps({**own, **settings, **dict(pair.split("=", 1) for pair in arguments.set)})
                command = [sys.executable, __file__, "one", order, *(["--eval"] if arguments.eval else [])]
                env = {**os.environ, "OFFBOOK_CACHE": str(without_grades(Path(f"{own['out']}-cache")))}
                done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=env)
                if done.returncode:
                    print(f"{way}, seed {seed}: ended with code {done.returncode}", file=sys.stderr)
                    continue
                row = {"seed": seed, "way": way, **json.loads(done.stdout.splitlines()[-1])}
                base = next((one["seconds"] for one in rows if (one["seed"], one["way"]) == (seed, "lockstep")), None)
                row["ratio"] = row["seconds"] / base if base else 1.0
                rows.append(row)
                print(_line(row), flush=True)
    return rows


def without_grades(folder: Path) -> Path:
    """What has been made on this machine, the model and its tasks among it, but for the grades of rollouts."""
    from offbook.core.config import cache_folder

    for made in cache_folder().glob("*/*"):
        if made.name != "grades":
            link = folder / made.relative_to(cache_folder())
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(made)
    return folder


def _line(row: dict[str, Any]) -> str:
    return "  ".join(
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()
    )


class Replayed:
    """In the place of a collector and its engine: every rollout is there at once."""

    version, kv_load = 0, 0.0
    monitors = None
    losses: Sequence[Any] = ()
    keeps_weights, monitors = False, None

    def __init__(self, rollout: Any):
        self.rollout, self.engine = rollout, self

    def apply(self, weights: Any) -> None:
        self.version = weights.version

    async def side_by_side(self, jobs: Sequence[Any], work: Callable[[Any], Any]) -> None:
        for job in jobs:
            await work(job)

    async def rollout(self, job: Any, watch: Any) -> Any:
        return replace(self.rollout, id=job.id, task=job.task.id, group=job.group)


class Tasks:
    def __init__(self, task: Any):
        self.task = task

    def tasks_of(self, batch: int, groups: int) -> list[Any]:
        return [replace(self.task, id=f"task-{batch}-{place}") for place in range(groups)]


def slots(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    from offbook.core.config import load_config
    from offbook.core.runfolder import RunFolder
    from offbook.core.weights import Weights
    from offbook.rl.scheduler import RolloutBuffer, Scheduler
    from offbook.types import Message, Rollout, Segment, Task, Usage

    tokens, here = arguments.tokens, Path("/")
    segment = Segment([7] * tokens, [True] * tokens, [-0.125] * tokens, [0] * tokens)
    segment.messages = [
        Message("assistant", "x" * 40, start, start, start, start + 10) for start in range(0, tokens, 100)
    ]
    rollout = Rollout("", "", "", (), [segment], "finish", Usage(turns=5, sampled_tokens=tokens))
    task = Task("", here, "x", here, here, (), (), (), (), "origin")
    replayed: Any = Replayed(rollout)
    tasks: Any = Tasks(task)
    steps = arguments.rollouts // 32
    found: dict[str, Any] = {"rollouts": steps * 32, "tokens": tokens}

    async def main(scratch: str) -> None:
        settings = {"out": scratch, "train.steps": str(steps), "engine.kind": "continuous", "loop.max_staleness": "2"}
        config = load_config(["pocket"], settings)
        kept = RolloutBuffer(RunFolder(scratch), config.train.group_size)
        scheduler = Scheduler(config, replayed, kept, tasks)
        began = time.monotonic()
        for step in range(1, steps + 1):
            await scheduler.take(step)
            (Path(scratch) / "rollouts" / f"step_{step:05d}.jsonl").unlink()  # a run keeps them; the disk is small
            await scheduler.apply(Weights(step, {}))
            if step in (max(1, steps // 10), steps):
                found[f"resident_mb_at_{step * 32}"] = _resident_mb()
        found["seconds"] = time.monotonic() - began
        found["journal_mb"] = (kept.folder / "journal.jsonl").stat().st_size / 1e6
        await scheduler.aclose()

    with tempfile.TemporaryDirectory() as scratch:
        asyncio.run(main(scratch))
    found |= {"a_second": found["rollouts"] / found["seconds"], "most_mb": _most_mb()}
    print(_line(found))
    return [found]


def _resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def _most_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    of_wall = verbs.add_parser("wall")
    of_wall.add_argument("--seeds", type=int, nargs="+", default=[0])
    of_wall.add_argument("--steps", type=int, default=20)
    of_wall.add_argument("--eval", action=argparse.BooleanOptionalAction, default=True)
    of_wall.add_argument("--set", nargs="*", default=[], help="KEY=VALUE of the configuration, for all ways")
    of_slots = verbs.add_parser("slots")
    of_slots.add_argument("--rollouts", type=int, default=10_000)
    of_slots.add_argument("--tokens", type=int, default=500)
    of_one = verbs.add_parser("one")
    of_one.add_argument("settings")
    of_one.add_argument("--eval", action="store_true")
    for verb in (of_wall, of_slots):
        verb.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.verb == "one":
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
        print(json.dumps(one_run(json.loads(arguments.settings), arguments.eval)))
        return
    rows = wall(arguments) if arguments.verb == "wall" else slots(arguments)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
