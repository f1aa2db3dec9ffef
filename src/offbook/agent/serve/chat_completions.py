"""OpenAI's Chat Completions."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from offbook.agent.recorder import Answer, Asked, Refused, Said, Shown
from offbook.agent.serve.dialect import (
    Frame,
    Json,
    Pieces,
    call_of,
    functions,
    ignored,
    member,
    most_tokens,
    name_in,
    objects,
    text_of,
    written,
)
from offbook.types import Role

ROLES: dict[str, Role] = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant",
                          "tool": "tool", "function": "tool"}  # fmt: skip
KNOWN = "messages tools max_tokens max_completion_tokens stream_options user metadata store parallel_tool_calls"


class ChatCompletions:
    path = "/v1/chat/completions"
    last = b"data: [DONE]\n\n"

    def read(self, body: Json) -> Asked:
        return Asked(
            tuple(map(_said, objects(body, "messages", needed=True))),
            functions(body),
            most_tokens(body, "max_completion_tokens", "max_tokens"),
            bool(body.get("stream")),
            ignored=ignored(body, KNOWN),
        )

    def whole(self, answer: Answer, model: str) -> Json:
        message = {"role": "assistant", "content": answer.shown.text or None, **_thinking(answer.shown.thinking)}
        if calls := _calls(answer):
            message["tool_calls"] = calls
        choice = {"index": 0, "message": message, "finish_reason": _finish(answer), "logprobs": None}
        return {**_about(answer.id, model, "chat.completion"), "choices": [choice], "usage": _usage(answer)}

    def stream(self) -> _Stream:
        return _Stream()

    def error(self, kind: str, sentence: str) -> Json:
        return {"error": {"message": sentence, "type": "invalid_request_error", "code": kind, "param": None}}


class _Stream:
    def __init__(self) -> None:
        self._text, self._thinking = Pieces(), Pieces()

    def begin(self, name: str, model: str) -> Iterator[Frame]:
        self._about = _about(name, model, "chat.completion.chunk")
        yield self._chunk({"role": "assistant", "content": ""})

    def more(self, shown: Shown) -> Iterator[Frame]:
        if new := self._thinking.of(shown.thinking):
            yield self._chunk(_thinking(new))
        if new := self._text.of(shown.text):
            yield self._chunk({"content": new})

    def end(self, answer: Answer) -> Iterator[Frame]:
        yield from self.more(answer.shown)
        for index, call in enumerate(_calls(answer)):
            yield self._chunk({"tool_calls": [{"index": index, **call}]})
        yield self._chunk({}, _finish(answer))
        yield "", {**self._about, "choices": [], "usage": _usage(answer)}

    def _chunk(self, delta: Json, finish: str | None = None) -> Frame:
        return "", {**self._about, "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


def _said(one: Json) -> Said:
    role = ROLES.get(member(one, "role", str, "a message"))
    if role is None:
        raise Refused(f"there is no role {one['role']}")
    calls = objects(one, "tool_calls", "a message")
    made = tuple(call_of(member(call, "function", dict, "a tool call"), "arguments") for call in calls)
    ids = tuple(name_in(call, "id", "a tool call") for call in calls)
    said = text_of(one, "content", "a message", ("text", "refusal"))
    return Said(role, said, made, (name_in(one, "tool_call_id", "a message"),) if role == "tool" else ids)


def _calls(answer: Answer) -> list[Json]:
    return [
        {"id": id, "type": "function", "function": {"name": call.name, "arguments": written(call.arguments)}}
        for id, call in zip(answer.call_ids, answer.shown.calls, strict=True)
    ]


def _thinking(text: str) -> dict[str, Any]:
    return {"reasoning_content": text} if text else {}


def _about(name: str, model: str, kind: str) -> Json:
    return {"id": f"chatcmpl-{name}", "object": kind, "created": int(time.time()), "model": model}


def _finish(answer: Answer) -> str:
    return "length" if answer.is_cut else "tool_calls" if answer.shown.calls else "stop"


def _usage(answer: Answer) -> Json:
    total = answer.prompt_tokens + answer.sampled_tokens
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.sampled_tokens,
        "total_tokens": total,
    }
