"""Streaming answers. If the client disconnects while the model writes, sampling stops and the answer is taken back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Iterator
from typing import Any, Self, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from offbook.agent.recorder import Answer, Asked, Session, Shown
from offbook.agent.serve.dialect import Dialect, Frame, Stream
from offbook.types import OffbookError

T = TypeVar("T")
HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]


class Gone(Exception):
    """The client has disconnected."""


async def while_there(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await the work, or raise Gone if the client disconnects first. The request's body has been read."""
    task, gone = asyncio.create_task(work), asyncio.create_task(_gone(request.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Gone
        return task.result()
    finally:
        task.cancel()
        gone.cancel()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Streamed(Response):
    """Server-sent events, each as soon as the engine reports new tokens."""

    def __init__(
        self,
        session: Session,
        work: asyncio.Task[Answer],
        news: asyncio.Queue[Shown | None],
        dialect: Dialect,
        writer: Stream,
        first: list[Frame],
    ):
        self.session, self.work, self.news = session, work, news
        self.dialect, self.writer, self.first = dialect, writer, first

    @classmethod
    async def begun(cls, request: Request, session: Session, asked: Asked, dialect: Dialect, model: str) -> Self:
        """Start a stream once the first tokens are there: an earlier failure is an HTTP error and not a stream."""
        news: asyncio.Queue[Shown | None] = asyncio.Queue()
        work = asyncio.create_task(session.answer(asked, news.put_nowait))
        work.add_done_callback(lambda _: news.put_nowait(None))
        try:
            shown = await while_there(request, news.get())
            name = asked.id if shown else work.result().id
        except BaseException:
            work.cancel()
            raise
        if shown is None:
            news.put_nowait(None)
        writer = dialect.stream()
        first = [*writer.begin(name, model), *writer.more(shown or Shown())]
        return cls(session, work, news, dialect, writer, first)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.create_task(_gone(receive))
        is_whole = False
        try:
            await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
            await _send(send, self.first)
            while (shown := await self._next(gone)) is not None:
                await _send(send, self.writer.more(shown))
            try:
                await _send(send, self.writer.end(self.work.result()), self.dialect.last)
            except OffbookError as error:  # the status is out already
                await _send(send, [("error", self.dialect.error("api_error", str(error)))])
            is_whole = not gone.done()
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except Gone:
            pass
        finally:
            gone.cancel()
            self.work.cancel()
            if not is_whole and self.work.done() and not self.work.cancelled() and not self.work.exception():
                self.session.take_back(self.work.result())

    async def _next(self, gone: asyncio.Task[None]) -> Shown | None:
        """The newest state; older ones in the queue are skipped."""
        news = asyncio.ensure_future(self.news.get())
        try:
            await asyncio.wait({news, gone}, return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                raise Gone
            shown = news.result()
        finally:
            news.cancel()
        while shown is not None and not self.news.empty():
            shown = self.news.get_nowait()
        return shown


async def _send(send: Send, frames: Iterator[Frame] | list[Frame], last: bytes = b"") -> None:
    lines = [(f"event: {name}\n" if name else "") + f"data: {json.dumps(data)}\n\n" for name, data in frames]
    if body := "".join(lines).encode() + last:
        await send({"type": "http.response.body", "body": body, "more_body": True})
