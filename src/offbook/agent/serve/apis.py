"""The three APIs: OpenAI's Chat Completions and Responses, and Anthropic's Messages. They differ in JSON alone.

Requests are read into what they ask of the model; what is wrong with one is said in a sentence. An answer is a list of
blocks (thinking, text, calls). Each API writes it whole, or as the frames of a stream; those come all at once.
"""

import itertools
import json
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, TypeVar

from offbook.agent.recorder import Answer, Asked, Refused, Said
from offbook.types import Json, Role, ToolCall, ToolSpec

T = TypeVar("T")
KINDS = {str: "a text", int: "a whole number", bool: "true or false", list: "a list", dict: "a JSON object"}
ROLES: dict[str, Role] = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant",
                          "tool": "tool", "function": "tool"}  # fmt: skip
TEXTS = ("text", "input_text", "output_text")
REFUSED = {  # other parameters that this model does not have, such as a temperature, are ignored
    "stop": "a message ends where the model ends it, or at max_tokens",
    "stop_sequences": "a message ends where the model ends it, or at max_tokens",
    "previous_response_id": "send the whole conversation",
}


def member(of: Json, name: str, kind: type[T], default: T | None = None) -> T:
    """A member of a JSON object; without a default it must be there."""
    value = of.get(name)
    if value is None and default is not None:
        return default
    if type(value) is not kind:
        raise Refused(f"{name} must be {KINDS[kind]}")
    return value


def _objects(of: Json, name: str, default: list[Json] | None = None) -> list[Json]:
    values = member(of, name, list, default)
    if not all(isinstance(value, dict) for value in values):
        raise Refused(f"{name} must be a list of JSON objects")
    return values


def _text(content: object) -> str:
    """Content is a text or a list of parts, which are texts."""
    if isinstance(content, list):
        parts = _objects({"content": content}, "content")
        return "\n".join(_text_of(part) for part in parts)
    if content is None or isinstance(content, str):
        return content or ""
    raise Refused("content must be a text or a list of texts")


def _text_of(part: Json) -> str:
    if part.get("type") not in TEXTS:
        raise Refused("this model takes text: the type of content must be text")
    return member(part, "text", str)


def _call(of: Json, arguments: object) -> ToolCall:
    """Arguments that are no JSON object are kept as text."""
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments or "{}")
    return ToolCall(member(of, "name", str), arguments if isinstance(arguments, dict) else {"input": arguments})


def _tool(tool: Json) -> ToolSpec:
    about = member(tool, "function", dict, tool)  # chat completions put it into a member of its own
    if tool.get("type", "function") not in ("function", "custom"):
        raise Refused("the type of a tool must be function or custom")
    schema = member(about, "parameters", dict, member(about, "input_schema", dict, {"type": "object"}))
    member(schema, "required", list, [])
    schema = {**schema, "properties": member(schema, "properties", dict, {})}
    return ToolSpec(member(about, "name", str), member(about, "description", str, ""), schema)


def _role(of: Json) -> Role:
    role = member(of, "role", str)
    if role not in ROLES:
        raise Refused(f"role must be one of {', '.join(ROLES)}")
    return ROLES[role]


def _asked(body: Json, messages: list[Said], limit: str) -> Asked:
    for name, instead in REFUSED.items():
        if body.get(name):
            raise Refused(f"{name} is not offered: {instead}")
    if body.get("n") not in (None, 1):
        raise Refused("n is not offered: ask as often as you want answers")
    max_tokens = member(body, limit, int, 0)
    if max_tokens < 1 and body.get(limit) is not None:
        raise Refused(f"{limit} must be greater than 0")
    tools = tuple(_tool(tool) for tool in _objects(body, "tools", []))
    return Asked(tuple(messages), tools, max_tokens, member(body, "stream", bool, False))


def _system(text: str) -> list[Said]:
    return [Said("system", text)] if text else []


def read_chat(body: Json) -> Asked:
    messages = []
    for message in _objects(body, "messages"):
        role = _role(message)
        calls = _objects(message, "tool_calls", [])
        ids = tuple(member(call, "id", str, "") for call in calls)
        if role == "tool":
            ids = (member(message, "tool_call_id", str, ""),)
        functions = [member(call, "function", dict) for call in calls]
        made = tuple(_call(function, function.get("arguments") or {}) for function in functions)
        messages.append(Said(role, _text(message.get("content")), made, ids))
    is_new = body.get("max_completion_tokens") is not None
    return _asked(body, messages, "max_completion_tokens" if is_new else "max_tokens")


