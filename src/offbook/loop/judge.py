"""The judge of a run: behind a URL, or here; and what its judgements come to."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from offbook.client import Client
from offbook.config import LOCAL, Config, FeedbackConfig
from offbook.engine import AnyVllm, Engine, LocalEngine
from offbook.feedback import MISTAKES
from offbook.judge import Judge, Judgement, TooLong
from offbook.loop.models import Progress, chat_folder, load_model, model_folder, quiet
from offbook.tokens import Chat, Transcript, chat_for
from offbook.types import Prompt, PromptTooLong

GREEDY = 1e-6  # a temperature at which the likeliest token is all there is


def judge_of(settings: FeedbackConfig) -> Judge | None:
    """The one behind a URL: before minutes go into a model, is it a URL?"""
    if settings.judge.url in ("", LOCAL) or not settings.weight:
        return None
    client = Client(settings.judge.url, settings.judge.name)
    return Judge(client, MISTAKES, settings.judge.rate, without=_turned_off(settings))


def local_judge(config: Config, engine: Engine, chat: Chat, progress: Progress = quiet) -> Judge | None:
    """The one that runs here: what the engine has, as it is when it is asked, or a model of its own."""
    settings = config.feedback
    if settings.judge.url != LOCAL or not settings.weight:
        return None
    if settings.judge.name:
        folder = model_folder(settings.judge.name, config.seed, progress)
        model, chat = load_model(folder), chat_for(chat_folder(folder))
    elif isinstance(engine, AnyVllm):
        return _judge(engine.at(GREEDY), chat, settings)
    else:
        assert isinstance(engine, LocalEngine)  # beside training it would read with weights that change
        model = engine.model
    return _judge(LocalEngine(model, chat.stop_ids, GREEDY, config.engine.kv_tokens, config.seed), chat, settings)


def _judge(greedy: Engine, chat: Chat, settings: FeedbackConfig) -> Judge:
    return Judge(LocalAnswers(greedy, chat), MISTAKES, settings.judge.rate, without=_turned_off(settings))


def _turned_off(settings: FeedbackConfig) -> list[str]:
    return [rule for rule, weight in settings.rule_weights.items() if not weight]


@dataclass(frozen=True, slots=True)
class LocalAnswers:
    """One question to an engine, and its answer as text."""

    engine: Engine
    chat: Chat
    max_tokens: int = 2048

    async def ask(self, question: str) -> str:
        transcript = Transcript(self.chat)
        transcript.add("user", question)
        session = self.engine.open("judge")
        try:
            await asyncio.sleep(0)  # so that all that are asked at once are decoded together
            prompt = Prompt(transcript.prompt(), tuple(transcript.segment.messages))
            completion = await session.complete(prompt, self.max_tokens)
        except PromptTooLong as error:
            raise TooLong(str(error)) from None
        finally:
            session.close()
        return transcript.add_sampled(completion).text


def judge_row(judgement: Judgement) -> dict[str, float]:
    """Nothing where no model was asked."""
    if not judgement.rollouts:
        return {}
    lost = {"refused": judgement.refused, "unanswered": judgement.unanswered}
    counts = {f"judge/{what}/{why}": count for what, whys in lost.items() for why, count in sorted(whys.items())}
    return {"judge/rollouts": judgement.rollouts, "judge/found": len(judgement.found), **counts}
