"""Rollouts by a model behind a URL.

What comes back is text. It is encoded here, so the ids are ours and not those that were sampled: log-probabilities are
0 and versions -1, and such rollouts can be judged and imitated but not trained on with importance weights.
Left out: streaming, log-probabilities from the server, and sending reasoning back in a field of its own.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from offbook.core.client import Client, Reply, ReplyMessage, connections
from offbook.engine.base import Engine, Session
from offbook.types import Completion, Message, Prompt

RenderCall = Callable[[str, Any], str]


@dataclass(slots=True)
class RemoteSession(Session):
    """One rollout's way to the engine."""

    engine: RemoteEngine

    async def complete(self, prompt: Prompt, max_tokens: int) -> Completion:
        reply = await self.engine.reply_to(prompt, max_tokens)
        choice = reply.choices[0]
        ids = self.engine.encode(_text(choice.message, self.engine.render_call))
        if choice.finish_reason != "length":
            ids = [*ids, self.engine.end_id]
        billed = (reply.usage.prompt_tokens, reply.usage.completion_tokens) if reply.usage else None
        return Completion(ids, [0.0] * len(ids), [-1] * len(ids), billed)


class RemoteEngine(Engine):
    """Lives in one event loop and is closed by `aclose`."""

    def __init__(
        self,
        client: Client,
        *,
        encode: Callable[[str], list[int]],
        end_id: int,
        render_call: RenderCall,
        temperature: float = 1.0,
        max_in_flight: int = 16,
    ):
        self.client = client
        self.encode = encode
        self.end_id = end_id
        self.render_call = render_call
        self.temperature = temperature
        self._slots = asyncio.Semaphore(max_in_flight)
        self._http = connections()

    def open(self, key: str) -> RemoteSession:
        return RemoteSession(self)

    async def aclose(self) -> None:
        await self._http.aclose()

    async def reply_to(self, prompt: Prompt, max_tokens: int) -> Reply:
        """A place in flight is held during the client's pauses: a server that is overloaded is asked less."""
        body: dict[str, Any] = {
            "messages": chat_messages(prompt.messages, self.render_call),
            "max_tokens": max_tokens,
            "temperature": self.temperature,
        }
        if prompt.tools:
            about = [
                {"name": one.name, "description": one.description, "parameters": one.parameters} for one in prompt.tools
            ]
            body["tools"] = [{"type": "function", "function": one} for one in about]
        async with self._slots:
            return await self.client.post(body, self._http)


def _text(message: ReplyMessage, render_call: RenderCall) -> str:
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
    """The conversation as the API has it: calls in a field of their own, each answer with the id of its call.

    Servers refuse calls that they cannot parse and calls without answers. So a message with such a call is sent as
    plain text, and the answers to it as the user's text.
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
        are_sendable = all(not call.error for call in message.calls) and all(text in message.text for text in rendered)
        if not rendered or not are_sendable or len(answers) != len(rendered):
            sent.append({"role": "user" if message.role == "tool" else message.role, "content": message.text})
            sent += [{"role": "user", "content": "\n".join(answers)}] if answers else []
            continue
        content = message.text
        calls = []
        tools = []
        for number, (call, text, answer) in enumerate(zip(message.calls, rendered, answers, strict=True)):
            content = content.replace(text, "", 1)
            id = f"call_{len(sent)}_{number}"
            function = {"name": call.name, "arguments": json.dumps(call.arguments)}
            calls.append({"id": id, "type": "function", "function": function})
            tools.append({"role": "tool", "tool_call_id": id, "content": answer})
        sent += [{"role": "assistant", "content": content.strip(), "tool_calls": calls}, *tools]
    return sent
