"""Evaluations compared task by task: values, differences, intervals and p-values."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from offbook.evals.metrics import NOTHING, Row, metric_of, ratios, show, show_change, show_interval, shown_keys
from offbook.evals.statistics import Difference, compare_paired
from offbook.evals.tables import Cells, contamination_sentence
from offbook.types import OffbookError

UNKNOWN = Difference(None, None, None, 0, True)  # one of the two lacks the metric


@dataclass(frozen=True)
class Evaluation:
    name: str
    result: dict[str, Any]
    rows: list[Row]


def find_evaluation(path: Path) -> Path | None:
    """The results of an evaluation: a result file, a folder of `offbook eval`, or an evaluated run."""
    places = (path, path / "results.json", path / "eval" / "final.json")
    return next((place for place in places if place.is_file()), None)


def load_evaluation(name: str, file: Path) -> Evaluation:
    try:
        result = json.loads(file.read_text())
        rows = [Row(**row) for row in result["rows"]]
    except (ValueError, TypeError, LookupError) as error:
        raise OffbookError(f"{file} is no result of `offbook eval`: {error}") from None
    return Evaluation(name, result, rows)


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
    base, *others = comparison.evaluations
    table = [["95% intervals", base.name]]
    for other in others:
        table[0] += [other.name, "difference", "p"]
    for key in comparison.keys:
        metric = metric_of(key)
        row = [metric.heading]
        for one, difference in zip(comparison.evaluations, [None, *comparison.differences[key]], strict=True):
            around = show_interval(metric, one.result.get("intervals", {}).get(key), "")
            row.append(f"{show(metric, one.result.get(key))} {around}".rstrip())
            if difference:
                around = show_interval(metric, difference.interval, "")
                row.append(f"{show_change(metric, difference.value)} {around}".rstrip())
                p = difference.p
                row.append(NOTHING if p is None else "<0.001" if p < 0.001 else f"{p:.3f}")
        table.append(row)
    return table


def notes_of(comparison: Comparison) -> list[str]:
    base, *others = comparison.evaluations
    notes = []
    for other, number in zip(others, comparison.num_paired, strict=True):
        if not number:
            notes.append(f"{base.name} and {other.name} have no task in common: nothing can be paired")
            continue
        left = [len({row.task for row in one.rows}) - number for one in (base, other)]
        notes.append(
            f"{other.name} against {base.name}: n = {number} tasks, paired; p by swapping the sides of tasks, not "
            "adjusted for the number of metrics; tasks that only one of them has count in its own column alone: "
            f"{left[0]} and {left[1]}"
        )
    for one in comparison.evaluations:
        if one.result.get("unreadable"):
            notes.append(f"{one.name}: {one.result['unreadable']} unreadable lines were skipped")
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
