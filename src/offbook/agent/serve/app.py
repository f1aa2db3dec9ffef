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
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from offbook.agent.recorder import Over, Refused, Session
from offbook.agent.serve.chat_completions import ChatCompletions
from offbook.agent.serve.dialect import MODEL, Dialect, Json, member, name_in
from offbook.agent.serve.messages import Messages
from offbook.agent.serve.responses import Responses
from offbook.agent.serve.streaming import Gone, Streamed, while_there
from offbook.types import ModelLost, OffbookError, PromptTooLong, Rollout, StopReason

Search = Callable[[str], Awaitable[str]]
DIALECTS: tuple[Dialect, ...] = (ChatCompletions(), Messages(), Responses())
MOST_REWARD = 1e6  # sums of such are still exact enough to learn from
BODY_S = 60.0  # that a request has to arrive in
TOKEN_BYTES = 64  # a body with more for each token of the context holds no prompt that fits
LEAST_BYTES = 1 << 20
SESSION = "x-offbook-session"  # the header that names a session in requests with the owner's key
RETRIES = "x-stainless-retry-count"  # of the clients of OpenAI and Anthropic
NAME = re.compile(r"[\w./-]{0,200}")
log = logging.getLogger(__name__)


class NoKey(OffbookError):
    """The request has no known key."""


class TooLong(Refused):
    """The request is longer than any prompt that fits."""


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
        self._make, self._keep, self._owner = make, keep, owner
        self._open: dict[str, Session] = {}
        self._keys: dict[str, str] = {}  # by their digests, so that a look-up tells nothing about a key
        self._ended = {*ended}  # sessions already in the run folder count, too

    def open(self, id: str = "", task: str = "", group: str = "") -> tuple[Session, str]:
        """Open a session; returns it and the key for its agent."""
        id = id or secrets.token_hex(8)
        if id in self._open or id in self._ended:
            raise Refused(f"there is a session {id} already")
        rollout = Rollout(id, task or id, group or task or id, (), foreign=True)
        assert self._make is not None
        session = self._make(rollout)
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
        session = self.named(id)
        rollout = session.end(stop)
        if rollout.segments:
            self._keep(rollout)
        self.remove(id)
        self._ended.add(id)
        return rollout

    def end_idle(self, idle_s: float) -> list[Rollout]:
        """End sessions without a request for `idle_s`."""
        before = time.monotonic() - idle_s
        idle = [id for id, session in self._open.items() if session.touched < before and not session.is_asked]
        return self._end_each(idle)

    def end_all(self) -> list[Rollout]:
        """End all sessions, as the server stops."""
        return self._end_each([*self._open])

    def _end_each(self, ids: Iterable[str]) -> list[Rollout]:
        """End sessions; if one cannot be kept, the others still are."""
        ended = []
        for id in ids:
            try:
                ended.append(self.end(id, "wall"))
            except Exception as error:  # the border of a session: the others are kept
                log.error(f"the session {id} cannot be kept: {error}", exc_info=error)
        return ended

    def named(self, id: str) -> Session:
        if id not in self._open:
            raise Over(f"the session {id} has ended" if id in self._ended else f"there is no session {id}")
        return self._open[id]

    def asking(self, request: Request) -> Session:
        """The session of a request, by its key, or by a header with the owner's key."""
        key, name = _key(request), request.headers.get(SESSION, "")
        if self.is_owner(key):
            if not name:
                raise NoKey(
                    f"the owner's key opens no session by itself: give a session's key, or its name as {SESSION}"
                )
            return self.named(name) if name in self._open or name in self._ended else self.open(_name(name))[0]
        id = self._keys.get(_digest(key), "")
        if not id:
            raise NoKey("there is no open session with this key")
        if name not in ("", id):
            raise NoKey("this key is another session's")
        return self.named(id)

    def is_owner(self, key: str) -> bool:
        return bool(self._owner) and secrets.compare_digest(key.encode(), self._owner.encode())


