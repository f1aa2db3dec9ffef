"""ATIF v1, the format of Harbor: steps of a user, the system or the agent, with calls and what came back of them.

Left out: token ids, images, and the trajectories of subagents that live in files of their own.
"""

from __future__ import annotations

from typing import Any

from offbook.trajectories.build import call_of, message, rollout_of, text_of
from offbook.types import Message, Rollout

ROLES = {"user": "user", "system": "system", "agent": "assistant"}


def from_atif(value: dict[str, Any], name: str) -> Rollout:
    """A ValueError or KeyError if it is not what it says it is."""
    version = str(value.get("schema_version", ""))
    if not version.startswith("ATIF-v1"):
        raise ValueError(f"{version or 'no version'} is not ATIF v1")
    messages: list[Message] = []
    for step in value["steps"]:
        role = ROLES[step["source"]]
        calls = tuple(call_of(call["function_name"], call.get("arguments")) for call in step.get("tool_calls") or ())
        messages.append(message(role, text_of(step.get("message")), calls))  # type: ignore[arg-type]
        for result in (step.get("observation") or {}).get("results") or ():
            messages.append(message("tool", text_of(result.get("content"))))
    agent = value.get("agent") or {}
    return rollout_of(str(value.get("session_id") or name), str(agent.get("name") or name), messages)
