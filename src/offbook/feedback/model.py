"""A model that reads rollouts for mistakes that no rule sees, here or behind a URL that speaks OpenAI's completions.

It is asked once for each pattern of prompts/ and is shown the conversation, never the reward, the solution or hidden
tests. Each mistake has to point at a message of the agent's own, quote the record and come with a hint that holds for
other tasks too; what does not is refused and counted by the reason. A server that fails costs a count.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any, Protocol

from pydantic import BaseModel, ValidationError

from offbook.acts import is_own
from offbook.asking import Asked, NoAnswer, is_sampled, json_part, prompts_in
from offbook.feedback.leaks import leak
from offbook.feedback.shown import show, words_of
from offbook.types import Hint, OffbookError, Rollout, Target, Task

PROMPTS = resources.files("offbook.feedback") / "prompts"
FRAME = "frame"  # the prompt around each pattern
PREFIX = "model/"  # of the rules of targets that a model found
MAX_MISTAKES = 4  # in one reply
MAX_WORDS = 60  # of a hint
QUOTE_CHARS = 8  # the least that a quotation must have
AT_ONCE = 8  # questions under way
TWICE = "the same message twice"
GIVE_UP_AFTER = 8  # questions in a row that got no answer: the rest of a reading is not asked


class TooLong(OffbookError):
    """The question does not fit into the model's context."""


class Answers(Protocol):
    """Who is asked: a server, or an engine."""

    async def ask(self, question: str) -> str: ...


class Mistake(BaseModel):
    segment: int = 0
    message: int
    rule: str
    hint: str
    quote: str


@dataclass(slots=True)
class Reading:
    """What a model found, and what became of the rest."""

    found: list[tuple[Target, Hint]] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)  # by reason: replies, and mistakes in replies
    rollouts: int = 0  # that were read
    asked: int = 0  # questions
    unchecked: int = 0  # hints found in rollouts whose task is not at hand: nobody knows whether they leak

    def add(self, other: Reading) -> None:
        self.found += other.found
        self.refused += other.refused
        self.rollouts += other.rollouts
        self.asked += other.asked
        self.unchecked += other.unchecked

    def by_rollout(self) -> dict[str, list[tuple[Target, Hint]]]:
        pairs: dict[str, list[tuple[Target, Hint]]] = {}
        for target, hint in self.found:
            pairs.setdefault(target.rollout, []).append((target, hint))
        return pairs


@cache
def patterns() -> dict[str, str]:
    """By the name of the mistake that each one describes."""
    return prompts_in(PROMPTS, FRAME)


class Reader:
    """`rate` is the share of the rollouts that are read, `without` are rules that nobody asks about."""

    def __init__(self, asked: Answers, rate: float = 1.0, at_once: int = AT_ONCE, without: Collection[str] = ()):
        self.asked, self.rate, self.at_once = asked, rate, at_once
        self.patterns = [name for name in patterns() if f"{PREFIX}{name}" not in without]

    async def read(
        self,
        rollouts: Iterable[tuple[Rollout, Task | None]],
        progress: Callable[[float], None] = lambda share: None,
    ) -> Reading:
        """Mistakes in the sampled share of these rollouts, in their order. Each comes with its task, if there is one.

        A message is a target once: for the first pattern that finds it. `progress` is told the share that is done.
        """
        chosen = [(rollout, task) for rollout, task in rollouts if is_sampled(rollout.id, self.rate)]
        questions = [(rollout, task, rule) for rollout, task in chosen for rule in self.patterns]
        turn, silent, done = asyncio.Semaphore(self.at_once), 0, 0

        async def one(rollout: Rollout, task: Task | None, rule: str) -> Reading:
            nonlocal silent, done
            async with turn:
                try:
                    if silent >= GIVE_UP_AFTER:
                        return Reading(refused=Counter({"not asked, the server had failed": 1}))
                    reply = await self.asked.ask(question(rollout, task, rule))
                    silent = 0
                except TooLong:
                    return Reading(refused=Counter({"longer than the model's context": 1}))
                except NoAnswer as error:
                    silent += 1
                    return Reading(refused=Counter({f"the server did not answer ({error.reason})": 1}), asked=1)
                finally:
                    done += 1
                    progress(done / len(questions))
            reading = await asyncio.to_thread(read_reply, reply, rule, rollout, task)  # a large tree takes a moment
            reading.asked = 1
            return reading

        whole = Reading(rollouts=len(chosen))
        for reading in await asyncio.gather(*(one(*each) for each in questions)):
            whole.add(reading)
        _keep_first(whole, {rollout.id for rollout, task in chosen if task is None})
        return whole


