"""Annotation of rollouts without a run around it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

from offbook.agent.chat import Chat
from offbook.core.config import Config, FeedbackConfig
from offbook.rl import train_step
from offbook.rl.train_step import TrainContext
from offbook.signals.feedback import RULES, Pairs, Rule
from offbook.types import Feedback, Rollout, Sample


def context_of(
    settings: FeedbackConfig,
    chat: Chat | None = None,
    rules: Mapping[str, Rule] = RULES,
    unhelpful: Collection[str] = (),
    whole: Any = None,
) -> TrainContext:
    nothing: Any = None
    return TrainContext(
        Config(feedback=settings), nothing, {}, rules, chat or nothing, nothing, {*unhelpful}, whole=whole
    )


def annotate(
    groups: list[list[Rollout]],
    settings: FeedbackConfig,
    chat: Chat,
    written: Mapping[str, Pairs] | None = None,
    counts: Counter[str] | None = None,
    **more: Any,
) -> tuple[list[Sample], list[Feedback]]:
    context = context_of(settings, chat, **more)
    return train_step.annotate(groups, context, written or {}, Counter() if counts is None else counts)
