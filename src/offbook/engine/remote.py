"""A model behind a URL that speaks OpenAI's chat completions: hosted, or a vLLM or llama.cpp server next door.

What comes back is text. It is encoded here, so the ids are ours and not those that were sampled: log-probabilities are
0 and versions -1, and such rollouts can be judged and imitated but not trained on with importance weights.
Left out: streaming, log-probabilities from the server, and sending reasoning back in a field of its own.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import httpx2
from pydantic import AliasChoices, BaseModel, Field, ValidationError

from offbook.types import Completion, Message, OffbookError, Prompt, ServerLost, ToolSpec

RenderCall = Callable[[str, Any], str]

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 60.0
TRY_AGAIN = frozenset({408, 409, 425, 429})  # besides every 5xx
# The server and not the request: no key, no credit, no such model, too busy, nothing behind the gateway.
LOST = frozenset({401, 402, 403, 404, 429, 502, 503, 504})


class _Function(BaseModel):
    name: str = ""
    arguments: Any = ""  # a string of JSON; some servers send the object itself


class _Call(BaseModel):
    function: _Function


class _Message(BaseModel):
    content: str | None = None
    reasoning: str | None = Field(default=None, validation_alias=AliasChoices("reasoning_content", "reasoning"))
    tool_calls: list[_Call] | None = None


class _Choice(BaseModel):
    message: _Message
    finish_reason: str | None = None


class _Usage(BaseModel):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Reply(BaseModel):
    choices: list[_Choice] = Field(min_length=1)
    usage: _Usage | None = None


@dataclass(slots=True)
class RemoteSession:
    """One rollout's way to the engine, and the tokens it was billed for."""

    engine: RemoteEngine
    key: str
    turn: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    unmetered: int = 0  # replies that did not say what they used

    async def complete(self, prompt: Prompt, max_tokens: int) -> Completion:
        reply = await self.engine.ask(prompt, max_tokens, f"{self.key}/{self.turn}")
        self.turn += 1
        self.unmetered += reply.usage is None
        if reply.usage:
            self.prompt_tokens += reply.usage.prompt_tokens
            self.completion_tokens += reply.usage.completion_tokens
        choice = reply.choices[0]
        ids = self.engine.encode(_text(choice.message, self.engine.render_call))
        if choice.finish_reason != "length":
            ids = [*ids, self.engine.end_id]
        billed = (reply.usage.prompt_tokens, reply.usage.completion_tokens) if reply.usage else None
        return Completion(ids, [0.0] * len(ids), [-1] * len(ids), billed)

    def close(self) -> None:
        """Nothing to give back: rollouts behind a URL do not wait for one another."""


