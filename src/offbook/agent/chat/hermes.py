"""Hermes calls: <tool_call>{"name": .., "arguments": {..}}</tool_call>. Qwen2.5, Qwen3 and the pocket model.

A call is JSON from its opening tag on and ends where the JSON ends, so tags inside a string are just text. A call that
is closed and wrong is one malformed call, and the reading goes on behind it.

Qwen's templates put the JSON on a line of its own; `render` does not, which matters only to what a script writes.
"""

from __future__ import annotations

import json
import re
from typing import Any

from offbook.agent.chat.strict import CALL_END, CALL_START, Tools, after_space, malformed, read_calls, read_json
from offbook.agent.chat.template import as_json
from offbook.core.thoughts import answer_start
from offbook.types import ToolCall

KEYS = {"name", "arguments"}
TELLING = """\
These are all the tools that you have, with their parameters as JSON schemas:

<tools>
{tools}
</tools>

To call a tool, write a JSON object between two tags:

<tool_call>
{{"name": "the tool's name", "arguments": {{"parameter": "value"}}}}
</tool_call>"""
NAME = re.compile(r'"name"\s*:\s*"(\w+)"')


def render(name: str, arguments: dict[str, Any]) -> str:
    return f"{CALL_START}{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}{CALL_END}"


def telling(tools: Tools) -> str:
    """For a system prompt, where the chat does not tell of tools itself."""
    return TELLING.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in as_json(tools)))


def parse(text: str, tools: Tools = (), thinking: bool = False) -> tuple[ToolCall, ...]:
    """Every attempted call in order. An attempt that is not a well-formed call is kept, with the reason."""
    return read_calls(text, answer_start(text, thinking), lambda start: _read(text, start))


def _read(text: str, start: int) -> tuple[ToolCall, int | None]:
    """The call whose opening tag is at `start`, and where it ends if that can be told."""
    body = after_space(text, start + len(CALL_START))
    seen = NAME.search(text, body)
    name = seen.group(1) if seen else ""
    closed = CALL_END in text[body:]
    try:
        value, end, problem = read_json(text, body)
    except ValueError as error:
        if not closed:
            return malformed(name, f"the call is not closed by {CALL_END}", start), None
        if text.startswith(CALL_START, body):
            return malformed(name, f"{CALL_START} stands inside a call: close one before the next begins", start), None
        return malformed(name, f"the call is not valid JSON ({error})", start), None
    end = after_space(text, end)
    if not text.startswith(CALL_END, end):
        reason = f"the call is not closed by {CALL_END}"
        if closed:
            reason = f"only {CALL_END} may follow the call's JSON object"
        return malformed(name, reason, start), None
    wrong = f"the call is not valid JSON ({problem})" if problem else _wrong(value)
    call = malformed(name, wrong, start) if wrong else ToolCall(value["name"], value["arguments"], start=start)
    return call, end + len(CALL_END)


def _wrong(value: Any) -> str | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return "the call needs a name"
    if not isinstance(value.get("arguments"), dict):
        return "the call needs arguments, a JSON object"
    if set(value) != KEYS:
        return "the call takes a name and arguments and nothing else"
    return None
