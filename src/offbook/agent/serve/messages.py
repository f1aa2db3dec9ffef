"""Anthropic's Messages."""

from __future__ import annotations

from collections.abc import Iterator

from offbook.agent.recorder import Answer, Asked, Refused, Said, Shown
from offbook.agent.serve.dialect import (
    Frame,
    Json,
    Pieces,
    call_of,
    ignored,
    member,
    most_tokens,
    objects,
    text_of,
    tool_of,
    written,
)
from offbook.types import Role

KNOWN = "messages system tools max_tokens metadata"
ROLES: dict[str, Role] = {"user": "user", "assistant": "assistant"}
THOUGHTS = ("thinking", "redacted_thinking")


class Messages:
    path = "/v1/messages"
    last = b""

    def read(self, body: Json) -> Asked:
        tools = objects(body, "tools")
        if own := [tool["type"] for tool in tools if tool.get("type", "custom") != "custom"]:
            raise Refused(f"there is no tool of the type {own[0]} here, only the client's own")
        system = text_of(body, "system", "the request")
        messages = objects(body, "messages", needed=True)
        first = [Said("system", system)] if system else []
        return Asked(
            (*first, *(said for one in messages for said in _said(one))),
            tuple(tool_of(tool, "input_schema") for tool in tools),
            most_tokens(body, "max_tokens"),
            bool(body.get("stream")),
            ignored=ignored(body, KNOWN, "stop_sequences"),
        )

    def whole(self, answer: Answer, model: str) -> Json:
        shown, content = answer.shown, list[Json]()
        if shown.thinking:
            content.append({"type": "thinking", "thinking": shown.thinking, "signature": ""})
        if shown.text:
            content.append({"type": "text", "text": shown.text})
        for id, call in zip(answer.call_ids, shown.calls, strict=True):
            content.append({"type": "tool_use", "id": id, "name": call.name, "input": call.arguments})
        usage = {"input_tokens": answer.prompt_tokens, "output_tokens": answer.sampled_tokens}
        return {**_about(answer.id, model), "content": content, "stop_reason": _stop(answer), "usage": usage}

    def stream(self) -> _Stream:
        return _Stream()

    def error(self, kind: str, sentence: str) -> Json:
        kind = "invalid_request_error" if kind == "context_length_exceeded" else kind  # a name of OpenAI's
        return {"type": "error", "error": {"type": kind, "message": sentence}}


class _Stream:
    """A stream of content blocks."""

    def __init__(self) -> None:
        self._pieces = {"thinking": Pieces(), "text": Pieces()}
        self._index, self._open = -1, ""

    def begin(self, name: str, model: str) -> Iterator[Frame]:
        usage = {"input_tokens": 0, "output_tokens": 0}
        yield _frame("message_start", message={**_about(name, model), "content": [], "usage": usage})

    def more(self, shown: Shown) -> Iterator[Frame]:
        for kind, text in (("thinking", shown.thinking), ("text", shown.text)):
            if new := self._pieces[kind].of(text):
                if self._open != kind:
                    yield from self._start(
                        {"type": kind, kind: "", **({"signature": ""} if kind == "thinking" else {})}
                    )
                yield self._delta({"type": f"{kind}_delta", kind: new})

    def end(self, answer: Answer) -> Iterator[Frame]:
        yield from self.more(answer.shown)
        for id, call in zip(answer.call_ids, answer.shown.calls, strict=True):
            yield from self._start({"type": "tool_use", "id": id, "name": call.name, "input": {}})
            yield self._delta({"type": "input_json_delta", "partial_json": written(call.arguments)})
        yield from self._stop()
        usage = {"input_tokens": answer.prompt_tokens, "output_tokens": answer.sampled_tokens}
        yield _frame("message_delta", delta={"stop_reason": _stop(answer), "stop_sequence": None}, usage=usage)
        yield _frame("message_stop")

    def _start(self, block: Json) -> Iterator[Frame]:
        yield from self._stop()
        self._index, self._open = self._index + 1, block["type"]
        yield _frame("content_block_start", index=self._index, content_block=block)

    def _stop(self) -> Iterator[Frame]:
        if self._open:
            yield _frame("content_block_stop", index=self._index)
        self._open = ""

    def _delta(self, delta: Json) -> Frame:
        return _frame("content_block_delta", index=self._index, delta=delta)


def _said(one: Json) -> Iterator[Said]:
    """A message of the user may hold the answers of tools, which come before its words."""
    role = ROLES.get(member(one, "role", str, "a message"))
    if role is None:
        raise Refused(f"there is no role {one['role']} among messages")
    if isinstance(one.get("content"), str):
        yield Said(role, one["content"])
        return
    content = objects(one, "content", "a message", needed=True)
    kinds = [member(block, "type", str, "a block of content") for block in content]
    uses = [block for kind, block in zip(kinds, content, strict=True) if kind == "tool_use"]
    not_text = ("tool_result", "tool_use", *THOUGHTS)
    words = [block for kind, block in zip(kinds, content, strict=True) if kind not in not_text]
    for block in (block for kind, block in zip(kinds, content, strict=True) if kind == "tool_result"):
        id, failed = member(block, "tool_use_id", str, "a tool's answer"), bool(block.get("is_error"))
        yield Said("tool", text_of(block, "content", "a tool's answer"), ids=(id,), failed=failed)
    if words or uses or role == "assistant":
        calls = tuple(call_of(block, "input") for block in uses)
        ids = tuple(member(block, "id", str, "a tool call") for block in uses)
        yield Said(role, text_of({"content": words}, "content", "a message"), calls, ids)


def _frame(kind: str, **more: object) -> Frame:
    return kind, {"type": kind, **more}


def _about(name: str, model: str) -> Json:
    about = {"id": f"msg_{name}", "type": "message", "role": "assistant", "model": model}
    return {**about, "stop_reason": None, "stop_sequence": None}


def _stop(answer: Answer) -> str:
    return "max_tokens" if answer.is_cut else "tool_use" if answer.shown.calls else "end_turn"
