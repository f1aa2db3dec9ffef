"""The client of models behind a URL that speaks OpenAI's chat completions: hosted, or a vLLM or llama.cpp server.

The key comes from an environment variable; it goes to that server and into no error. Left out: streaming.
"""

import asyncio
import functools
import json
import os
import re
import socket
import ssl
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

import httpx2
from pydantic import AliasChoices, BaseModel, Field, ValidationError

from offbook.types import Json, OffbookError, PromptTooLong, ServerLost

Turns = Sequence[tuple[str, str]]  # role and text
KEY = "OPENAI_API_KEY"  # the variable with the server's key, if it wants one
LEAST_KEY = 8  # characters; what is shorter is no secret, and may be a word of every sentence
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 60.0
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


class NoServer(NoAnswer, ServerLost):
    """Not this request, but every one would fail."""


class ContextFull(NoAnswer, PromptTooLong):
    """The request exceeds the context of the server's model."""


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
        self.url = f"{url.rstrip('/')}/chat/completions"
        self.model = model
        self.timeout_s = timeout_s
        self.max_retries = max_retries
        self._key = os.environ.get(KEY, "").strip()
        if not (self._key.isascii() and self._key.isprintable()):  # the HTTP client would show it in its complaint
            raise OffbookError(f"the key in {KEY} has characters that cannot be sent; set it again")
        self._headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        self._takes_schemas = True

    async def ask(
        self,
        question: str | Turns,
        *,
        schema: Json | None = None,
        max_tokens: int = 2048,
    ) -> str:
        """The likeliest answer to a question, or to a conversation of roles and texts. `schema` goes along as
        `response_format` until the server refuses it. Each call has a connection of its own, for any event loop."""
        turns = [("user", question)] if isinstance(question, str) else question
        said = [{"role": role, "content": text} for role, text in turns]
        body: Json = {"messages": said, "temperature": 0.0, "max_tokens": max_tokens}
        form: Json = {}
        if schema is not None and self._takes_schemas:
            named = {"name": "reply", "schema": schema, "strict": True}
            form = {"response_format": {"type": "json_schema", "json_schema": named}}
        async with connections() as http:
            try:
                reply = await self.post({**body, **form}, http)
            except NoAnswer as error:
                if not form or isinstance(error, NoServer) or not error.reason.startswith("status"):
                    raise
                reply = await self.post(body, http)
                self._takes_schemas = False  # refused with it, answered without
        return reply.choices[0].message.content or ""

    async def post(self, body: Json, http: httpx2.AsyncClient) -> Reply:
        """One reply, with retries. A server that does not want this request is asked once."""
        for attempt in range(self.max_retries + 1):
            pause_s = FIRST_PAUSE_S * 2**attempt
            kind: type[NoAnswer] = NoAnswer
            try:
                async with asyncio.timeout(self.timeout_s):
                    response = await http.post(self.url, json={"model": self.model, **body}, headers=self._headers)
            except TimeoutError:
                problem, reason = f"did not answer within {self.timeout_s:g} s", "no answer in time"
            except httpx2.RequestError as error:
                kind = NoServer
                reason = _cause(error)
                problem = f"cannot be reached ({reason})"
            else:
                if response.is_success:
                    return self._parse(response)
                status = response.status_code
                said = _refusal(response)
                problem, reason = f"answered {status}: {said}", f"status {status}"
                if TOO_LONG.search(said):
                    raise self._error(problem, reason, ContextFull)
                kind = NoServer if status in LOST else NoAnswer
                if status not in TRY_AGAIN and status < 500:
                    about_key = f" ({KEY} is not set)" if status in (401, 403) and not self._key else ""
                    raise self._error(problem + about_key, reason, kind)
                with suppress(ValueError):
                    pause_s = max(0.0, float(response.headers.get("retry-after", "")))
            if attempt < self.max_retries:
                await asyncio.sleep(min(pause_s, LONGEST_PAUSE_S))
        raise self._error(f"{problem} (after {self.max_retries + 1} attempts)", reason, kind)

    def _parse(self, response: httpx2.Response) -> Reply:
        try:
            return Reply.model_validate_json(mend_escapes(response.text))
        except ValidationError as error:
            first = error.errors()[0]
        said = _refusal(response)
        if TOO_LONG.search(said):
            raise self._error(f"answered: {said}", "context too long", ContextFull)
        what = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        if first["type"] == "json_invalid":
            what = f"not JSON but {response.headers.get('content-type', 'of no type')}"
        raise self._error(f"sent something that is not a chat completion ({what})", "no chat completion")

    def _error(self, problem: str, reason: str, kind: type[NoAnswer] = NoAnswer) -> NoAnswer:
        sentence = f"the model server {self.host} {problem}"
        if len(self._key) >= LEAST_KEY:
            sentence = sentence.replace(self._key, "[key]")
        return kind(sentence, reason)


