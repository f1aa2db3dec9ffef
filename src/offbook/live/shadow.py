"""A candidate behind an endpoint, unseen: at every request of a session it says what it would have said there.

It continues the ids that the deployed version continued, and nothing that it says goes on: another agent's tools cannot
be run twice. So single messages are compared, of both versions after the same history: calls that cannot be run, and
questions or empty hands where a change was asked for. Left out are what users think, and latency: a shadow waits for
nobody, and reads whole histories again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from offbook.agent.chat import Chat, Transcript
from offbook.agent.chat.strict import Tools
from offbook.agent.recorder import Track
from offbook.agent.recorder.said import status_of
from offbook.engine import Engine, Session
from offbook.live.reactions import broken_calls, dodged
from offbook.types import INVALID, OffbookError, Prompt, Rollout, Segment

BEHIND = 16  # answers that a shadow may be late by: one that cannot keep up is given up


class TooLate(OffbookError):
    """The shadow cannot keep up with its session."""


@dataclass(slots=True)
class Side:
    """One version's messages, each at the end of the history that both have read."""

    num_broken: int = 0
    dodged: float = 0.0

    def add(self, segment: Segment, tools: Tools) -> None:
        last = segment.messages[-1]
        self.num_broken += sum(status_of(call, tools)[0] in INVALID for call in last.calls)
        self.dodged = min(self.dodged, dodged(Rollout("", "", "", (), [segment], "answer", foreign=True)))

    @property
    def parts(self) -> dict[str, float]:
        return {"broken_calls": broken_calls(self.num_broken), "dodged": self.dodged}


@dataclass(slots=True)
class Shadow:
    """Of one session. `load` may take long and is called in a thread, when the first answer is there."""

    key: str
    version: int
    chat: Chat
    load: Callable[[], Engine]
    shown: Side = field(default_factory=Side)
    unseen: Side = field(default_factory=Side)
    _answers: asyncio.Queue[Track | None] = field(default_factory=asyncio.Queue)
    _following: asyncio.Task[None] | None = None
    _is_late: bool = False

    def hear(self, track: Track) -> None:
        """An answer that was shown."""
        self._is_late = self._is_late or self._answers.qsize() >= BEHIND
        if self._is_late:
            return
        if self._following is None:
            self._following = asyncio.create_task(self._follow())
        self._answers.put_nowait(track)

    async def finish(self) -> None:
        """The session is over: what is still to be said is said. Raises what the shadow was lost to."""
        self._answers.put_nowait(None)
        if self._following is None:
            return
        if self._is_late and not self._following.done():
            self._following.cancel()
            await asyncio.wait({self._following})
            raise TooLate(f"it was {BEHIND} answers behind")
        await self._following

    async def _follow(self) -> None:
        line = (await asyncio.to_thread(self.load)).open(self.key)
        try:
            while (track := await self._answers.get()) is not None:
                segment = await self._said(line, track)
                await asyncio.to_thread(self.shown.add, track.segment, track.tools)
                await asyncio.to_thread(self.unseen.add, segment, track.tools)
        finally:
            line.close()

    async def _said(self, line: Session, track: Track) -> Segment:
        """The segment as it would be, with the candidate's message at its end."""
        old = track.segment
        end, messages = old.messages[-1].start, old.messages[:-1]
        cut = Segment(old.ids[:end], old.sampled[:end], old.logprobs[:end], old.versions[:end], messages)
        transcript = Transcript.after(cut, self.chat, track.tools)
        prompt = Prompt(transcript.prompt(), tuple(messages), track.tools)
        transcript.add_sampled(await line.complete(prompt, track.room))
        return transcript.segment
