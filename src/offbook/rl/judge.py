"""The judge of a run: a model behind a URL that reads rollouts for hints."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import dataclass

from offbook.core.client import Client, NoAnswer
from offbook.core.config import JUDGED, Config
from offbook.signals.feedback import MISTAKES
from offbook.signals.judge import Judge, Judgement
from offbook.types import OffbookError, Rollout, Task

SILENT_STEPS = 3  # in a row in which the judge answered no question, after which a run stops
log = logging.getLogger(__name__)


def refuse_silent_judge(config: Config) -> None:
    """Ask a judge one question: a wrong URL, name or key stops the run before its first step."""
    judge = config.judge
    reads = (judge.feedback and config.feedback.weight) or (judge.monitors and config.monitors.on)
    if not judge.url or not (reads or any(map(config.rewards.weights.get, JUDGED))):
        return
    try:
        asyncio.run(Client(judge.url, judge.name).ask("Are you there? Answer with one word.", max_tokens=16))
    except NoAnswer as problem:
        way_out = "start the server, correct judge.url and judge.name, or leave judge out"
        raise OffbookError(f"the judge does not answer: {problem}; {way_out}") from None


@dataclass(slots=True)
class StepJudge:
    """The judge of a run, asked once per step. It warns about questions without an answer, and stops the run after
    SILENT_STEPS steps in a row without any."""

    judge: Judge
    silent_steps: int = 0

    async def read(self, when: str, rollouts: Iterable[tuple[Rollout, Task | None]]) -> Judgement:
        judgement = await self.judge.read(rollouts)
        lost = judgement.unanswered.total()
        if not lost:
            self.silent_steps = 0
            return judgement
        reasons = ", ".join(f"{reason}: {count}" for reason, count in judgement.unanswered.most_common())
        problem = f"{when}: the judge left {lost} of {lost + judgement.answered} questions unanswered"
        log.warning("%s (%s)", problem, reasons)
        self.silent_steps = 0 if judgement.answered else self.silent_steps + 1
        if self.silent_steps >= SILENT_STEPS:
            raise OffbookError(
                f"{problem} ({reasons}), and all of the {SILENT_STEPS - 1} steps before; give the same command again "
                "when its server answers"
            )
        return judgement


def hint_judge_of(config: Config) -> Judge | None:
    """The judge of feedback."""
    judge = config.judge
    if not (judge.feedback and config.feedback.weight):
        return None
    turned_off = [rule for rule, weight in config.feedback.rule_weights.items() if not weight]
    return Judge(Client(judge.url, judge.name), MISTAKES, judge.feedback, without=turned_off)
