"""A rollout as a reader model is shown it: every message with its number, within a budget of characters.

The agent's own messages come first: they are shown whole as long as the budget allows. What it was told, and what tools
answered, share the rest. A message that is cut says so, and none is left out.
"""

from __future__ import annotations

import json

from offbook.acts import is_own
from offbook.types import Message, Rollout, Segment

BUDGET = 60_000  # characters, numbers and marks aside
LEAST = 120  # characters that are shown of any message


def show(rollout: Rollout, budget: int = BUDGET) -> str:
    listed = [
        (number, index, message, _text(segment, message))
        for number, segment in enumerate(rollout.segments)
        for index, message in enumerate(segment.messages)
    ]
    own = [len(text) for _, _, message, text in listed if message.role == "assistant"]
    others = [len(text) for _, _, message, text in listed if message.role != "assistant"]
    own_limit = max(LEAST, level(own, budget - sum(min(length, LEAST) for length in others)))
    other_limit = max(LEAST, level(others, budget - sum(min(length, own_limit) for length in own)))
    return "\n".join(
        f"[segment {number} message {index}] {_who(rollout.segments[number], message)}: "
        + cut(text, own_limit if message.role == "assistant" else other_limit)
        for number, index, message, text in listed
    )


def level(lengths: list[int], budget: int) -> int:
    """The largest limit under which texts of these lengths, each cut to it, fit into the budget."""
    left = max(0, budget)
    for number, length in enumerate(sorted(lengths)):
        share = left // (len(lengths) - number)
        if length > share:
            return share
        left -= length
    return max(lengths, default=0)


def cut(text: str, limit: int) -> str:
    """The middle goes: how an output begins and how it ends says most."""
    if len(text) <= limit:
        return text
    head = limit // 2
    return f"{text[:head]} [... {len(text) - limit} characters left out ...] {text[len(text) - (limit - head) :]}"


def words_of(message: Message) -> list[str]:
    """All that may be quoted of a message: its text, its calls as JSON, and the values in them."""
    calls = [json.dumps(call.arguments, ensure_ascii=False) for call in message.calls]
    return [message.text, *calls, *(str(value) for call in message.calls for value in call.arguments.values())]


def _text(segment: Segment, message: Message) -> str:
    """Where there are ids the text is all that was sampled. Other agents' calls stand beside it."""
    calls = () if segment.ids else message.calls
    shown = [f"calls {call.name} {json.dumps(call.arguments, ensure_ascii=False)}" for call in calls]
    return "\n".join(filter(None, [message.text, *shown]))


def _who(segment: Segment, message: Message) -> str:
    if message.role == "tool":
        return "answer" if message.status in (None, "ok") else f"answer ({message.status})"
    if message.role == "assistant":
        return "agent" if is_own(segment, message) else "worked example, not the agent's"
    return message.role
