"""A model that reads rollouts: what it is shown, what it is asked, and what of its words holds."""

from offbook.judge.judge import PREFIX, Critique, Judge, Judgement, Rubrics, TooLong
from offbook.judge.shown import show

__all__ = ["PREFIX", "Critique", "Judge", "Judgement", "Rubrics", "TooLong", "show"]
