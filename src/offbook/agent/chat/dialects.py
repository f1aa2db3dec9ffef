"""The call dialects: how a model writes a tool call into its message, and how it is read back.

hermes (Qwen2.5, Qwen3, the pocket model) is JSON between two tags:

    <tool_call>{"name": .., "arguments": {..}}</tool_call>

A call ends where its JSON ends, so tags inside a string are just text. A call that is closed and wrong is one malformed
call, and the reading continues behind it. Qwen's templates put the JSON on a line of its own; `render_hermes` does not.

xml (Qwen3-Coder, Qwen3.5, Nemotron-3):

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    value
    </parameter>
    </function>
    </tool_call>

A value is the text as written, less one newline at either end. Its type comes from the tool's schema: a parameter that
may be a string is the text; any other is JSON of the declared kind, without conversions. The format cannot escape its
own tags, so a value with one is refused; <tool_call> and its end are plain text inside a value. Left out: anyOf and the
like are read as strings. Qwen3-Coder's own template writes True where this writes true.

json (Qwen2.5-Coder, Llama 3) is the same JSON object in a fenced block, or alone as the whole message:

    ```json
    {"name": .., "arguments": {..}}
    ```

Other JSON is text: a call has both keys, or the name of a tool. Llama's word for arguments, parameters, is read too.

bash is the bash-only profile, compatible with mini-swe-agent's text mode: a message's one fenced command is a call.

    ```bash
    the command
    ```

The fence is named bash (as in its version 1) or mswea_bash_command (2); ToolCall("bash", {"command": ..}) is also what
version 2 makes of a native call. Every call read here is the same command there, up to surrounding white space. This
reader is stricter where one must guess: a fence in the middle of a line, after the command, or inside the command. One
difference: a message without a block is an answer here and a mistake there. The agent submits by a command that
succeeds and whose first line of output is SUBMIT; the harness looks for that.

A message whose only call is in another dialect is no answer: `Dialect.read` makes a malformed call of it, whose error
says how this dialect writes calls.

Nothing is repaired. What Python's JSON reader accepts and JSON does not (a duplicate key, NaN, numbers beyond a float,
half surrogate pairs) is named and refused, because two readers would disagree about it.
"""

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from offbook.core.thoughts import answer_start
from offbook.types import Json, ToolCall, ToolSpec

Tools = tuple[ToolSpec, ...]
CALL_START, CALL_END = "<tool_call>", "</tool_call>"
SPACE = re.compile(r"[ \t\r\n]*")
TELLING = """\
These are all the tools that you have, with their parameters as JSON schemas:

<tools>
{tools}
</tools>

{how}"""
OBJECT = """{"name": "the tool's name", "arguments": {"parameter": "value"}}"""


def as_json(tools: Tools) -> list[Json]:
    """Tools in the envelope that chat templates are written for."""
    return [{"type": "function", "function": asdict(tool)} for tool in tools]


# What the dialects share


def after_space(text: str, position: int = 0) -> int:
    found = SPACE.match(text, position)
    assert found  # the pattern also matches the empty string
    return found.end()


def malformed(name: str, reason: str, start: int) -> ToolCall:
    """A call that cannot be run. `name` is kept if it can be seen, so feedback can name the tool that was meant."""
    return ToolCall(name, error=reason, start=start)


def _in_tags(text: str, position: int, read: Callable[[int], tuple[ToolCall, int | None]]) -> tuple[ToolCall, ...]:
    """Every attempt in tags, in order. `read` takes the position of an opening tag and returns the call's end if known.

    A call whose end is unknown ends the reading: what follows may be its own inside, or may build on it. A closing tag
    that closes nothing is an attempt, too: models forget the opening one.
    """
    calls: list[ToolCall] = []
    end: int | None = position
    while end is not None:
        start = text.find(CALL_START, end)
        stray = text.find(CALL_END, end, len(text) if start < 0 else start)
        if stray >= 0:
            calls.append(malformed("", f"{CALL_END} closes nothing: begin the call with {CALL_START}", stray))
        if start < 0:
            break
        call, end = read(start)
        calls.append(call)
    return tuple(calls)


