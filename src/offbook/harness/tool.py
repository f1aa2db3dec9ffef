"""What a tool is: a function of a workbench whose parameters a model can be told of and a call can be held to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from offbook.sandbox.access import Opened
from offbook.sandbox.box import Box
from offbook.types import Limits, ToolSpec

Kind = Literal["string", "integer", "number", "boolean", "edits", "todos"]
Status = Literal["pending", "in_progress", "done"]
MARKS: dict[Status, str] = {"pending": "[ ]", "in_progress": "[>]", "done": "[x]"}


class ToolFailed(Exception):
    """The call was well formed and the tool could not do it; the message is for the agent.

    Tools and parameters are shown under other names to some agents, so the message says neither.
    """


@dataclass(frozen=True, slots=True)
class Todo:
    text: str
    status: Status


@dataclass(slots=True)
class Workbench:
    """What the tools of one rollout work on."""

    box: Box
    limits: Limits
    todos: list[Todo] = field(default_factory=list)
    test_command: str = ""  # what run_tests runs; empty where the task offers none
    opened: list[Opened] = field(default_factory=list)  # by commands of this turn, where the box watches
    _calls: list[tuple[asyncio.Event, bool]] = field(default_factory=list)  # those not over: when one is, and if alone

    @asynccontextmanager
    async def turn(self, alone: bool) -> AsyncIterator[None]:
        """Calls of one message run side by side, but one that must be alone waits for all before it, and all after it
        wait for that one: an edit is there for the command that follows it, and two edits of a file are both kept."""
        before = [over for over, other in self._calls if alone or other]
        mine = (asyncio.Event(), alone)
        self._calls.append(mine)
        try:
            for over in before:
                await over.wait()
            yield
        finally:
            mine[0].set()
            self._calls.remove(mine)

    def todo_text(self) -> str:
        return "\n".join(f"{MARKS[todo.status]} {todo.text}" for todo in self.todos)


@dataclass(frozen=True, slots=True)
class Parameter:
    kind: Kind
    description: str
    required: bool = True

    def check(self, name: str, value: Any) -> str | None:
        """What is wrong with a value, or None. A number in quotes is a string and true is no number."""
        if self.kind == "integer":
            return None if type(value) is int else f"{name} must be an integer"
        if self.kind == "number":
            return None if type(value) in (int, float) else f"{name} must be a number"
        if self.kind == "boolean":
            return None if type(value) is bool else f"{name} must be true or false"
        if self.kind == "string":
            return _check_string(name, value)
        if type(value) is not list:
            return f"{name} must be a list of objects"
        schema = _ITEMS[self.kind]["properties"]
        for number, item in enumerate(value, 1):
            if type(item) is not dict or set(item) != set(schema):
                return f"item {number} of {name} must be an object with {' and '.join(schema)}"
            for key, part in item.items():
                problem = _check_string(f"{key} of item {number} of {name}", part)
                if problem:
                    return problem
                allowed = schema[key].get("enum")
                if allowed and part not in allowed:
                    return f"{key} of item {number} of {name} must be one of {', '.join(allowed)}"
        return None

    def schema(self) -> dict[str, Any]:
        if self.kind in _ITEMS:
            return {"type": "array", "description": self.description, "items": _ITEMS[self.kind]}
        return {"type": self.kind, "description": self.description}


@dataclass(frozen=True, slots=True)
class Tool:
    """`function` takes the workbench and then the parameters by name; optional ones have defaults there."""

    name: str
    description: str
    parameters: dict[str, Parameter]
    function: Callable[..., Awaitable[str]]
    alone: bool = False  # it changes what other tools see, so no other runs at the same time

    @property
    def signature(self) -> str:
        required = [name for name, parameter in self.parameters.items() if parameter.required]
        return f"{self.name}({', '.join(required)})"

    def check(self, arguments: dict[str, Any], strict: bool = True) -> str | None:
        """What is wrong with the arguments, or None. Only `strict` minds arguments that the tool does not take."""
        for name, parameter in self.parameters.items():
            if name not in arguments:
                if parameter.required:
                    return f"{self.name} needs {name}"
                continue
            problem = parameter.check(name, arguments[name])
            if problem:
                return problem
        unknown = [name for name in arguments if name not in self.parameters]
        return f"{self.name} takes no {unknown[0]}" if strict and unknown else None

    def spec(self) -> ToolSpec:
        return ToolSpec(
            self.name,
            self.description,
            {
                "type": "object",
                "properties": {name: parameter.schema() for name, parameter in self.parameters.items()},
                "required": [name for name, parameter in self.parameters.items() if parameter.required],
            },
        )

    async def run(self, bench: Workbench, arguments: dict[str, Any]) -> str:
        """The arguments have passed `check`. The answer can be encoded: file names may hold bytes that are no UTF-8."""
        async with bench.turn(self.alone):
            answer = await self.function(bench, **arguments)
        return answer.encode(errors="replace").decode()


def _check_string(name: str, value: Any) -> str | None:
    if type(value) is not str:
        return f"{name} must be a string"
    try:
        value.encode()
    except UnicodeEncodeError:  # JSON can spell half a character: "\ud800"
        return f"{name} holds characters that are no text"
    return None


def _object(**properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


_ITEMS = {
    "edits": _object(old={"type": "string"}, new={"type": "string"}),
    "todos": _object(text={"type": "string"}, status={"type": "string", "enum": list(MARKS)}),
}
