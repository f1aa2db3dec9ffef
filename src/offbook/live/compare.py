"""The three tests that decide about a version: the gate before it is tried, the trial on users, the drift watch after.

Gate. Both versions work on the same held-out tasks and side suites. Every metric that has a direction is compared task
by task (evals/statistics.py). With Holm's correction the chance to refuse a version that is worse in nothing is at most
alpha, for all metrics together. The record has the intervals, so it shows what so few tasks cannot tell.

Trial. A sequential test that may be looked at after every user, and stopped as soon as it decides. Users are given to a
version by a hash, so the n-th user of one and the n-th of the other make a pair, and without a difference a pair's
difference has mean 0 whatever came before. Betting against that, a fortune of 1 stays a fair game, and the chance that
it ever reaches 1/alpha is at most alpha (Ville's inequality; Waudby-Smith and Ramdas 2024). Each direction gets half of
alpha. The fortune is a mean over stakes from small to large, so none has to be guessed. Only a user's first session
counts: later ones come from the same person, and a test that took them for new ones would find differences that are not
there.

Watch. The drift watch of monitors/drift.py over batches of sessions since a deployment: what agents do and what users
think of it. Only changes for the worse raise an alarm, and one alarm rolls the version back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist, fmean, stdev
from typing import Any, Literal

import numpy as np

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
STAKES = np.linspace(0.05, 0.95, 19)  # of the fortune, at the largest possible difference
POWER = 0.8
BATCH = 16  # sessions per point of the watch
MAX_POINTS_BEFORE = 12  # of earlier versions that it is compared with


# Gate


def measured(config: Config, version: int, weights: Path, suites: Suites, out: Path) -> list[Row]:
    """Evaluate a version; rollouts that are stored already are not run again."""
    result = run_eval(Subject(f"version {version}", config, weights), suites, RolloutFiles.folder(out))
    return [Row(**row) for row in result["rows"]]


def compare_rows(deployed: Sequence[Row], candidate: Sequence[Row], alpha: float, main: str) -> dict[str, Any]:
    """Each metric of each suite (`suite/metric`), the significantly worse first. `main` is the suite of held-out tasks.

    Holm's procedure runs over the metrics that fell; p is halved, since one direction is tested."""
    found: dict[str, dict[str, Any]] = {}
    for suite in dict.fromkeys(row.suite for row in deployed):
        base, other = (ratios(row for row in rows if row.suite == suite) for rows in (deployed, candidate))
        for metric, direction in DIRECTIONS.items():
            if metric not in base or metric not in other or (metric == "edit_rate" and suite != main):
                continue
            before, after = base[metric][1], other[metric][1]
            difference = compare_paired(before, after)
            found[f"{suite}/{metric}"] = {
                "deployed": before.value,
                "candidate": after.value,
                "difference": difference.value,
                "interval": difference.interval,
                "p": difference.p,
                "worse": difference.value is not None and direction * difference.value < 0,
            }
    ordered = sorted(
        found.items(), key=lambda item: (not item[1]["worse"], 1.0 if item[1]["p"] is None else item[1]["p"])
    )
    is_rejecting = True
    for rank, (_, row) in enumerate(ordered):
        p = 1.0 if row["p"] is None else row["p"] / 2
        is_rejecting = is_rejecting and row["worse"] and p <= alpha / (len(ordered) - rank)
        row["worse"] = is_rejecting
    return dict(ordered)


# Trial


@dataclass(frozen=True, slots=True)
class Verdict:
    """`other` against `base`, by the reward."""

    verdict: Literal["better", "worse", "undecided"]
    pairs: int
    difference: float | None  # of the means, `other` less `base`, over the pairs that were looked at
    fortune_better: float  # the highest so far when betting that it is better, or worse
    fortune_worse: float
    needed: float  # that one of them has to reach
    later_sessions: int = 0  # of users who had one before: not counted
    detectable: float | None = None  # a difference that so many pairs would show with a chance of 0.8


