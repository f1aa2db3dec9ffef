"""What users' reactions come to: named, bounded parts of a reward, and the messages that dissatisfied words point at.

Every part lies between -1 and 1 (most between -1 and 0), so its weight is the most that it can give or take. What an
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
    """What a user says next; -1 where it reads as a complaint."""
    return Reaction("follow_up", -1.0 if is_complaint(text) else 0.0, text, at)


def _kept(session: Session) -> float:
    """The newest measurement counts: the longer after, the more it says."""
    return next((one.value for one in reversed(session.reactions) if one.kind == "kept"), 0.0)


def _reverted(session: Session) -> float:
    """All but gone later, or never taken in the first place."""
    measured = any(one.kind == "kept" for one in session.reactions)
    declined = any(one.kind == "declined" for one in session.reactions)
    return -1.0 if declined or (measured and _kept(session) <= GONE) else 0.0


def _dissatisfied(session: Session) -> float:
    return -1.0 if any(one.kind == "follow_up" and one.value < 0 for one in session.reactions) else 0.0


def _thumbs(session: Session) -> float:
    return next((max(-1.0, min(1.0, one.value)) for one in reversed(session.reactions) if one.kind == "thumbs"), 0.0)


REACTIONS: dict[str, Callable[[Session], float]] = {
    "kept": _kept,
    "reverted": _reverted,
    "dissatisfied": _dissatisfied,
    "thumbs": _thumbs,
    "interrupted": lambda session: -1.0 if any(one.kind == "interrupted" for one in session.reactions) else 0.0,
}


def score(session: Session, settings: LiveConfig) -> Session:
    """With the reward that its reactions come to so far. What its words tell was told before they were dropped."""
    parts = {name: part(session) for name, part in REACTIONS.items()}
    if session.has_words:
        parts |= _own_parts(session.rollout, settings)
    else:
        parts |= {name: value for name, value in session.rollout.reward.parts.items() if name not in REACTIONS}
    known = {name: value for name, value in parts.items() if settings.weights.get(name)}
    weights = {name: settings.weights[name] for name in known}
    return replace(session, rollout=replace(session.rollout, reward=Reward(known, weights)))


def _own_parts(rollout: Rollout, settings: LiveConfig) -> dict[str, float]:
    """Whatever anybody says of it. A call that cannot be run counts, whether or not its session is thrown away."""
    usage = rollout.usage
    seconds = usage.model_seconds if rollout.foreign else usage.seconds  # an endpoint cannot tell tools from pauses
    return {
        "latency": -min(1.0, seconds / LATENCY_S),
        "broken_calls": broken_calls(usage.invalid_calls),
        "dodged": dodged(rollout),
    }


def broken_calls(count: int) -> float:
    return -min(1.0, count / BROKEN_CALLS)


def dodged(rollout: Rollout) -> float:
    return -1.0 if read_all(rollout, rules=DODGES) else 0.0


def with_hints(session: Session, teaches: Callable[[str], bool]) -> Rollout:
    """Its rollout, with those complaints that may teach at the messages that they are about."""
    events = [*session.rollout.events]
    for one in session.reactions:
        if one.kind != "follow_up" or one.value >= 0 or not one.text or not teaches(one.text):
            continue
        if (at := blamed(session.rollout, one.text)) is not None:
            events.append(Event(at[1], FOLLOW_UP, hint_of(one.text), at[0]))
    return replace(session.rollout, events=events)


def hint_of(said: str) -> str:
    """What the user said, as something that is known before: the first sentences of it."""
    words = " ".join(said.split()).split()
    return "The user would say: " + " ".join(words[:HINT_WORDS])


def blamed(rollout: Rollout, said: str) -> At | None:
    """The message that words like these are about: the edit of a file that they name or that is a test, the closing
    words where they are about words, else the last edit, else the last message."""
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
    """What the user said right after a message of the agent's, in a recorded conversation: what is answered by no tool
    was the end of a turn. A later segment may repeat that message as its client remembers it."""
    found = []
    for number, segment in enumerate(rollout.segments):
        for before, message in pairwise(segment.messages):
            if (before.role, message.role) == ("assistant", "user") and (number or segment.is_own(before)):
                found.append(message.text)
    return list(dict.fromkeys(found))
