"""The judge of a run: behind a URL, or here; and what its judgements come to."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import dataclass

from offbook.agent.chat import Chat, Transcript, chat_for
from offbook.core.asking import Schema, Turns
from offbook.core.client import Client, NoAnswer
from offbook.core.config import JUDGED, LOCAL, Config, FeedbackConfig
from offbook.engine import Engine, LocalEngine
from offbook.rl.models import Progress, chat_folder, load_model, model_folder, quiet
from offbook.signals.feedback import MISTAKES
from offbook.signals.judge import Judge, Judgement
from offbook.types import OffbookError, Prompt, Rollout, Task

SILENT_STEPS = 3  # in a row in which the judge answered no question, after which a run stops
GREEDY = 1e-6  # a temperature at which the likeliest token is all there is
log = logging.getLogger(__name__)


def refuse_silent_judge(config: Config) -> None:
    """Ask a judge behind a URL one question: a wrong URL, name or key stops the run before its first step."""
    judge = config.judge
    reads = (judge.feedback and config.feedback.weight) or (judge.monitors and config.monitors.on)
    if judge.url in ("", LOCAL) or not (reads or any(map(config.rewards.weights.get, JUDGED))):
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


def judge_of(config: Config) -> Judge | None:
    """The judge of feedback, if it is behind a URL."""
    judge = config.judge
    if judge.url in ("", LOCAL) or not (judge.feedback and config.feedback.weight):
        return None
    return Judge(Client(judge.url, judge.name), MISTAKES, judge.feedback, without=_turned_off(config.feedback))


def step_judge(config: Config, engine: Engine, chat: Chat, progress: Progress = quiet) -> StepJudge | None:
    """The judge behind a URL or the one that runs here: the engine's model as it is when asked, or one of its own."""
    judge = judge_of(config)
    if config.judge.url == LOCAL and config.feedback.weight:
        if config.judge.name:
            folder = model_folder(config.judge.name, config.seed, progress)
            chat = chat_for(chat_folder(folder))
            tokens, seed = config.engine.kv_tokens, config.seed
            greedy: Engine = LocalEngine(load_model(folder), chat.stop_ids, GREEDY, tokens, seed)
        else:
            greedy = engine.at(GREEDY)
        judge = Judge(LocalAnswers(greedy, chat), MISTAKES, config.judge.feedback, without=_turned_off(config.feedback))
    return StepJudge(judge) if judge else None


def _turned_off(settings: FeedbackConfig) -> list[str]:
    return [rule for rule, weight in settings.rule_weights.items() if not weight]


@dataclass(frozen=True, slots=True)
class LocalAnswers:
    """One question or conversation to an engine, and its answer as text."""

    engine: Engine
    chat: Chat
    max_tokens: int = 2048

    async def ask(self, question: str | Turns, *, schema: Schema | None = None) -> str:
        """`schema` has no effect: the engine does not constrain what it samples."""
        transcript = Transcript(self.chat)
        for role, text in [("user", question)] if isinstance(question, str) else question:
            transcript.add("assistant" if role == "assistant" else "user", text)
        session = self.engine.open("judge")
        try:
            await asyncio.sleep(0)  # so that all that are asked at once are decoded together
            prompt = Prompt(transcript.prompt(), tuple(transcript.segment.messages))
            completion = await session.complete(prompt, self.max_tokens)
        finally:
            session.close()
        return transcript.add_sampled(completion).text
