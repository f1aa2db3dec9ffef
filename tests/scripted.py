"""An engine that says what it is told to, in tokens of its own choice, and keeps a log of every prompt and message."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from offbook.agent.chat import BLOCK_END, BLOCK_START, CALL_END, CALL_START, ChatFormat
from offbook.engine import Engine, Session
from offbook.types import Completion, Prompt


def merging_chat(**how: str) -> ChatFormat:
    """Bytes and a few pairs of them: a text has several spellings in ids, of which `encode` knows one."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("e", "r"), ("l", "s"), ("o", "n"), ("h", "e")]
    names = [*alphabet, *("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={name: index for index, name in enumerate(names)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([BLOCK_START, BLOCK_END])
    tokenizer.add_tokens([CALL_START, CALL_END])
    return ChatFormat(tokenizer, **how)  # type: ignore[arg-type]


def spelled(chat: ChatFormat, text: str) -> list[int]:
    """Byte by byte, and so otherwise than `encode` would."""
    marks = {mark: chat.tokenizer.token_to_id(mark) for mark in (CALL_START, CALL_END)}
    ids: list[int] = []
    while text:
        mark = next((mark for mark in marks if text.startswith(mark)), "")
        ids += [marks[mark]] if mark else chat.encode(text[0])
        text = text[len(mark) or 1 :]
    return ids


@dataclass
class Scripted(Engine):
    """`answers` are given in order. None is never given, an error is raised; the next one takes so many seconds."""

    chat: ChatFormat
    answers: list[Any] = field(default_factory=list)
    log: list[tuple[list[int], list[int]]] = field(default_factory=list)
    opened: list[str] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)
    dropped: int = 0
    version: int = 0

    def open(self, key: str) -> ScriptedLine:
        self.opened.append(key)
        return ScriptedLine(self, key)

    async def say(self, prompt: Prompt, max_tokens: int) -> Completion:
        answer = self.answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        pause = 0.0
        if isinstance(answer, float):
            pause, answer = answer, self.answers.pop(0)
        assert not isinstance(answer, float)
        try:
            if answer is None:
                await asyncio.Event().wait()
                raise AssertionError
            ids = [*spelled(self.chat, answer), self.chat.end_id][:max_tokens]
            await asyncio.sleep(pause)
        except asyncio.CancelledError:
            self.dropped += 1
            raise
        self.log.append((prompt.ids, ids))
        return Completion(ids, [-0.5 - number / 100 for number in range(len(ids))], [self.version] * len(ids))


@dataclass(slots=True)
class ScriptedLine(Session):
    engine: Scripted
    key: str

    async def complete(self, prompt: Prompt, max_tokens: int) -> Completion:
        return await self.engine.say(prompt, max_tokens)

    def close(self) -> None:
        self.engine.closed.append(self.key)


def sampled_runs(segments: Sequence[object]) -> list[tuple[list[int], list[int]]]:
    """Every run of sampled tokens of a rollout, with all that stands before it: what an engine's log has to have."""
    found = []
    for segment in segments:
        ids, sampled = segment.ids, segment.sampled  # type: ignore[attr-defined]
        for message in segment.messages:  # type: ignore[attr-defined]
            count = sum(sampled[message.body : message.end])
            if count:
                found.append((ids[: message.body], ids[message.body : message.body + count]))
    return found
