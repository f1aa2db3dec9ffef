"""The two tests that decide about a version: the gate before it is deployed, the drift watch after.

Gate. Both versions work on the same held-out tasks and side suites. Every metric that has a direction is compared task
by task (evals/statistics.py). With Bonferroni's correction the chance to refuse a version that is worse in nothing is
at most alpha, for all metrics together. The record has the intervals, so it shows what so few tasks cannot tell.

Watch. The drift watch of monitors/drift.py over batches of sessions since a deployment: what agents do and what users
think of it. Only changes for the worse raise an alarm, and one alarm rolls the version back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from offbook.core.config import Config
from offbook.evals.metrics import Row, ratios
from offbook.evals.run import Subject, run_eval
from offbook.evals.statistics import compare_paired
from offbook.evals.suites import Suites
from offbook.live.sessions import Session
from offbook.rl.resume import RolloutFiles
from offbook.signals.monitors.drift import SERIES, Alarm, Direction, Point, find_shift
from offbook.signals.trajectory import Trajectory

# 1: more is better. What a model does less of to dodge bad reactions counts, too.
DIRECTIONS = {
    "solved": 1,
    "invalid_per_100": -1,
    "test_edits": -1,
    "question_rate": -1,
    "terminal_only": -1,
    "flagged": -1,
    "crashed": -1,
    "edit_rate": 1,  # of the held-out tasks alone: side suites have requests that call for no edit
}
BATCH = 16  # sessions per point of the watch
MAX_POINTS_BEFORE = 12  # of earlier versions that it is compared with


def measured(config: Config, version: int, weights: Path, suites: Suites, out: Path) -> list[Row]:
    """Evaluate a version; rollouts that are stored already are not run again."""
    result = run_eval(Subject(f"version {version}", config, weights), suites, RolloutFiles.folder(out))
    return [Row(**row) for row in result["rows"]]


def compare_rows(deployed: Sequence[Row], candidate: Sequence[Row], alpha: float, main: str) -> dict[str, Any]:
    """Each metric of each suite (`suite/metric`), the significantly worse first. `main` is the suite of held-out tasks.

    By Bonferroni's correction; p is halved, since one direction is tested."""
    found: dict[str, dict[str, Any]] = {}
    for suite in dict.fromkeys(row.suite for row in deployed):
        base, other = (ratios(row for row in rows if row.suite == suite) for rows in (deployed, candidate))
        for metric in DIRECTIONS:
            if metric in base and metric in other and (metric != "edit_rate" or suite == main):
                before, after = base[metric][1], other[metric][1]
                difference = compare_paired(before, after)
                found[f"{suite}/{metric}"] = {
                    "deployed": before.value,
                    "candidate": after.value,
                    "difference": difference.value,
                    "interval": difference.interval,
                    "p": difference.p,
                }
    for name, row in found.items():
        fell = DIRECTIONS[name.rpartition("/")[2]] * (row["difference"] or 0.0) < 0
        row["worse"] = fell and row["p"] is not None and row["p"] / 2 <= alpha / len(found)
    return dict(sorted(found.items(), key=lambda item: not item[1]["worse"]))


Value = Callable[[Session], float | None]  # None: the session says nothing about it
WATCHED: dict[str, tuple[Value, Direction]] = {
    "reward": (lambda session: session.rollout.reward.total, -1),
    "kept": (lambda one: one.rollout.reward.parts.get("kept", 0.0) if one.has_edited else None, -1),
    "dissatisfied": (lambda session: -session.rollout.reward.parts.get("dissatisfied", 0.0), 1),
    "edit_rate": (lambda session: float(session.has_edited), -1),
    "invalid_calls": (lambda session: SERIES["invalid_calls"][0](Trajectory(session.rollout)), 1),
    "question_rate": (lambda session: SERIES["question_rate"][0](Trajectory(session.rollout)), 1),
    "terminal_only": (lambda session: SERIES["terminal_only"][0](Trajectory(session.rollout)), 1),
}


def alarms(before: Sequence[Session], since: Sequence[Session]) -> list[Alarm]:
    """What became worse, the first to be noticed first. All sessions are scored; only whole batches count."""
    old, new = _batches(before)[-MAX_POINTS_BEFORE:], _batches(since)
    examples = tuple(session.id for session in since[-3:])
    found = []
    for name, (value, direction) in WATCHED.items():
        if alarm := find_shift(_points(old, value), _points(new, value, len(old)), direction):
            found.append(replace(alarm, series=name, examples=examples))
    return sorted(found, key=lambda alarm: alarm.step)


def _points(batches: Sequence[Sequence[Session]], value: Value, first: int = 0) -> list[Point]:
    points = []
    for step, batch in enumerate(batches, first):
        known = [one for session in batch if (one := value(session)) is not None]
        if known:
            points.append(Point(step, sum(known) / len(known), len(known)))
    return points


def _batches(sessions: Sequence[Session]) -> list[Sequence[Session]]:
    return [sessions[start : start + BATCH] for start in range(0, len(sessions) - BATCH + 1, BATCH)]
