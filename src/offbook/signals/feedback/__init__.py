"""Which message went wrong, and the one-line rule that would have helped."""

from offbook.signals.feedback.hints import MISTAKES, NEGATIVE, Pairs, hints_in, stand_in
from offbook.signals.feedback.rules import RULES, SAID, Rule, read_all, read_rollout, rules_of, write_hint
from offbook.signals.feedback.rules.calls import more_than_needed, unneeded