def read_json(text: str, position: int) -> tuple[Any, int, str | None]:
    """The JSON value at `position`, its end, and what is wrong with it although it can be read.

    A ValueError says why there is none.
    """
    problems: list[str] = []

    def pairs(items: list[tuple[str, Any]]) -> Json:
        if len({key for key, _ in items}) < len(items):
            problems.append("a key is there twice")
        return dict(items)

    def constant(literal: str) -> None:
        problems.append(f"{literal} is no JSON")

    def number(literal: str) -> float:
        if math.isinf(float(literal)):
            problems.append(f"{literal} is too large")
        return float(literal)

    decoder = json.JSONDecoder(object_pairs_hook=pairs, parse_constant=constant, parse_float=number)
    try:
        value, end = decoder.raw_decode(text, position)
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg} at character {error.pos - position}") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except ValueError:  # the one other thing the decoder raises: Python reads no integer of thousands of digits
        raise ValueError("a number is too long") from None
    if "\\u" in text[position:end] and not can_be_written(value):
        problems.append("a \\u escape is half a character")
    return value, end, problems[0] if problems else None


def can_be_written(value: Any) -> bool:
    """Whether a value can be written as JSON, and so as text: "\\ud800" is half a character."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except ValueError:
        return False
    return True


def _object(name: str, arguments: Json) -> str:
    return json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)


def _call_of(value: Any, problem: str | None, name: str, start: int) -> ToolCall:
    """What was read as a call's JSON object, if it is one."""
    reason = ""
    if problem:
        reason = f"the call is not valid JSON ({problem})"
    elif not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        reason = "the call needs a name"
    elif not isinstance(value.get("arguments"), dict):
        reason = "the call needs arguments, a JSON object"
    elif set(value) != {"name", "arguments"}:
        reason = "the call takes a name and arguments and nothing else"
    return malformed(name, reason, start) if reason else ToolCall(value["name"], value["arguments"], start=start)


# hermes

NAME = re.compile(r'"name"\s*:\s*"(\w+)"')


def render_hermes(name: str, arguments: Json) -> str:
    return f"{CALL_START}{_object(name, arguments)}{CALL_END}"


def parse_hermes(text: str, tools: Tools = (), thinking: bool = False) -> tuple[ToolCall, ...]:
    """Every attempted call in order. An attempt that is not a well-formed call is kept, with the reason."""

    def read(start: int) -> tuple[ToolCall, int | None]:
        body = after_space(text, start + len(CALL_START))
        seen = NAME.search(text, body)
        name = seen[1] if seen else ""
        reason = ""
        try:
            value, end, problem = read_json(text, body)
            end = after_space(text, end)
            if text.startswith(CALL_END, end):
                return _call_of(value, problem, name, start), end + len(CALL_END)
            reason = f"only {CALL_END} may follow the call's JSON object"
        except ValueError as error:
            reason = f"the call is not valid JSON ({error})"
            if text.startswith(CALL_START, body):
                reason = f"{CALL_START} stands inside a call: close one before the next begins"
        if CALL_END not in text[body:]:
            reason = f"the call is not closed by {CALL_END}"
        return malformed(name, reason, start), None

    return _in_tags(text, answer_start(text, thinking), read)


# xml

FUNCTION_END, PARAMETER_START, PARAMETER_END = "</function>", "<parameter=", "</parameter>"
FUNCTION = re.compile(r"<function=([\w.-]+)>")
PARAMETER = re.compile(r"<parameter=([\w.-]+)>")
ENDS = re.compile(f"{FUNCTION_END}{SPACE.pattern}{CALL_END}")
KINDS: dict[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "object": (dict,),
    "array": (list,),
    "null": (type(None),),
}


def render_xml(name: str, arguments: Json) -> str:
    """A value that contains one of the format's own tags cannot be written."""
    lines = [CALL_START, f"<function={name}>"]
    for key, value in arguments.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        if PARAMETER_END in text or _has_tag(text):
            raise ValueError(f"the value of {key} holds a tag of the format")
        lines += [f"<parameter={key}>", text, PARAMETER_END]
    return "\n".join([*lines, FUNCTION_END, CALL_END])


