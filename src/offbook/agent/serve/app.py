"""The HTTP routes. A session's key lets an agent talk to the model in that session and nothing else. Rewards and the
end of a session need the owner's key, so no agent rewards itself."""

import asyncio
import hashlib
import json
import logging
import re
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from offbook.agent.recorder import Over, Recorder, Refused
from offbook.agent.serve.apis import APIS, CHAT, Api, member
from offbook.types import Json, ModelLost, OffbookError, PromptTooLong, Rollout, StopReason

T = TypeVar("T")
MODEL = "offbook"  # what the model is called here; requests may call it what they like
MAX_REWARD = 1e6  # sums of such are still exact enough to learn from
TOKEN_BYTES = 64  # a body with more for each token of the context holds no prompt that fits
MIN_BYTES = 1 << 20
log = logging.getLogger(__name__)


class NoKey(OffbookError):
    """The request has no known key."""


class TooLong(Refused):
    """The request is longer than any prompt that fits."""


class Gone(Exception):
    """The client has disconnected."""


STATUSES: dict[type[Exception], tuple[int, str]] = {
    NoKey: (401, "authentication_error"),
    Over: (403, "permission_error"),
    TooLong: (413, "request_too_large"),
    PromptTooLong: (400, "context_length_exceeded"),
    ModelLost: (503, "overloaded_error"),
    OffbookError: (400, "invalid_request_error"),
    Gone: (499, "client_gone"),
    ClientDisconnect: (499, "client_gone"),
}


def _name(body: Json, name: str, default: str = "") -> str:
    value = member(body, name, str, default)
    if not re.fullmatch(r"[\w./-]{0,200}", value):
        raise Refused(f"{name} must have up to 200 letters, digits and ./_-")
    return value


def _amount(body: Json, name: str, default: float | None = None) -> float:
    value: Any = body.get(name, default)
    if type(value) not in (int, float) or not abs(value) <= MAX_REWARD:  # also refuses NaN
        raise Refused(f"{name} must be a number from -{MAX_REWARD:g} to {MAX_REWARD:g}")
    return float(value)


class Sessions:
    """The open sessions. `make` opens a recorder for a rollout; `keep` is a callback for finished ones. Without an
    owner's key none can be opened or ended over HTTP."""

    def __init__(
        self,
        make: Callable[[Rollout], Recorder] | None = None,
        keep: Callable[[Rollout], None] = lambda rollout: None,
        owner: str = "",
        ended: Iterable[str] = (),
    ):
        self._make = make
        self._keep = keep
        self._owner = owner
        self._open: dict[str, Recorder] = {}
        self._keys: dict[str, str] = {}  # by their digests, so that a look-up tells nothing about a key
        self._ended = {*ended}  # sessions already in the run folder count, too
        self.num_kept = len(self._ended)

    def open(self, id: str = "", task: str = "", group: str = "") -> tuple[Recorder, str]:
        """Open a session; returns it and the key for its agent."""
        id = id or secrets.token_hex(8)
        if id in self._open or id in self._ended:
            raise Refused(f"there is a session {id} already")
        assert self._make is not None
        session = self._make(Rollout(id, task or id, group or task or id, (), foreign=True))
        return session, self.add(session)

    def add(self, session: Recorder) -> str:
        """Register a session that its owner ends. Returns the key for its agent."""
        key = f"ob-{secrets.token_urlsafe(24)}"
        self._open[session.rollout.id] = session
        self._keys[_digest(key)] = session.rollout.id
        return key

    def remove(self, id: str) -> None:
        del self._open[id]
        self._keys = {key: owner for key, owner in self._keys.items() if owner != id}

    def end(self, id: str, stop: StopReason | None = None) -> Rollout:
        """End a session and keep it, if it has messages."""
        rollout = self.named(id).end(stop)
        if rollout.segments:
            self._keep(rollout)
            self.num_kept += 1
        self.remove(id)
        self._ended.add(id)
        return rollout

    def end_idle(self, idle_s: float) -> list[Rollout]:
        """End sessions without a request for `idle_s`. If one cannot be kept, the others still are."""
        before = time.monotonic() - idle_s
        ended = []
        for id, session in [*self._open.items()]:
            if session.touched <= before and (not session.num_waiting or idle_s < 0):
                try:
                    ended.append(self.end(id, "wall"))
                except Exception as error:  # the border of a session
                    log.error(f"the session {id} cannot be kept: {error}", exc_info=error)
        return ended

    def named(self, id: str) -> Recorder:
        if id not in self._open:
            raise Over(f"the session {id} has ended" if id in self._ended else f"there is no session {id}")
        return self._open[id]

    def asking(self, request: Request) -> Recorder:
        """The session of a request, by its key."""
        id = self._keys.get(_digest(_key(request)), "")
        if not id:
            raise NoKey("there is no open session with this key")
        return self.named(id)

    def is_owner(self, key: str) -> bool:
        return bool(self._owner) and secrets.compare_digest(key.encode(), self._owner.encode())


