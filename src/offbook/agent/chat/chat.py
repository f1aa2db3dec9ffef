"""A conversation as token ids, whatever the chat format.

The ids are the truth. A conversation only ever grows at its end, so the prompt of turn n+1 is the ids of turn n plus
new ids; what a model sampled is never decoded and encoded again.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from offbook.agent.chat.dialects import HERMES, Dialect, Tools
from offbook.core.thoughts import THINK_END, THINK_START, answer_start
from offbook.types import CallStatus, Completion, Message, Role, Segment, ToolCall, Usage

Line = tuple[Role, str]
Span = tuple[int, int, int, int]  # start, body, body_end, end of a message, as in Message


@dataclass(frozen=True, slots=True)
class Encoded:
    """Messages as ids, and the span of each. The spans follow each other without a gap."""

    ids: list[int]
    spans: list[Span]


class Chat(Protocol):
    """What a transcript and the annotators need of a chat format. ChatFormat and RenderedChat are the two there are."""

    end_id: int  # ends a message where the model did not
    stop_ids: frozenset[int]  # what a model may end its message with
    assistant_header: list[int]  # what a prompt ends with: the model continues here
    dialect: Dialect | None  # None: the family's own
    tells_tools: bool  # the format itself tells the model of its tools, so that no prompt has to
    call_marks: tuple[str, ...]  # what an attempted call begins with in a message's text; empty: that is not known

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...

    def encode_lines(self, lines: Sequence[Line], tools: Tools = (), opening: bool = False) -> Encoded:
        """The lines between two messages of the model, or before the first of them (`opening`)."""
        ...

    def closing(self, sampled: list[int]) -> list[int]:
        """What follows a sampled message: its end, where the model did not write it, and what belongs behind an end."""
        ...

    def parse(self, sampled: list[int], tools: Tools = ()) -> tuple[ToolCall, ...]: ...

    def answer(self, text: str, calls: Sequence[ToolCall] = ()) -> list[int]:
        """A message of the model that it did not sample, as it would have: words, then calls; without its end."""
        ...

    def telling(self, tools: Tools) -> str:
        """The description of the tools for a system prompt; empty where the format itself describes them."""
        return (self.dialect or HERMES).telling(tools) if tools and not self.tells_tools else ""

    def block(self, role: Role, text: str) -> list[int]:
        """A closed message, complete in itself: it can be spliced in between any two others."""
        return self.encode_lines([(role, text)]).ids

    def pieces(self, ids: list[int]) -> list[str]:
        """The text of each token; joined, they are the text of all. A character cut across tokens goes to its last."""
        pieces, held = [], 0
        for position in range(len(ids)):
            text = self.decode(ids[position - held : position + 1])
            if text.endswith("\ufffd") and position + 1 < len(ids) and held < 8:
                pieces.append("")
                held += 1
            else:
                pieces.append(text)
                held = 0
        return pieces


class Transcript:
    """A segment as it grows, message by message."""

    def __init__(self, chat: Chat, tools: Tools = ()):
        self.chat = chat
        self.tools = tools
        self.segment = Segment()
        self._settled = 0  # up to here nothing changes any more: it has been in a prompt that a model continued
        self._lines: list[Message] = []  # the messages behind that; some formats write several results as one block

    @classmethod
    def after(cls, segment: Segment, chat: Chat, tools: Tools = ()) -> Transcript:
        """One that goes on behind a segment which ends where the model is to speak. The segment grows with it."""
        transcript = cls(chat, tools)
        said = [place for place, message in enumerate(segment.messages) if segment.is_own(message)]
        transcript.segment = segment
        transcript._settled = segment.messages[said[-1]].end if said else 0
        transcript._lines = segment.messages[said[-1] + 1 if said else 0 :]
        return transcript

    def add(self, role: Role, text: str, status: CallStatus | None = None) -> Message:
        """A message that the model did not write."""
        message = Message(role, text, 0, 0, 0, 0, status=status)
        self._lines.append(message)
        self.segment.messages.append(message)
        lines = [(line.role, line.text) for line in self._lines]
        encoded = self.chat.encode_lines(lines, self.tools, opening=self._settled == 0)
        for stream in (self.segment.ids, self.segment.sampled, self.segment.logprobs, self.segment.versions):
            del stream[self._settled :]
        self._feed(encoded.ids)
        for line, span in zip(self._lines, encoded.spans, strict=True):
            line.start, line.body, line.body_end, line.end = (self._settled + place for place in span)
        return message

    def prompt(self) -> list[int]:
        """What the model is to continue: everything so far and the header of its own message."""
        return [*self.segment.ids, *self.chat.assistant_header]

    def add_sampled(self, completion: Completion) -> Message:
        """The model's own message, its ids kept as they were sampled."""
        start = len(self.segment.ids)
        self._feed(self.chat.assistant_header)
        body = len(self.segment.ids)
        self.segment.ids.extend(completion.ids)
        self.segment.sampled.extend([True] * len(completion.ids))
        self.segment.logprobs.extend(completion.logprobs)
        self.segment.versions.extend(completion.versions)
        self.segment.routes = completion.routes
        words = completion.ids[:-1] if set(completion.ids[-1:]) & self.chat.stop_ids else completion.ids
        body_end = body + len(words)
        self._feed(self.chat.closing(completion.ids))
        self._settled = len(self.segment.ids)
        self._lines = []
        calls = self.chat.parse(words, self.tools)
        message = Message("assistant", self.chat.decode(words), start, body, body_end, self._settled, calls)
        self.segment.messages.append(message)
        return message

    def _feed(self, ids: list[int]) -> None:
        self.segment.ids.extend(ids)
        self.segment.sampled.extend([False] * len(ids))
        self.segment.logprobs.extend([0.0] * len(ids))
        self.segment.versions.extend([-1] * len(ids))


