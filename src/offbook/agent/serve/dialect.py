"""What the three API dialects share: they differ only in the JSON of requests and answers."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Protocol, TypeVar

from offbook.agent.recorder import Answer, Asked, Refused, Shown
from offbook.types import ToolCall, ToolSpec

Json = dict[str, Any]
Frame = tuple[str, Json]  # of a stream: the name of the event, empty where the API has none, and its data
T = TypeVar("T")
WORDS: dict[type, str] = {str: "text", int: "a whole number", float: "a number", list: "a list", dict: "an object"}
MODEL = "offbook"  # what the model is called here; requests may call it what they like


class Stream(Protocol):
    """One answer, a piece at a time."""

    def begin(self, name: str, model: str) -> Iterator[Frame]: ...

    def more(self, shown: Shown) -> Iterator[Frame]:
        """`shown` is all there is by now."""
        ...

    def end(self, answer: Answer) -> Iterator[Frame]: ...


class Dialect(Protocol):
    path: str
    last: bytes  # what ends a stream

    def read(self, body: Json) -> Asked:
        """Raises Refused, with a sentence, where it is no such request."""
        ...

    def whole(self, answer: Answer, model: str) -> Json: ...

    def stream(self) -> Stream: ...

    def error(self, kind: str, sentence: str) -> Json: ...


class Pieces:
    """Returns the new part of a growing text."""

    def __init__(self) -> None:
        self.sent = ""

    def of(self, text: str) -> str:
        new, self.sent = text[len(self.sent) :], max(self.sent, text, key=len)
        return new


def member(of: Json, name: str, kind: type[T], where: str = "the request") -> T:
    """A required member, checked for its type."""
    if name not in of:
        raise Refused(f"{where} has no {name}")
    fits = int | float if kind is float else kind
    if not isinstance(of[name], fits) or (isinstance(of[name], bool) and kind in (int, float)):
        raise Refused(f"{name} of {where} is to be {WORDS[kind]}")
    return of[name]


def name_in(of: Json, name: str, where: str = "the request") -> str:
    """An optional name or id."""
    return member(of, name, str, where) if of.get(name) is not None else ""


def objects(of: Json, name: str, where: str = "the request", needed: bool = False) -> list[Json]:
    found = member(of, name, list, where) if needed or of.get(name) is not None else []
    if not all(isinstance(one, dict) for one in found):
        raise Refused(f"{name} of {where} is to be a list of objects")
    return found


def text_of(of: Json, name: str, where: str, kinds: Collection[str] = ("text",)) -> str:
    """Content is text, nothing, or parts that are text."""
    if isinstance(of.get(name), str | None):
        return of.get(name) or ""
    if not isinstance(of[name], list):
        raise Refused(f"{name} of {where} is to be text, or a list of parts")
    parts = objects(of, name, where)
    for part in parts:
        if member(part, "type", str, "a part of content") not in kinds:
            raise Refused(f"content of the type {part['type']} cannot be read here: text alone can")
    return "\n".join(member(part, "text", str, "a part of content") for part in parts)


def call_of(of: Json, inside: str) -> ToolCall:
    """A call in the history. Arguments that are not JSON are kept as text."""
    name, arguments = member(of, "name", str, "a tool call"), of.get(inside)
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            arguments = {"input": arguments}
    return ToolCall(name, arguments if isinstance(arguments, dict) else {"input": arguments})


def tool_of(tool: Json, schema: str) -> ToolSpec:
    name, parameters = member(tool, "name", str, "a tool"), tool.get(schema)
    if not isinstance(parameters, dict | None) or not isinstance((parameters or {}).get("properties", {}), dict):
        raise Refused(f"{schema} of the tool {name} is to be a JSON schema of an object")
    return ToolSpec(name, name_in(tool, "description", "a tool"), parameters or {"type": "object", "properties": {}})


def functions(body: Json) -> tuple[ToolSpec, ...]:
    """The tools of a request, in the form of both OpenAI APIs."""
    found = []
    for tool in objects(body, "tools"):
        if tool.get("type", "function") != "function":
            raise Refused(f"there are no tools of the type {tool['type']} here, only the client's own functions")
        inner = member(tool, "function", dict, "a tool") if tool.get("function") is not None else tool
        found.append(tool_of(inner, "parameters"))
    return tuple(found)


def most_tokens(body: Mapping[str, Any], *names: str) -> int:
    """The maximum tokens of the answer; 0 means as many as there is room for."""
    name = next((name for name in names if body.get(name) is not None), None)
    if name is not None and member(dict(body), name, int) < 1:
        raise Refused(f"{name} is at least 1")
    return body[name] if name else 0


def ignored(body: Mapping[str, Any], known: str, stops: str = "stop") -> Json:
    """The request's parameters without effect here. Those that would change the meaning of an answer are refused."""
    if body.get(stops):
        raise Refused(f"{stops} is not offered: a message ends where the model ends it, or at max_tokens")
    if body.get("n") not in (None, 1):
        raise Refused("n is not offered: ask as often as you want answers")
    left = {*body} - {*known.split(), stops, "n", "model", "stream"}
    return {name: body[name] for name in sorted(left) if body[name] is not None}


def written(arguments: Json) -> str:
    return json.dumps(arguments, ensure_ascii=False)