def parse_xml(text: str, tools: Tools = (), thinking: bool = False) -> tuple[ToolCall, ...]:
    """Every attempted call in order. A call of a tool that is not among `tools` keeps its values as text."""

    def read(start: int) -> tuple[ToolCall, int | None]:
        function = FUNCTION.match(text, after_space(text, start + len(CALL_START)))
        if not function:
            return malformed("", f"write <function=NAME> right after {CALL_START}", start), None
        name, last = function[1], "<function=NAME>"
        written: list[tuple[str, str]] = []
        position = after_space(text, function.end())
        while parameter := PARAMETER.match(text, position):
            end = text.find(PARAMETER_END, parameter.end())
            value = text[parameter.end() : end]
            if end < 0 or _has_tag(value):
                return malformed(name, f"the value of {parameter[1]} is not closed by {PARAMETER_END}", start), None
            written.append((parameter[1], value.removeprefix("\n").removesuffix("\n")))
            last = f"the parameter {parameter[1]}"
            position = after_space(text, end + len(PARAMETER_END))
        ends = ENDS.match(text, position)
        if not ends:
            reason = f"only <parameter=KEY> or {FUNCTION_END}{CALL_END} may stand after {last}"
            return malformed(name, reason, start), None
        schema = next((tool.parameters for tool in tools if tool.name == name), None)
        try:
            return ToolCall(name, _arguments(name, written, schema), start=start), ends.end()
        except ValueError as error:
            return malformed(name, str(error), start), ends.end()

    return _in_tags(text, answer_start(text, thinking), read)


def _has_tag(value: str) -> bool:
    """Tags that no value may contain: they mean that </parameter> was forgotten."""
    return PARAMETER_START in value or FUNCTION_END in value


def _arguments(name: str, written: list[tuple[str, str]], schema: Json | None) -> Json:
    """The values with the types of the tool's schema. A ValueError says what does not fit."""
    arguments: Json = {}
    for key, text in written:
        if key in arguments:
            raise ValueError(f"the parameter {key} is there twice")
        if schema is not None and key not in schema.get("properties", {}):
            raise ValueError(f"{name} takes no {key}")
        declared = schema["properties"][key].get("type", "string") if schema is not None else "string"
        kinds = [declared] if isinstance(declared, str) else declared
        arguments[key] = text
        if "string" in kinds:
            continue
        try:
            arguments[key], end, wrong = read_json(text, after_space(text))
            wrong = wrong or text[end:].strip(" \t\r\n")
        except ValueError as error:
            wrong = str(error)
        if wrong or not any(type(arguments[key]) in KINDS[kind] for kind in kinds):
            raise ValueError(f"{key} must be {' or '.join(kinds)}, written as JSON")
    return arguments


# json

FENCE = "```"
BLOCK = re.compile(r"```([^\n`]*)\n(.*?)(?:((?<=\n)```)|\Z)", re.DOTALL)
CALL_BLOCKS = ("json", "tool_call", "")  # what models name the blocks of their calls; only json is right


def render_json(name: str, arguments: Json) -> str:
    return f"{FENCE}json\n{_object(name, arguments)}\n{FENCE}"


def parse_json(text: str, tools: Tools = (), thinking: bool = False) -> tuple[ToolCall, ...]:
    """Every attempted call in order: of blocks, or of a message that begins with the object."""
    begin = after_space(text, answer_start(text, thinking))
    if text.startswith("{", begin):
        call = _json_attempt(text[begin:], begin, tools)
        if call:
            return (call,)
    calls = []
    for block in BLOCK.finditer(text, begin):
        call = _json_attempt(block[2], block.start(), tools)
        label = block[1].strip()
        if call is None or label not in CALL_BLOCKS:
            continue
        if not block[3]:
            call = malformed(call.name, f"the block is not closed: end it with a line {FENCE}", block.start())
        elif label != "json":
            call = malformed(call.name, f"the block must begin with {FENCE}json", block.start())
        calls.append(call)
    return tuple(calls)


def _json_attempt(text: str, start: int, tools: Tools) -> ToolCall | None:
    """The call that all of `text` is, malformed if more than that is wrong; None where it is none."""
    seen = NAME.search(text)
    name = seen[1] if seen else ""
    begin = after_space(text)
    try:
        value, end, problem = read_json(text, begin)
    except ValueError as error:
        is_meant = text.startswith(("{", "["), begin) and name and '"arguments"' in text
        return malformed(name, f"the call is not valid JSON ({error})", start) if is_meant else None
    first = value[0] if isinstance(value, list) and value else value
    if not isinstance(first, dict):
        return None
    if "parameters" in first and "arguments" not in first:  # as Llama has it
        first["arguments"] = first.pop("parameters")
    if not {"name", "arguments"} <= set(first) and all(tool.name != first.get("name") for tool in tools):
        return None
    if first is not value or after_space(text, end) < len(text):
        return malformed(name, "only the JSON object of one call may stand there", start)
    return _call_of(value, problem, name, start)


# bash

