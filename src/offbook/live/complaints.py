"""Decides by its form whether a follow-up is a complaint, clause by clause.

A wish or a question is no complaint, whatever words it has ("Add an undo button", "What if the input is too long?"),
unless it wants something taken back. Other clauses are complaints if they name a fault, blame, or contradict; thanks in
another clause change nothing. English only.
"""

from __future__ import annotations

import re

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


def is_complaint(text: str) -> bool:
    return any(
        TAKE_BACK.search(clause) or (FAULT.search(clause) and not WISH.search(clause) and not FINE.search(clause))
        for clause in CLAUSE_END.split(text)
        if clause
    )
