"""The HTTP routes. A session's key lets an agent talk to the model in that session and nothing else. Rewards and the
end of a session need the owner's key, so no agent rewards itself."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import re
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from dataclasses import replace
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, Field
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from offbook.agent.recorder import Asked, Over, Refused, Session, Shown
from offbook.agent.serve.apis import APIS, Api, ChatCompletions, Frame, Messages, Stream, blocks_of
from offbook.agent.serve.reading import Json, read
from offbook.types import ModelLost, OffbookError, PromptTooLong, Rollout, StopReason

T = TypeVar("T")
MODEL = "offbook"  # what the model is called here; requests may call it what they like
MAX_REWARD = 1e6  # sums of such are still exact enough to learn from
TOKEN_BYTES = 64  # a body with more for each token of the context holds no prompt that fits
MIN_BYTES = 1 << 20
SESSION = "x-offbook-session"  # the header that names a session in requests with the owner's key
RETRIES = "x-stainless-retry-count"  # of the clients of OpenAI and Anthropic
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


def _checked(name: str) -> str:
    if not re.fullmatch(r"[\w./-]{0,200}", name):
        raise ValueError("a name has up to 200 letters, digits and ./_-")
    return name


Name = Annotated[str, AfterValidator(_checked)]
Amount = Annotated[float, Field(ge=-MAX_REWARD, le=MAX_REWARD)]


class Opening(BaseModel):
    id: Name = ""
    task: Name = ""
    group: Name = ""


class Earned(BaseModel):
    value: Amount
    weight: Amount = 1.0
    name: Name = "outcome"


class Feedback(BaseModel):
    text: str
    answer: str = ""


class Sessions:
    """The open sessions. `make` opens a recorder for a rollout; `keep` is a callback for finished ones. Without an
    owner's key none can be opened or ended over HTTP."""

    def __init__(
        self,
        make: Callable[[Rollout], Session] | None = None,
        keep: Callable[[Rollout], None] = lambda rollout: None,
        owner: str = "",
        ended: Iterable[str] = (),
    ):
        self._make = make
        self._keep = keep
        self._owner = owner
        self._open: dict[str, Session] = {}
        self._keys: dict[str, str] = {}  # by their digests, so that a look-up tells nothing about a key
        self._ended = {*ended}  # sessions already in the run folder count, too

    def open(self, id: str = "", task: str = "", group: str = "") -> tuple[Session, str]:
        """Open a session; returns it and the key for its agent."""
        id = id or secrets.token_hex(8)
        if id in self._open or id in self._ended:
            raise Refused(f"there is a session {id} already")
        assert self._make is not None
        session = self._make(Rollout(id, task or id, group or task or id, (), foreign=True))
        return session, self.add(session)

    def add(self, session: Session) -> str:
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
        self.remove(id)
        self._ended.add(id)
        return rollout

    def end_idle(self, idle_s: float) -> list[Rollout]:
        """End sessions without a request for `idle_s`. If one cannot be kept, the others still are."""
        before = time.monotonic() - idle_s
        ended = []
        for id, session in [*self._open.items()]:
            if session.touched <= before and (not session.is_asked or idle_s < 0):
                try:
                    ended.append(self.end(id, "wall"))
                except Exception as error:  # the border of a session
                    log.error(f"the session {id} cannot be kept: {error}", exc_info=error)
        return ended

    def end_all(self) -> list[Rollout]:
        """End all sessions, as the server stops."""
        return self.end_idle(-1.0)

    def named(self, id: str) -> Session:
        if id not in self._open:
            raise Over(f"the session {id} has ended" if id in self._ended else f"there is no session {id}")
        return self._open[id]

    def asking(self, request: Request) -> Session:
        """The session of a request, by its key, or by a header with the owner's key."""
        key, name = _key(request), request.headers.get(SESSION, "")
        if self.is_owner(key):
            if not name:
                raise NoKey(f"the owner's key opens no session by itself: name one in the header {SESSION}")
            known = name in self._open or name in self._ended
            return self.named(name) if known else self.open(read(Opening, {"id": name}).id)[0]
        id = self._keys.get(_digest(key), "")
        if not id or name not in ("", id):
            raise NoKey("there is no open session with this key")
        return self.named(id)

    def is_owner(self, key: str) -> bool:
        return bool(self._owner) and secrets.compare_digest(key.encode(), self._owner.encode())


