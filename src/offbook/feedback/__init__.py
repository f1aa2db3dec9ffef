"""Which message went wrong, and the one-line rule that would have helped."""

from offbook.feedback.controls import NEGATIVE, Pairs, stand_in
from offbook.feedback.hints import write_hint
from offbook.feedback.readers import RULES, read_rollout
from offbook.types import OffbookError

__all__ = ["NEGATIVE", "RULES", "Pairs", "read_rollout", "refuse_unknown_rules", "stand_in", "write_hint"]


def refuse_unknown_rules(names: list[str]) -> None:
    for name in names:
        if name not in RULES:
            raise OffbookError(f"there is no rule {name}; the rules are {', '.join(RULES)}")
