"""Training runs compared by arm: mean and standard deviation over an arm's seeds."""

from __future__ import annotations

import glob
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from offbook.core.runfolder import RunFolder
from offbook.evals.metrics import NOTHING, metric_of, show, show_change
from offbook.evals.statistics import Ratio, compare_paired, mean_and_deviation
from offbook.evals.tables import Cells
from offbook.types import OffbookError
from offbook.view.lines import is_number
from offbook.view.scales import Points

HELD_OUT = ("solved", "invalid_per_100", "turns", "tokens")
TRAINING = (*HELD_OUT, "reward", "hinted_targets", "hint/kl")
SEED = re.compile(r"seed[-_]?(\d+)")
MAX_WINDOW = 5  # steps that `first` and `last` are means over


@dataclass(slots=True)
class Run:
    """A run of an arm; an evaluation folder is a run without steps."""

    arm: str
    seed: str
    folder: RunFolder
    rows: list[dict[str, Any]]  # of metrics.jsonl, each with a numeric `step`
    final: dict[str, Any] | None
    numbers: dict[str, float] = field(default_factory=dict)  # cells of the table

    def series(self, key: str) -> Points:
        """(step, value) where the row has a finite number under `key`."""
        return [(row["step"], row[key]) for row in self.rows if is_number(row.get(key))]


@dataclass(frozen=True, slots=True)
class Arms:
    members: dict[str, list[Run]]
    keys: list[str]
    held_out: bool  # the numbers are of evaluations; else of the first and last steps of training
    unreadable: Counter[str]

    def spread(self, arm: str, key: str) -> dict[str, Any]:
        """Mean and deviation over the arm's runs that have this number."""
        values = [member.numbers[key] for member in self.members[arm] if key in member.numbers]
        mean, deviation = mean_and_deviation(values) if values else (None, None)
        return {"mean": mean, "sd": deviation, "n": len(values)}


def arm_and_seed(path: Path) -> tuple[str, str]:
    """runs/rl/seed-1 and runs/seed-1/rl are both seed 1 of the arm rl; other runs are arms of their own."""
    for own, arm in ((path.name, path.parent.name), (path.parent.name, path.name)):
        if match := SEED.fullmatch(own):
            return arm, match[1]
    if (match := SEED.search(path.name)) and (arm := path.name.replace(match[0], "").strip("-_.")):
        return arm, match[1]
    return path.name, ""


def parse_groups(groups: Sequence[str]) -> dict[str, list[Path]]:
    """The run folders of each NAME=GLOB, in order."""
    found: dict[str, list[Path]] = {}
    for group in groups:
        name, equals, pattern = group.partition("=")
        if not equals or not name or not pattern:
            raise OffbookError(f"--group {group}: give NAME=GLOB, for example hints='runs/hints/seed-*'")
        paths = sorted(path for path in map(Path, glob.glob(pattern, recursive=True)) if path.is_dir())
        if not paths:
            raise OffbookError(f"--group {group}: there is no folder {pattern}")
        found.setdefault(name, []).extend(paths)
    return found


def load_arms(paths: Sequence[Path], groups: Mapping[str, Sequence[Path]], keys: Sequence[str] = ()) -> Arms:
    """`keys` are metrics by name; without any, those of evaluations where all runs have one, else those of training."""
    placed = [(*arm_and_seed(path.resolve()), path) for path in paths]
    placed += [(arm, arm_and_seed(path.resolve())[1], path) for arm, of_arm in groups.items() for path in of_arm]
    unreadable: Counter[str] = Counter()
    loaded = [_load(*place, unreadable) for place in placed]
    held_out = all(run.final for run in loaded)
    members: dict[str, list[Run]] = {}
    for run in loaded:
        numbers = training_numbers(run, keys or TRAINING)
        if held_out and run.final:
            numbers = {key: run.final[key] for key in keys or HELD_OUT if is_number(run.final.get(key))}
        run.numbers = numbers
        members.setdefault(run.arm, []).append(run)
    present = dict.fromkeys(key for arm in members.values() for member in arm for key in member.numbers)
    for key in keys:
        if key not in {name.partition(", ")[0] for name in present}:
            raise OffbookError(f"none of these runs has a metric {key}")
    return Arms(members, list(present), held_out, unreadable)


