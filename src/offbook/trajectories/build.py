"""What both readers share: messages without tokens, and what the calls put into files."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator
from itertools import takewhile
from typing import Any

from offbook.client import mend_escapes
from offbook.types import Event, Message, Role, Rollout, Segment, ToolCall, Usage

PATHS = ("path", "file_path", "filename", "file", "filepath", "target_file")
WHOLE = ("file_text", "content", "contents")
PARTS = ("new_str", "new_string", "new", "new_text", "replacement")
WRITES = re.compile(r"writ|creat|edit|insert|append|replac|save|update", re.IGNORECASE)
ERROR_CHARS = 400  # of an answer in which an edit is said to have failed; further on it may quote a file
NOT_APPLIED = re.compile(  # the text to replace was not there, or there more than once
    r"the text to replace (is not in|occurs (more than )?\d+ times)"
    r"|no replacement was (performed|made)|did not appear verbatim|string to replace (was )?not found"
    r"|old_?str(ing)?\W? (was )?not found|old_?str(ing)?\W? is not unique|\d+ matches of the string to replace",
    re.IGNORECASE,
)
REFUSED = re.compile(  # for that reason or another
    r"\A\W*(tool_use_)?error\b|\bno (replacements?|changes?|edits?) (was|were) (performed|made|applied)"
    r"|(changes|edit) (have|has|was|were) not (been )?applied|file has not been read yet"
    r"|(string|text) to replace (was |is )?not (found|in)\b|old_?str(ing)?\W? (was |is )?not (found|unique)"
    rf"|{NOT_APPLIED.pattern}",
    re.IGNORECASE,
)
MAX_DEPTH = 100  # of lists and objects in each other; what reads them later must not run out of stack


def parsed(text: str) -> Any:
    """The value of a JSON text that anybody may have written. A ValueError if it is none that can be worked with."""
    try:
        value = json.loads(mend_escapes(text))
    except RecursionError:
        raise ValueError("nested too deep") from None
    if _is_deeper(value, MAX_DEPTH):
        raise ValueError("nested too deep")
    return value


def _is_deeper(value: Any, limit: int) -> bool:
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return limit < 0 or any(_is_deeper(one, limit - 1) for one in inside)


def text_of(content: Any) -> str:
    """Content is a string, or parts of which the text ones are read."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(str(part.get("text") or "") if isinstance(part, dict) else str(part) for part in content)
    raise ValueError("content is neither text nor parts")


def call_of(name: Any, arguments: Any) -> ToolCall:
    """Arguments are an object, or a string of JSON. What is neither is a call that could not be read."""
    if isinstance(arguments, str):
        try:
            arguments = parsed(arguments or "{}")
        except ValueError:
            return ToolCall(str(name), {}, "its arguments are not JSON")
    if not isinstance(arguments, dict):
        return ToolCall(str(name), {"input": arguments})
    return ToolCall(str(name), arguments)


def message(role: Role, text: str, calls: tuple[ToolCall, ...] = ()) -> Message:
    return Message(role, text, 0, 0, 0, 0, calls, "ok" if role == "tool" else None)


def rollout_of(name: str, task: str, messages: list[Message]) -> Rollout:
    calls = [call for one in messages for call in one.calls]
    usage = Usage(
        turns=sum(one.role == "assistant" for one in messages),
        calls=len(calls),
        invalid_calls=sum(call.error is not None for call in calls),
    )
    tools = tuple(dict.fromkeys(call.name for call in calls))
    rollout = Rollout(name, task, task, tools, [Segment(messages=messages)], "answer", usage)
    _add_changes(rollout, messages)
    return rollout


def _add_changes(rollout: Rollout, messages: list[Message]) -> None:
    """The files as far as the calls show them: whole where one wrote the whole, else the new pieces in order.

    An edit whose answer says that it was refused changed nothing, and its answer is one of a call that failed.
    """
    pieces: dict[str, list[str]] = {}
    for call, answer in _answered(messages):
        path, whole, part = _given(call, PATHS), _given(call, WHOLE), _given(call, PARTS)
        if whole is None and WRITES.search(call.name):
            whole = _given(call, ("text",))  # of any other tool, more often what it searches for
        if not path or (whole is None and part is None):
            continue
        if answer is not None and REFUSED.search(answer.text[:ERROR_CHARS]):
            answer.status = "failed"
        elif part is not None:
            pieces.setdefault(path, []).append(textwrap.dedent(part))
        elif whole is not None:
            pieces[path] = [whole]
    names = {path: path.removeprefix("/app/").removeprefix("/testbed/").removeprefix("/workspace/") for path in pieces}
    rollout.changed = {names[path]: "\n\n".join(texts) for path, texts in pieces.items()}
    if pieces:
        rollout.events.append(Event(-1, "changes_partial", f"{len(pieces)} files as far as calls show them"))


def _given(call: ToolCall, names: tuple[str, ...]) -> str | None:
    return next((call.arguments[name] for name in names if isinstance(call.arguments.get(name), str)), None)


def _answered(messages: list[Message]) -> Iterator[tuple[ToolCall, Message | None]]:
    """Calls with the answers that follow them, one a call. Where their numbers differ nobody knows which is whose."""
    for index, one in enumerate(messages):
        count = len(one.calls)
        answers = list(takewhile(lambda later: later.role == "tool", messages[index + 1 : index + 2 + count]))
        yield from zip(one.calls, answers if len(answers) == count else [None] * count, strict=True)