def connections() -> httpx2.AsyncClient:
    """To be closed, in the event loop in which they are used. Timeouts are the client's."""
    return httpx2.AsyncClient(timeout=None, limits=httpx2.Limits(max_connections=None), verify=_certificates())


@functools.cache
def _certificates() -> ssl.SSLContext:
    """Reading them takes as long as a short answer, so it is done once."""
    return ssl.create_default_context()


def _host(url: str) -> str:
    """A password in the URL is not for error texts and run folders."""
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


def _refusal(response: httpx2.Response) -> str:
    """What the server says about its refusal: OpenAI's error.message, others' message or detail, or its text."""
    text = response.text
    with suppress(ValueError, RecursionError):
        value = response.json()
        if isinstance(value, dict):
            error = value.get("error")
            inner = error.get("message") if isinstance(error, dict) else error
            text = str(inner or value.get("message") or value.get("detail") or text)
    return " ".join(text.split())[:400] or "no reason given"


def _cause(error: BaseException | None) -> str:
    """The operating system's reason for a failed connection, else the kind of failure."""
    kind = type(error).__name__
    while error is not None:
        if isinstance(error, ssl.SSLError | socket.gaierror):  # their numbers are not the system's
            return str(error.strerror)
        if isinstance(error, OSError) and error.errno:
            return os.strerror(error.errno).lower()
        error = error.__cause__ or error.__context__
    return kind


def mend_escapes(text: str) -> str:
    """JSON may have half a character as an escape. json.loads takes it and no file does, so it becomes `?`."""
    return ESCAPES.sub(lambda found: found.group(1) or "?", text)


def json_part(answer: str, opening: str = "{", closing: str = "}") -> str:
    """The JSON in an answer, without thinking, a fence or words around it."""
    said = mend_escapes(answer.rpartition("</think>")[2])
    starts = [start for start in map(said.find, opening) if start >= 0]
    return said[min(starts, default=0) : max(map(said.rfind, closing)) + 1]


AGAIN = "That cannot be used: {problem}. Answer once more, with the JSON object alone."


class Answers(Protocol):
    """A model: behind a URL, or here. `schema` bounds the reply where the model's server can do that."""

    async def ask(self, question: str | Turns, *, schema: Json | None = None) -> str: ...


def object_of(**properties: Json) -> Json:
    """The schema of an object with all of these, in this order."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def loaded(reply: str) -> Any:
    """The JSON in a reply, also in a fence or between words; None if there is none."""
    try:
        return json.loads(json_part(reply, "[{", "]}"))
    except (ValueError, RecursionError):
        return None


async def ask_json(model: Answers, question: str, schema: Json, problem: Callable[[Any], str]) -> tuple[Any, str]:
    """The reply's JSON and what is wrong with it, if anything. `problem` is given None where there is no JSON."""
    first = await model.ask(question, schema=schema)
    value = loaded(first)
    if not (wrong := problem(value)):
        return value, ""
    turns = [("user", question), ("assistant", first or "(nothing)"), ("user", AGAIN.format(problem=wrong))]
    try:
        value = loaded(await model.ask(turns, schema=schema))
    except PromptTooLong:  # the question itself was not
        return value, wrong
    return value, problem(value)