def _load(arm: str, seed: str, path: Path, unreadable: Counter[str]) -> Run:
    folder = RunFolder.open(path)
    lines, broken = folder.metrics()
    rows = [row for row in lines if is_number(row.get("step"))]
    results, final = path / "results.json", folder.read_eval("final")
    if final is None and results.is_file():
        final = json.loads(results.read_text())
    if not rows and not final:
        raise OffbookError(f"{path} has neither training steps nor an evaluation to compare")
    if skipped := broken + len(lines) - len(rows):
        unreadable[" ".join(filter(None, (arm, seed, "metrics line")))] += skipped
    return Run(arm, seed, folder, rows, final)


def training_numbers(run: Run, keys: Sequence[str]) -> dict[str, float]:
    """Means over the first and over the last steps."""
    numbers = {}
    for key in keys:
        points = [value for _, value in run.series(key)]
        if points:
            window = max(1, min(MAX_WINDOW, len(points) // 3))
            numbers[f"{key}, first {window}"] = sum(points[:window]) / window
            numbers[f"{key}, last {window}"] = sum(points[-window:]) / window
    return numbers


def cells(arms: Arms) -> Cells:
    """By arm, from the second one on also the difference to the first, where both have the same seeds. Arms are rows,
    but columns where there are more numbers than arms: a table is easier to read when it is long than when it is wide.
    """
    table = [["", "runs", *(_label(key) for key in arms.keys)]]
    base = next(iter(arms.members))
    for arm, members in arms.members.items():
        table.append([arm, str(len(members)), *(_spread(arms, arm, key) for key in arms.keys)])
        if arm != base and (pairs := _paired(arms, base, arm)):
            row = [f"{arm} - {base}", f"{len(pairs)} paired"]
            table.append([*row, *(_apart(pairs, key) for key in arms.keys)])
    return table if len(arms.keys) <= len(arms.members) else [list(column) for column in zip(*table, strict=True)]


def _label(key: str) -> str:
    name, comma, when = key.partition(",")
    return metric_of(name).label.lstrip("· ").replace("_", " ") + comma + when


def _spread(arms: Arms, arm: str, key: str) -> str:
    metric, found = metric_of(key.partition(",")[0]), arms.spread(arm, key)
    deviation = show(metric, found["sd"]).removesuffix("%")
    return show(metric, found["mean"]) + (f" ± {deviation}" if found["n"] > 1 else "")


def _paired(arms: Arms, base: str, arm: str) -> list[tuple[Run, Run]]:
    of_base = {member.seed: member for member in arms.members[base]}
    return [(of_base[member.seed], member) for member in arms.members[arm] if member.seed in of_base]


def _apart(pairs: Sequence[tuple[Run, Run]], key: str) -> str:
    numbers = [(one.numbers, other.numbers) for one, other in pairs]
    both = np.array([(one[key], other[key]) for one, other in numbers if key in one and key in other], dtype=np.float64)
    if not len(both):
        return NOTHING
    ones = np.ones(len(both))
    difference = compare_paired(Ratio(both[:, 0], ones), Ratio(both[:, 1], ones))
    shown = show_change(metric_of(key.partition(",")[0]), difference.value)
    return shown if difference.p is None else f"{shown} (p {difference.p:.2f})"


def notes_of(arms: Arms) -> list[str]:
    counts = ", ".join(f"{arm} n = {len(members)}" for arm, members in arms.members.items())
    what = "numbers of each run's evaluation" if arms.held_out else "numbers of training steps"
    notes = [f"{what}; runs: {counts}; ± is the standard deviation over runs"]
    if any(len(members) > 1 for members in arms.members.values()):
        notes.append("p by swapping the arms of runs of one seed: with n seeds it cannot be below 2 / 2^n")
    return [*notes, *(f"{number} unreadable: {what} skipped" for what, number in arms.unreadable.items())]


def as_json(arms: Arms) -> dict[str, Any]:
    return {
        "kind": "training runs",
        "held_out": arms.held_out,
        "unreadable": dict(arms.unreadable),
        "arms": {
            arm: {
                "runs": [{"path": str(one.folder.path), "seed": one.seed, **one.numbers} for one in members],
                **{key: arms.spread(arm, key) for key in arms.keys},
            }
            for arm, members in arms.members.items()
        },
    }
