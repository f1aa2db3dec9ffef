"""Whether use has become worse since a deployment: the drift watch of monitors/drift.py over batches of sessions.

Watched are what agents do (edits, questions, broken calls, the terminal alone) and what users think of it. Changes for
the worse alone alarm; one that began with the deployed version takes it back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from offbook.live.sessions import Session
from offbook.monitors.drift import Alarm, Point, find_changes
from offbook.monitors.drift import watch as watch_rollouts

BATCH = 16  # sessions a point
BEFORE = 12  # points of earlier versions that it is compared with, at most
BEHAVIOUR = ("edit_rate", "question_rate", "invalid_calls", "terminal_only")


def _edited(session: Session) -> bool:
    return bool(session.rollout.changed)


REACTIONS: dict[str, tuple[Callable[[Session], float | None], int]] = {  # and the direction that is worse
    "reward": (lambda session: session.rollout.reward.total, -1),
    "kept": (lambda session: session.rollout.reward.parts.get("kept", 0.0) if _edited(session) else None, -1),
    "dissatisfied": (lambda session: -session.rollout.reward.parts.get("dissatisfied", 0.0), 1),
}


def alarms(before: Sequence[Session], since: Sequence[Session]) -> list[Alarm]:
    """Those that the sessions since a deployment give rise to, after those before. All are scored; whole batches of
    both count."""
    old = _batches(before)[-BEFORE:]
    batches = [*old, *_batches(since)]
    _, behaviour = watch_rollouts([(step, [one.rollout for one in batch]) for step, batch in enumerate(batches)])
    found = [alarm for alarm in behaviour if alarm.series in BEHAVIOUR]
    for name, (value, direction) in REACTIONS.items():
        points = []
        for step, batch in enumerate(batches):
            known = [one for session in batch if (one := value(session)) is not None]
            if known:
                points.append(Point(step, sum(known) / len(known), len(known)))
        examples = tuple(session.id for session in since[-3:])
        for alarm in find_changes(points, direction):
            found.append(Alarm(name, alarm.step, alarm.since, alarm.before, alarm.after, examples))
    return [alarm for alarm in found if alarm.since >= len(old)]


def _batches(sessions: Sequence[Session]) -> list[Sequence[Session]]:
    """The newest are whole, so that a deployment begins a batch of its own."""
    first = len(sessions) % BATCH
    return [sessions[place : place + BATCH] for place in range(first, len(sessions), BATCH)]
