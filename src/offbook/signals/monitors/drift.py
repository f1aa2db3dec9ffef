"""Slow changes over a run that no single rollout shows: fewer edits, more questions, the terminal alone, long comments.

Each series is watched by a self-starting CUSUM (Hawkins 1987): every step is compared with all before it, so nothing
has to be known beforehand. Only changes for the worse alarm, else learning itself would.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from offbook.signals.trajectory import Trajectory
from offbook.signals.trajectory.diff import COMMENT
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


def _comments(trajectory: Trajectory) -> float:
    """The share of the added lines that is comments."""
    added = [line for file in trajectory.diff for line in file.added.values() if line.strip()]
    return sum(bool(COMMENT.match(line)) for line in added) / len(added) if added else 0.0


SERIES: dict[str, tuple[Callable[[Trajectory], float], Direction]] = {
    "edit_rate": (lambda one: float(bool(one.rollout.changed)), -1),
    "question_rate": (lambda one: float(bool(one.question)), 1),
    "invalid_calls": (_invalid, 1),
    "terminal_only": (_terminal_only, 1),
    "comment_share": (_comments, 1),
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
    scores: dict[str, dict[int, list[tuple[float, str]]]] = {name: {} for name in SERIES}
    for step, rollouts in steps:
        worked = [Trajectory(rollout) for rollout in rollouts]
        for name, (function, _) in SERIES.items() if rollouts else ():
            values = [(function(trajectory), trajectory.rollout.id) for trajectory in worked]
            series[name].append(Point(step, sum(value for value, _ in values) / len(values), len(values)))
            scores[name][step] = values
    alarms = [
        replace(alarm, series=name, examples=_examples(alarm, scores[name]))
        for name, points in series.items()
        for alarm in find_changes(points, SERIES[name][1])
    ]
    return series, sorted(alarms, key=lambda alarm: alarm.step)


def _examples(alarm: Alarm, scores: dict[int, list[tuple[float, str]]]) -> tuple[str, ...]:
    """The rollouts since the change that moved furthest in its direction, newest first among equals."""
    sign = 1.0 if alarm.after > alarm.before else -1.0
    inside = [
        (sign * value, step, id)
        for step, values in scores.items()
        if alarm.since <= step <= alarm.step
        for value, id in values
    ]
    return tuple(id for _, _, id in sorted(inside, reverse=True)[:NUM_EXAMPLES])


def find_changes(points: Sequence[Point], direction: Direction) -> list[Alarm]:
    """Every change for the worse. After an alarm the watch starts again from the new level."""
    signs = {1: (1.0,), -1: (-1.0,), 0: (1.0, -1.0)}[direction]
    alarms, start, sums = list[Alarm](), 0, dict.fromkeys(signs, 0.0)
    for index, point in enumerate(points):
        values = [one.value for one in points[start : index + 1]]
        if len(values) <= 2:
            continue
        surprise = _surprise(values[:-1], point)
        sums = {sign: max(0.0, sums[sign] + sign * surprise - SLACK) for sign in signs}
        if max(sums.values()) > THRESHOLD and len(values) > MIN_STEPS:
            first = _best_split(values)
            before, after = sum(values[:first]) / first, sum(values[first:]) / len(values[first:])
            alarms.append(Alarm("", point.step, points[start + first].step, before, after))
            start, sums = index + 1, dict.fromkeys(signs, 0.0)
    return alarms


def find_shift(before: Sequence[Point], since: Sequence[Point], direction: Direction) -> Alarm | None:
    """The same where it is known when a change would have begun, as with a deployment: those before it alone are what
    is normal. Their mean is not exact, and an error in it would add up; so the fewer there are, the larger the slack.
    """
    if len(before) < MIN_BEFORE:
        return None
    normal = [point.value for point in before]
    slack = SLACK + 1 / math.sqrt(len(before))
    sums = dict.fromkeys({1: (1.0,), -1: (-1.0,), 0: (1.0, -1.0)}[direction], 0.0)
    for index, point in enumerate(since):
        surprise = _surprise(normal, point)
        sums = {sign: max(0.0, sums[sign] + sign * surprise - slack) for sign in sums}
        if max(sums.values()) > THRESHOLD:
            after = [one.value for one in since[: index + 1]]
            return Alarm("", point.step, since[0].step, sum(normal) / len(normal), sum(after) / len(after))
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
