"""Decides whether a follow-up is a complaint: by its form, or by asking a model behind a URL.

By form, clause by clause: a wish or a question is no complaint, whatever words it has ("Add an undo button", "What if
the input is too long?"), unless it wants something taken back. Other clauses are complaints if they name a fault,
blame, or contradict; thanks in another clause change nothing. English only.

The model is asked which of a few kinds each follow-up is, in sessions whose words were kept. Sessions with consent to
numbers alone are never sent to it.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from offbook.core.asking import ask_json, object_of
from offbook.core.client import Client, NoAnswer, NoServer
from offbook.live.sessions import Session
from offbook.signals.trajectory import Trajectory
from offbook.types import Rollout

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
DISSATISFIED = {  # the kinds of follow-ups that a model tells apart, and whether they are complaints
    "happy": False, "new_request": False, "question": False, "complaint": True, "correction": True, "take_back": True,
    "missing": True, "unrelated": False,
}  # fmt: skip
KIND = object_of(kind={"type": "string", "enum": [*DISSATISFIED]})
MOST_CHARS = 2000  # of each text that a model is shown
AT_ONCE = 8


def is_complaint(text: str) -> bool:
    return any(
        TAKE_BACK.search(clause) or (FAULT.search(clause) and not WISH.search(clause) and not FINE.search(clause))
        for clause in CLAUSE_END.split(text)
        if clause
    )


def unread(session: Session) -> list[str]:
    """The follow-ups that the model has not read yet. Sessions stored as numbers alone have no text."""
    said = (one for one in session.reactions if one.kind == "follow_up" and one.text and not one.is_read)
    return [one.text for one in said]


async def read_by(client: Client, sessions: Sequence[Session]) -> tuple[dict[str, dict[str, bool]], Counter[str]]:
    """Ask the model which follow-ups are complaints. Returns its answers by session and text, and how many questions
    failed, by reason. After a failed connection the server is not asked again."""
    found: dict[str, dict[str, bool]] = {}
    unanswered, slots, is_gone = Counter[str](), asyncio.Semaphore(AT_ONCE), False

    async def ask(session: Session, said: str) -> None:
        nonlocal is_gone
        async with slots:
            if is_gone:
                unanswered["not asked, the server had failed"] += 1
                return
            try:
                value, problem = await ask_json(client, question(session.rollout, said), KIND, _no_kind)
            except NoAnswer as error:
                is_gone = is_gone or isinstance(error, NoServer)
                unanswered[error.reason] += 1
                return
        if problem:
            unanswered["no kind of follow-up"] += 1
        else:
            found.setdefault(session.id, {})[said] = DISSATISFIED[value["kind"]]

    await asyncio.gather(*(ask(session, said) for session in sessions for said in unread(session)))
    return found, unanswered


def _no_kind(value: Any) -> str:
    kind = value.get("kind") if isinstance(value, dict) else None
    return "" if kind in [*DISSATISFIED] else f'"kind" is none of {", ".join(DISSATISFIED)}'


def question(rollout: Rollout, said: str) -> str:
    """The prompt: the request, what the agent had said right before, and the follow-up."""
    pairs = [pair for segment in rollout.segments for pair in pairwise(segment.messages)]
    before = [one.text for one, other in pairs if (one.role, other.role, other.text) == ("assistant", "user", said)]
    trajectory = Trajectory(rollout)
    texts = {"request": trajectory.instruction, "ended": (before or [trajectory.last_words])[0], "said": said}
    cut = {name: text if len(text) <= MOST_CHARS else text[:MOST_CHARS] + " ..." for name, text in texts.items()}
    return Path(__file__).with_name("complaints.md").read_text().format(**cut)
