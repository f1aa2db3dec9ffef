"""Which message went wrong, and the one-line rule that would have helped."""

from offbook.signals.feedback.controls import NEGATIVE, Pairs, stand_in
from offbook.signals.feedback.judged import MISTAKES, hints_in
from offbook.signals.feedback.own import rules_of
from offbook.signals.feedback.rules import RULES, Rule, read_all, read_rollout, write_hint
from offbook.signals.feedback.rules.effort import more_than_needed, unneeded
