"""Where the endpoint listens: a port of this machine's loopback, or a socket that boxes are shown."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import uvicorn
from starlette.applications import Starlette

from offbook.types import OffbookError

LAST_S = 2  # that requests have to end in when the server does


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
    found = socket.socket(socket.AF_UNIX)
    found.bind(str(path))
    return found


@asynccontextmanager
async def serving(app: Starlette, listener: socket.socket) -> AsyncIterator[None]:
    config = uvicorn.Config(
        app, log_config=None, access_log=False, lifespan="off", ws="none", timeout_graceful_shutdown=LAST_S
    )
    server = _Server(config)
    running = asyncio.create_task(server.serve([listener]))
    try:
        while not server.started and not running.done():
            await asyncio.sleep(0.005)
        yield
    finally:
        server.should_exit = True
        await running
