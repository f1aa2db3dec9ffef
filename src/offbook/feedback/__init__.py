"""Which message went wrong, and the one-line rule that would have helped."""

from collections.abc import Iterable

from offbook.feedback.controls import NEGATIVE, Pairs, stand_in
from offbook.feedback.hints import write_hint
from offbook.feedback.judged import MISTAKES, hints_in
from offbook.feedback.rules import RULES, read_all, read_rollout
from offbook.types import OffbookError

__all__ = [
    "MISTAKES",
    "NEGATIVE",
    "RULES",
    "Pairs",
    "hints_in",
    "read_all",
    "read_rollout",
    "refuse_unknown_rules",
    "stand_in",
    "write_hint",
]


def refuse_unknown_rules(chosen: Iterable[str], weighted: Iterable[str] = ()) -> None:
    """Rules can be chosen; what a judge finds has a weight too."""
    for names, known in ((chosen, list(RULES)), (weighted, [*RULES, *MISTAKES.rules])):
        for name in names:
            if name not in known:
                raise OffbookError(f"there is no rule {name}; the rules are {', '.join(known)}")