def read_messages(body: Json) -> Asked:
    messages = _system(_text(body.get("system")))
    for message in _objects(body, "messages"):
        content = message.get("content")
        if not isinstance(content, list):
            messages.append(Said(_role(message), _text(content)))
            continue
        texts = []
        uses = []
        for block in _objects(message, "content"):
            kind = block.get("type")
            if kind == "tool_result":  # a message of the user may have the answers of tools before its words
                answer = _text(block.get("content"))
                ids = (member(block, "tool_use_id", str),)
                messages.append(Said("tool", answer, ids=ids, failed=member(block, "is_error", bool, False)))
            elif kind == "tool_use":
                uses.append(block)
            elif kind not in ("thinking", "redacted_thinking"):
                texts.append(_text_of(block))
        role = _role(message)
        if texts or uses or role == "assistant":
            calls = tuple(_call(use, use.get("input") or {}) for use in uses)
            messages.append(Said(role, "\n".join(texts), calls, tuple(member(use, "id", str) for use in uses)))
    return _asked(body, messages, "max_tokens")


def read_responses(body: Json) -> Asked:
    messages = _system(_text(body.get("instructions")))
    items = body.get("input")
    if isinstance(items, str):
        messages.append(Said("user", items))
        items = []
    for item in _objects({"input": items}, "input"):
        kind = item.get("type", "message")
        if kind == "message":
            messages.append(Said(_role(item), _text(item.get("content"))))
        elif kind == "function_call":
            call = _call(item, item.get("arguments") or {})
            messages.append(Said("assistant", "", (call,), (member(item, "call_id", str),)))
        elif kind == "function_call_output":
            messages.append(Said("tool", _text(item.get("output")), ids=(member(item, "call_id", str),)))
        elif kind != "reasoning":  # which is in the record
            raise Refused("the type of input must be message, function_call, function_call_output or reasoning")
    return _asked(body, messages, "max_output_tokens")


Frame = tuple[str, Json]  # the name of the event, empty where the API has none, and its data


@dataclass(frozen=True)
class Block:
    """A part of an answer. `text` of a call is its arguments as JSON."""

    kind: Literal["thinking", "text", "call"]
    text: str
    id: str = ""
    name: str = ""


def blocks_of(answer: Answer) -> list[Block]:
    shown = answer.shown
    blocks = [Block("thinking", shown.thinking)] if shown.thinking else []
    blocks += [Block("text", shown.text)] if shown.text else []
    for id, call in zip(answer.call_ids, shown.calls, strict=True):
        blocks.append(Block("call", json.dumps(call.arguments, ensure_ascii=False), id, call.name))
    return blocks


@dataclass(frozen=True)
class Api:
    path: str
    read: Callable[[Json], Asked]
    whole: Callable[[Answer, str], Json]  # an answer of the model of this name
    frames: Callable[[Answer, str], Iterator[Frame]]  # the same as a stream
    error: Callable[[str, str], Json]
    last: bytes = b""  # ends a stream


# Chat completions


def _openai_error(kind: str, sentence: str) -> Json:
    return {"error": {"message": sentence, "type": "invalid_request_error", "code": kind, "param": None}}


def _chat_message(answer: Answer) -> Json:
    message: Json = {"role": "assistant", "content": answer.shown.text or None}
    if answer.shown.thinking:
        message["reasoning_content"] = answer.shown.thinking
    calls = [block for block in blocks_of(answer) if block.kind == "call"]
    if calls:
        message["tool_calls"] = [
            {"index": n, "id": one.id, "type": "function", "function": {"name": one.name, "arguments": one.text}}
            for n, one in enumerate(calls)
        ]
    return message


def _completion(answer: Answer, model: str, kind: str, choice: Json) -> Json:
    finish = "length" if answer.is_cut else "tool_calls" if answer.shown.calls else "stop"
    read = answer.prompt_tokens
    written = answer.sampled_tokens
    return {
        "id": f"chatcmpl-{answer.id}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "choices": [{"index": 0, "finish_reason": finish, "logprobs": None, **choice}],
        "usage": {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written},
    }


def chat_whole(answer: Answer, model: str) -> Json:
    return _completion(answer, model, "chat.completion", {"message": _chat_message(answer)})


def chat_frames(answer: Answer, model: str) -> Iterator[Frame]:
    yield "", _completion(answer, model, "chat.completion.chunk", {"delta": _chat_message(answer)})


# Anthropic's messages


def _anthropic_error(kind: str, sentence: str) -> Json:
    kind = "invalid_request_error" if kind == "context_length_exceeded" else kind  # a name of OpenAI's
    return {"type": "error", "error": {"type": kind, "message": sentence}}


