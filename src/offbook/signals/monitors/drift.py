"""Slow changes over a run that no single rollout shows: fewer edits, more questions, the terminal alone, long comments.

Each series is watched by a self-starting CUSUM (Hawkins 1987): every step is compared with all before it, so nothing
has to be known beforehand. Only changes for the worse alarm, else learning itself would.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from offbook.signals.trajectory import Trajectory
from offbook.types import Rollout

SLACK = 0.5  # standard deviations a step; changes of twice this are found fastest
THRESHOLD = 8.0  # docs/results/monitors.md has the rate of false alarms that goes with it
MIN_STEPS = 6  # before anything is compared
MIN_BEFORE = 3  # of a change whose beginning is known
NUM_EXAMPLES = 3
Direction = int  # 1: more is worse; -1: less is worse; 0: both


def _invalid(trajectory: Trajectory) -> float:
    usage = trajectory.rollout.usage
    return usage.invalid_calls / usage.calls if usage.calls else 0.0


def _terminal_only(trajectory: Trajectory) -> float:
    return float({one.kind for one in trajectory.uses if one.reads or one.kind in ("edit", "command")} == {"command"})


SERIES: dict[str, tuple[Callable[[Trajectory], float], Direction]] = {
    "edit_rate": (lambda one: float(bool(one.rollout.changed)), -1),
    "question_rate": (lambda one: float(bool(one.question)), 1),
    "invalid_calls": (_invalid, 1),
    "terminal_only": (_terminal_only, 1),
    "comment_share": (lambda one: one.comment_share, 1),
    "length": (lambda one: float(one.rollout.usage.sampled_tokens), 0),
    "machine_faults": (lambda one: float(one.rollout.struck), 1),
    "solved_unflagged": (lambda one: float(one.rollout.solved and not one.rollout.flags), -1),
}


@dataclass(frozen=True, slots=True)
class Point:
    step: int
    value: float  # the mean over the step's rollouts
    count: int


@dataclass(frozen=True, slots=True)
class Alarm:
    series: str
    step: int  # at which it was noticed
    since: int  # the first step of the change, as far as the statistic can tell
    before: float
    after: float
    examples: tuple[str, ...] = ()


def watch(steps: Iterable[tuple[int, Sequence[Rollout]]]) -> tuple[dict[str, list[Point]], list[Alarm]]:
    """All series of a run and its alarms, in the order of the steps. Steps without rollouts are left out."""
    series: dict[str, list[Point]] = {name: [] for name in SERIES}
    scores: dict[str, list[tuple[int, float, str]]] = {name: [] for name in SERIES}  # step, value, rollout
    for step, rollouts in steps:
        worked = [Trajectory(rollout) for rollout in rollouts]
        for name, (function, _) in SERIES.items() if rollouts else ():
            values = [function(trajectory) for trajectory in worked]
            series[name].append(Point(step, sum(values) / len(values), len(values)))
            scores[name] += [(step, value, one.id) for value, one in zip(values, rollouts, strict=True)]
    alarms = []
    for name, points in series.items():
        for alarm in find_changes(points, SERIES[name][1]):
            inside = [one for one in scores[name] if alarm.since <= one[0] <= alarm.step]
            # The rollouts that moved furthest in the direction of the change, newest first among equals.
            sign = 1.0 if alarm.after > alarm.before else -1.0
            inside.sort(key=lambda one: (sign * one[1], *one), reverse=True)
            alarms.append(replace(alarm, series=name, examples=tuple(id for _, _, id in inside[:NUM_EXAMPLES])))
    return series, sorted(alarms, key=lambda alarm: alarm.step)


def find_changes(points: Sequence[Point], direction: Direction) -> list[Alarm]:
    """Every change for the worse. After an alarm the watch starts again from the new level."""
    alarms: list[Alarm] = []
    start = 0
    while (index := _first_alarm(points[start:], direction)) is not None:
        end = start + index
        values = [one.value for one in points[start : end + 1]]
        first = _best_split(values)
        before, after = sum(values[:first]) / first, sum(values[first:]) / len(values[first:])
        alarms.append(Alarm("", points[end].step, points[start + first].step, before, after))
        start = end + 1
    return alarms


def find_shift(before: Sequence[Point], since: Sequence[Point], direction: Direction) -> Alarm | None:
    """The same where it is known when a change would have begun, as with a deployment: those before it alone are what
    is normal. Their mean is not exact, and an error in it would add up; so the fewer there are, the larger the slack.
    """
    normal = [point.value for point in before]
    index = _first_alarm(since, direction, normal) if len(before) >= MIN_BEFORE else None
    if index is None:
        return None
    after = [one.value for one in since[: index + 1]]
    return Alarm("", since[index].step, since[0].step, sum(normal) / len(normal), sum(after) / len(after))


def _first_alarm(points: Sequence[Point], direction: Direction, normal: Sequence[float] = ()) -> int | None:
    """The place at which the sum of surprises passes the threshold. Without what is normal it is learned on the way."""
    sums = dict.fromkeys({1: (1.0,), -1: (-1.0,), 0: (1.0, -1.0)}[direction], 0.0)
    slack = SLACK + (1 / math.sqrt(len(normal)) if normal else 0.0)
    for index, point in enumerate(points):
        before = normal or [one.value for one in points[:index]]
        if len(before) < 2:
            continue
        surprise = _surprise(before, point)
        sums = {sign: max(0.0, sums[sign] + sign * surprise - slack) for sign in sums}
        if max(sums.values()) > THRESHOLD and (normal or index >= MIN_STEPS):
            return index
    return None


def _best_split(values: Sequence[float]) -> int:
    """Where two means explain the values best: the likeliest place of one change under equal spread."""
    total, number = sum(values), len(values)

    def explained(first: int) -> float:
        head = sum(values[:first])
        return head**2 / first + (total - head) ** 2 / (number - first)

    return max(range(1, number), key=explained)


def _surprise(before: Sequence[float], point: Point) -> float:
    """How far a value is from those before it, as a standard normal number (Wallace's approximation of Student's t)."""
    number = len(before)
    mean = sum(before) / number
    spread = math.sqrt(sum((value - mean) ** 2 for value in before) / (number - 1))
    distance = math.sqrt(number / (number + 1)) * (point.value - mean) / max(spread, _least_spread(mean, point))
    degrees = number - 1
    size = (8 * degrees + 1) / (8 * degrees + 3) * math.sqrt(degrees * math.log1p(distance**2 / degrees))
    return math.copysign(size, distance)


def _least_spread(mean: float, point: Point) -> float:
    """A share that was 0 so far has no spread; one rollout of many must not look like the end of the world."""
    if 0.0 <= mean <= 1.0 and 0.0 <= point.value <= 1.0:
        share = (mean * point.count + 0.5) / (point.count + 1)
        return math.sqrt(share * (1 - share) / max(1, point.count))
    return max(1e-9, 0.02 * abs(mean))
