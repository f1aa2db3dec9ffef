"""The client of models behind a URL that speaks OpenAI's chat completions: hosted, or a vLLM or llama.cpp server.

The key comes from a variable of the environment; it goes to that server and into no error. Left out: streaming.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import re
import socket
import ssl
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import httpx2
from pydantic import AliasChoices, BaseModel, Field, ValidationError

from offbook.types import OffbookError, PromptTooLong, ServerLost

log = logging.getLogger(__name__)

KEY = "OPENAI_API_KEY"  # the variable with the server's key, if it wants one
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 60.0
SILENCE_S = 10.0  # after which a message says that a server is waited for
LEAST_KEY = 4  # characters; what is shorter is no secret, and may be a letter of every sentence
LONG_KEY = 8  # a shorter one may be part of a word, and is taken out where it stands alone
TRY_AGAIN = frozenset({408, 409, 425, 429})  # besides every 5xx
# The server and not the request: no key, no credit, no such model, too busy, nothing behind the gateway.
LOST = frozenset({401, 402, 403, 404, 429, 502, 503, 504})
# In the words of OpenAI, vLLM, llama.cpp, SGLang and Anthropic.
TOO_LONG = re.compile(r"maximum (context|model) length|context.(length|size|window)|prompt is too long", re.IGNORECASE)
# A pair of escapes that make one character, or half of such a pair. A backslash that is escaped itself begins neither.
ESCAPES = re.compile(r"(\\\\|\\u[dD][89abAB]\w\w\\u[dD][c-fC-F]\w\w)|\\u[dD][89a-fA-F]\w\w")


class NoAnswer(OffbookError):
    """`reason` is what happened in a few words, for counts: it names no server."""

    def __init__(self, sentence: str, reason: str):
        super().__init__(sentence)
        self.reason = reason

    @property
    def is_refusal(self) -> bool:
        """The server answers, and does not want this request; perhaps one of its parameters."""
        return not isinstance(self, NoServer) and self.reason.startswith("status")


class NoServer(NoAnswer, ServerLost):
    """Not this request, but every one would fail."""


class ContextFull(NoAnswer, PromptTooLong):
    """The server's model has not so much context."""


class _Function(BaseModel):
    name: str = ""
    arguments: Any = ""  # a string of JSON; some servers send the object itself


class _Call(BaseModel):
    function: _Function


class ReplyMessage(BaseModel):
    content: str | None = None
    reasoning: str | None = Field(default=None, validation_alias=AliasChoices("reasoning_content", "reasoning"))
    tool_calls: list[_Call] | None = None


class _Choice(BaseModel):
    message: ReplyMessage
    finish_reason: str | None = None


class _Usage(BaseModel):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class Reply(BaseModel):
    choices: list[_Choice] = Field(min_length=1)
    usage: _Usage | None = None


class Client:
    def __init__(self, url: str, model: str, *, timeout_s: float = 120.0, max_retries: int = 2):
        self.host = _host(url)
        self.url, self.model = f"{url.rstrip('/')}/chat/completions", model
        self.timeout_s, self.max_retries = timeout_s, max_retries
        self._key = _key()
        self._headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        self._patience_s = SILENCE_S
        self._takes_schemas = True

    async def ask(
        self,
        question: str | Sequence[tuple[str, str]],
        *,
        schema: dict[str, Any] | None = None,
        max_tokens: int = 2048,
    ) -> str:
        """One question, or a conversation as roles and texts, and its answer, the likeliest one. `schema` goes along as
        `response_format` until the server refuses it. It has a connection of its own, so any event loop will do."""
        turns = [("user", question)] if isinstance(question, str) else question
        said = [{"role": role, "content": text} for role, text in turns]
        body = {"messages": said, "temperature": 0.0, "max_tokens": max_tokens}
        async with connections() as http:
            if schema is not None and self._takes_schemas:
                form = {"type": "json_schema", "json_schema": {"name": "reply", "schema": schema, "strict": True}}
                try:
                    reply = await self.post({**body, "response_format": form}, http)
                    return reply.choices[0].message.content or ""
                except NoAnswer as error:
                    if not error.is_refusal:
                        raise
            reply = await self.post(body, http)
        if schema is not None:
            self._takes_schemas = False  # refused with it, answered without
        return reply.choices[0].message.content or ""

    async def post(self, body: dict[str, Any], http: httpx2.AsyncClient) -> Reply:
        """One reply, after as many attempts as it takes. A server that does not want this request is asked once."""
        loop = asyncio.get_running_loop()
        heard = loop.time()  # of the server last: attempts that end without a word are one silence
        for attempt in range(self.max_retries + 1):
            pause_s, kind = FIRST_PAUSE_S * 2**attempt, NoAnswer
            silence = loop.call_at(heard + self._patience_s, self._tell_silence, self._patience_s)
            try:
                async with asyncio.timeout(self.timeout_s):
                    response = await http.post(self.url, json={"model": self.model, **body}, headers=self._headers)
            except TimeoutError:
                problem, reason = f"did not answer within {self.timeout_s:g} s", "no answer in time"
            except httpx2.RequestError as error:
                reason = _cause(error)
                problem, kind = f"cannot be reached ({reason})", NoServer
            else:
                heard = loop.time()
                if response.is_success:
                    return self._parse(response)
                status, said = response.status_code, _refusal(response)
                problem, reason = f"answered {status}: {said}", f"status {status}"
                if TOO_LONG.search(said):
                    raise self._error(problem, reason, ContextFull)
                kind = NoServer if status in LOST else NoAnswer
                if status not in TRY_AGAIN and status < 500:
                    needs_key = status in (401, 403) and not self._key
                    about_key = f" ({KEY} is not set)" if needs_key else ""
                    raise self._error(problem + about_key, reason, kind)
                pause_s = _retry_after(response) or pause_s
            finally:
                silence.cancel()
            if attempt < self.max_retries:
                await asyncio.sleep(min(pause_s, LONGEST_PAUSE_S))
        raise self._error(f"{problem} (after {self.max_retries + 1} attempts)", reason, kind)

    def _tell_silence(self, waited_s: float) -> None:
        """Once for all that wait, and the next time only after twice as long: a slow model is not a hung one."""
        if waited_s == self._patience_s:
            self._patience_s *= 2
            log.warning(
                f"the model server {self.host} has not answered for {waited_s:g} s; each request waits for "
                f"{self.timeout_s:g} s and is sent {self.max_retries + 1} times at most"
            )

    def _parse(self, response: httpx2.Response) -> Reply:
        try:
            return Reply.model_validate_json(mend_escapes(response.text))
        except ValidationError as error:
            first = error.errors()[0]
        what = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        reason = "but other JSON"
        if first["type"] == "json_invalid":
            what = reason = f"not JSON but {response.headers.get('content-type', 'of no type')}"
        elif TOO_LONG.search(said := _refusal(response)):
            raise self._error(f"answered: {said}", reason, ContextFull)
        raise self._error(f"sent something that is not a chat completion ({what})", f"no chat completion, {reason}")

    def _error(self, problem: str, reason: str, kind: type[NoAnswer] = NoAnswer) -> NoAnswer:
        texts = f"the model server {self.host} {problem}", reason
        if len(self._key) < LEAST_KEY:
            return kind(*texts)
        ends = ("", "") if len(self._key) >= LONG_KEY else (r"(?<!\w)", r"(?!\w)")
        found = re.escape(self._key).join(ends)
        return kind(*(re.sub(found, "[key]", text) for text in texts))