def _content(block: Block, text: str) -> Json:
    if block.kind == "call":
        return {"type": "tool_use", "id": block.id, "name": block.name, "input": json.loads(text or "{}")}
    signature = {"signature": ""} if block.kind == "thinking" else {}
    return {"type": block.kind, block.kind: text, **signature}


def messages_whole(answer: Answer, model: str) -> Json:
    return {
        "id": f"msg_{answer.id}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [_content(block, block.text) for block in blocks_of(answer)],
        "stop_reason": "max_tokens" if answer.is_cut else "tool_use" if answer.shown.calls else "end_turn",
        "stop_sequence": None,
        "usage": {"input_tokens": answer.prompt_tokens, "output_tokens": answer.sampled_tokens},
    }


def messages_frames(answer: Answer, model: str) -> Iterator[Frame]:
    def event(kind: str, **more: object) -> Frame:
        return kind, {"type": kind, **more}

    whole = messages_whole(answer, model)
    yield event("message_start", message={**whole, "content": [], "stop_reason": None})
    for index, block in enumerate(blocks_of(answer)):
        yield event("content_block_start", index=index, content_block=_content(block, ""))
        delta = {"type": f"{block.kind}_delta", block.kind: block.text}
        if block.kind == "call":
            delta = {"type": "input_json_delta", "partial_json": block.text}
        yield event("content_block_delta", index=index, delta=delta)
        yield event("content_block_stop", index=index)
    stop = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
    yield event("message_delta", delta=stop, usage=whole["usage"])
    yield event("message_stop")


# Responses. Left out: tools that OpenAI runs, background work, and reading a response back.

PARTS = {"thinking": "reasoning_text", "text": "output_text", "call": "function_call_arguments"}


def _part(block: Block, text: str) -> Json:
    more: Json = {"annotations": [], "logprobs": []} if block.kind == "text" else {}
    return {"type": PARTS[block.kind], "text": text, **more}


def _item(block: Block) -> Json:
    if block.kind == "call":
        about = {"type": "function_call", "id": f"fc_{block.id}", "call_id": block.id, "name": block.name}
        return {**about, "arguments": block.text, "status": "completed"}
    kind = "reasoning" if block.kind == "thinking" else "message"
    more: Json = {"summary": []} if kind == "reasoning" else {"role": "assistant"}
    return {"id": kind, "type": kind, "status": "completed", "content": [_part(block, block.text)], **more}


def responses_whole(answer: Answer, model: str) -> Json:
    read = answer.prompt_tokens
    written = answer.sampled_tokens
    return {
        "id": f"resp_{answer.id}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "incomplete" if answer.is_cut else "completed",
        "model": model,
        "output": [_item(block) for block in blocks_of(answer)],
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if answer.is_cut else None,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": {
            "input_tokens": read,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": written,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": read + written,
        },
    }


def responses_frames(answer: Answer, model: str) -> Iterator[Frame]:
    numbers = itertools.count()

    def event(kind: str, **more: object) -> Frame:
        return f"response.{kind}", {"type": f"response.{kind}", "sequence_number": next(numbers), **more}

    whole = responses_whole(answer, model)
    yield event("created", response={**whole, "status": "in_progress", "output": []})
    for index, block in enumerate(blocks_of(answer)):
        item = _item(block)
        where = {"item_id": item["id"], "output_index": index, "content_index": 0}
        if block.kind == "call":
            yield event("output_item.added", output_index=index, item={**item, "arguments": ""})
            yield event("function_call_arguments.delta", **where, delta=block.text)
            yield event("function_call_arguments.done", **where, arguments=block.text, name=block.name)
        else:
            yield event("output_item.added", output_index=index, item={**item, "content": []})
            yield event("content_part.added", **where, part=_part(block, ""))
            yield event(f"{PARTS[block.kind]}.delta", **where, delta=block.text, logprobs=[])
            yield event(f"{PARTS[block.kind]}.done", **where, text=block.text, logprobs=[])
            yield event("content_part.done", **where, part=_part(block, block.text))
        yield event("output_item.done", output_index=index, item=item)
    yield event(whole["status"], response=whole)


CHAT = Api("/v1/chat/completions", read_chat, chat_whole, chat_frames, _openai_error, b"data: [DONE]\n\n")
MESSAGES = Api("/v1/messages", read_messages, messages_whole, messages_frames, _anthropic_error)
RESPONSES = Api("/v1/responses", read_responses, responses_whole, responses_frames, _openai_error)
APIS = (CHAT, MESSAGES, RESPONSES)
