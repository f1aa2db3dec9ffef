"""Conversations as OpenAI's chat completions have them: a list of messages, bare or under a key."""

from __future__ import annotations

from typing import Any

from offbook.trajectories.build import call_of, message, rollout_of, text_of
from offbook.types import Message, Rollout

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool",
         "function": "tool"}  # fmt: skip
KEYS = ("messages", "conversation", "conversations", "history", "trajectory", "traj")


def from_messages(value: Any, name: str) -> Rollout:
    """A ValueError or KeyError if it is no conversation."""
    about: dict[str, Any] = value if isinstance(value, dict) else {}
    listed = value if isinstance(value, list) else next((about[key] for key in KEYS if key in about), None)
    if not listed:
        raise ValueError("no messages")
    messages: list[Message] = []
    for one in listed:
        calls = [call_of(*_function(call)) for call in one.get("tool_calls") or ()]
        if old := one.get("function_call"):
            calls.append(call_of(old["name"], old.get("arguments")))
        messages.append(message(ROLES[one["role"]], text_of(one.get("content")), tuple(calls)))  # type: ignore[arg-type]
    id = next((str(about[key]) for key in ("id", "session_id", "instance_id") if about.get(key)), name)
    return rollout_of(id, str(about.get("task") or about.get("instance_id") or name), messages)


def _function(call: dict[str, Any]) -> tuple[Any, Any]:
    function = call.get("function", call)
    return function["name"], function.get("arguments")
