"""Records one agent's work at an endpoint as a rollout: requests become ids, the model continues them, ids are kept.

A request whose history is a conversation of this session plus new messages extends that segment: the prompt is the
recorded ids and new ones. Any other history (edited, summarised, rewound, a sub-agent's) opens a segment, in which the
model's messages do not count as sampled, so no token is learned from twice. Overlapping requests go on in two segments.

A request whose client disconnects while the model writes leaves nothing. Thinking stays in the conversation, whether or
not the client sends it back.

Left out: a message that the client has begun, sampling parameters (an engine has one temperature), logprobs.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Protocol

from offbook.agent.chat import Chat, Transcript, count_tokens
from offbook.agent.chat.dialects import Tools
from offbook.core.thoughts import THINK_END, THINK_START, answer_start
from offbook.types import (
    INVALID,
    CallStatus,
    Completion,
    Event,
    Limits,
    Message,
    ModelLost,
    OffbookError,
    Policy,
    Prices,
    Prompt,
    PromptTooLong,
    Role,
    Rollout,
    Segment,
    StopReason,
    ToolCall,
)


class Refused(OffbookError):
    """A request that can never be answered as it is; a retry fails again."""


@dataclass(frozen=True)
class Said:
    """One message. `ids` are the client's names of its calls or, of a tool's answer, of the call that it answers."""

    role: Role
    text: str
    calls: tuple[ToolCall, ...] = ()
    ids: tuple[str, ...] = ()
    failed: bool = False  # of a tool's answer: the client says so

    def is_like(self, other: Said) -> bool:
        """Whether it is the same message: clients send it back without thinking, stripped, with arguments rewritten."""
        if self.role != other.role or self.failed != other.failed:
            return False
        if self.role != "assistant":
            return self.text == other.text
        calls = [(call.name, call.arguments) for call in self.calls]
        return self.text.strip() == other.text.strip() and calls == [(c.name, c.arguments) for c in other.calls]


@dataclass(frozen=True)
class Asked:
    messages: tuple[Said, ...]
    tools: Tools = ()
    max_tokens: int = 0  # 0 is as many as the session allows
    stream: bool = False
    id: str = field(default_factory=lambda: secrets.token_hex(12))  # of the answer


@dataclass(frozen=True)
class Shown:
    """A call that cannot be read stays text. Words after a readable call are in the record only."""

    thinking: str = ""
    text: str = ""
    calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True)
class Answer:
    id: str
    number: int  # in the order of answers
    shown: Shown
    call_ids: tuple[str, ...]
    is_cut: bool  # by a limit
    prompt_tokens: int
    sampled_tokens: int


def in_order(messages: Sequence[Said]) -> tuple[Said, ...]:
    """The messages as a model reads them: consecutive assistant messages joined, answers in the order of the calls."""
    joined: list[Said] = []
    for said in messages:
        last = joined[-1] if joined else None
        if last and last.role == said.role == "assistant":
            text = "\n".join(filter(None, (last.text, said.text)))
            joined[-1] = Said("assistant", text, (*last.calls, *said.calls), (*last.ids, *said.ids))
        else:
            joined.append(said)
    for place, said in enumerate(joined):
        answers = list(takewhile(lambda one: one.role == "tool", joined[place + 1 :]))
        if len(said.ids) > 1 and {one.ids[:1] for one in answers} == {(id,) for id in said.ids}:
            joined[place + 1 : place + 1 + len(answers)] = sorted(answers, key=lambda one: said.ids.index(one.ids[0]))
    return tuple(joined)


def num_shared(one: Sequence[Said], other: Sequence[Said]) -> int:
    """The length of the common prefix."""
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0].is_like(pair[1]), pairs))


def status_of(call: ToolCall, tools: Tools) -> tuple[CallStatus, str]:
    """Whether a call is of a tool that the client offered, and what is wrong with it."""
    if call.error:
        return "malformed", call.error
    if not tools:  # calls are text between the agent and the model
        return "ok", ""
    tool = next((tool for tool in tools if tool.name == call.name), None)
    if tool is None:
        return "unknown_tool", f"there is no tool {call.name}"
    known = tool.parameters.get("properties")
    missing = [name for name in tool.parameters.get("required") or () if name not in call.arguments]
    if missing:
        return "malformed", f"{call.name} needs {', '.join(missing)}"
    extra = [name for name in call.arguments if known and name not in known]
    if extra:
        return "malformed", f"{call.name} takes no {', '.join(extra)}"
    return "ok", ""


def _shown(message: Message, chat: Chat, tools: Tools) -> Shown:
    """A sampled message as a client sees it. Without tools everything is text."""
    text = message.text
    calls = message.calls if tools else ()
    begin = answer_start(text, chat.thinking)
    starts = [*(max(begin, call.start) for call in calls), len(text)]
    said = text[begin : starts[0]]
    said += "".join(text[starts[n] : starts[n + 1]] for n, call in enumerate(calls) if call.error)
    thought = text[:begin].strip().removeprefix(THINK_START).removesuffix(THINK_END).strip()
    return Shown(thought, said.strip(), tuple(call for call in calls if not call.error))


FREE = Prices()


@dataclass(frozen=True)
class Request:
    messages: tuple[Said, ...]
    tools: Tools


@dataclass(eq=False)
class Track:
    """A segment as of its last answer, and its messages as the client knows them. The next answer makes a new track."""

    request: Request  # with the answer: one message for each of the segment
    places: dict[str, int]  # of the answers among the messages, by their ids
    segment: Segment
    answer: Answer
    is_busy: bool = False  # a request waits for its next message


class Over(OffbookError):
    """The session has ended or has reached a limit."""


class Line(Policy, Protocol):
    """A session of the engine."""

    def close(self) -> None: ...


class Recorder:
    """`open_line` opens an engine session, by a name for its random numbers: one for the whole session, and more while
    requests overlap. A `line` that is passed in is used first, and its owner closes it."""

    def __init__(
        self,
        rollout: Rollout,
        chat: Chat,
        open_line: Callable[[str], Line],
        limits: Limits,
        prices: Prices = FREE,
        on_turn: Callable[[], None] = lambda: None,
        line: Line | None = None,
    ):
        self.rollout = rollout
        self.chat = chat
        self.limits = limits
        self.prices = prices
        self.on_turn = on_turn
        self.tracks: list[Track] = []
        self.limit: StopReason | None = None  # that was reached
        self.lost: ModelLost | None = None
        self.is_over = asyncio.Event()  # nothing more will come of it
        self.has_ended = False
        self.num_waiting = 0  # requests without an answer
        self._open_line = open_line
        self._line = line or open_line(rollout.id)
        self._is_line_own = line is None
        self._is_line_busy = False
        self._numbers = itertools.count(1)
        self._notes: list[tuple[str, str, str]] = []  # answer's id, kind, detail
        self._began = self.touched = time.monotonic()

    async def answer(self, asked: Asked) -> Answer:
        """The model's next message."""
        self.touched = time.monotonic()
        request = _request(asked)
        if self.has_ended:
            raise Over("this session has ended")
        if self.rollout.usage.turns + self.num_waiting >= self.limits.turns:
            self._reach("turns", f"{self.limits.turns} messages (harness.turns)")
        self.num_waiting += 1
        track = self._continued(request)
        if track is not None:
            track.is_busy = True
        try:
            return await self._sampled(request, track, asked)
        finally:
            if track is not None:
                track.is_busy = False
            self.num_waiting -= 1
            self.touched = time.monotonic()

    def note(self, kind: str, detail: str, answer: str = "") -> None:
        """Record an event at the answer with this id, or at the last one."""
        if answer and not any(answer in track.places for track in self.tracks):
            raise Refused(f"this session has no answer {answer}")
        last = self._last()
        self._notes.append((answer or (last.answer.id if last else ""), kind, detail))

    def end(self, stop: StopReason | None = None) -> Rollout:
        """The rollout, complete except for its reward. Without a reason its last message says how it ended."""
        rollout = self.rollout
        if self.has_ended:
            return rollout
        self.has_ended = True
        self.is_over.set()
        if self._is_line_own:
            self._line.close()
        last = self._last()
        has_called = last is not None and last.segment.messages[-1].calls
        rollout.stop = self.limit or stop or ("finish" if has_called else "answer")
        if not rollout.tools and self.tracks:
            rollout.tools = tuple(tool.name for tool in self.tracks[0].request.tools)
        for name, kind, detail in self._notes:
            places = [(track.places[name], number) for number, track in enumerate(self.tracks) if name in track.places]
            message, number = places[0] if places else (-1, 0)
            rollout.events.append(Event(message, kind, detail, number))
        self._count_calls()
        rollout.usage.seconds = time.monotonic() - self._began
        count_tokens(rollout.segments, self.chat, rollout.usage)
        return rollout

    def _last(self) -> Track | None:
        return max(self.tracks, key=lambda track: track.answer.number, default=None)

    # Where a request belongs

    def _continued(self, request: Request) -> Track | None:
        """The longest conversation that the request continues and no other request is using."""
        found = []
        for track in self.tracks:
            known = track.request
            is_begin = num_shared(known.messages, request.messages) == len(known.messages)
            if is_begin and known.tools == request.tools and not track.is_busy:
                found.append(track)
        return max(found, key=lambda track: len(track.request.messages), default=None)

    def _written(self, request: Request, track: Track | None) -> Transcript:
        """The request as a transcript: a copy of the track's segment and the new messages, or all of it."""
        transcript = Transcript(self.chat, request.tools)
        begin = 0
        if track is not None:
            old = track.segment
            copy = Segment([*old.ids], [*old.sampled], [*old.logprobs], [*old.versions], [*old.messages])
            transcript = Transcript.after(copy, self.chat, request.tools)
            begin = len(old.messages)
        try:
            for index, said in enumerate(request.messages[begin:], begin):
                if said.role == "assistant":
                    ids = [*self.chat.answer(said.text, said.calls), self.chat.end_id]
                    message = transcript.add_sampled(Completion(ids, [0.0] * len(ids), [-1] * len(ids)))
                    transcript.segment.sampled[message.body : message.end] = [False] * (message.end - message.body)
                    continue
                telling = self.chat.telling(request.tools) if index == 0 else ""
                status = _answer_status(request, index) if said.role == "tool" else None
                transcript.add(said.role, "\n\n".join(filter(None, (said.text, telling))), status)
        except OffbookError:
            raise
        except Exception as error:  # the border to the model's template: not every order of messages has a form
            raise Refused(f"the model's chat cannot hold this conversation: {error}") from error
        return transcript

    # From the engine to the record

    async def _sampled(self, request: Request, track: Track | None, asked: Asked) -> Answer:
        usage = self.rollout.usage
        written = self._written(request, track)
        ids = written.prompt()
        if track is not None:
            usage.drift += ids[: len(track.segment.ids)] != track.segment.ids
        room = self._room(len(ids), track, asked.max_tokens)
        completion = await self._complete(Prompt(ids, tuple(written.segment.messages), request.tools), room)
        num_read, num_written = completion.billed or (len(ids), len(completion.ids))
        usage.cost += (self.prices.input * num_read + self.prices.output * num_written) / 1e6
        if self.has_ended:
            raise Over("this session ended before the answer was there")
        message = written.add_sampled(completion)
        shown = _shown(message, self.chat, request.tools)
        answer = Answer(
            asked.id,
            next(self._numbers),
            shown,
            tuple(f"call_{asked.id}_{place}" for place in range(len(shown.calls))),
            is_cut=not set(completion.ids[-1:]) & self.chat.stop_ids,
            prompt_tokens=len(ids),
            sampled_tokens=len(completion.ids),
        )
        known = track.request.messages if track else ()
        own = Said("assistant", shown.text, shown.calls, answer.call_ids)
        said = (*known, *request.messages[len(known) :], own)
        places = {**(track.places if track else {}), answer.id: len(said) - 1}
        new = Track(Request(said, request.tools), places, written.segment, answer)
        if track is None:
            self.tracks.append(new)
        else:
            self.tracks[self.tracks.index(track)] = new
        usage.turns += 1
        self.rollout.segments = [one.segment for one in self.tracks]
        self.on_turn()
        return answer

    async def _complete(self, prompt: Prompt, room: int) -> Completion:
        """Ask an engine session that is free: each has the KV cache of one conversation."""
        began = time.monotonic()
        is_extra = self._is_line_busy
        line = self._open_line(f"{self.rollout.id}/{next(self._numbers)}") if is_extra else self._line
        self._is_line_busy = True
        try:
            return await line.complete(prompt, room)
        except ModelLost as lost:
            self.lost = lost
            self.is_over.set()
            raise
        finally:
            self.rollout.usage.model_seconds += time.monotonic() - began
            if is_extra:
                line.close()
            else:
                self._is_line_busy = False

    # Limits and counts

    def _reach(self, limit: StopReason, what: str) -> None:
        self.limit = limit
        self.is_over.set()
        raise Over(f"this session has used up its {what}")

    def _room(self, length: int, track: Track | None, wanted: int) -> int:
        """Tokens that the answer may have. An agent whose context is full may summarize and continue; one that has used
        all its tokens has ended."""
        limits = self.limits
        budget = limits.tokens - length - sum(len(one.segment.ids) for one in self.tracks if one is not track)
        if budget <= 0:
            self._reach("tokens", f"{limits.tokens} tokens (harness.tokens)")
        window = limits.context - length
        if window <= 0:
            most = f"this model's maximum context length is {limits.context} tokens (harness.context)"
            raise PromptTooLong(f"{most}, and the prompt has {length}")
        return min(limits.message_tokens, budget, window, wanted or limits.message_tokens)

    def _count_calls(self) -> None:
        """Count calls, with an event for each that cannot be run."""
        usage = self.rollout.usage
        for number, track in enumerate(self.tracks):
            for index, message in enumerate(track.segment.messages):
                for call in message.calls if track.segment.is_own(message) else ():
                    status, problem = status_of(call, track.request.tools)
                    usage.calls += 1
                    if status in INVALID:
                        usage.invalid_calls += 1
                        self.rollout.events.append(Event(index, status, problem, number))


def _request(asked: Asked) -> Request:
    """The conversation, in a form that can be compared and written."""
    messages = in_order(asked.messages)
    if not messages or messages[-1].role == "assistant":
        raise Refused("the last message must be the user's or a tool's: the model begins its messages itself")
    if messages[0].role not in ("system", "user"):
        raise Refused("a conversation begins with the system's or the user's message")
    if asked.tools and messages[0].role != "system":  # which describes them
        messages = (Said("system", ""), *messages)
    return Request(messages, asked.tools)


def _answer_status(request: Request, index: int) -> CallStatus:
    """How the call went that a tool's message answers: answers follow the calls in their order."""
    begin = index
    while request.messages[begin].role == "tool":
        begin -= 1
    calls = request.messages[begin].calls
    place = index - begin - 1
    status = status_of(calls[place], request.tools)[0] if place < len(calls) else "ok"
    return "failed" if status == "ok" and request.messages[index].failed else status