class ModelReader(Reader):
    """Behind a URL. `key_env` names the variable with the server's key, if it wants one."""

    def __init__(
        self,
        url: str,
        model: str,
        rate: float = 1.0,
        at_once: int = AT_ONCE,
        timeout_s: float = 120.0,
        key_env: str = "OPENAI_API_KEY",
        without: Collection[str] = (),
    ):
        super().__init__(Asked(url, model, timeout_s, key_env), rate, at_once, without)


def _keep_first(reading: Reading, without_task: set[str]) -> None:
    """One mistake a message; the others are refused, and so nobody has to check them."""
    first: dict[tuple[str, int, int], tuple[Target, Hint]] = {}
    for target, hint in reading.found:
        place = target.rollout, target.segment, target.message
        if place in first:
            reading.refused[TWICE] += 1
            reading.unchecked -= target.rollout in without_task
        else:
            first[place] = target, hint
    reading.found = list(first.values())


def question(rollout: Rollout, task: Task | None, rule: str) -> str:
    instruction = task.instruction if task is not None else "It is in the record."
    frame = (PROMPTS / f"{FRAME}.md").read_text()
    return frame.format(pattern=patterns()[rule].strip(), rule=rule, instruction=instruction, rollout=show(rollout))


def read_reply(reply: str, rule: str, rollout: Rollout, task: Task | None = None) -> Reading:
    """The mistakes of a reply that hold, and the reasons why the others do not."""
    reading = Reading()
    mistakes = _listed(reply)
    if mistakes is None:
        reading.refused["no JSON"] += 1
        return reading
    taken: set[tuple[int, int]] = set()
    for number, value in enumerate(mistakes):
        try:
            mistake = Mistake.model_validate(value)
        except ValidationError:
            reading.refused["not in the form asked for"] += 1
            continue
        place = mistake.segment, mistake.message
        reason = "too many" if number >= MAX_MISTAKES else refusal(mistake, rule, rollout, task)
        if place in taken:
            reason = reason or TWICE
        if reason:
            reading.refused[reason] += 1
            continue
        taken.add(place)
        evidence = " ".join(mistake.quote.split())[:240]
        target = Target(rollout.id, *place, f"{PREFIX}{rule}", evidence)
        reading.found.append((target, Hint(target.rule, " ".join(mistake.hint.split()))))
        reading.unchecked += task is None
    return reading


def refusal(mistake: Mistake, rule: str, rollout: Rollout, task: Task | None) -> str | None:
    """Why a mistake does not hold, or None."""
    if mistake.rule != rule:
        return "unknown rule"
    if not 0 <= mistake.segment < len(rollout.segments):
        return "no such message"
    segment = rollout.segments[mistake.segment]
    if not 0 <= mistake.message < len(segment.messages):
        return "no such message"
    if not is_own(segment, segment.messages[mistake.message]):
        return "not the agent's message"
    if not mistake.hint.strip():
        return "empty hint"
    if len(mistake.hint.split()) > MAX_WORDS:
        return f"hint of more than {MAX_WORDS} words"
    quote = " ".join(mistake.quote.split())
    texts = [text for message in segment.messages for text in words_of(message)]
    if len(quote) < QUOTE_CHARS or not any(quote in " ".join(text.split()) for text in texts):
        return "a quote that is not in the record"
    leaked = leak(mistake.hint, task) if task is not None else None
    return f"leaks {leaked}" if leaked else None


def _listed(reply: str) -> list[Any] | None:
    """The list of a reply, with or without the object around it; None where there is none."""
    try:
        value = json.loads(json_part(reply, "[{", "]}"))
    except (ValueError, RecursionError):
        return None
    listed = value.get("mistakes") if isinstance(value, dict) else value
    return listed if isinstance(listed, list) else None
