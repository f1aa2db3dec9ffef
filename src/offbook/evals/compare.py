"""Evaluations compared task by task: values, differences, intervals and p-values."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from offbook.core.runfolder import RunFolder, load_lines
from offbook.evals.metrics import (
    NOTHING,
    Row,
    measure,
    metric_of,
    ratios,
    row_of,
    show,
    show_change,
    show_interval,
    shown_keys,
)
from offbook.evals.statistics import Difference, compare_paired
from offbook.evals.tables import Cells, contamination_sentence
from offbook.rl.resume import RolloutFiles
from offbook.types import OffbookError, Rollout

UNKNOWN = Difference(None, None, None, 0, True)  # one of the two lacks the metric


@dataclass(frozen=True)
class Evaluation:
    name: str
    result: dict[str, Any]
    rows: list[Row]
    notes: list[str] = field(default_factory=list)


def find_evaluation(path: Path) -> RolloutFiles | None:
    """The files of an evaluation: a folder of `offbook eval`, a result file, or an evaluated run."""
    if path.is_file():
        rollouts = path.with_name(f"{path.stem}.rollouts.jsonl")
        return RolloutFiles(path, rollouts, path.with_name(f"{path.stem}.fingerprint.json"))
    folder = RolloutFiles.folder(path)
    if (path / "fingerprint.json").is_file() or folder.results.is_file():
        return folder
    final = RolloutFiles.in_run(path, "final")
    if final.results.is_file():
        return final
    return folder if RunFolder(path).steps() == [0] else None  # rollouts without training


def load_evaluation(name: str, files: RolloutFiles) -> Evaluation:
    """From its results or, without results that have rows, from its rollouts."""
    result: dict[str, Any] = {}
    rows: list[Row] = []
    notes = []
    if files.results.is_file():
        try:
            result = json.loads(files.results.read_text())
            rows = [Row(**row) for row in result.get("rows", ())]
        except (ValueError, TypeError, AttributeError) as error:
            raise OffbookError(f"{files.results} is no result of `offbook eval`: {error}") from None
    unreadable = int(result.get("unreadable", 0))
    if not rows:
        if not files.rollouts.is_file():
            raise OffbookError(f"{files.results.parent} has neither results nor rollouts of an evaluation")
        rollouts, unreadable = load_lines(files.rollouts, Rollout)
        if not rollouts:
            raise OffbookError(f"{files.rollouts} has no rollout that can be read ({unreadable} lines cannot)")
        rows = [row_of(rollout, None) for rollout in rollouts]
        if not result:
            notes.append(f"{name} is not finished, or was never summed up: {len(rows)} rollouts so far")
        result = {**result, **measure(rows)}
    if unreadable:
        notes.append(f"{name}: {unreadable} unreadable lines were skipped")
    return Evaluation(name, result, rows, notes)


@dataclass(frozen=True)
class Comparison:
    """The first evaluation is what the others are compared with."""

    evaluations: list[Evaluation]
    keys: list[str]
    differences: dict[str, list[Difference]]  # by metric, for each evaluation but the first
    num_paired: list[int]  # tasks that each of the others has in common with the first


def compare(evaluations: Sequence[Evaluation], chosen: Sequence[str] = ()) -> Comparison:
    """On the chosen metrics; by default on all that `shown_keys` has."""
    base, *others = evaluations
    known = dict.fromkeys(key for one in evaluations for key in ratios(one.rows))
    for key in chosen:
        if key not in known:
            raise OffbookError(f"there is no metric {key} in these evaluations; there are {', '.join(known)}")
    keys = list(chosen) or shown_keys([one.result for one in evaluations])
    differences: dict[str, list[Difference]] = {key: [] for key in keys}
    num_paired = []
    for other in others:
        common = {row.task for row in base.rows} & {row.task for row in other.rows}
        num_paired.append(len(common))
        before = ratios(row for row in base.rows if row.task in common)
        after = ratios(row for row in other.rows if row.task in common)
        for key in keys:
            in_both = key in before and key in after
            differences[key].append(compare_paired(before[key][1], after[key][1]) if in_both else UNKNOWN)
    return Comparison(list(evaluations), keys, differences, num_paired)


def cells(comparison: Comparison) -> Cells:
    header = ["95% intervals"]
    for one in comparison.evaluations:
        header += [one.name] if len(header) == 1 else [one.name, "difference", "p"]
    table = [header]
    for key in comparison.keys:
        metric = metric_of(key)
        row = [metric.heading]
        for one, difference in zip(comparison.evaluations, [None, *comparison.differences[key]], strict=True):
            around = one.result.get("intervals", {}).get(key)
            row.append(show(metric, one.result.get(key)) + (f" {show_interval(metric, around)}" if around else ""))
            if difference:
                around = f" {show_interval(metric, difference.interval)}" if difference.interval else ""
                row.append(show_change(metric, difference.value) + around)
                p = difference.p
                row.append(NOTHING if p is None else "<0.001" if p < 0.001 else f"{p:.3f}")
        table.append(row)
    return table


def notes_of(comparison: Comparison) -> list[str]:
    base, *others = comparison.evaluations
    notes = []
    for index, (other, number) in enumerate(zip(others, comparison.num_paired, strict=True)):
        if not number:
            notes.append(f"{base.name} and {other.name} have no task in common: nothing can be paired")
            continue
        exact = all(each[index].exact for each in comparison.differences.values())
        how = "all swaps tried" if exact else "swaps sampled where more than 16 tasks differ"
        notes.append(
            f"{other.name} against {base.name}: n = {number} tasks, paired; p by swapping the sides of tasks ({how}), "
            "not adjusted for the number of metrics"
        )
        left = [len({row.task for row in one.rows}) - number for one in (base, other)]
        if any(left):
            notes.append(f"tasks that only one of them has count in its own column alone: {left[0]} and {left[1]}")
    for one in comparison.evaluations:
        notes += one.notes
        if one.result.get("contamination"):
            notes.append(f"{one.name}: {contamination_sentence(one.result['contamination'])}")
    return notes


def as_json(comparison: Comparison) -> dict[str, Any]:
    names = [one.name for one in comparison.evaluations]
    metrics = {}
    for key in comparison.keys:
        differences = [asdict(difference) for difference in comparison.differences[key]]
        metrics[key] = {
            "values": {one.name: one.result.get(key) for one in comparison.evaluations},
            "intervals": {one.name: one.result.get("intervals", {}).get(key) for one in comparison.evaluations},
            "differences": dict(zip(names[1:], differences, strict=True)),
        }
    return {
        "kind": "evaluations",
        "names": names,
        "paired_tasks": dict(zip(names[1:], comparison.num_paired, strict=True)),
        "metrics": metrics,
    }