def fortunes(differences_N: Sequence[float], most: float) -> list[float]:
    """The fortune of a bet on positive differences, after each of them; none is further from 0 than `most`."""
    if any(abs(one) > most + 1e-9 for one in differences_N):
        raise ValueError(f"a difference is larger than {most:g}")
    wealth_K = np.ones(len(STAKES))
    found = []
    for one in differences_N:
        wealth_K = wealth_K * (1 + STAKES * one / most)
        found.append(float(wealth_K.mean()))
    return found


def judge_pairs(pairs: Sequence[tuple[float, float]], most: float, alpha: float, later: int = 0) -> Verdict:
    """Pairs of rewards, base first, in the order in which they came. What comes after a verdict does not change it."""
    differences = [other - base for base, other in pairs]
    needed = 2 / alpha
    better, worse = fortunes(differences, most), fortunes([-one for one in differences], most)
    stop = next((n for n, both in enumerate(zip(better, worse, strict=True), 1) if max(both) >= needed), None)
    seen = differences[:stop]
    return Verdict(
        "undecided" if stop is None else "better" if better[stop - 1] >= needed else "worse",
        len(seen),
        fmean(seen) if seen else None,
        max([1.0, *better[:stop]]),
        max([1.0, *worse[:stop]]),
        needed,
        later,
        detectable(differences, alpha),
    )


def detectable(differences_N: Sequence[float], alpha: float) -> float | None:
    """By a test at the end alone; one that may stop at any time needs more."""
    if len(differences_N) < 2:
        return None
    reach = NormalDist().inv_cdf(1 - alpha / 2) + NormalDist().inv_cdf(POWER)
    return reach * stdev(differences_N) / math.sqrt(len(differences_N))


def span(weights: dict[str, float]) -> float:
    """The largest difference of two rewards: thumbs go both ways, every other part one."""
    return sum(weights.values()) + weights.get("thumbs", 0.0)


def compare_versions(
    sessions: Sequence[Session], base: int, other: int, weights: dict[str, float], alpha: float
) -> Verdict:
    """By the scored sessions of users who were given one of the two."""
    sides, num_later = [], 0
    for version in (base, other):
        own = [one for one in sessions if one.version == version]
        first: dict[str, Session] = {}
        for one in own:
            first.setdefault(one.user, one)
        num_later += len(own) - len(first)
        sides.append([one.rollout.reward.total for one in first.values()])
    return judge_pairs(list(zip(*sides, strict=False)), span(weights), alpha, num_later)


def concurrent(sessions: Sequence[Session], base: int, other: int) -> list[Session]:
    """Sessions from the time in which both versions were served, of users who then had only one of them: what a
    comparison outside of a trial may use. Another time has other requests."""
    seen = [one for one in sessions if one.version in (base, other)]
    times = [[one.at for one in seen if one.version == version] for version in (base, other)]
    if not all(times):
        return []
    since, until = max(map(min, times)), min(map(max, times))
    seen = [one for one in seen if since <= one.at <= until]
    mixed = set.intersection(*({one.user for one in seen if one.version == version} for version in (base, other)))
    return [one for one in seen if one.user not in mixed]


# Watch

Value = Callable[[Session], float | None]  # None: the session says nothing about it


def _from_words(function: Callable[[Trajectory], float]) -> Value:
    return lambda session: function(Trajectory(session.rollout)) if session.has_words else None


WATCHED: dict[str, tuple[Value, Direction]] = {
    "reward": (lambda session: session.rollout.reward.total, -1),
    "kept": (lambda one: one.rollout.reward.parts.get("kept", 0.0) if one.has_edited else None, -1),
    "dissatisfied": (lambda session: -session.rollout.reward.parts.get("dissatisfied", 0.0), 1),
    "edit_rate": (lambda one: None if one.has_edited is None else float(one.has_edited), -1),
    "invalid_calls": (lambda session: SERIES["invalid_calls"][0](Trajectory(session.rollout)), 1),
    **{name: (_from_words(SERIES[name][0]), SERIES[name][1]) for name in ("question_rate", "terminal_only")},
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
