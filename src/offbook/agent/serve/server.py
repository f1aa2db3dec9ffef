"""Where the endpoint listens: a port of this machine's loopback, or a socket that sandboxes are shown."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn
from starlette.applications import Starlette

from offbook.types import OffbookError

LAST_S = 2  # that requests have to end in when the server does
IDLE_S = 3600  # that a connection may be silent: agents keep theirs while their tools run


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are for whoever runs the server."""
        yield


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
    """In the background of the event loop, until it is closed."""

    def __init__(self, app: Starlette, listener: socket.socket):
        quiet = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", ws="none")
        quiet.timeout_graceful_shutdown, quiet.timeout_keep_alive = LAST_S, IDLE_S
        self._server = _Server(quiet)
        self._running = asyncio.create_task(self._server.serve([listener]))

    async def aclose(self) -> None:
        self._server.should_exit = True
        await self._running
