"""Hints. Each states a general rule in a sentence; none says what the right message would have been."""

from __future__ import annotations

from offbook.types import Hint

TEXTS = {
    "unknown_tool": "Reminder: available tools are {tools}.",
    "malformed_arguments": "Reminder: give a tool one JSON object with exactly its parameters.",
    "repeated_call": "Reminder: do not repeat a call, its answer is above.",
    "edited_tests": "Reminder: never edit tests, change the source.",
}


def write_hint(rule: str, tools: tuple[str, ...]) -> Hint:
    return Hint(rule, TEXTS[rule].format(tools=", ".join(tools)))
