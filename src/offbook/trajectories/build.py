"""What both readers share: messages without tokens, and what the calls put into files."""

from __future__ import annotations

import json
import textwrap
from typing import Any

from offbook.types import Event, Message, Role, Rollout, Segment, ToolCall, Usage

PATHS = ("path", "file_path", "filename", "file", "filepath", "target_file")
WHOLE = ("file_text", "content", "contents", "text")
PARTS = ("new_str", "new_string", "new", "new_text", "replacement")


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
            arguments = json.loads(arguments or "{}")
        except ValueError:
            return ToolCall(str(name), {}, "its arguments are not JSON")
    if not isinstance(arguments, dict):
        return ToolCall(str(name), {"input": arguments})
    return ToolCall(str(name), arguments)


def message(role: Role, text: str, calls: tuple[ToolCall, ...] = (), failed: bool = False) -> Message:
    status = ("failed" if failed else "ok") if role == "tool" else None
    return Message(role, text, 0, 0, 0, 0, calls, status)  # type: ignore[arg-type]


def rollout_of(name: str, task: str, messages: list[Message]) -> Rollout:
    calls = [call for one in messages for call in one.calls]
    usage = Usage(
        turns=sum(one.role == "assistant" for one in messages),
        calls=len(calls),
        invalid_calls=sum(call.error is not None for call in calls),
    )
    tools = tuple(dict.fromkeys(call.name for call in calls))
    rollout = Rollout(name, task, task, tools, [Segment(messages=messages)], "answer", usage)
    _add_changes(rollout, calls)
    return rollout


def _add_changes(rollout: Rollout, calls: list[ToolCall]) -> None:
    """The files as far as the calls show them: whole where one wrote the whole, else the new pieces in order."""
    pieces: dict[str, list[str]] = {}
    for call in calls:
        path = next((call.arguments[key] for key in PATHS if isinstance(call.arguments.get(key), str)), "")
        whole = next((call.arguments[key] for key in WHOLE if isinstance(call.arguments.get(key), str)), None)
        part = next((call.arguments[key] for key in PARTS if isinstance(call.arguments.get(key), str)), None)
        if path and whole is not None and part is None:
            pieces[path] = [whole]
        elif path and part is not None:
            pieces.setdefault(path, []).append(textwrap.dedent(part))
    names = {path: path.removeprefix("/app/").removeprefix("/testbed/").removeprefix("/workspace/") for path in pieces}
    rollout.changed = {names[path]: "\n\n".join(texts) for path, texts in pieces.items()}
    if pieces:
        rollout.events.append(Event(-1, "changes_partial", f"{len(pieces)} files as far as calls show them"))
