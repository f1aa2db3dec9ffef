"""A tool: a function of a workbench. Its annotations describe its parameters to the model and validate calls."""

import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypedDict, Union, get_args, get_origin, get_type_hints, is_typeddict

from offbook.agent.chat.dialects import can_be_written
from offbook.sandbox.access import Opened
from offbook.sandbox.sandbox import Sandbox
from offbook.types import Json, Limits, ToolSpec

Status = Literal["pending", "in_progress", "done"]
MARKS: dict[Status, str] = {"pending": "[ ]", "in_progress": "[>]", "done": "[x]"}
PLAIN = {str: "string", int: "integer", float: "number", bool: "boolean"}
WORDS = {"string": "a string", "integer": "an integer", "number": "a number", "boolean": "true or false"}


class ToolFailed(Exception):
    """The call was well formed and the tool could not do it; the message is for the agent.

    Tools and parameters are shown under other names to some agents, so the message says neither.
    """


class TodoItem(TypedDict):
    text: str
    status: Status


@dataclass
class Workbench:
    """State that the tools of one rollout share."""

    sandbox: Sandbox
    limits: Limits
    todos: list[TodoItem] = field(default_factory=list)
    test_command: str = ""  # what run_tests runs; empty where the task offers none
    opened: list[Opened] = field(default_factory=list)  # by commands of this turn, where the sandbox watches
    timeouts: int = 0  # commands that their timeout ended

    def todo_text(self) -> str:
        return "\n".join(f"{MARKS[item['status']]} {item['text']}" for item in self.todos)


@dataclass(frozen=True)
class Parameter:
    own_name: str  # what the function calls it, whatever it is shown as
    schema: Json  # JSON schema
    required: bool


@dataclass(frozen=True)
class Tool:
    """`function` takes the workbench and then the parameters by their own names; optional ones have defaults there.

    A task may show it under another name and its parameters too: `parameters` is by the names that are shown.
    """

    name: str
    own_name: str
    description: str
    parameters: dict[str, Parameter]
    function: Callable[..., Awaitable[str]]

    @property
    def required(self) -> list[str]:
        return [name for name, parameter in self.parameters.items() if parameter.required]

    def check(self, arguments: Json, strict: bool = True) -> str | None:
        """What is wrong with the arguments, or None. Only `strict` minds arguments that the tool does not take."""
        for name, parameter in self.parameters.items():
            if name not in arguments and parameter.required:
                return f"{self.name} needs {name}"
            problem = problem_with(name, arguments[name], parameter.schema) if name in arguments else None
            if problem:
                return problem
        unknown = [name for name in arguments if name not in self.parameters]
        return f"{self.name} takes no {unknown[0]}" if strict and unknown else None

    def spec(self) -> ToolSpec:
        properties = {name: parameter.schema for name, parameter in self.parameters.items()}
        return ToolSpec(
            self.name, self.description, {"type": "object", "properties": properties, "required": self.required}
        )

    async def run(self, bench: Workbench, arguments: Json) -> str:
        """The arguments have passed `check`. The answer can be encoded: file names may hold bytes that are no UTF-8."""
        known = {self.parameters[name].own_name: value for name, value in arguments.items() if name in self.parameters}
        answer = await self.function(bench, **known)
        return answer.encode(errors="replace").decode()


def tool_of(function: Callable[..., Any]) -> Tool:
    """A function as a tool: its docstring is the description, `Annotated[str, "words"]` describes a parameter, and a
    parameter with a default is optional. A ValueError says what is missing."""
    description = inspect.getdoc(function)
    if not description:
        raise ValueError("needs a docstring: the agent reads it")
    hints = get_type_hints(function, include_extras=True)
    parameters = {}
    for given in list(inspect.signature(function).parameters.values())[1:]:
        kind, words = hints.get(given.name), ""
        if get_origin(kind) is Annotated:
            kind, words, *_ = get_args(kind)
        schema = schema_of(kind)
        if schema is None or given.kind not in (given.POSITIONAL_OR_KEYWORD, given.KEYWORD_ONLY):
            raise ValueError(f"must annotate {given.name} as str, int, float, bool, a list or a TypedDict of them")
        described = {"type": schema.pop("type"), "description": words, **schema}
        parameters[given.name] = Parameter(given.name, described, required=given.default is given.empty)
    return Tool(function.__name__, function.__name__, " ".join(description.split()), parameters, function)


def schema_of(kind: Any) -> Json | None:
    """The JSON schema of an annotation, or None if the type is not supported."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType) and len(inner) == 2 and inner[1] is NoneType:
        return schema_of(inner[0])
    if origin is Literal and all(isinstance(value, str) for value in inner):
        return {"type": "string", "enum": [*inner]}
    if origin is list:
        items = schema_of(inner[0])
        return items and {"type": "array", "items": items}
    if is_typeddict(kind):
        properties = {name: schema_of(part) for name, part in get_type_hints(kind).items()}
        if all(properties.values()):
            return {"type": "object", "properties": properties, "required": [*properties]}
    return {"type": PLAIN[kind]} if kind in PLAIN else None


def problem_with(name: str, value: Any, schema: Json) -> str | None:
    """What is wrong with a value, or None. A number in quotes is a string and true is no number."""
    inner: list[tuple[str, Any, Json]] = []
    if schema["type"] == "array":
        if type(value) is not list:
            return f"{name} must be a list of {schema['items']['type']}s"
        inner = [(f"item {number} of {name}", item, schema["items"]) for number, item in enumerate(value, 1)]
    elif schema["type"] == "object":
        parts = schema["properties"]
        if type(value) is not dict or set(value) != set(parts):
            return f"{name} must be an object with {' and '.join(parts)}"
        inner = [(f"{key} of {name}", part, parts[key]) for key, part in value.items()]
    elif PLAIN.get(type(value)) != schema["type"] and not (schema["type"] == "number" and type(value) is int):
        return f"{name} must be {WORDS[schema['type']]}"
    elif type(value) is str and not can_be_written(value):
        return f"{name} holds characters that are no text"
    elif value not in schema.get("enum", [value]):
        return f"{name} must be one of {', '.join(schema['enum'])}"
    return next((problem for each in inner if (problem := problem_with(*each))), None)
