"""Models that read rollouts: asked once, or as an agent that looks for itself; what of their words holds."""

from offbook.signals.judge.agent import Agent, Assessor, Auditor
from offbook.signals.judge.judge import PREFIX, Critique, Judge, Judgement, Rubrics, is_sampled, show
