"""Records one agent's work at an endpoint as a rollout: requests become ids, the model continues them, ids are kept.

A request whose history is a conversation of this session plus new messages extends that segment: the prompt is the
recorded ids and new ones. Any other history (edited, summarised, rewound, a sub-agent's) opens a segment. Messages of
the model in it keep the ids that were sampled, and do not count as sampled, so no token is learned from twice.
Overlapping requests go on in two segments.

A retry of a request gets the answer of the first attempt. A request whose client disconnects while the model writes
leaves nothing. Thinking stays in the conversation, whether or not the client sends it back.

Left out: a message that the client has begun, sampling parameters (an engine has one temperature), logprobs.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from offbook.agent.chat import Chat, Transcript, count_tokens
from offbook.agent.chat.dialects import Tools
from offbook.agent.recorder.said import Answer, Asked, Reading, Refused, Said, Shown, in_order, num_shared, status_of
from offbook.types import (
    INVALID,
    CallStatus,
    Completion,
    Event,
    Limits,
    ModelLost,
    OffbookError,
    Policy,
    Prices,
    Prompt,
    PromptTooLong,
    Rollout,
    Segment,
    StopReason,
)

FREE = Prices()
OnShown = Callable[[Shown], None]


@dataclass(frozen=True, slots=True)
class Request:
    messages: tuple[Said, ...]
    tools: Tools

    def is_like(self, other: Request) -> bool:
        count = len(self.messages)
        same = count == len(other.messages) and self.tools == other.tools
        return same and num_shared(self.messages, other.messages) == count


@dataclass(slots=True, eq=False)
class Track:
    """A segment as of its last answer, and its messages as the client knows them. The next answer makes a new track."""

    tools: Tools
    said: tuple[Said, ...]  # one for each message of the segment
    names: tuple[str, ...]  # ids of the answers, empty for other messages
    segment: Segment
    answer: Answer
    is_busy: bool = False  # a request waits for its next message


class Over(OffbookError):
    """The session has ended or has reached a limit."""


class Line(Policy, Protocol):
    """A session of the engine."""

    def close(self) -> None: ...


class Session:
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
        self._open_line = open_line
        self._line = line or open_line(rollout.id)
        self._is_line_own = line is None
        self._is_line_busy = False
        self._numbers = itertools.count(1)
        self._waiting: dict[asyncio.Future[Answer], Request] = {}
        self._notes: list[tuple[str, str, str]] = []  # answer's id, kind, detail
        self._began = self.touched = time.monotonic()

    @property
    def is_asked(self) -> bool:
        """Whether a request waits for an answer."""
        return bool(self._waiting)

    async def answer(self, asked: Asked, on_shown: OnShown | None = None) -> Answer:
        """The model's next message. `on_shown` is a callback for the message so far, if the engine streams."""
        self.touched = time.monotonic()
        request = self._request(asked)
        earlier = await self._earlier(request) if asked.retry else None
        if earlier:
            return earlier
        self._refuse_over()
        for name, value in asked.ignored.items():
            note = ("", "ignored", f"{name} = {str(value)[:80]}")
            if note not in self._notes:
                self._notes.append(note)
        done = asyncio.get_running_loop().create_future()
        self._waiting[done] = request
        track = self._continued(request)
        if track is not None:
            track.is_busy = True
        try:
            answer = await self._sampled(request, track, asked, on_shown)
            done.set_result(answer)
            return answer
        except asyncio.CancelledError:
            self._notes.append(("", "given_up", "the client disconnected before the answer"))
            raise
        finally:
            if track is not None:
                track.is_busy = False
            del self._waiting[done]
            done.cancel()
            self.touched = time.monotonic()

    def count(self, asked: Asked) -> int:
        """The tokens of the prompt that this request would be."""
        request = self._request(asked)
        return len(self._written(request, self._continued(request)).prompt())

    def note(self, kind: str, detail: str, answer: str = "") -> None:
        """Record an event at the answer with this id, or at the last one."""
        if answer and not any(answer in track.names for track in self.tracks):
            raise Refused(f"this session has no answer {answer}")
        last = self._last()
        self._notes.append((answer or (last.answer.id if last else ""), kind, detail))

    def end(self, stop: StopReason | None = None) -> Rollout:
        """The rollout, complete except for its reward. Without a reason its last message says how it ended."""
        rollout, usage = self.rollout, self.rollout.usage
        if self.has_ended:
            return rollout
        self.has_ended = True
        self.is_over.set()
        if self._is_line_own:
            self._line.close()
        last = self._last()
        has_called = last is not None and last.segment.messages[-1].calls
        rollout.stop = self.limit or stop or ("finish" if has_called else "answer")
        rollout.tools = rollout.tools or next((tuple(tool.name for tool in one.tools) for one in self.tracks), ())
        for name, kind, detail in self._notes:
            places = ((number, track) for number, track in enumerate(self.tracks) if name and name in track.names)
            number, track = next(places, (0, None))
            rollout.events.append(Event(track.names.index(name) if track else -1, kind, detail, number))
        self._count_calls()
        usage.seconds = time.monotonic() - self._began
        count_tokens(rollout.segments, self.chat, usage)
        return rollout

    def _last(self) -> Track | None:
        return max(self.tracks, key=lambda track: track.answer.number, default=None)

    # Where a request belongs

    def _request(self, asked: Asked) -> Request:
        """The whole conversation, in a form that can be compared and written."""
        messages = asked.messages
        if asked.after:  # its instructions are not carried over
            before = next((track for track in self.tracks if asked.after in track.names), None)
            if before is None:
                raise Refused(f"this session has no answer {asked.after}")
            history = before.said[: before.names.index(asked.after) + 1]
            system = [said for said in messages if said.role == "system"]
            rest = [said for said in (*history, *messages) if said.role != "system"]
            messages = (*system, *rest)
        messages = in_order(messages)
        if not messages or messages[-1].role == "assistant":
            raise Refused("the last message must be the user's or a tool's: the model begins its messages itself")
        if messages[0].role not in ("system", "user"):
            raise Refused("a conversation begins with the system's or the user's message")
        if asked.tools and messages[0].role != "system":  # which describes them
            messages = (Said("system", ""), *messages)
        return Request(messages, asked.tools)

    async def _earlier(self, request: Request) -> Answer | None:
        """The answer of an equal request, also of one that is still waiting for it."""
        for done in [done for done, waiting in self._waiting.items() if waiting.is_like(request)]:
            await asyncio.wait({done})
            if not done.cancelled():
                return done.result()
        answered = (track for track in self.tracks if Request(track.said[:-1], track.tools).is_like(request))
        return next((track.answer for track in answered), None)

    def _continued(self, request: Request) -> Track | None:
        """The longest conversation that the request continues and no other request is using."""
        found = [
            track
            for track in self.tracks
            if not track.is_busy
            and track.tools == request.tools
            and num_shared(track.said, request.messages) == len(track.said)
        ]
        return max(found, key=lambda track: len(track.said), default=None)

    def _written(self, request: Request, track: Track | None) -> Transcript:
        """The request as a transcript: a copy of the track's segment and the new messages, or all of it."""
        transcript = Transcript(self.chat, request.tools)
        if track is not None:
            old = track.segment
            copy = Segment([*old.ids], [*old.sampled], [*old.logprobs], [*old.versions], [*old.messages])
            transcript = Transcript.after(copy, self.chat, request.tools)
        try:
            for index in range(len(track.said) if track else 0, len(request.messages)):
                said = request.messages[index]
                if said.role == "assistant":
                    ids = self._sampled_before(request, index)
                    ids = ids or [*self.chat.answer(said.text, said.calls), self.chat.end_id]
                    message = transcript.add_sampled(Completion(ids, [0.0] * len(ids), [-1] * len(ids)))
                    transcript.segment.sampled[message.body : message.end] = [False] * (message.end - message.body)
                    continue
                telling = self.chat.telling(request.tools) if index == 0 else ""
                status = answer_status(request, index) if said.role == "tool" else None
                transcript.add(said.role, "\n\n".join(filter(None, (said.text, telling))), status)
        except OffbookError:
            raise
        except Exception as error:  # the border to the model's template: not every order of messages has a form
            raise Refused(f"the model's chat cannot hold this conversation: {error}") from error
        return transcript

    def _sampled_before(self, request: Request, index: int) -> list[int]:
        """The ids of an equal message that was sampled in this session, preferably at the same index."""
        said = request.messages[index]
        for track in sorted(self.tracks, key=lambda one: -num_shared(one.said, request.messages)):
            places = [place for place, other in enumerate(track.said) if said.is_like(other)]
            if places:
                message = track.segment.messages[index if index in places else places[-1]]
                return track.segment.ids[message.body : message.body_end + 1]
        return []

    # From the engine to the record

    async def _sampled(self, request: Request, track: Track | None, asked: Asked, on_shown: OnShown | None) -> Answer:
        usage = self.rollout.usage
        written = self._written(request, track)
        ids = written.prompt()
        reading = Reading(self.chat, request.tools)
        if track is not None:
            usage.drift += ids[: len(track.segment.ids)] != track.segment.ids
        room = self._room(len(ids), track, asked.max_tokens)
        heard = (lambda ids: on_shown(reading.so_far(ids))) if on_shown else None
        prompt = Prompt(ids, tuple(written.segment.messages), request.tools, heard)
        began = time.monotonic()
        try:
            async with self._free_line() as line:
                completion = await line.complete(prompt, room)
        except ModelLost as lost:
            self.lost = lost
            self.is_over.set()
            raise
        finally:
            usage.model_seconds += time.monotonic() - began
        num_read, num_written = completion.billed or (len(ids), len(completion.ids))
        usage.cost += (self.prices.input * num_read + self.prices.output * num_written) / 1e6
        if self.has_ended:
            raise Over("this session ended before the answer was there")
        message = written.add_sampled(completion)
        shown = reading.whole(written.segment.ids[message.body : message.body_end])
        answer = Answer(
            asked.id,
            next(self._numbers),
            shown,
            tuple(f"call_{asked.id}_{place}" for place in range(len(shown.calls))),
            is_cut=not set(completion.ids[-1:]) & self.chat.stop_ids,
            prompt_tokens=len(ids),
            sampled_tokens=len(completion.ids),
        )
        known = track.said if track else ()
        names = track.names if track else ()
        own = Said("assistant", shown.text, shown.calls, answer.call_ids)
        said = (*known, *request.messages[len(known) :], own)
        names = (*names, *[""] * (len(said) - len(names) - 1), answer.id)
        new = Track(request.tools, said, names, written.segment, answer)
        if track is None:
            self.tracks.append(new)
        else:
            self.tracks[self.tracks.index(track)] = new
        usage.turns += 1
        self.rollout.segments = [one.segment for one in self.tracks]
        self.on_turn()
        return answer

    @asynccontextmanager
    async def _free_line(self) -> AsyncIterator[Line]:
        """An engine session that is free: each has the KV cache of one conversation."""
        if not self._is_line_busy:
            self._is_line_busy = True
            try:
                yield self._line
            finally:
                self._is_line_busy = False
            return
        line = self._open_line(f"{self.rollout.id}/{next(self._numbers)}")
        try:
            yield line
        finally:
            line.close()

    # Limits and counts

    def _refuse_over(self) -> None:
        if self.has_ended:
            raise Over("this session has ended")
        if self.rollout.usage.turns + len(self._waiting) >= self.limits.turns:
            self._reach("turns", f"{self.limits.turns} messages (harness.turns)")

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
                    status, problem = status_of(call, track.tools)
                    usage.calls += 1
                    if status in INVALID:
                        usage.invalid_calls += 1
                        self.rollout.events.append(Event(index, status, problem, number))


def answer_status(request: Request, index: int) -> CallStatus:
    """How the call went that a tool's message answers: answers follow the calls in their order."""
    begin = index
    while request.messages[begin].role == "tool":
        begin -= 1
    calls, place = request.messages[begin].calls, index - begin - 1
    status = status_of(calls[place], request.tools)[0] if place < len(calls) else "ok"
    return "failed" if status == "ok" and request.messages[index].failed else status
