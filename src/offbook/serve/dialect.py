"""What the three APIs have in common: they differ in how requests and answers are spelled."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Protocol

from offbook.recorder import Answer, Asked, Refused, Shown
from offbook.types import ToolCall, ToolSpec

Json = dict[str, Any]
Frame = tuple[str, Json]  # of a stream: the name of the event, empty where the API has none, and its data
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
        """Raises Refused, KeyError, TypeError, ValueError or AttributeError where it is no such request."""
        ...

    def whole(self, answer: Answer, model: str) -> Json: ...

    def stream(self) -> Stream: ...

    def error(self, kind: str, sentence: str) -> Json: ...


class Pieces:
    """What is new of a text that grows."""

    def __init__(self) -> None:
        self.sent = ""

    def of(self, text: str) -> str:
        new, self.sent = text[len(self.sent) :], max(self.sent, text, key=len)
        return new


def text_of(content: Any, kinds: Collection[str] = ("text",)) -> str:
    """Content is text, nothing, or parts that are text."""
    if isinstance(content, str | None):
        return content or ""
    for part in content:
        if part["type"] not in kinds:
            raise Refused(f"content of the type {part['type']} cannot be read here: text alone can")
    return "\n".join(part["text"] for part in content)


def call_of(name: Any, arguments: Any) -> ToolCall:
    """Of the history. What an agent has made of arguments that were no JSON goes on as the text that it is."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError:
            arguments = {"input": arguments}
    return ToolCall(str(name), arguments if isinstance(arguments, dict) else {"input": arguments})


def tool_of(name: Any, description: Any, parameters: Any) -> ToolSpec:
    if not isinstance(name, str) or not isinstance(parameters, dict | None):
        raise Refused("a tool needs a name, and a JSON schema of its parameters")
    return ToolSpec(name, str(description or ""), parameters or {"type": "object", "properties": {}})


def functions(tools: Iterable[Json] | None) -> Iterator[Json]:
    for tool in tools or ():
        if tool.get("type", "function") != "function":
            raise Refused(f"there are no tools of the type {tool['type']} here, only the client's own functions")
        yield tool.get("function") or tool


def most_tokens(body: Mapping[str, Any], *names: str) -> int:
    """That an answer may have; 0 is as many as there is room for."""
    given = next((body[name] for name in names if body.get(name) is not None), None)
    if given is not None and int(given) < 1:
        raise Refused(f"{names[0]} is at least 1")
    return int(given or 0)


def ignored(body: Mapping[str, Any], known: str, stops: str = "stop") -> Json:
    """What was asked for and changes nothing. What would change the meaning of an answer is refused."""
    if body.get(stops):
        raise Refused(f"{stops} is not offered: a message ends where the model ends it, or at max_tokens")
    if body.get("n") not in (None, 1):
        raise Refused("n is not offered: ask as often as you want answers")
    left = {*body} - {*known.split(), stops, "n", "model", "stream"}
    return {name: body[name] for name in sorted(left) if body[name] is not None}


def written(arguments: Json) -> str:
    return json.dumps(arguments, ensure_ascii=False)
