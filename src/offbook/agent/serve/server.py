"""Runs the endpoint's server on a loopback port, or on a Unix socket that sandboxes mount."""

from __future__ import annotations

import asyncio
import socket
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import uvicorn
from starlette.applications import Starlette

from offbook.types import OffbookError

LAST_S = 2  # shutdown timeout for open requests
IDLE_S = 3600  # keep-alive timeout: agents hold connections while their tools run


class _Server(uvicorn.Server):
    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        """Leave signals to the caller."""
        return nullcontext()


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
            http="h11",
            timeout_graceful_shutdown=LAST_S,
            timeout_keep_alive=IDLE_S,
        )
        self._server = _Server(settings)
        self._running = asyncio.create_task(self._server.serve([listener]))

    async def aclose(self) -> None:
        self._server.should_exit = True
        await self._running
