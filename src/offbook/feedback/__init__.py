"""Which message went wrong, and the one-line rule that would have helped."""

from offbook.feedback.hints import write_hint
from offbook.feedback.readers import RULES, read_rollout

__all__ = ["RULES", "read_rollout", "write_hint"]
