"""Runs the endpoint's server on a loopback port, or on a Unix socket that sandboxes mount."""

from __future__ import annotations

import asyncio
import socket
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from offbook.types import OffbookError

LAST_S = 2  # shutdown timeout for open requests
IDLE_S = 3600  # keep-alive timeout: agents hold connections while their tools run
HEADERS_S = 30  # timeout for a request line and its headers


class _Server(uvicorn.Server):
    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        """Leave signals to the caller."""
        return nullcontext()


class _Protocol(H11Protocol):
    """Close connections that do not finish a request's headers in time: half requests would hold them forever."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_watching()
        super().connection_lost(exc)

    def _watch(self) -> None:
        """The timer runs while no request is in progress; bytes of an unfinished one do not restart it."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_watching()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(HEADERS_S, self.transport.close)

    def _stop_watching(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def listen(port: int = 0, host: str = "127.0.0.1") -> socket.socket:
    try:
        return socket.create_server((host, port), backlog=512)
    except OSError as error:
        raise OffbookError(f"cannot listen on {host}:{port}: {error.strerror}; --port 0 takes any free port") from None


def listen_at(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen(512)
    return listener


class Serving:
    """A running server, in a task of the event loop, until it is closed."""

    def __init__(self, app: Starlette, listener: socket.socket):
        settings = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            http=_Protocol,
            timeout_graceful_shutdown=LAST_S,
            timeout_keep_alive=IDLE_S,
        )
        self._server = _Server(settings)
        self._running = asyncio.create_task(self._server.serve([listener]))

    async def aclose(self) -> None:
        self._server.should_exit = True
        await self._running
