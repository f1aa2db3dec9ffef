"""Training runs compared by arm: mean and standard deviation over an arm's seeds."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np

from offbook.core.runfolder import RunFolder
from offbook.evals.metrics import NOTHING, metric_of, show, show_change
from offbook.evals.statistics import Ratio, compare_paired
from offbook.evals.tables import Cells
from offbook.types import OffbookError
from offbook.view.lines import is_number
from offbook.view.scales import Points

HELD_OUT = ("solved", "invalid_per_100", "turns", "tokens")
TRAINING = (*HELD_OUT, "reward", "hinted_targets", "hint/kl")
SEED = re.compile(r"seed[-_]?(\d+)")
WINDOW = 5  # steps at the end of training that numbers are means over


@dataclass
class Run:
    """A run of an arm; an evaluation folder is a run without steps."""

    arm: str
    seed: str
    folder: RunFolder
    rows: list[dict[str, Any]]  # of metrics.jsonl, each with a numeric `step`
    final: dict[str, Any] | None
    unreadable: int  # lines of metrics.jsonl
    numbers: dict[str, float] = field(default_factory=dict)  # cells of the table

    def series(self, key: str) -> Points:
        """(step, value) where the row has a finite number under `key`."""
        return [(row["step"], row[key]) for row in self.rows if is_number(row.get(key))]


@dataclass(frozen=True)
class Arms:
    members: dict[str, list[Run]]
    keys: list[str]
    held_out: bool  # the numbers are of evaluations; else of the last steps of training

    def spread(self, arm: str, key: str) -> dict[str, Any]:
        """Mean and deviation over the arm's runs that have this number."""
        values = [member.numbers[key] for member in self.members[arm] if key in member.numbers]
        deviation = stdev(values) if len(values) > 1 else None
        return {"mean": fmean(values) if values else None, "sd": deviation, "n": len(values)}


def arm_and_seed(path: Path) -> tuple[str, str]:
    """runs/rl/seed-1 and runs/seed-1/rl are both seed 1 of the arm rl; other runs are arms of their own."""
    for own, arm in ((path.name, path.parent.name), (path.parent.name, path.name)):
        if match := SEED.fullmatch(own):
            return arm, match[1]
    match = SEED.search(path.name)
    arm = path.name.replace(match[0], "").strip("-_.") if match else ""
    return (arm, match[1]) if match and arm else (path.name, "")


def load_arms(paths: Sequence[Path], keys: Sequence[str] = ()) -> Arms:
    """`keys` are metrics by name; without any, those of evaluations where all runs have one, else those of training."""
    loaded = [_load(*arm_and_seed(path.resolve()), path) for path in paths]
    held_out = all(run.final for run in loaded)
    members: dict[str, list[Run]] = {}
    for run in loaded:
        members.setdefault(run.arm, []).append(run)
        if held_out and run.final:
            run.numbers = {key: run.final[key] for key in keys or HELD_OUT if is_number(run.final.get(key))}
        else:
            run.numbers = training_numbers(run, keys or TRAINING)
    present = list(dict.fromkeys(key for run in loaded for key in run.numbers))
    for key in keys:
        if key not in present:
            raise OffbookError(f"none of these runs has a metric {key}")
    return Arms(members, present, held_out)


def _load(arm: str, seed: str, path: Path) -> Run:
    folder = RunFolder.open(path)
    lines, broken = folder.metrics()
    rows = [row for row in lines if is_number(row.get("step"))]
    results = path / "results.json"
    final = folder.read_eval("final")
    if final is None and results.is_file():
        final = json.loads(results.read_text())
    if not rows and not final:
        raise OffbookError(f"{path} has neither training steps nor an evaluation to compare")
    return Run(arm, seed, folder, rows, final, broken + len(lines) - len(rows))


def training_numbers(run: Run, keys: Sequence[str]) -> dict[str, float]:
    """Means over the last steps."""
    series = {key: [value for _, value in run.series(key)] for key in keys}
    return {key: fmean(values[-WINDOW:]) for key, values in series.items() if values}


def cells(arms: Arms) -> Cells:
    """A column per arm; from the second arm on also the difference to the first, where both have the same seeds."""
    base, *_ = arms.members
    table = [["", *arms.members], ["runs", *(str(len(members)) for members in arms.members.values())]]
    table += [[metric_of(key).label, *(_spread(arms, arm, key) for arm in arms.members)] for key in arms.keys]
    for arm, members in arms.members.items():
        of_base = {member.seed: member for member in arms.members[base]}
        pairs = [(of_base[member.seed], member) for member in members if member.seed in of_base]
        if arm != base and pairs:
            column = [f"{arm} - {base}", f"{len(pairs)} paired", *(_change(pairs, key) for key in arms.keys)]
            for row, cell in zip(table, column, strict=True):
                row.append(cell)
    return table


def _spread(arms: Arms, arm: str, key: str) -> str:
    metric = metric_of(key)
    found = arms.spread(arm, key)
    deviation = f" ± {show(metric, found['sd']).removesuffix('%')}" if found["n"] > 1 else ""
    return show(metric, found["mean"]) + deviation


def _change(pairs: Sequence[tuple[Run, Run]], key: str) -> str:
    both = [
        (one.numbers[key], other.numbers[key]) for one, other in pairs if key in one.numbers and key in other.numbers
    ]
    if not both:
        return NOTHING
    values = np.array(both, dtype=np.float64)
    ones = np.ones(len(values))
    difference = compare_paired(Ratio(values[:, 0], ones), Ratio(values[:, 1], ones))
    shown = show_change(metric_of(key), difference.value)
    return shown if difference.p is None else f"{shown} (p {difference.p:.2f})"


def notes_of(arms: Arms) -> list[str]:
    counts = ", ".join(f"{arm} n = {len(members)}" for arm, members in arms.members.items())
    what = "numbers of each run's evaluation" if arms.held_out else f"means over the last {WINDOW} steps of training"
    notes = [f"{what}; runs: {counts}; ± is the standard deviation over runs"]
    if any(len(members) > 1 for members in arms.members.values()):
        notes.append("p by swapping the arms of runs of one seed: with n seeds it cannot be below 2 / 2^n")
    unreadable = sum(run.unreadable for members in arms.members.values() for run in members)
    return [*notes, *([f"{unreadable} unreadable metrics lines were skipped"] if unreadable else [])]


def as_json(arms: Arms) -> dict[str, Any]:
    return {
        "kind": "training runs",
        "held_out": arms.held_out,
        "arms": {
            arm: {
                "runs": [{"path": str(one.folder.path), "seed": one.seed, **one.numbers} for one in members],
                **{key: arms.spread(arm, key) for key in arms.keys},
            }
            for arm, members in arms.members.items()
        },
    }