def make_app(sessions: Sessions) -> Starlette:

    def posted(path: str, handle: Callable[[Request], Awaitable[Response]], api: Api = CHAT) -> Route:
        """A route whose errors are in the API's form."""

        async def endpoint(request: Request) -> Response:
            try:
                return await handle(request)
            except Exception as error:
                return _refusal(error, api)

        return Route(path, endpoint, methods=["POST"])

    def answered(api: Api) -> Route:
        async def handle(request: Request) -> Response:
            session = sessions.asking(request)
            body = await _body(request, session)
            asked = api.read(body)
            model = str(body.get("model") or MODEL)
            answer = await _while_there(request, session.answer(asked))
            if not asked.stream:
                return JSONResponse(api.whole(answer, model))
            lines = ((f"event: {name}\n" if name else "", json.dumps(data)) for name, data in api.frames(answer, model))
            stream = "".join(f"{event}data: {data}\n\n" for event, data in lines).encode() + api.last
            return Response(stream, media_type="text/event-stream", headers={"cache-control": "no-store"})

        return posted(api.path, handle, api)

    def owned(path: str, handle: Callable[[str, Json], Json]) -> Route:
        async def checked(request: Request) -> Response:
            if not sessions.is_owner(_key(request)):
                raise NoKey("this needs the owner's key")
            return JSONResponse(handle(request.path_params.get("id", ""), await _body(request)))

        return posted(path, checked)

    def opened(_: str, body: Json) -> Json:
        session, key = sessions.open(*(_name(body, name) for name in ("id", "task", "group")))
        return {"id": session.rollout.id, "key": key}

    def rewarded(id: str, body: Json) -> Json:
        reward = sessions.named(id).rollout.reward
        value, weight, name = _amount(body, "value"), _amount(body, "weight", 1.0), _name(body, "name", "outcome")
        reward.parts[name] = value
        reward.weights[name] = weight
        return {"total": reward.total}

    def noted(id: str, body: Json) -> Json:
        answer = member(body, "answer", str, "")
        sessions.named(id).note("feedback", member(body, "text", str), re.split("[-_]", answer)[-1])
        return {}

    def ended(id: str, body: Json) -> Json:
        rollout = sessions.end(id)
        return {"stop": rollout.stop, "segments": len(rollout.segments), "turns": rollout.usage.turns}

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": MODEL}]})

    routes = [
        *map(answered, APIS),
        Route("/v1/models", models),
        owned("/sessions", opened),
        owned("/sessions/{id:path}/reward", rewarded),
        owned("/sessions/{id:path}/feedback", noted),
        owned("/sessions/{id:path}/end", ended),
    ]
    return Starlette(routes=routes)


async def _while_there(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await the work, or raise Gone if the client disconnects first. The request's body has been read."""

    async def disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, gone = asyncio.create_task(work), asyncio.create_task(disconnect())
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Gone
        return task.result()
    finally:
        task.cancel()
        gone.cancel()


async def _body(request: Request, session: Recorder | None = None) -> Json:
    most = max(MIN_BYTES, TOKEN_BYTES * session.limits.context) if session else MIN_BYTES
    raw = b""
    async for part in request.stream():
        raw += part
        if len(raw) > most:
            raise TooLong(f"the request has more than {most} bytes, which no prompt of this model has")
    try:
        body = json.loads(raw or b"{}")
        if b"\\ud" in raw.lower():  # half a character could not be stored later
            json.dumps(body, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        raise Refused("the request cannot be read: it is not JSON in UTF-8, or too deep") from None
    if not isinstance(body, dict):
        raise Refused("a request is a JSON object")
    return body


def _key(request: Request) -> str:
    """The key, as either vendor's client sends it."""
    return request.headers.get("x-api-key") or request.headers.get("authorization", "").removeprefix("Bearer ")


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def _refusal(error: Exception, api: Api) -> Response:
    """The error response. Clients retry after a 5xx, and after none of the others."""
    for kind, (status, code) in STATUSES.items():
        if isinstance(error, kind):
            return JSONResponse(api.error(code, str(error)), status)
    log.error("a request failed", exc_info=error)
    return JSONResponse(api.error("api_error", f"the server failed: {type(error).__name__}"), 500)


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
