"""Models that read rollouts: one question, one JSON object as the answer, one retry, and what is found is confirmed."""

from offbook.signals.judge.judge import PREFIX, Assessor, Critique, Judge, Judgement, Rubrics
from offbook.signals.judge.record import show
