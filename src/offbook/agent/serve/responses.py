"""OpenAI's Responses. Left out: tools that OpenAI runs, background work, and reading a response back."""

from __future__ import annotations

import time
from collections.abc import Iterator

from offbook.agent.recorder import Answer, Asked, Refused, Said, Shown
from offbook.agent.serve.chat_completions import ROLES, ChatCompletions
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

KNOWN = (
    "input instructions tools max_output_tokens previous_response_id store metadata user parallel_tool_calls include"
)
NAME = "resp_"


class Responses:
    path = "/v1/responses"
    last = b""

    def read(self, body: Json) -> Asked:
        system = [Said("system", text_of(body, "instructions", "the request"))] if body.get("instructions") else []
        if isinstance(body.get("input"), str):
            items = [{"role": "user", "content": body["input"]}]
        else:
            items = objects(body, "input", needed=True)
        return Asked(
            (*system, *(said for item in items for said in _said(item))),
            functions(body),
            most_tokens(body, "max_output_tokens"),
            bool(body.get("stream")),
            after=name_in(body, "previous_response_id").removeprefix(NAME),
            ignored=ignored(body, KNOWN),
        )

    def whole(self, answer: Answer, model: str) -> Json:
        return _response(answer.id, model, "incomplete" if answer.is_cut else "completed", _items(answer), answer)

    def stream(self) -> _Stream:
        return _Stream()

    error = ChatCompletions.error


class _Stream:
    def __init__(self) -> None:
        self._pieces = {"reasoning": Pieces(), "message": Pieces()}
        self._opened: list[str] = []
        self._number = -1

    def begin(self, name: str, model: str) -> Iterator[Frame]:
        self._model = model
        for kind in ("created", "in_progress"):
            yield self._frame(f"response.{kind}", response=_response(name, model, "in_progress", []))

    def more(self, shown: Shown) -> Iterator[Frame]:
        for kind, text, part in (
            ("reasoning", shown.thinking, "reasoning_text"), ("message", shown.text, "output_text")
        ):  # fmt: skip
            if new := self._pieces[kind].of(text):
                if kind not in self._opened:
                    self._opened.append(kind)
                    yield self._frame("response.output_item.added", output_index=self._at, item=_item(kind, "", False))
                    where = {"item_id": kind, "output_index": self._at, "content_index": 0}
                    yield self._frame("response.content_part.added", **where, part=_part(kind, ""))
                where = {"item_id": kind, "output_index": self._at, "content_index": 0}
                more: Json = {"logprobs": []} if kind == "message" else {}
                yield self._frame(f"response.{part}.delta", **where, delta=new, **more)

    def end(self, answer: Answer) -> Iterator[Frame]:
        yield from self.more(answer.shown)
        items = _items(answer)
        for index, item in enumerate(items):
            if item["type"] == "function_call":
                begun = {**item, "arguments": "", "status": "in_progress"}
                where = {"item_id": item["id"], "output_index": index}
                yield self._frame("response.output_item.added", output_index=index, item=begun)
                yield self._frame("response.function_call_arguments.delta", **where, delta=item["arguments"])
                done = {"arguments": item["arguments"], "name": item["name"]}
                yield self._frame("response.function_call_arguments.done", **where, **done)
            else:
                where = {"item_id": item["type"], "output_index": index, "content_index": 0}
                (part,) = item["content"]
                more: Json = {"logprobs": []} if part["type"] == "output_text" else {}
                yield self._frame(f"response.{part['type']}.done", **where, text=part["text"], **more)
                yield self._frame("response.content_part.done", **where, part=part)
            yield self._frame("response.output_item.done", output_index=index, item=item)
        status = "incomplete" if answer.is_cut else "completed"
        yield self._frame(f"response.{status}", response=_response(answer.id, self._model, status, items, answer))

    @property
    def _at(self) -> int:
        return len(self._opened) - 1

    def _frame(self, kind: str, **more: object) -> Frame:
        self._number += 1
        return kind, {"type": kind, "sequence_number": self._number, **more}


def _said(item: Json) -> Iterator[Said]:
    kind = item.get("type", "message")
    if kind == "message":
        if member(item, "role", str, "a message") not in ROLES:
            raise Refused(f"there is no role {item['role']}")
        parts = ("input_text", "output_text", "text", "refusal")
        yield Said(ROLES[item["role"]], text_of(item, "content", "a message", parts))
    elif kind == "function_call":
        yield Said("assistant", "", (call_of(item, "arguments"),), (member(item, "call_id", str, "a tool call"),))
    elif kind == "function_call_output":
        output = text_of(item, "output", "a tool's answer", ("input_text", "text"))
        yield Said("tool", output, ids=(member(item, "call_id", str, "a tool's answer"),))
    elif kind != "reasoning":  # which is in the record
        raise Refused(f"items of the type {kind} cannot be read here")


def _items(answer: Answer) -> list[Json]:
    shown = (("reasoning", answer.shown.thinking), ("message", answer.shown.text))
    items = [_item(kind, text, True) for kind, text in shown if text]
    for id, call in zip(answer.call_ids, answer.shown.calls, strict=True):
        made = {"type": "function_call", "id": f"fc_{id}", "call_id": id, "name": call.name}
        items.append({**made, "arguments": written(call.arguments), "status": "completed"})
    return items


def _item(kind: str, text: str, is_done: bool) -> Json:
    item = {"id": kind, "type": kind, "status": "completed" if is_done else "in_progress"}
    item["content"] = [_part(kind, text)] if is_done else []  # type: ignore[assignment]
    return {**item, "summary": []} if kind == "reasoning" else {**item, "role": "assistant"}


def _part(kind: str, text: str) -> Json:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _response(name: str, model: str, status: str, items: list[Json], answer: Answer | None = None) -> Json:
    response = {
        "id": f"{NAME}{name}",
        "object": "response",
        "created_at": int(time.time()),
        "status": status,
        "model": model,
        "output": items,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
    }
    if answer is not None:
        read, sampled = answer.prompt_tokens, answer.sampled_tokens
        response["usage"] = {
            "input_tokens": read,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": read + sampled,
        }
    return response
