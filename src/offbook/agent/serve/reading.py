"""Reads the requests of the three APIs: pydantic models of their JSON, and what they ask of the model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    Field,
    PositiveInt,
    ValidationError,
    model_validator,
)

from offbook.agent.recorder import Asked, Refused, Said
from offbook.types import Role, ToolCall, ToolSpec

Json = dict[str, Any]
T = TypeVar("T", bound=BaseModel)
# Parameters that change nothing and are not worth an event on the rollout.
PLAIN = {"metadata", "user", "store", "parallel_tool_calls", "stream_options", "include"}
ROLES: dict[str, Role] = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant",
                          "tool": "tool", "function": "tool"}  # fmt: skip


def read(model: type[T], value: object) -> T:
    """The value as this model; Refused, with a sentence, if it is none."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "the request"
        said = first["msg"].removeprefix("Value error, ")
        raise Refused(f"{place}: {said[:1].lower()}{said[1:]}") from None


def _content(value: object) -> object:
    if value is None:
        return []
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


def _arguments(value: object) -> Json:
    """Arguments that are no JSON object are kept as text."""
    if isinstance(value, str):
        with suppress(ValueError, RecursionError):
            value = json.loads(value or "{}")
    return value if isinstance(value, dict) else {"input": value}


def _schema(value: Json) -> Json:
    if not isinstance(value.get("properties", {}), dict) or not isinstance(value.get("required", []), list):
        raise ValueError("a JSON schema of an object is needed")
    return value


class Text(BaseModel):
    type: Literal["text", "input_text", "output_text"]
    text: str


Content = Annotated[list[Text], BeforeValidator(_content)]
Arguments = Annotated[Json, BeforeValidator(_arguments)]


class Tool(BaseModel):
    type: Literal["function", "custom"] = "function"
    name: str
    description: str | None = None
    parameters: Annotated[Json, AfterValidator(_schema)] | None = Field(
        None, validation_alias=AliasChoices("parameters", "input_schema")
    )

    @model_validator(mode="before")
    @classmethod
    def _flat(cls, value: Any) -> Any:
        """Chat completions put a function into a member of its own."""
        inner = value.get("function") if isinstance(value, dict) else None
        return {"type": value.get("type", "function"), **inner} if isinstance(inner, dict) else value

    def spec(self) -> ToolSpec:
        return ToolSpec(self.name, self.description or "", self.parameters or {"type": "object", "properties": {}})


class Body(BaseModel, extra="allow"):
    """The members that all three APIs have."""

    model: str | None = None
    stream: bool | None = None
    tools: list[Tool] | None = None

    def asked(self, messages: list[Said], max_tokens: int | None, after: str = "") -> Asked:
        given = {name: value for name, value in (self.model_extra or {}).items() if value is not None}
        for name in ("stop", "stop_sequences"):
            if given.pop(name, None):
                raise Refused(f"{name} is not offered: a message ends where the model ends it, or at max_tokens")
        if given.pop("n", 1) != 1:
            raise Refused("n is not offered: ask as often as you want answers")
        ignored = {name: given[name] for name in sorted(given.keys() - PLAIN)}
        tools = tuple(tool.spec() for tool in self.tools or ())
        return Asked(tuple(messages), tools, max_tokens or 0, bool(self.stream), after, ignored=ignored)


def _text(content: list[Text]) -> str:
    return "\n".join(part.text for part in content)


# Chat completions


class Function(BaseModel):
    name: str
    arguments: Arguments = {}


class ChatCall(BaseModel):
    id: str | None = None
    function: Function


class ChatMessage(BaseModel):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content = []
    tool_calls: list[ChatCall] | None = None
    tool_call_id: str | None = None

    def said(self) -> Said:
        made = self.tool_calls or []
        calls = tuple(ToolCall(call.function.name, call.function.arguments) for call in made)
        role = ROLES[self.role]
        ids = (self.tool_call_id or "",) if role == "tool" else tuple(call.id or "" for call in made)
        return Said(role, _text(self.content), calls, ids)


class ChatBody(Body):
    messages: list[ChatMessage]
    max_tokens: PositiveInt | None = None
    max_completion_tokens: PositiveInt | None = None


def read_chat(body: Json) -> Asked:
    request = read(ChatBody, body)
    messages = [message.said() for message in request.messages]
    return request.asked(messages, request.max_completion_tokens or request.max_tokens)


# Anthropic's messages


class Thought(BaseModel):
    type: Literal["thinking", "redacted_thinking"]


class ToolUse(BaseModel):
    type: Literal["tool_use"]
    id: str
    name: str
    input: Arguments = {}


class ToolResult(BaseModel):
    type: Literal["tool_result"]
    tool_use_id: str
    content: Content = []
    is_error: bool | None = None


class Message(BaseModel):
    role: Literal["user", "assistant"]
    content: Annotated[
        list[Annotated[Text | Thought | ToolUse | ToolResult, Field(discriminator="type")]], BeforeValidator(_content)
    ]

    def said(self) -> Iterator[Said]:
        """A message of the user may hold the answers of tools, which come before its words."""
        results = [block for block in self.content if isinstance(block, ToolResult)]
        uses = [block for block in self.content if isinstance(block, ToolUse)]
        texts = [block for block in self.content if isinstance(block, Text)]
        for result in results:
            yield Said("tool", _text(result.content), ids=(result.tool_use_id,), failed=bool(result.is_error))
        if texts or uses or self.role == "assistant":
            calls = tuple(ToolCall(use.name, use.input) for use in uses)
            yield Said(self.role, _text(texts), calls, tuple(use.id for use in uses))


class MessagesBody(Body):
    messages: list[Message]
    system: Content = []
    max_tokens: PositiveInt | None = None


def read_messages(body: Json) -> Asked:
    request = read(MessagesBody, body)
    system = [Said("system", _text(request.system))] if request.system else []
    return request.asked([*system, *(said for one in request.messages for said in one.said())], request.max_tokens)


# Responses


class ItemMessage(BaseModel):
    type: Literal["message"]
    role: Literal["system", "developer", "user", "assistant"]
    content: Content = []


class FunctionCall(BaseModel):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: Arguments = {}


class FunctionOutput(BaseModel):
    type: Literal["function_call_output"]
    call_id: str
    output: Content = []


class Reasoning(BaseModel):
    type: Literal["reasoning"]  # it is in the record


def _items(value: object) -> object:
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    if isinstance(value, list):
        return [{"type": "message", **item} if isinstance(item, dict) else item for item in value]
    return value


class ResponsesBody(Body):
    input: Annotated[
        list[Annotated[ItemMessage | FunctionCall | FunctionOutput | Reasoning, Field(discriminator="type")]],
        BeforeValidator(_items),
    ]
    instructions: Content = []
    max_output_tokens: PositiveInt | None = None
    previous_response_id: str | None = None


def read_responses(body: Json) -> Asked:
    request = read(ResponsesBody, body)
    messages = [Said("system", _text(request.instructions))] if request.instructions else []
    for item in request.input:
        if isinstance(item, ItemMessage):
            messages.append(Said(ROLES[item.role], _text(item.content)))
        elif isinstance(item, FunctionCall):
            messages.append(Said("assistant", "", (ToolCall(item.name, item.arguments),), (item.call_id,)))
        elif isinstance(item, FunctionOutput):
            messages.append(Said("tool", _text(item.output), ids=(item.call_id,)))
    after = (request.previous_response_id or "").removeprefix("resp_")
    return request.asked(messages, request.max_output_tokens, after)