SUBMIT = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
HOW_BASH = f"Write one fenced block:\n\n{FENCE}bash\nyour command\n{FENCE}"
OPENING = re.compile(r"```(?:bash|mswea_bash_command)(?![\w-])")
COMMAND = re.compile(r"(?:^|(?<=\n))```[a-z_]+[^\S\n]*\n(?:(.*?)\n)?```[^\S\n]*(?:\n(?!```)|$)", re.DOTALL)


def render_bash(name: str, arguments: Json) -> str:
    """A command with a line that begins with a fence cannot be written."""
    command = arguments["command"]
    if name != "bash" or set(arguments) != {"command"} or not command.strip() or f"\n{FENCE}" in f"\n{command}":
        raise ValueError("this dialect writes bash commands and nothing else, and none with a fence inside")
    return f"{FENCE}bash\n{command}\n{FENCE}"


def parse_bash(text: str, tools: Tools = (), thinking: bool = False) -> tuple[ToolCall, ...]:
    """No call, one call, or one malformed call."""
    openings = [found.start() for found in OPENING.finditer(text, answer_start(text, thinking))]
    if not openings:
        return ()
    start = openings[0]
    block = COMMAND.match(text, start)
    problem = ""
    if len(openings) > 1:
        problem = f"{len(openings)} command blocks: write exactly one"
    elif block is None or f"\n{FENCE}" in text[block.end() :]:  # another fence: the first may not be the end
        problem = f"the command block is not closed, or not the last one. {HOW_BASH}"
    elif not (block[1] or "").strip():
        problem = "the command is empty"
    else:
        return (ToolCall("bash", {"command": block[1]}, start=start),)
    return (malformed("bash", problem, start),)


TAGS = re.compile(rf"{CALL_START}\s*(?:\{{|<function=)|{FUNCTION.pattern}\s*(?:{PARAMETER_START}|{FUNCTION_END})")


def other_attempt(text: str, tools: Tools, thinking: bool, how: str) -> tuple[ToolCall, ...]:
    """The first call in tags or in JSON, for a message in which the chat's own dialect finds none."""
    starts = [call.start for call in parse_json(text, tools, thinking)]
    tags = TAGS.search(text, answer_start(text, thinking))
    starts += [tags.start()] if tags else []
    if not starts:
        return ()
    start = starts[0]
    named = NAME.search(text, start) or FUNCTION.search(text, start)
    error = f"this call is in another format, so it was not run. {how}"
    return (ToolCall(named[1] if named else "", error=error, start=start, other_dialect=True),)


@dataclass(frozen=True)
class Dialect:
    """`parse` takes a message's text, the tools with their schemas, and whether the header opened the thinking."""

    name: str
    parse: Callable[[str, Tools, bool], tuple[ToolCall, ...]]
    render: Callable[[str, Json], str]
    how: str  # to write a call, in words for the model

    def read(self, text: str, tools: Tools, thinking: bool) -> tuple[ToolCall, ...]:
        """The calls of a message or, where it has none, the attempt at one in another dialect."""
        return self.parse(text, tools, thinking) or other_attempt(text, tools, thinking, self.how)

    def telling(self, tools: Tools) -> str:
        """The description of the tools for a system prompt, if the chat format has none of its own."""
        return TELLING.format(
            tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in as_json(tools)), how=self.how
        )

    def answer(self, text: str, calls: Sequence[ToolCall]) -> str:
        """A message's text: its words, then its calls, each on a line of its own."""
        lines = [text] if text else []
        for call in calls:
            try:
                lines.append(self.render(call.name, call.arguments))
            except (ValueError, KeyError):  # this dialect cannot say it
                lines.append(render_hermes(call.name, call.arguments))
        return "\n".join(lines)


HERMES = Dialect(
    "hermes",
    parse_hermes,
    render_hermes,
    f"To call a tool, write a JSON object between two tags:\n\n{CALL_START}\n{OBJECT}\n{CALL_END}",
)
XML = Dialect(
    "xml",
    parse_xml,
    render_xml,
    "To call a tool, write its name and its parameters between tags:\n\n" + render_xml("NAME", {"PARAMETER": "value"}),
)
JSON = Dialect(
    "json",
    parse_json,
    render_json,
    f"To call a tool, write a JSON object in a fenced block:\n\n{FENCE}json\n{OBJECT}\n{FENCE}",
)
BASH = Dialect("bash", parse_bash, render_bash, HOW_BASH)


DIALECTS = {dialect.name: dialect for dialect in (HERMES, XML, JSON, BASH)}
