"""One agent's work at an endpoint, as a rollout: requests are written as ids, continued by the model, and kept as ids.

A request whose history is a conversation of this session with something new behind it extends that segment: the prompt
is the ids that are there and new ones. Any other history opens a segment: edited, summed up, gone back to an earlier
message, or a sub-agent's. What it repeats of the model's messages has the ids that were sampled then and does not count
as sampled, so that no token is learned from twice. Two requests at once go on in two segments.

An answer that did not arrive is taken back, and given again to whoever asks the same. Thinking stays in the
conversation, whether or not the client sends it back, as it does in offbook's own agent.

Left out: a message that the client has begun, sampling parameters (an engine has one temperature), logprobs.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Protocol

from offbook.agent.chat import Chat, Transcript, count_tokens, telling
from offbook.agent.recorder.said import Answer, Asked, Reading, Refused, Said, Shown, in_order, num_shared, status_of
from offbook.agent.recorder.track import Request, Track, answer_status
from offbook.types import (
    INVALID,
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

LONG = 50_000  # characters; what takes the tokenizer longer is written in a thread
FREE = Prices()
OnShown = Callable[[Shown], None]


class Over(OffbookError):
    """The session has ended, or has used up what it may."""


class Line(Policy, Protocol):
    """To the engine."""

    def close(self) -> None: ...


class Session:
    """`open_line` gives a way to the engine, by a name for its random numbers: one for the session, unless it is given
    a `line` that somebody else closes, and more while its requests overlap."""

    def __init__(
        self,
        rollout: Rollout,
        chat: Chat,
        open_line: Callable[[str], Line],
        limits: Limits,
        prices: Prices = FREE,
        on_turn: Callable[[Track], None] = lambda track: None,
        line: Line | None = None,
    ):
        self.rollout, self.chat, self.limits, self.prices, self.on_turn = rollout, chat, limits, prices, on_turn
        self.tracks: list[Track] = []
        self.limit: StopReason | None = None  # that was reached
        self.lost: ModelLost | None = None  # what the model was lost to
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
        """Somebody waits for an answer."""
        return bool(self._flying)

    async def answer(self, asked: Asked, on_shown: OnShown | None = None) -> Answer:
        """The model's next message. `on_shown` is told of it as it comes, where the engine tells."""
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
        """What a first attempt that still goes on comes to. If one was answered, the answer did not arrive."""
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
            return self._keep(asked.id, track, written, request, completion, room)
        finally:
            if track is not None:
                track.is_busy = False

    def take_back(self, answer: Answer) -> None:
        """It did not arrive: then it is as if it had not been, but for whoever asks the same."""
        track = next((track for track in self.tracks if track.answer is answer), None)
        if track is None or track.is_busy or self.has_ended:  # busy: the client did get it, and goes on from there
            return
        self._notes.append(("", "taken_back", "an answer did not arrive"))
        place = self.tracks.index(track)
        self.tracks[place : place + 1] = [track.before] if track.before else []
        self._taken_back.append((track.request, track.completion))
        self.rollout.usage.turns -= 1
        self._show()

    def note(self, kind: str, detail: str, answer: str = "") -> None:
        """An event at the answer of this name; without one at the last."""
        if answer and not any(answer in track.names for track in self.tracks):
            raise Refused(f"this session has no answer {answer}")
        last = max((track.answer for track in self.tracks), key=lambda one: one.number, default=None)
        self._notes.append((answer or (last.id if last else ""), kind, detail))

    def end(self, stop: StopReason | None = None) -> Rollout:
        """The rollout, complete but for what it earned. Without a reason it ended as its last message says."""
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
        if asked.tools and messages[0].role != "system":  # which is where they are told of
            messages = (Said("system", ""), *messages)
        return Request(messages, asked.tools)

    def _history(self, answer: str) -> tuple[Said, ...]:
        for track in self.tracks:
            if answer in track.names:
                return track.said[: track.names.index(answer) + 1]
        raise Refused(f"this session has no answer {answer}")

    def _continued(self, request: Request) -> Track | None:
        """The longest conversation that the request goes on, if nobody else does so just now."""
        found = [
            track
            for track in self.tracks
            if not track.is_busy
            and track.tools == request.tools
            and num_shared(track.said, request.messages) == len(track.said)
        ]
        return max(found, key=lambda track: len(track.said), default=None)

    def _written(self, request: Request, track: Track | None) -> Transcript:
        """Behind a copy of the track's segment, or from the beginning."""
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
        if index == 0 and tools and not self.chat.tells_tools:
            text = "\n\n".join(filter(None, (text, telling(tools))))
        transcript.add(said.role, text, answer_status(request, index) if said.role == "tool" else None)

    def _sampled_before(self, request: Request, index: int) -> list[int]:
        """The ids of such a message of this session, of one at the same place if there is one."""
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
        """A line holds the keys and values of one conversation at a time."""
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
        self, name: str, track: Track | None, written: Transcript, request: Request, completion: Completion, room: int
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
        new = Track(request.tools, (*said, own), names, written.segment, answer, completion, room, track)
        if track is None:
            self.tracks.append(new)
        else:
            self.tracks[self.tracks.index(track)] = new
            track.before = None
        self.rollout.usage.turns += 1
        self._show()
        self.on_turn(new)
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
        """An agent whose context is full may sum it up and go on; one without tokens is at its end."""
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
        places = {
            name: (segment, index)
            for segment, track in enumerate(self.tracks)
            for index, name in enumerate(track.names)
            if name
        }
        found = [(*places.get(name, (0, -1)), kind, detail) for name, kind, detail in self._notes]
        return [Event(index, kind, detail, segment) for segment, index, kind, detail in found]

    def _count_calls(self) -> list[Event]:
        """Those that could not be run are events."""
        events, usage = [], self.rollout.usage
        for number, track in enumerate(self.tracks):
            for index, message in enumerate(track.segment.messages):
                for call in message.calls if track.segment.is_own(message) else ():
                    status, problem = status_of(call, track.tools)
                    usage.calls += 1
                    usage.invalid_calls += status in INVALID
                    events += [Event(index, status, problem, number)] if status in INVALID else []
        return events