def make_app(sessions: Sessions, search: Search | None = None) -> Starlette:
    """The application. `search` is the documentation search, if there is one: agents use it with their keys."""

    def posted(path: str, does: Callable[[Request], Awaitable[Response]], dialect: Dialect = DIALECTS[0]) -> Route:
        """A route whose errors are in the dialect's form."""

        async def answered(request: Request) -> Response:
            try:
                return await does(request)
            except Exception as error:
                return _refusal(error, dialect)

        return Route(path, answered, methods=["POST"])

    def speaks(dialect: Dialect) -> Route:
        return posted(dialect.path, lambda request: _answered(request, dialect, sessions), dialect)

    def owned(path: str, does: Callable[[str, Json], Json]) -> Route:
        async def done(request: Request) -> Response:
            if not sessions.is_owner(_key(request)):
                raise NoKey("this needs the owner's key")
            body = await _body(request, LEAST_BYTES)
            return JSONResponse(does(request.path_params.get("id", ""), body))

        return posted(path, done)

    def opened(_: str, body: Json) -> Json:
        session, key = sessions.open(*(_name(name_in(body, name)) for name in ("id", "task", "group")))
        return {"id": session.rollout.id, "key": key}

    def rewarded(id: str, body: Json) -> Json:
        value, weight = (member({"weight": 1.0, **body}, name, float) for name in ("value", "weight"))
        if not (abs(value) <= MOST_REWARD and abs(weight) <= MOST_REWARD):  # nor is NaN
            raise Refused(f"a reward and its weight are numbers from {-MOST_REWARD:,.0f} to {MOST_REWARD:,.0f}")
        reward, name = sessions.named(id).rollout.reward, _name(name_in(body, "name") or "outcome")
        reward.parts[name], reward.weights[name] = value, weight
        return {"total": reward.total}

    def noted(id: str, body: Json) -> Json:
        answer = name_in(body, "answer").rpartition("_")[2].rpartition("-")[2]
        sessions.named(id).note("feedback", member(body, "text", str), answer)
        return {}

    def ended(id: str, body: Json) -> Json:
        rollout = sessions.end(id)
        return {"stop": rollout.stop, "segments": len(rollout.segments), "turns": rollout.usage.turns}

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": MODEL}]})

    async def counted(request: Request) -> Response:
        session = sessions.asking(request)
        body = await _body(request, _most(session))
        return JSONResponse({"input_tokens": session.count(Messages().read(body))})

    async def searched(request: Request) -> Response:
        session = sessions.asking(request)
        body = await _body(request, LEAST_BYTES)
        if search is None:
            raise Refused("there is no documentation here; start the server with tools.pages")
        answer = await search(member(body, "query", str))
        session.note("search_docs", body["query"])
        return JSONResponse({"answer": answer})

    routes = [
        *map(speaks, DIALECTS),
        Route("/v1/models", models),
        posted("/tools/search_docs", searched),
        posted(f"{Messages.path}/count_tokens", counted, Messages()),
        owned("/sessions", opened),
        owned("/sessions/{id:path}/reward", rewarded),
        owned("/sessions/{id:path}/feedback", noted),
        owned("/sessions/{id:path}/end", ended),
    ]
    return Starlette(routes=routes)


async def _answered(request: Request, dialect: Dialect, sessions: Sessions) -> Response:
    session = sessions.asking(request)
    body = await _body(request, _most(session))
    is_retry = request.headers.get(RETRIES, "0") != "0"
    asked = replace(dialect.read(body), retry=is_retry)
    model = str(body.get("model") or MODEL)
    if asked.stream:
        return await Streamed.begun(request, session, asked, dialect, model)
    return JSONResponse(dialect.whole(await while_there(request, session.answer(asked)), model))


def _most(session: Session) -> int:
    """The maximum body size in bytes."""
    return max(LEAST_BYTES, TOKEN_BYTES * session.limits.context)


async def _body(request: Request, most: int) -> Json:
    size, parts = 0, list[bytes]()
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                size += len(part)
                if size > most:
                    raise TooLong(f"the request has more than {most} bytes, which no prompt of this model has")
                parts.append(part)
    except TimeoutError:
        raise Refused(f"the request did not arrive within {BODY_S:g} s") from None
    raw = b"".join(parts)
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


def _name(text: str) -> str:
    if not NAME.fullmatch(text):
        raise Refused("names are up to 200 letters, digits and ./_-")
    return text


def _refusal(error: Exception, dialect: Dialect) -> Response:
    """The error response. Clients retry after a 5xx, and after none of the others."""
    for kind, (status, code) in STATUSES.items():
        if isinstance(error, kind):
            return JSONResponse(dialect.error(code, str(error)), status)
    log.error("a request failed", exc_info=error)
    return JSONResponse(dialect.error("api_error", f"the server failed: {type(error).__name__}"), 500)