def count_tokens(segments: list[Segment], chat: Chat, usage: Usage) -> None:
    """What the tokens of a rollout were for."""
    usage.sampled_tokens = sum(sum(segment.sampled) for segment in segments)
    usage.prompt_tokens = sum(len(segment.ids) for segment in segments) - usage.sampled_tokens
    for segment in segments:
        for index, message in enumerate(segment.messages):
            if message.role == "tool":
                usage.output_tokens += message.body_end - message.body
            if message.role != "assistant":
                continue
            sampled = sum(segment.sampled[message.body : message.end])
            if not sampled:  # repeated, or not sampled by this model
                continue
            if index == segment.summary:
                usage.summary_tokens += sampled
            elif message.calls:
                thinking = _tokens_before(chat, segment.ids[message.body : message.body_end], message.calls[0].start)
                usage.thinking_tokens += thinking
                usage.call_tokens += sampled - thinking
            else:
                usage.final_tokens += sampled


def _tokens_before(chat: Chat, ids: list[int], offset: int) -> int:
    """How many of the tokens end at or before a place in their text."""
    return bisect_right(range(1, len(ids) + 1), offset, key=lambda count: len(chat.decode(ids[:count])))


def is_in(segment: Segment, chat: Chat, vocabulary: int) -> bool:
    """Whether the ids are this chat's: they decode to the messages' texts and have its headers."""
    if not segment.ids or max(segment.ids) >= vocabulary:
        return False
    own = [message for message in segment.messages if message.role == "assistant"]
    return all(
        chat.decode(segment.ids[message.body : message.body_end]) == message.text
        and (not segment.is_own(message) or segment.ids[message.start : message.body] == chat.assistant_header)
        for message in own
    )


def written_again(segment: Segment, chat: Chat, tools: Tools = ()) -> Segment:
    """The same messages in this chat's ids; what the agent said counts as sampled. For conversations with another
    tokenizer's ids, or none."""
    transcript = Transcript(chat, tools)
    for message in segment.messages:
        if message.role != "assistant":
            transcript.add(message.role, message.text, message.status)
            continue
        ids = [*_words(message, chat, bool(segment.ids)), chat.end_id]
        said = transcript.add_sampled(Completion(ids, [0.0] * len(ids), [-1] * len(ids)))
        if not segment.is_own(message):  # a worked example
            transcript.segment.sampled[said.body : said.end] = [False] * (said.end - said.body)
    return transcript.segment


def _words(message: Message, chat: Chat, is_whole: bool) -> list[int]:
    """A segment with ids has the calls in its text, which is kept if this chat reads the same calls from it."""
    text, calls = message.text, message.calls
    if is_whole:
        ids = chat.encode(text)
        if any(call.error for call in calls) or [c.name for c in chat.parse(ids)] == [c.name for c in calls]:
            return ids
        text = text[: calls[0].start].rstrip() if calls else text
        return chat.answer(text, calls)
    return chat.answer(behind_header(text, chat), calls)


def has_no_thoughts(chat: Chat) -> bool:
    """Whether thinking is switched off: the header of every answer ends an empty thought."""
    return chat.decode(chat.assistant_header).rstrip().endswith(THINK_END)


def behind_header(text: str, chat: Chat) -> str:
    """The text without what the header has already: the begin of a thought, which is ended if the message has none, or
    the whole thought if the chat has no thoughts."""
    begin = answer_start(text)
    if begin and has_no_thoughts(chat):
        return text[begin:].lstrip()
    if not chat.decode(chat.assistant_header).rstrip().endswith(THINK_START):
        return text
    return text.lstrip().removeprefix(THINK_START).lstrip("\n") if begin else f"\n{THINK_END}\n\n{text}"
