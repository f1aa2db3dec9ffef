"""What the call dialects share: where calls may stand in a message, JSON read strictly, and how a broken call is kept.

Nothing is repaired. What Python's JSON reader lets pass and JSON does not (a key twice, NaN, numbers beyond a float,
halves of a character) is named and refused, because two readers would disagree about it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any

from offbook.types import ToolCall, ToolSpec

CALL_START, CALL_END = "<tool_call>", "</tool_call>"
SPACE = re.compile(r"[ \t\r\n]*")

Tools = tuple[ToolSpec, ...]


def after_space(text: str, position: int) -> int:
    found = SPACE.match(text, position)
    assert found  # the pattern matches nothing, too
    return found.end()


def malformed(name: str, reason: str, start: int) -> ToolCall:
    """`name` is kept where it can be seen, so that feedback can speak of the tool that was meant."""
    return ToolCall(name, error=reason, start=start)


def read_calls(text: str, position: int, read: Callable[[int], tuple[ToolCall, int | None]]) -> tuple[ToolCall, ...]:
    """Every attempt in tags, in order. `read` takes an opening tag's place and says where the call ends if it can.

    A call whose end cannot be found ends the reading: what follows may be its own inside, or may build on it. A closing
    tag that closes nothing is an attempt, too: models forget the opening one.
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
    """The JSON value at `position`, where it ends, and what is wrong with it although it can be read.

    A ValueError says why there is none.
    """
    problems: list[str] = []

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(items)
        if len(value) < len(items):
            problems.append("a key is there twice")
        return value

    def constant(literal: str) -> None:
        problems.append(f"{literal} is no JSON")

    def number(literal: str) -> float:
        value = float(literal)
        if math.isinf(value):
            problems.append(f"{literal} is too large")
        return value

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
    """As JSON, and so as text: "\\ud800" is half a character."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except ValueError:
        return False
    return True
