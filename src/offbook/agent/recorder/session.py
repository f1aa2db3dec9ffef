"""Records one agent's work at an endpoint as a rollout: requests become ids, the model continues them, ids are kept.

A request whose history is a conversation of this session with something new behind it extends that segment: the prompt
is the ids that are there and new ones. Any other history opens a segment: edited, summed up, gone back to an earlier
message, or a sub-agent's. What it repeats of the model's messages has the ids that were sampled then and does not count
as sampled, so that no token is learned from twice. Two requests at once go on in two segments.

An answer that did not arrive is taken back, and returned again if the same request is retried. Thinking stays in the
conversation, whether or not the client sends it back, as it does in offbook's own agent.

Left out: a message that the client has begun, sampling parameters (an engine has one temperature), logprobs.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
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

LONG = 50_000  # characters; longer texts are encoded in a thread
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
    names: tuple[str, ...]  # the answers that they are, empty for others
    segment: Segment
    answer: Answer
    completion: Completion
    before: Track | None = None  # without this answer; None where it is the first, or can no longer be taken back
    is_busy: bool = False  # a request waits for its next message

    @property
    def request(self) -> Request:
        return Request(self.said[:-1], self.tools)

    def words(self, index: int) -> list[int]:
        """The ids of a message of the model's, with the token that ends it."""
        message = self.segment.messages[index]
        return self.segment.ids[message.body : message.body_end + 1]


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
        self.rollout, self.chat, self.limits, self.prices, self.on_turn = rollout, chat, limits, prices, on_turn
        self.tracks: list[Track] = []
        self.limit: StopReason | None = None  # that was reached
        self.lost: ModelLost | None = None  # why the model was lost
        self.is_over = asyncio.Event()  # nothing more will come of it
        self.has_ended = False
        self._open_line, self._line, self._is_line_busy = open_line, line or open_line(rollout.id), False
        self._is_line_own = line is None
        self._numbers = itertools.count(1)
        self._flying: dict[asyncio.Future[Answer], Request] = {}
        self._taken_back: list[tuple[Request, Completion]] = []
        self._notes: list[tuple[str, str, str]] = []  # the answer it is about, kind, detail
        self._began = self.touched = time.monotonic()

    @property
    def is_asked(self) -> bool:
        """Whether a request waits for an answer."""
        return bool(self._flying)

    async def answer(self, asked: Asked, on_shown: OnShown | None = None) -> Answer:
        """The model's next message. `on_shown` is a callback for the message so far, if the engine streams."""
        self.touched = time.monotonic()
        request = self._request(asked)
        if asked.retry and (answer := await self._before(request)):
            return answer
        self._refuse_over()
        for name, value in asked.ignored.items():
            self._note_once("ignored", f"{name} = {str(value)[:80]}")
        done = asyncio.get_running_loop().create_future()
        self._flying[done] = request
        try:
            answer = await self._answered(request, asked, on_shown)
            done.set_result(answer)
            return answer
        except asyncio.CancelledError:
            self._notes.append(("", "given_up", "the client went away before the answer was there"))
            raise
        finally:
            del self._flying[done]
            done.cancel()
            self.touched = time.monotonic()

    def count(self, asked: Asked) -> int:
        """The tokens of the prompt that this request would be."""
        request = self._request(asked)
        return len(self._written(request, self._continued(request)).prompt())

    async def _before(self, request: Request) -> Answer | None:
        """For a retry: the result of the first attempt if it is still running. If it was answered, the answer did not
        arrive."""
        for done in [done for done, flying in self._flying.items() if flying.is_like(request)]:
            await asyncio.wait({done})
            if not done.cancelled():
                return done.result()
        answers = [track.answer for track in self.tracks if track.request.is_like(request)]
        if answers:
            self.take_back(max(answers, key=lambda answer: answer.number))
        return None

    async def _answered(self, request: Request, asked: Asked, on_shown: OnShown | None) -> Answer:
        track = self._continued(request)
        if track is not None:
            track.is_busy = True
        try:
            new = request.messages[len(track.said) if track else 0 :]
            is_long = sum(len(said.text) for said in new) > LONG
            write = partial(self._written, request, track)
            written = await asyncio.to_thread(write) if is_long else write()
            ids, reading = written.prompt(), Reading(self.chat, request.tools)
            if track is not None:
                self.rollout.usage.drift += ids[: len(track.segment.ids)] != track.segment.ids
            room = self._room(len(ids), track, asked.max_tokens)
            heard = (lambda ids: on_shown(reading.so_far(ids))) if on_shown else None
            prompt = Prompt(ids, tuple(written.segment.messages), request.tools, heard)
            completion = self._given_again(request) or await self._completed(prompt, room)
            if self.has_ended:
                raise Over("this session ended before the answer was there")
            return self._keep(asked.id, track, written, request, completion)
        finally:
            if track is not None:
                track.is_busy = False

    def take_back(self, answer: Answer) -> None:
        """Undo an answer that did not arrive; it is kept for a retry of the same request."""
        track = next((track for track in self.tracks if track.answer is answer), None)
        if track is None or track.is_busy or self.has_ended:  # busy: the client got it and continues from it
            return
        self._notes.append(("", "taken_back", "an answer did not arrive"))
        place = self.tracks.index(track)
        self.tracks[place : place + 1] = [track.before] if track.before else []
        self._taken_back.append((track.request, track.completion))
        self.rollout.usage.turns -= 1
        self._show()

    def note(self, kind: str, detail: str, answer: str = "") -> None:
        """Record an event at the answer of this name, or at the last one."""
        if answer and not any(answer in track.names for track in self.tracks):
            raise Refused(f"this session has no answer {answer}")
        last = max((track.answer for track in self.tracks), key=lambda one: one.number, default=None)
        self._notes.append((answer or (last.id if last else ""), kind, detail))

    def end(self, stop: StopReason | None = None) -> Rollout:
        """The rollout, complete except for its reward. Without a reason its last message says how it ended."""
        rollout, usage = self.rollout, self.rollout.usage
        if self.has_ended:
            return rollout
        self.has_ended = True
        self.is_over.set()
        last = max(self.tracks, key=lambda track: track.answer.number, default=None)
        has_called = last is not None and last.segment.messages[-1].calls
        rollout.stop = self.limit or stop or ("finish" if has_called else "answer")
        if self._is_line_own:
            self._line.close()
        self._show()
        rollout.tools = rollout.tools or next((tuple(tool.name for tool in one.tools) for one in self.tracks), ())
        rollout.events += [*self._noted(), *self._count_calls()]
        usage.seconds = time.monotonic() - self._began
        count_tokens(rollout.segments, self.chat, usage)
        return rollout

    # Where a request belongs

    def _request(self, asked: Asked) -> Request:
        """The whole conversation, in a form that can be compared and written."""
        messages = asked.messages
        if asked.after:  # its instructions are not carried over
            history = [said for said in self._history(asked.after) if said.role != "system"]
            own = [said for said in messages if said.role == "system"]
            messages = (*own, *history, *(said for said in messages if said.role != "system"))
        messages = in_order(messages)
        if not messages or messages[-1].role == "assistant":
            raise Refused("the last message must be the user's or a tool's: the model begins its messages itself")
        if messages[0].role not in ("system", "user"):
            raise Refused("a conversation begins with the system's or the user's message")
        if asked.tools and messages[0].role != "system":  # which describes them
            messages = (Said("system", ""), *messages)
        return Request(messages, asked.tools)

    def _history(self, answer: str) -> tuple[Said, ...]:
        for track in self.tracks:
            if answer in track.names:
                return track.said[: track.names.index(answer) + 1]
        raise Refused(f"this session has no answer {answer}")

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
        try:
            if track is None:
                transcript = Transcript(self.chat, request.tools)
            else:
                old = track.segment
                copy = Segment([*old.ids], [*old.sampled], [*old.logprobs], [*old.versions], [*old.messages])
                transcript = Transcript.after(copy, self.chat, request.tools)
            for index in range(len(track.said) if track else 0, len(request.messages)):
                self._write(transcript, request, index)
        except OffbookError:
            raise
        except Exception as error:  # the border to the model's template: not every order of messages has a form
            raise Refused(f"the model's chat cannot hold this conversation: {error}") from error
        return transcript

    def _write(self, transcript: Transcript, request: Request, index: int) -> None:
        said = request.messages[index]
        if said.role == "assistant":
            ids = self._sampled_before(request, index) or [*self.chat.answer(said.text, said.calls), self.chat.end_id]
            message = transcript.add_sampled(Completion(ids, [0.0] * len(ids), [-1] * len(ids)))
            transcript.segment.sampled[message.body : message.end] = [False] * (message.end - message.body)
            return
        text, tools = said.text, request.tools
        if index == 0:
            text = "\n\n".join(filter(None, (text, self.chat.telling(tools))))
        transcript.add(said.role, text, answer_status(request, index) if said.role == "tool" else None)

    def _sampled_before(self, request: Request, index: int) -> list[int]:
        """The ids of an equal message that was sampled in this session, preferably at the same index."""
        said = request.messages[index]
        for track in sorted(self.tracks, key=lambda one: -num_shared(one.said, request.messages)):
            places = [place for place, other in enumerate(track.said) if said.is_like(other)]
            if places:
                return track.words(index if index in places else places[-1])
        return []

    # From the engine to the record

    async def _completed(self, prompt: Prompt, room: int) -> Completion:
        began = time.monotonic()
        try:
            async with self._free_line() as line:
                completion = await line.complete(prompt, room)
        except ModelLost as lost:
            self.lost = lost
            self.is_over.set()
            raise
        finally:
            self.rollout.usage.model_seconds += time.monotonic() - began
        read, written = completion.billed or (len(prompt.ids), len(completion.ids))
        self.rollout.usage.cost += (self.prices.input * read + self.prices.output * written) / 1e6
        return completion

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

    def _given_again(self, request: Request) -> Completion | None:
        for place, (before, completion) in enumerate(self._taken_back):
            if before.is_like(request):
                del self._taken_back[place]
                return completion
        return None

    def _keep(
        self, name: str, track: Track | None, written: Transcript, request: Request, completion: Completion
    ) -> Answer:
        num_prompt = len(written.prompt())
        message = written.add_sampled(completion)
        shown = Reading(self.chat, request.tools).whole(written.segment.ids[message.body : message.body_end])
        answer = Answer(
            name,
            next(self._numbers),
            shown,
            tuple(f"call_{name}_{place}" for place in range(len(shown.calls))),
            is_cut=not set(completion.ids[-1:]) & self.chat.stop_ids,
            prompt_tokens=num_prompt,
            sampled_tokens=len(completion.ids),
        )
        names = track.names if track else ()
        names = (*names, *[""] * (len(request.messages) - len(names)), name)
        said = (*(track.said if track else ()), *request.messages[len(track.said) if track else 0 :])
        own = Said("assistant", shown.text, shown.calls, answer.call_ids)
        new = Track(request.tools, (*said, own), names, written.segment, answer, completion, track)
        if track is None:
            self.tracks.append(new)
        else:
            self.tracks[self.tracks.index(track)] = new
            track.before = None
        self.rollout.usage.turns += 1
        self._show()
        self.on_turn()
        return answer

    def _show(self) -> None:
        self.rollout.segments = [track.segment for track in self.tracks]

    # Limits and counts

    def _refuse_over(self) -> None:
        limits, usage = self.limits, self.rollout.usage
        if self.has_ended:
            raise Over("this session has ended")
        if usage.turns + len(self._flying) >= limits.turns:
            self._reach("turns", f"{limits.turns} messages (harness.turns)")

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

    def _note_once(self, kind: str, detail: str) -> None:
        if all((kind, detail) != note[1:] for note in self._notes):
            self._notes.append(("", kind, detail))

    def _noted(self) -> list[Event]:
        positions = {
            name: (index, segment)
            for segment, track in enumerate(self.tracks)
            for index, name in enumerate(track.names)
            if name
        }
        events = []
        for name, kind, detail in self._notes:
            index, segment = positions.get(name, (-1, 0))
            events.append(Event(index, kind, detail, segment))
        return events

    def _count_calls(self) -> list[Event]:
        """Count calls; an event for each that cannot be run."""
        events, usage = [], self.rollout.usage
        for number, track in enumerate(self.tracks):
            for index, message in enumerate(track.segment.messages):
                for call in message.calls if track.segment.is_own(message) else ():
                    status, problem = status_of(call, track.tools)
                    usage.calls += 1
                    usage.invalid_calls += status in INVALID
                    events += [Event(index, status, problem, number)] if status in INVALID else []
        return events


def answer_status(request: Request, index: int) -> CallStatus:
    """How the call went that a tool's message answers: answers stand behind the calls in their order."""
    begin = index
    while request.messages[begin].role == "tool":
        begin -= 1
    calls, place = request.messages[begin].calls, index - begin - 1
    status = status_of(calls[place], request.tools)[0] if place < len(calls) else "ok"
    return "failed" if status == "ok" and request.messages[index].failed else status
