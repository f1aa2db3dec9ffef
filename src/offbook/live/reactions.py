"""From users' reactions to named, bounded parts of a reward, and to the message that a complaint is about.

Every part is between -1 and 1 (most between -1 and 0), so its weight is the most that it can give or take. What an
agent could do to dodge bad reactions costs as much as they do: calls that are broken so as to be thrown away
(`broken_calls`), and questions or empty hands where a change was asked for (`dodged`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from offbook.core.config import LiveConfig
from offbook.live.complaints import is_complaint
from offbook.live.sessions import Reaction, Session
from offbook.signals.feedback import read_all
from offbook.signals.rewards.behaviour import BROKEN_CALLS
from offbook.signals.trajectory import At, Trajectory, spoken
from offbook.types import Event, Reward, Rollout, is_test_file

GONE = 0.1  # a share of kept lines up to which an edit counts as reverted
FOLLOW_UP = "feedback"  # the event by which a message is taught; `offbook serve` writes the same
HINT_WORDS = 40
LATENCY_S = 600.0  # seconds that cost all of the part `latency`
DODGES = ("asked_instead", "finished_without_edit")
ABOUT_WORDS = re.compile(r"(?i)\b(long|verbose|words?|short\w*|essay|talk\w*|explanation|summary|point)\b")
ABOUT_TESTS = re.compile(r"(?i)\btests?\b")


def follow_up(text: str, at: float = 0.0) -> Reaction:
    """The reaction for what a user says next: -1 if it reads as a complaint."""
    return Reaction("follow_up", -1.0 if is_complaint(text) else 0.0, text, at)


def _reaction_parts(session: Session) -> dict[str, float]:
    """The newest measurement of kept lines and the newest thumb count. Reverted: all but gone later, or declined."""
    values: dict[str, list[float]] = {}
    for one in session.reactions:
        values.setdefault(one.kind, []).append(one.value)
    kept = values.get("kept", [])
    reverted = "declined" in values or (kept and kept[-1] <= GONE)
    return {
        "kept": kept[-1] if kept else 0.0,
        "reverted": -1.0 if reverted else 0.0,
        "dissatisfied": -1.0 if min(values.get("follow_up", [0.0])) < 0 else 0.0,
        "thumbs": max(-1.0, min(1.0, values.get("thumbs", [0.0])[-1])),
        "interrupted": -1.0 if "interrupted" in values else 0.0,
    }


def score(session: Session, settings: LiveConfig) -> Session:
    """The session with the reward of its reactions so far."""
    rollout, usage = session.rollout, session.rollout.usage
    parts = _reaction_parts(session)
    seconds = usage.model_seconds if rollout.foreign else usage.seconds  # an endpoint cannot tell tools from pauses
    parts["latency"] = -min(1.0, seconds / LATENCY_S)
    parts["broken_calls"] = -min(1.0, usage.invalid_calls / BROKEN_CALLS)
    parts["dodged"] = -1.0 if read_all(rollout, rules=DODGES) else 0.0
    weights = {name: settings.weights[name] for name in parts if settings.weights.get(name)}
    known = {name: parts[name] for name in weights}
    return replace(session, rollout=replace(rollout, reward=Reward(known, weights)))


def with_hints(session: Session, teaches: Callable[[str], bool]) -> Rollout:
    """The session's rollout, with the complaints that may teach as events at the messages that they are about."""
    events = [*session.rollout.events]
    for one in session.reactions:
        if one.kind != "follow_up" or one.value >= 0 or not one.text or not teaches(one.text):
            continue
        at = blamed(session.rollout, one.text)
        if at is not None:
            hint = "The user would say: " + " ".join(one.text.split()[:HINT_WORDS])  # as something known before
            events.append(Event(at[1], FOLLOW_UP, hint, at[0]))
    return replace(session.rollout, events=events)


def blamed(rollout: Rollout, said: str) -> At | None:
    """The message that a complaint is about: the edit of a file that it names or of a test, the closing words if it is
    about words, else the last edit, else the last message."""
    trajectory, messages = Trajectory(rollout), list(spoken(rollout))
    if not messages:
        return None
    edits = [one for one in trajectory.uses if one.kind == "edit" and one.ran]
    for one in reversed(edits):
        if one.path and (one.path in said or re.search(rf"\b{re.escape(Path(one.path).stem)}\b", said)):
            return one.at
    tests = [one for one in edits if one.path and is_test_file(one.path)]
    if tests and ABOUT_TESTS.search(said):
        return tests[-1].at
    if ABOUT_WORDS.search(said) or not edits:
        return messages[-1][0]
    return edits[-1].at


def follow_ups(rollout: Rollout) -> list[str]:
    """What the user said right after a message of the agent in a recorded conversation. A later segment may repeat that
    message as its client remembers it."""
    found = []
    for number, segment in enumerate(rollout.segments):
        for before, message in pairwise(segment.messages):
            if (before.role, message.role) == ("assistant", "user") and (number or segment.is_own(before)):
                found.append(message.text)
    return list(dict.fromkeys(found))
