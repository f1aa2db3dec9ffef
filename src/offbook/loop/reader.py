"""The reader model of a run: behind a URL, or here; and what its readings come to."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from offbook.config import LOCAL, Config, FeedbackConfig
from offbook.engine import LocalEngine, PromptTooLong
from offbook.feedback import ModelReader, Reader, Reading, TooLong
from offbook.loop.collector import Engine
from offbook.loop.models import Progress, load_model, model_folder, quiet
from offbook.tokens import Chat, Transcript, chat_for
from offbook.types import Prompt

GREEDY = 1e-6  # a temperature at which the likeliest token is all there is


def reader_of(settings: FeedbackConfig) -> Reader | None:
    """The one behind a URL: before minutes go into a model, is it a URL?"""
    if settings.model_url in ("", LOCAL) or not settings.weight:
        return None
    return ModelReader(settings.model_url, settings.model_name, settings.model_rate, without=_turned_off(settings))


def local_reader(config: Config, engine: LocalEngine, chat: Chat, progress: Progress = quiet) -> Reader | None:
    """The one that runs here: what the engine has, as it is when it is asked, or a model of its own."""
    settings, model = config.feedback, engine.model
    if settings.model_url != LOCAL or not settings.weight:
        return None
    if settings.model_name:
        folder = model_folder(settings.model_name, config.seed, progress)
        model, chat = load_model(folder), chat_for(folder)
    greedy = LocalEngine(model, chat.stop_ids, GREEDY, config.engine.max_rows, config.seed)
    return Reader(LocalAsked(greedy, chat), settings.model_rate, without=_turned_off(settings))


def _turned_off(settings: FeedbackConfig) -> list[str]:
    return [rule for rule, weight in settings.rule_weights.items() if not weight]


@dataclass(frozen=True, slots=True)
class LocalAsked:
    """One question to an engine, and its answer as text."""

    engine: Engine
    chat: Chat
    max_tokens: int = 2048

    async def ask(self, question: str) -> str:
        transcript = Transcript(self.chat)
        transcript.add("user", question)
        session = self.engine.open("reader")
        try:
            await asyncio.sleep(0)  # so that all that are asked at once are decoded together
            prompt = Prompt(transcript.prompt(), tuple(transcript.segment.messages))
            completion = await session.complete(prompt, self.max_tokens)
        except PromptTooLong as error:
            raise TooLong(str(error)) from None
        finally:
            session.close()
        return transcript.add_sampled(completion).text


def reader_row(reading: Reading) -> dict[str, float]:
    """Nothing where no model was asked."""
    if not reading.rollouts:
        return {}
    refused = {f"reader/refused/{reason}": count for reason, count in sorted(reading.refused.items())}
    return {"reader/rollouts": reading.rollouts, "reader/found": len(reading.found), **refused}
