"""From scored rollouts to one optimizer step, and the record of what it did."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from offbook.agent.chat import Chat
from offbook.core.config import Config
from offbook.core.runfolder import RunFolder
from offbook.rl.annotate import annotate
from offbook.rl.evaluate import summarize
from offbook.rl.judge import judge_row
from offbook.rl.teachers import WholeResponse
from offbook.signals.feedback import Rule, hints_in
from offbook.signals.judge import Judgement
from offbook.train.algorithms import target_key
from offbook.train.schedule import learning_rate_share
from offbook.train.targets import Measured
from offbook.train.trainer import NotFinite, StepResult, Trainer, WeightsLost
from offbook.types import Feedback, Likely, Rollout, Sample, Task

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Lessons:
    """What a step of a run learns with, and where it is written down."""

    config: Config
    folder: RunFolder
    tasks: Mapping[str, Task]  # by id
    rules: Mapping[str, Rule]
    chat: Chat
    trainer: Trainer
    unhelpful: set[str] = field(default_factory=set)  # rules whose hint was looked at and is not taught
    baselines: Mapping[str, float] = field(default_factory=dict)  # by group, of those that have no mean of their own
    whole: WholeResponse | None = None  # teachers of all that rollouts say


def recall_look(by: Lessons, rows: Iterable[Mapping[str, Any]]) -> None:
    """What was found out about hints, of each rule the newest."""
    for row in rows:
        (by.unhelpful.add if row["why_not"] else by.unhelpful.discard)(row["rule"])


def learn(
    step: int, groups: list[list[Rollout]], judgement: Judgement, by: Lessons, corrected: Sequence[Sample] = ()
) -> dict[str, Any]:
    """One optimizer step on scored rollouts, and on what was corrected of them. What the hints did to them goes to the
    run folder."""
    config, folder, chat = by.config, by.folder, by.chat
    counts: Counter[str] = Counter()
    temperature, written = config.engine.temperature, hints_in(judgement)
    told = written, counts, temperature, by.rules, by.unhelpful, by.baselines, config.train.rl_weight, by.whole
    samples, feedback = annotate(groups, config.feedback, chat, step, by.tasks, *told)
    samples += corrected
    try:
        result = by.trainer.step(samples, lr_scale=learning_rate_share(config.train, step))
    except NotFinite as problem:
        folder.write_feedback(step, feedback)
        what = f"{problem}; nothing was applied, and {_set_aside(step, samples, folder)}"
        if config.train.on_nonfinite == "stop":
            raise NotFinite(what) from None
        result = StepResult({}, skipped=what)
    except WeightsLost as problem:
        folder.write_feedback(step, feedback)
        raise WeightsLost(f"{problem}; they are not kept, and {_set_aside(step, samples, folder)}") from None
    if result.skipped:
        log.warning("step %d is skipped: %s", step, result.skipped)
    for item in feedback:
        if measured := result.measured.get(target_key(item.target)):
            record(item, measured, chat)
    folder.write_feedback(step, feedback)
    by_rule = Counter(item.target.rule for item in feedback)
    counts.update(f"left_out/{item.skipped}" for item in feedback if item.skipped)
    return {
        **summarize(groups),
        **result.metrics,
        "learning_rate": config.train.learning_rate * learning_rate_share(config.train, step),
        "hinted_targets": len(feedback),
        **{f"targets/{rule}": count for rule, count in sorted(by_rule.items())},
        **dict(sorted(counts.items())),
        **judge_row(judgement),
        "groups_without_signal": sum(len({rollout.reward.total for rollout in group}) == 1 for group in groups),
    }


def _set_aside(step: int, samples: list[Sample], folder: RunFolder) -> str:
    return f"its samples are in {folder.write_samples(step, samples)}"


def record(item: Feedback, measured: Measured, chat: Chat) -> None:
    """What the hint did to its message, for people and for `offbook view`."""
    item.student, item.teacher, item.divergence = measured.student, measured.teacher, measured.divergence
    item.skipped = measured.skipped
    item.student_top = [_as_text(likely, chat) for likely in measured.student_top]
    item.teacher_top = [_as_text(likely, chat) for likely in measured.teacher_top]


def _as_text(likely: Likely, chat: Chat) -> list[tuple[str, float]]:
    return [(chat.decode([token]), round(logprob, 3)) for token, logprob in likely]
