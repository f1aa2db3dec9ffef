"""Users' reactions: parts of a reward, the message that a complaint is about, and which complaints become hints.

Every part is between -1 and 1 (most between -1 and 0), so its weight is the most that it can give or take. What an
agent could do to dodge bad reactions costs as much as they do: calls that are broken so as to be thrown away
(`broken_calls`), and questions or empty hands where a change was asked for (`dodged`).

Whether a follow-up is a complaint is decided by its form, clause by clause. A wish or a question is none, whatever
words it has ("Add an undo button", "What if the input is too long?"), unless it wants something taken back. Other
clauses are complaints if they name a fault, blame, or contradict; thanks in another clause change nothing. English
only.

A hint changes the model for everyone it serves, so one person's words are not enough. A complaint teaches when at least
two people said nearly the same, or when a maintainer approved it (`offbook live --approve ID`). One that tells the
agent to run, fetch or ignore something never teaches, approved or not: it would train an instruction of an attacker
into the weights.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from offbook.core.config import LiveConfig
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
CLAUSE_END = re.compile(r"(?<=[.!?;:])\s+|\n+|,\s+|\s+(?=but\b|yet\b)|\s+-+\s+")
LEAD_IN = r"^\W*((ok(ay)?|and|but|so|then|also|now|next|please|good|great|perfect|thanks|thank\ you)\b\W*)*"
WISH = re.compile(
    rf"""(?ix){LEAD_IN}(add|use|write|make|rename|raise|log|show|implement|remove|handle|fix|run|do|create|update|move|set
    |refactor|explain|print|return|support|commit|ship|let'?s|try|check|look|see|change|replace|put|give|tell|test|split
    |document|extract|delete|bump|keep|allow|ensure|if|when|could\ you|can\ (you|we)|would\ you|what|how|where|which
    |does|who(?!\ asked)|is\ (there|it)|are\ there|should)\b"""
)
TAKE_BACK = re.compile(
    rf"""(?ix){LEAD_IN}((undo|revert|restore)(\ (it|this|that|these|those|them|all|everything|the|your|my)\b|\W*$)
    |(roll|put|take|change|give)\ .{{1,40}}\bback\b|stop\ (it|this|that|\w+ing)\b|leave\ .{{1,40}}\ alone\b|hands\ off\b
    |(don'?t|do\ not)\ (?!forget|worry|hesitate|bother)\w+|get\ to\ the\ point
    |(be\ |keep\ it\ )?(short|brief)(er)?\b)"""
)
FINE = re.compile(
    r"(?i)\b(no longer|not bad|nothing('?s| is)? wrong|works? (now|fine|great|well)|looks? (good|great|fine))\b"
)
FAULT = re.compile(
    r"""(?ix)
    \b(wrong(ly)?|incorrect|broken?|worse|useless|nonsense|garbage|rubbish|unnecessary|needless(ly)?|pointless|awful|terrible
    |horrible|overkill|mess|bugs?|cheat\w*)\b
    |\b(does|did|do|would|could|can|wo|ca|is|was|are|were|has|have|should)(n'?t|\ not|not)\ (\w+\ )?
        (work\w*|pass\w*|compile\w*|help\w*|build|run|start|load|do|ask\w*|want\w*|read|listen|look|change\w*|need\w*|mean|have|test\w*
        |right|correct|what|it|a|the|fixed|done|enough|good|how)\b
    |\bit'?s\ not\b|\bthat'?s\ not\b|\bnot\ (what|how|the\ way)\b
    |\bstill\b.{0,30}\b(fail\w*|crash\w*|hang\w*|throw\w*|get|see|error\w*|missing|not|no|the\ same|there|wrong)\b
    |\b(fail|crash|hang|throw|break|error)(s|es|ed|ing)?\b|\bthe\ same\ (as\ before|error|result|problem|thing|bug)\b
    |\bnothing\ (\w+\ )?(chang|happen|work)\w*|\bno\ (reason|need|point)\b
    |\btoo\ (long|verbose|wordy|much|many|complicated)\b
    |\b(you|u)\ (\w+\ )?(never|forgot|missed|ignored|skipped|broke|just|only|deleted|removed)\b
    |\bwhy\ (did|would|are|were|have)\ you\b|\bdid\ you\ (even|not|actually)\b|\bdidn'?t\ you\b|\bwho\ asked\b
    |\bi\ ((\w+\ )?(said|asked|told|had\ to)|(only|just)\ (wanted|meant|needed))\b|\bagain\s*[!?]*$
    |^\W*(no|nope|nah|ugh)\b(?!\ (problem|worries|rush|hurry|idea|thanks|more|other))"""
)
PEOPLE = 2  # that have to say nearly the same
SIMILAR = 0.5  # share of the words of two follow-ups that are the same (Jaccard)
STOP_WORDS = frozenset(
    """the and you your that this was not for with are but have has had did does don didn doesn isn wasn can could would
    should please again still just what why how all any into from they them its get got""".split()  # noqa: SIM905
)
COMMANDS = re.compile(
    r"""(?ix)
    [a-z][a-z0-9+.-]*://|\bwww\.|\b[\w.-]+\.(sh|exe|ps1|bat|dll|jar|whl)\b   # addresses and programs
    |[|;&`<>]|\$\(|\$\{|(^|\s)(\.{0,2}|~)/\w                                 # shell syntax, paths of the machine
    |\b(curl|wget|sudo|bash|zsh|chmod|chown|rm|ssh|scp|netcat|exec|base64|pip3?|npm|npx|uvx|apt(-get)?|brew|docker
        |powershell|crontab|systemctl)\b
    |(?<!not\ )(?<!n't\ )\b(run|execute)\ +(?!((the|all|your|my|these|those|any|unit|existing)\ +)*tests?\b)\w
    |(^|[.,!?:]\ *|\b(always|never|please|must|should|then|first|and|to)\ +)
        (install|download|upload|fetch|post|send|email|paste|clone|push|open|visit|call)\b
    |\b(ignore|disregard|bypass|override|disable|skip|turn\ off)\b              # what holds the agent back
    |\b(system\ prompt|hidden\ tests?|grader|no-verify|xfail|(assert|return)\ true)\b
    |\b(print|show|log|leak|include|write|reveal|tell)\b.{0,40}\b(password|secret|token|credential|api\ key)s?\b
    """
)


def follow_up(text: str, at: float = 0.0) -> Reaction:
    """The reaction for what a user says next: -1 if it reads as a complaint."""
    is_complaint = any(
        TAKE_BACK.search(clause) or (FAULT.search(clause) and not WISH.search(clause) and not FINE.search(clause))
        for clause in CLAUSE_END.split(text)
    )
    return Reaction("follow_up", -1.0 if is_complaint else 0.0, text, at)


def score(session: Session, settings: LiveConfig) -> Session:
    """The session with the reward of its reactions so far. The newest measurement of kept lines and the newest thumb
    count. Reverted: all but gone later, or declined."""
    rollout = session.rollout
    values: dict[str, list[float]] = {}
    for one in session.reactions:
        values.setdefault(one.kind, []).append(one.value)
    kept = values.get("kept", [1.0])[-1]
    # An endpoint cannot tell tools from pauses.
    seconds = rollout.usage.model_seconds if rollout.foreign else rollout.usage.seconds
    parts = {
        "kept": kept if "kept" in values else 0.0,
        "reverted": -1.0 if "declined" in values or kept <= GONE else 0.0,
        "dissatisfied": -1.0 if min(values.get("follow_up", [0.0])) < 0 else 0.0,
        "thumbs": max(-1.0, min(1.0, values.get("thumbs", [0.0])[-1])),
        "interrupted": -1.0 if "interrupted" in values else 0.0,
        "latency": -min(1.0, seconds / LATENCY_S),
        "broken_calls": -min(1.0, rollout.usage.invalid_calls / BROKEN_CALLS),
        "dodged": -1.0 if read_all(rollout, rules=DODGES) else 0.0,
    }
    weights = {name: settings.weights[name] for name in parts if settings.weights.get(name)}
    reward = Reward({name: parts[name] for name in weights}, weights)
    return replace(session, rollout=replace(rollout, reward=reward))


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
    edits = [one for one in Trajectory(rollout).uses if one.kind == "edit" and one.ran]
    about_tests = ABOUT_TESTS.search(said)
    named = [one.at for one in edits if one.path and _names(said, one.path)]
    tests = [one.at for one in edits if one.path and about_tests and is_test_file(one.path)]
    last = [] if ABOUT_WORDS.search(said) else [one.at for one in edits]
    for found in (named, tests, last, [at for at, _ in spoken(rollout)]):
        if found:
            return found[-1]
    return None


def _names(said: str, path: str) -> bool:
    return path in said or re.search(rf"\b{re.escape(Path(path).stem)}\b", said) is not None


def follow_ups(rollout: Rollout) -> list[str]:
    """What the user said right after a message of the agent in a recorded conversation. A later segment may repeat that
    message as its client remembers it."""
    found = []
    for number, segment in enumerate(rollout.segments):
        for before, message in pairwise(segment.messages):
            if (before.role, message.role) == ("assistant", "user") and (number or segment.is_own(before)):
                found.append(message.text)
    return list(dict.fromkeys(found))


def refusal(text: str) -> str:
    """Why these words never become a hint; empty if they may."""
    found = COMMANDS.search(text)
    return f"it contains {found.group().strip()!r}, which reads as a command" if found else ""


def hint_id(text: str) -> str:
    """What a maintainer approves: the words, without case and spacing."""
    return hashlib.sha256(" ".join(text.lower().split()).encode()).hexdigest()[:12]


def said_against(sessions: Iterable[Session]) -> dict[str, set[str]]:
    """The dissatisfied follow-ups, each with the users who said it."""
    said: dict[str, set[str]] = {}
    for session in sessions:
        for one in session.reactions:
            if one.kind == "follow_up" and one.value < 0 and one.text:
                said.setdefault(one.text, set()).add(session.user)
    return said


def may_teach(said: Mapping[str, set[str]], approved: Collection[str]) -> dict[str, str]:
    """For each follow-up why it does not teach; empty if it does."""
    words = {text: _content(text) for text in said}
    reasons = {}
    for text in said:
        reason = refusal(text)
        if not reason and hint_id(text) not in approved:
            people = set().union(*(said[other] for other in said if _similar(words[text], words[other])))
            if len(people | said[text]) < PEOPLE:
                reason = "one person said it; `offbook live --approve` takes it"
        reasons[text] = reason
    return reasons


def _content(text: str) -> set[str]:
    return {word for word in re.findall(r"[a-z0-9_']{3,}", text.lower()) if word not in STOP_WORDS}


def _similar(one: set[str], other: set[str]) -> bool:
    return bool(one & other) and len(one & other) >= SIMILAR * len(one | other)