def make_app(sessions: Sessions) -> Starlette:

    def posted(path: str, handle: Callable[[Request], Awaitable[Response]], api: type[Api] = ChatCompletions) -> Route:
        """A route whose errors are in the API's form."""

        async def endpoint(request: Request) -> Response:
            try:
                return await handle(request)
            except Exception as error:
                return _refusal(error, api)

        return Route(path, endpoint, methods=["POST"])

    def answered(api: type[Api]) -> Route:
        async def handle(request: Request) -> Response:
            session = sessions.asking(request)
            body = await _body(request, session)
            asked = replace(api.read(body), retry=request.headers.get(RETRIES, "0") != "0")
            model = str(body.get("model") or MODEL)
            if asked.stream:
                return await _streamed(request, session, asked, api, model)
            answer = await _while_there(request, session.answer(asked))
            return JSONResponse(api(answer.id, model).whole(answer))

        return posted(api.path, handle, api)

    def owned(path: str, handle: Callable[[str, Json], Json]) -> Route:
        async def checked(request: Request) -> Response:
            if not sessions.is_owner(_key(request)):
                raise NoKey("this needs the owner's key")
            return JSONResponse(handle(request.path_params.get("id", ""), await _body(request)))

        return posted(path, checked)

    def opened(_: str, body: Json) -> Json:
        session, key = sessions.open(**read(Opening, body).model_dump())
        return {"id": session.rollout.id, "key": key}

    def rewarded(id: str, body: Json) -> Json:
        earned, reward = read(Earned, body), sessions.named(id).rollout.reward
        reward.parts[earned.name] = earned.value
        reward.weights[earned.name] = earned.weight
        return {"total": reward.total}

    def noted(id: str, body: Json) -> Json:
        feedback = read(Feedback, body)
        sessions.named(id).note("feedback", feedback.text, re.split("[-_]", feedback.answer)[-1])
        return {}

    def ended(id: str, body: Json) -> Json:
        rollout = sessions.end(id)
        return {"stop": rollout.stop, "segments": len(rollout.segments), "turns": rollout.usage.turns}

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": MODEL}]})

    async def counted(request: Request) -> Response:
        session = sessions.asking(request)
        return JSONResponse({"input_tokens": session.count(Messages.read(await _body(request, session)))})

    routes = [
        *map(answered, APIS),
        Route("/v1/models", models),
        posted(f"{Messages.path}/count_tokens", counted, Messages),
        owned("/sessions", opened),
        owned("/sessions/{id:path}/reward", rewarded),
        owned("/sessions/{id:path}/feedback", noted),
        owned("/sessions/{id:path}/end", ended),
    ]
    return Starlette(routes=routes)


async def _streamed(request: Request, session: Session, asked: Asked, api: type[Api], model: str) -> Response:
    """Server-sent events, as the engine reports tokens. The stream starts with the first tokens: an earlier failure is
    an HTTP error. A client that disconnects ends the sampling."""
    news: asyncio.Queue[Shown | None] = asyncio.Queue()
    work = asyncio.create_task(session.answer(asked, news.put_nowait))
    work.add_done_callback(lambda _: news.put_nowait(None))
    try:
        first = await _while_there(request, news.get())
        writer = api(asked.id if first else work.result().id, model)
    except BaseException:
        work.cancel()
        raise

    async def events() -> AsyncIterator[bytes]:
        stream, shown = Stream(writer), first
        try:
            yield _lines(writer.begin())
            while shown is not None:
                yield _lines(stream.more(blocks_of(shown)))
                shown = await news.get()
                while shown is not None and not news.empty():  # older ones are skipped
                    shown = news.get_nowait()
            yield _lines(stream.end(await work)) + api.last
        except OffbookError as error:  # the status is out already
            yield _lines([("error", api.error("api_error", str(error)))])
        finally:
            work.cancel()

    return StreamingResponse(events(), media_type="text/event-stream", headers={"cache-control": "no-store"})


def _lines(frames: Iterable[Frame]) -> bytes:
    lines = ((f"event: {name}\n" if name else "") + f"data: {json.dumps(data)}\n\n" for name, data in frames)
    return "".join(lines).encode()


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


async def _body(request: Request, session: Session | None = None) -> Json:
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


def _refusal(error: Exception, api: type[Api]) -> Response:
    """The error response. Clients retry after a 5xx, and after none of the others."""
    for kind, (status, code) in STATUSES.items():
        if isinstance(error, kind):
            return JSONResponse(api.error(code, str(error)), status)
    log.error("a request failed", exc_info=error)
    return JSONResponse(api.error("api_error", f"the server failed: {type(error).__name__}"), 500)
