"""Which message went wrong, and the one-line rule that would have helped."""

from offbook.feedback.controls import NEGATIVE, Pairs, stand_in
from offbook.feedback.judged import MISTAKES, hints_in
from offbook.feedback.own import rules_of
from offbook.feedback.rules import RULES, Rule, read_all, read_rollout, write_hint
from offbook.feedback.rules.effort import more_than_needed, unneeded

__all__ = [
    "MISTAKES",
    "NEGATIVE",
    "RULES",
    "Pairs",
    "Rule",
    "hints_in",
    "more_than_needed",
    "read_all",
    "read_rollout",
    "rules_of",
    "stand_in",
    "unneeded",
    "write_hint",
]