class RemoteEngine:
    """Lives in one event loop and is closed by `aclose`. The key comes from the environment and is told to no one.

    `temperature` None and `limit_name` "max_completion_tokens" are what OpenAI's reasoning models ask for.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        encode: Callable[[str], list[int]],
        end_id: int,
        render_call: RenderCall,
        api_key_env: str = "OPENAI_API_KEY",
        temperature: float | None = 1.0,
        seed: int | None = None,
        limit_name: str = "max_tokens",
        timeout_s: float = 300.0,
        max_retries: int = 5,
        max_in_flight: int = 16,
    ):
        self.url = f"{url.rstrip('/')}/chat/completions"
        self.host = _host(url)
        self.model = model
        self.encode, self.end_id, self.render_call = encode, end_id, render_call
        self.api_key_env = api_key_env
        self.temperature, self.seed, self.limit_name = temperature, seed, limit_name
        self.timeout_s, self.max_retries = timeout_s, max_retries
        self._key = _key_from(api_key_env)
        self._slots = asyncio.Semaphore(max_in_flight)
        self._client = httpx2.AsyncClient(timeout=None, limits=httpx2.Limits(max_connections=None))

    def open(self, key: str) -> RemoteSession:
        return RemoteSession(self, key)

    async def aclose(self) -> None:
        await self._client.aclose()

    async def ask(self, prompt: Prompt, max_tokens: int, dice: str) -> _Reply:
        """One reply, after as many attempts as it takes; a server that does not want this request is not asked again.

        A place in flight is held during the pauses: a server that is overloaded is asked less.
        """
        body = self._body(prompt, max_tokens, dice)
        async with self._slots:
            for attempt in range(self.max_retries + 1):
                kind = OffbookError
                pause_s = min(FIRST_PAUSE_S * 2**attempt, LONGEST_PAUSE_S)
                try:
                    async with asyncio.timeout(self.timeout_s):
                        response = await self._client.post(self.url, json=body, headers=self._headers())
                except TimeoutError:
                    problem = f"did not answer within {self.timeout_s:g} s"
                except httpx2.TransportError as error:
                    problem, kind = f"cannot be reached ({type(error).__name__}: {error})", ServerLost
                else:
                    if response.is_success:
                        return self._parse(response)
                    problem = f"answered {response.status_code}: {_reason(response)}"
                    kind = ServerLost if response.status_code in LOST else OffbookError
                    if response.status_code not in TRY_AGAIN and response.status_code < 500:
                        raise self._error(problem + self._about_key(response.status_code), kind)
                    pause_s = _retry_after(response) or pause_s
                if attempt < self.max_retries:
                    await asyncio.sleep(min(pause_s, LONGEST_PAUSE_S))
        raise self._error(f"{problem} (after {self.max_retries + 1} attempts)", kind)

    def _body(self, prompt: Prompt, max_tokens: int, dice: str) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "messages": chat_messages(prompt.messages, self.render_call),
            self.limit_name: max_tokens,
        }
        if prompt.tools:
            body["tools"] = [_function(tool) for tool in prompt.tools]
        if self.temperature is not None:
            body["temperature"] = self.temperature
        if self.seed is not None:  # one for each message, or every rollout of a group would be the same
            digest = hashlib.blake2b(f"{self.seed}/{dice}".encode(), digest_size=4).digest()
            body["seed"] = int.from_bytes(digest) >> 1
        return body

    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._key}"} if self._key else {}

    def _parse(self, response: httpx2.Response) -> _Reply:
        try:
            return _Reply.model_validate_json(response.content)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise self._error(f"sent something that is not a chat completion ({where}: {first['msg']})") from None

    def _about_key(self, status: int) -> str:
        return f" ({self.api_key_env} is not set)" if status in (401, 403) and not self._key else ""

    def _error(self, problem: str, kind: type[OffbookError] = OffbookError) -> OffbookError:
        text = f"the model server {self.host} {problem}"
        return kind(text.replace(self._key, "[key]") if self._key else text)


def _host(url: str) -> str:
    try:
        parsed = httpx2.URL(url)
    except httpx2.InvalidURL as error:
        raise OffbookError(f"the URL of the model server cannot be read: {error}") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise OffbookError("the URL of the model server must look like https://host/v1")
    return parsed.host


def _key_from(variable: str) -> str:
    key = os.environ.get(variable, "").strip()
    if not (key.isascii() and key.isprintable()):  # the HTTP client would show it in its complaint
        raise OffbookError(f"the key in {variable} has characters that cannot be sent; set it again")
    return key


def _retry_after(response: httpx2.Response) -> float | None:
    """Seconds, from a number or a date; None if the server does not say or says it unreadably."""
    value = response.headers.get("retry-after", "")
    with suppress(ValueError):
        return max(0.0, float(value))
    with suppress(ValueError, TypeError):
        return max(0.0, (parsedate_to_datetime(value) - datetime.now(UTC)).total_seconds())
    return None


def _reason(response: httpx2.Response) -> str:
    """What the server says about its refusal: OpenAI's error.message, others' message or detail, or its first line."""
    text = response.text
    try:
        value = response.json()
    except ValueError:
        value = None
    if isinstance(value, dict):
        error = value.get("error")
        inner = error.get("message") if isinstance(error, dict) else error
        text = str(inner or value.get("message") or value.get("detail") or text)
    return " ".join(text.split())[:400] or "no reason given"


def _function(tool: ToolSpec) -> dict[str, Any]:
    about = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": about}


def _text(message: _Message, render_call: RenderCall) -> str:
    """The reply in the words that a local model would use.

    Arguments that are not JSON stay the string they came as, which the parser of calls refuses and reports.
    """
    parts = [f"<think>\n{message.reasoning}\n</think>"] if message.reasoning else []
    parts += [message.content] if message.content else []
    for call in message.tool_calls or []:
        arguments = call.function.arguments
        if isinstance(arguments, str):
            with suppress(ValueError):
                arguments = json.loads(arguments)
        parts.append(render_call(call.function.name, arguments))
    return "\n".join(parts)


def chat_messages(messages: Sequence[Message], render_call: RenderCall) -> list[dict[str, Any]]:
    """The conversation as the API has it: calls beside the content, each answer with the id of its call.

    Servers refuse calls that they cannot parse and calls without answers. So a message with such a call goes as the
    text it is, and what the tools said to it as the user's words.
    """
    sent: list[dict[str, Any]] = []
    place = 0
    while place < len(messages):
        message = messages[place]
        place += 1
        answers = []
        while message.role == "assistant" and place < len(messages) and messages[place].role == "tool":
            answers.append(messages[place].text)
            place += 1
        rendered = [render_call(call.name, call.arguments) for call in message.calls]
        sendable = all(
            not call.error and text in message.text for call, text in zip(message.calls, rendered, strict=True)
        )
        if rendered and sendable and len(answers) == len(rendered):
            sent += _native(message, rendered, answers, f"call_{len(sent)}")
        else:
            sent.append({"role": "user" if message.role == "tool" else message.role, "content": message.text})
            sent += [{"role": "user", "content": "\n".join(answers)}] if answers else []
    return sent


def _native(message: Message, rendered: list[str], answers: list[str], name: str) -> list[dict[str, Any]]:
    content = message.text
    for text in rendered:
        content = content.replace(text, "", 1)
    ids = [f"{name}_{number}" for number in range(len(rendered))]
    calls = [
        {"id": id, "type": "function", "function": {"name": call.name, "arguments": json.dumps(call.arguments)}}
        for id, call in zip(ids, message.calls, strict=True)
    ]
    tools = [{"role": "tool", "tool_call_id": id, "content": text} for id, text in zip(ids, answers, strict=True)]
    return [{"role": "assistant", "content": content.strip(), "tool_calls": calls}, *tools]
