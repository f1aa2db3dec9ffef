"""Mistakes that no rule sees: found by a judge, each with a hint that has to hold for other tasks too."""

from __future__ import annotations

from pathlib import Path

from offbook.signals.feedback.controls import Pairs
from offbook.signals.feedback.leaks import leak
from offbook.signals.judge import Critique, Judgement, Rubrics
from offbook.types import Hint, Target, Task

MAX_WORDS = 60  # of a hint


def _refusal(hint: str, task: Task | None) -> str | None:
    """Without the task nobody knows whether a hint leaks."""
    if not hint:
        return "empty hint"
    if len(hint.split()) > MAX_WORDS:
        return f"hint of more than {MAX_WORDS} words"
    leaked = leak(hint, task) if task is not None else None
    return f"leaks {leaked}" if leaked else None


MISTAKES = Rubrics(Path(__file__).with_name("prompts"), thoughts=True, refusal=_refusal)


def pair_of(critique: Critique) -> tuple[Target, Hint]:
    place = critique.rollout.id, critique.segment, critique.message
    return Target(*place, critique.rule, critique.quote), Hint(critique.rule, critique.note)


def hints_in(judgement: Judgement) -> dict[str, Pairs]:
    """Targets and their hints by rollout."""
    pairs: dict[str, Pairs] = {}
    for one in judgement.found:
        pairs.setdefault(one.rollout.id, []).append(pair_of(one))
    return pairs