def connections() -> httpx2.AsyncClient:
    """To be closed, in the event loop in which they are used. Deadlines are the client's."""
    return httpx2.AsyncClient(timeout=None, limits=httpx2.Limits(max_connections=None), verify=_certificates())


@functools.cache
def _certificates() -> ssl.SSLContext:
    """Reading them takes as long as a short answer, so it is done once."""
    return ssl.create_default_context()


def _host(url: str) -> str:
    """Not without the scheme, and a password in it is not for error texts and run folders."""
    try:
        parsed = httpx2.URL(url)
    except httpx2.InvalidURL:
        parsed = httpx2.URL("")
    if parsed.userinfo:
        raise OffbookError(f"the URL of the model server has a password in it; give the key in {KEY} instead")
    if parsed.scheme not in ("http", "https") or not parsed.host:
        shown = "" if "@" in url else f", not {url or 'nothing'}"
        raise OffbookError(f"the URL of the model server must look like https://host/v1{shown}")
    return parsed.host


def _key() -> str:
    key = os.environ.get(KEY, "").strip()
    if not (key.isascii() and key.isprintable()):  # the HTTP client would show it in its complaint
        raise OffbookError(f"the key in {KEY} has characters that cannot be sent; set it again")
    return key


def _retry_after(response: httpx2.Response) -> float | None:
    """Seconds, from a number or a date; None if the server does not say or says it unreadably."""
    value = response.headers.get("retry-after", "")
    with suppress(ValueError):
        return max(0.0, float(value))
    with suppress(ValueError, TypeError):
        return max(0.0, (parsedate_to_datetime(value) - datetime.now(UTC)).total_seconds())
    return None


def _refusal(response: httpx2.Response) -> str:
    """What the server says about its refusal: OpenAI's error.message, others' message or detail, or its first line."""
    text = response.text
    try:
        value = response.json()
    except (ValueError, RecursionError):
        value = None
    if isinstance(value, dict):
        error = value.get("error")
        inner = error.get("message") if isinstance(error, dict) else error
        text = str(inner or value.get("message") or value.get("detail") or text)
    return " ".join(text.split())[:400] or "no reason given"


def _cause(error: Exception) -> str:
    """The operating system's reason for a failed connection, else the kind of failure."""
    below: BaseException | None = error
    while below is not None:
        if isinstance(below, ssl.SSLError | socket.gaierror):  # their numbers are not the system's
            return str(below.strerror)
        if isinstance(below, OSError) and below.errno:
            return os.strerror(below.errno).lower()
        below = below.__cause__ or below.__context__
    return type(error).__name__


def mend_escapes(text: str) -> str:
    """JSON may have half a character as an escape. json.loads takes it and no file does, so it becomes `?`."""
    return ESCAPES.sub(lambda found: found.group(1) or "?", text)


def json_part(answer: str, opening: str = "{", closing: str = "}") -> str:
    """What of an answer is JSON: no thinking, no fence, no words around it."""
    said = mend_escapes(answer.rpartition("</think>")[2])
    starts = [start for start in map(said.find, opening) if start >= 0]
    return said[min(starts, default=0) : max(map(said.rfind, closing)) + 1]
