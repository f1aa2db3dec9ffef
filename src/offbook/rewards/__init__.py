"""What a rollout earned."""

from offbook.rewards.outcome import Grader

__all__ = ["Grader"]
