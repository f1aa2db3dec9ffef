"""A rollout as a judge is shown it: every message with its number, within a budget of characters.

The agent's own messages come first: they are shown whole as long as the budget allows. What it was told, and what tools
answered, share the rest. A message that is cut says so, and none is left out.

Without thoughts only what was done is shown: calls, their answers, files that were opened and the diff. A summary that
the agent wrote for itself is thoughts too, so what it is told at the start of a segment is left out as well.
"""

from __future__ import annotations

import json

from offbook.types import Message, Rollout, Segment

BUDGET = 60_000  # characters of messages, numbers and marks aside
LEAST = 120  # characters that are shown of any message
OPENED_CHARS, DIFF_CHARS = 2000, 8000


def show(rollout: Rollout, thoughts: bool = True, budget: int = BUDGET, diff: bool = True) -> str:
    listed = [
        (f"[segment {number} message {index}] {_who(segment, message)}: ", message.role == "assistant", text)
        for number, segment in enumerate(rollout.segments)
        for index, message in enumerate(segment.messages)
        if (text := text_of(segment, message, thoughts)) or thoughts
    ]
    own = [len(text) for _, is_agents, text in listed if is_agents]
    others = [len(text) for _, is_agents, text in listed if not is_agents]
    own_limit = max(LEAST, level(own, budget - sum(min(length, LEAST) for length in others)))
    other_limit = max(LEAST, level(others, budget - sum(min(length, own_limit) for length in own)))
    shown = [start + cut(text, own_limit if is_agents else other_limit) for start, is_agents, text in listed]
    if not thoughts:
        opened = [f"[message {event.message}] {event.detail}" for event in rollout.events if event.kind == "opened"]
        shown.append(f"\nOpened files:\n{cut(chr(10).join(opened), OPENED_CHARS)}")
        shown += [f"\nDiff:\n{cut(rollout.diff, DIFF_CHARS)}"] if diff else []
    return "\n".join(shown)


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


def quotable(rollout: Rollout, segment: int, message: int, thoughts: bool) -> list[str]:
    """What a judge may quote: all that the segment says or, of what was done, this message's part and the diff."""
    messages = rollout.segments[segment].messages
    if thoughts:
        return [text for one in messages for text in (one.text, *_acts(one))]
    return [*_acts(messages[message]), rollout.diff]


def _acts(message: Message) -> list[str]:
    """An answer, or calls as JSON and the values in them."""
    if message.role == "tool":
        return [message.text]
    calls = [json.dumps(call.arguments, ensure_ascii=False) for call in message.calls]
    return [*calls, *(str(value) for call in message.calls for value in call.arguments.values())]


def text_of(segment: Segment, message: Message, thoughts: bool) -> str:
    """Where there are ids the text is all that was sampled. Other agents' calls stand beside it."""
    if message.role == "tool":
        return message.text
    calls = [f"calls {call.name} {json.dumps(call.arguments, ensure_ascii=False)}" for call in message.calls]
    if not thoughts:
        return "\n".join(calls)
    return "\n".join(filter(None, [message.text, *(() if segment.ids else calls)]))


def _who(segment: Segment, message: Message) -> str:
    if message.role == "tool":
        return "answer" if message.status in (None, "ok") else f"answer ({message.status})"
    if message.role == "assistant":
        return "agent" if segment.is_own(message) else "worked example, not the agent's"
    return message.role
