"""The gate before a deployment: a version is refused if it is significantly worse than the deployed one in anything.

Both work on the same held-out tasks and side suites. Every metric that has a direction is compared task by task, by
swapping the sides of tasks (evals/statistics.py). With Holm's correction the chance to refuse a version that is worse
in nothing is at most alpha, for all metrics together. What so many tasks cannot tell is in the record: the intervals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from offbook.core.config import Config
from offbook.evals.metrics import Row, ratios
from offbook.evals.run import Subject, run_eval
from offbook.evals.statistics import compare_paired
from offbook.evals.suites import Suites
from offbook.rl.resume import RolloutFiles

# 1: more is better. What a model does less of to dodge bad reactions counts, too.
DIRECTIONS = {
    "solved": 1,
    "invalid_per_100": -1,
    "test_edits": -1,
    "question_rate": -1,
    "terminal_only": -1,
    "flagged": -1,
    "crashed": -1,
    "edit_rate": 1,  # of the held-out tasks alone: side suites have requests that are to be left alone
}


@dataclass(frozen=True, slots=True)
class Compared:
    suite: str
    metric: str
    deployed: float | None
    candidate: float | None
    difference: float | None
    interval: tuple[float, float] | None
    p: float | None
    is_worse: bool = False


def measured(config: Config, version: int, weights: Path, suites: Suites, out: Path) -> list[Row]:
    """Once a version: what is there from before is not run again."""
    result = run_eval(Subject(f"version {version}", config, weights), suites, RolloutFiles.folder(out))
    return [Row(**row) for row in result["rows"]]


def compare_rows(deployed: Sequence[Row], candidate: Sequence[Row], alpha: float, main: str) -> list[Compared]:
    """By suite and metric, those that are significantly worse first. `main` is the suite of held-out tasks."""
    found = []
    for suite in dict.fromkeys(row.suite for row in deployed):
        sides = [ratios(row for row in rows if row.suite == suite) for rows in (deployed, candidate)]
        for name, direction in DIRECTIONS.items():
            if any(name not in side for side in sides) or (name == "edit_rate" and suite != main):
                continue
            base, other = (side[name][1] for side in sides)
            found.append((compare_paired(base, other), direction, suite, name, base.value, other.value))
    compared = []
    for difference, direction, suite, name, base_value, other_value in found:
        numbers = suite, name, base_value, other_value, difference.value, difference.interval, difference.p
        is_down = difference.value is not None and direction * difference.value < 0
        compared.append((Compared(*numbers), is_down))
    return _marked(compared, alpha)


def _marked(compared: list[tuple[Compared, bool]], alpha: float) -> list[Compared]:
    """Holm's procedure over those that are worse; p is halved, since one direction is asked about."""
    order = sorted(compared, key=lambda each: (not each[1], each[0].p if each[0].p is not None else 1.0))
    worse, rejecting = [], True
    for place, (one, is_down) in enumerate(order):
        p = one.p / 2 if one.p is not None else 1.0
        rejecting = rejecting and is_down and p <= alpha / (len(order) - place)
        worse.append(replace(one, is_worse=rejecting))
    return worse


def told(compared: Sequence[Compared]) -> dict[str, Any]:
    """For the record."""
    return {
        f"{one.suite}/{one.metric}": {
            "deployed": one.deployed,
            "candidate": one.candidate,
            "difference": one.difference,
            "interval": one.interval,
            "p": one.p,
            "worse": one.is_worse,
        }
        for one in compared
    }
