"""XML calls, the dialect of Qwen3-Coder, Qwen3.5 and Nemotron-3:

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    value
    </parameter>
    </function>
    </tool_call>

A value is the text as written, less one newline at either end. It has no type, so the tool's schema says how it is
read: a parameter that may be a string is the text; any other is JSON of the declared kind, and nothing else converts.
The format cannot escape its own tags, so a value that holds one is refused and not guessed at; <tool_call> and its
end are no tags inside a value.

Left out: anyOf and its like are read as strings. Qwen3-Coder's own template writes True where this writes true.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from offbook.agent.chat.strict import CALL_END, CALL_START, SPACE, Tools, after_space, malformed, read_calls, read_json
from offbook.core.thoughts import answer_start
from offbook.types import ToolCall

FUNCTION_END, PARAMETER_START, PARAMETER_END = "</function>", "<parameter=", "</parameter>"
FUNCTION = re.compile(r"<function=([\w.-]+)>")
PARAMETER = re.compile(r"<parameter=([\w.-]+)>")
ENDS = re.compile(f"{FUNCTION_END}{SPACE.pattern}{CALL_END}")

KINDS: dict[str, Callable[[Any], bool]] = {
    "integer": lambda value: type(value) is int,
    "number": lambda value: type(value) in (int, float),
    "boolean": lambda value: isinstance(value, bool),
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "null": lambda value: value is None,
}


def render(name: str, arguments: dict[str, Any]) -> str:
    """A value that holds one of the format's own tags cannot be written."""
    lines = [CALL_START, f"<function={name}>"]
    for key, value in arguments.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        if PARAMETER_END in text or _foreign_tag(text):
            raise ValueError(f"the value of {key} holds a tag of the format")
        lines += [f"<parameter={key}>", text, PARAMETER_END]
    return "\n".join([*lines, FUNCTION_END, CALL_END])


def parse(text: str, tools: Tools = (), thinking: bool = False) -> tuple[ToolCall, ...]:
    """Every attempted call in order. A call of a tool that is not among `tools` keeps its values as text."""
    return read_calls(text, answer_start(text, thinking), lambda start: _read(text, start, tools))


def _read(text: str, start: int, tools: Tools) -> tuple[ToolCall, int | None]:
    """The call whose opening tag is at `start`, and where it ends if that can be told."""
    function = FUNCTION.match(text, after_space(text, start + len(CALL_START)))
    if not function:
        return malformed("", f"write <function=NAME> right after {CALL_START}", start), None
    name = function.group(1)
    written: list[tuple[str, str]] = []
    position = after_space(text, function.end())
    while parameter := PARAMETER.match(text, position):
        end = text.find(PARAMETER_END, parameter.end())
        value = text[parameter.end() : end]
        if end < 0 or _foreign_tag(value):
            return malformed(name, f"the value of {parameter.group(1)} is not closed by {PARAMETER_END}", start), None
        written.append((parameter.group(1), value.removeprefix("\n").removesuffix("\n")))
        position = after_space(text, end + len(PARAMETER_END))
    ends = ENDS.match(text, position)
    if not ends:
        reason = f"only <parameter=KEY> or {FUNCTION_END}{CALL_END} may stand after {_last(written)}"
        return malformed(name, reason, start), None
    try:
        return ToolCall(name, _arguments(name, written, tools), start=start), ends.end()
    except ValueError as error:
        return malformed(name, str(error), start), ends.end()


def _foreign_tag(value: str) -> bool:
    """Tags that no value may hold: they are how a forgotten </parameter> shows."""
    return PARAMETER_START in value or FUNCTION_END in value


def _last(written: list[tuple[str, str]]) -> str:
    return f"the parameter {written[-1][0]}" if written else "<function=NAME>"


def _arguments(name: str, written: list[tuple[str, str]], tools: Tools) -> dict[str, Any]:
    schema = next((tool.parameters for tool in tools if tool.name == name), None)
    arguments: dict[str, Any] = {}
    for key, value in written:
        if key in arguments:
            raise ValueError(f"the parameter {key} is there twice")
        if schema is None:
            arguments[key] = value
        elif key in schema.get("properties", {}):
            arguments[key] = _convert(key, value, schema["properties"][key])
        else:
            raise ValueError(f"{name} takes no {key}")
    return arguments


def _convert(key: str, text: str, schema: dict[str, Any]) -> Any:
    declared = schema.get("type", "string")
    kinds = [declared] if isinstance(declared, str) else declared
    if "string" in kinds:
        return text
    problem = f"{key} must be {' or '.join(kinds)}, written as JSON"
    try:
        value, end, wrong = read_json(text, after_space(text, 0))
    except ValueError:
        raise ValueError(problem) from None
    if wrong or after_space(text, end) < len(text) or not any(KINDS[kind](value) for kind in kinds):
        raise ValueError(problem)
    return value
