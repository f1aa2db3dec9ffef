"""Models that read rollouts: asked once, or as an agent that looks for itself; what of their words holds."""

from offbook.judge.agent import Agent, Assessor, Auditor
from offbook.judge.judge import PREFIX, Critique, Judge, Judgement, Rubrics, TooLong
from offbook.judge.shown import show

__all__ = [
    "PREFIX", "Agent", "Assessor", "Auditor", "Critique", "Judge", "Judgement", "Rubrics", "TooLong", "show",
]  # fmt: skip
