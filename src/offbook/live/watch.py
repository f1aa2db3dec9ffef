"""Whether use has become worse since a deployment: the drift watch of monitors/drift.py over batches of sessions.

Watched are what agents do (edits, questions, broken calls, the terminal alone) and what users think of it. Changes for
the worse alone alarm, and one alarm takes the deployed version back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from offbook.live.sessions import Session
from offbook.signals.monitors.drift import SERIES, Alarm, Direction, Point, find_shift
from offbook.signals.trajectory import Trajectory

BATCH = 16  # sessions a point
BEFORE = 12  # points of earlier versions that it is compared with, at most
IN_WORDS = ("question_rate", "terminal_only")  # what was said tells these, where it is kept
Value = Callable[[Session], float | None]  # None: the session says nothing about it


def _of_words(function: Callable[[Trajectory], float]) -> Value:
    return lambda session: function(Trajectory(session.rollout)) if session.has_words else None


WATCHED: dict[str, tuple[Value, Direction]] = {
    "reward": (lambda session: session.rollout.reward.total, -1),
    "kept": (lambda one: one.rollout.reward.parts.get("kept", 0.0) if one.has_edited else None, -1),
    "dissatisfied": (lambda session: -session.rollout.reward.parts.get("dissatisfied", 0.0), 1),
    "edit_rate": (lambda one: None if one.has_edited is None else float(one.has_edited), -1),
    "invalid_calls": (lambda session: SERIES["invalid_calls"][0](Trajectory(session.rollout)), 1),
    **{name: (_of_words(SERIES[name][0]), SERIES[name][1]) for name in IN_WORDS},
}


def alarms(before: Sequence[Session], since: Sequence[Session]) -> list[Alarm]:
    """What became worse, the first to be noticed first. All sessions are scored; whole batches of both count."""
    old, new = _batches(before)[-BEFORE:], _batches(since)
    examples = tuple(session.id for session in since[-3:])
    found = []
    for name, (value, direction) in WATCHED.items():
        sides = _points(old, value), _points(new, value, len(old))
        if alarm := find_shift(*sides, direction):
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
    return [sessions[place : place + BATCH] for place in range(0, len(sessions) - BATCH + 1, BATCH)]
