"""Which follow-ups of users may become hints.

A hint changes the model for everyone it serves, so one person's words are not enough. A follow-up teaches when at least
two people said nearly the same, or when a maintainer approved it (`offbook live --approve ID`). A follow-up that tells
the agent to run, fetch or ignore something never teaches, approved or not: it would train an instruction of an
attacker into the weights.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable, Mapping

from offbook.live.sessions import Session

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
