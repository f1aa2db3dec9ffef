"""The record of a rollout as a judge is shown it, within a budget of characters, and what it may quote."""

from __future__ import annotations

import hashlib
import json

from offbook.types import Message, Rollout, Segment

BUDGET = 60_000  # characters of messages, without numbers and marks
LEAST = 120  # characters that are shown of any message
OPENED_CHARS, DIFF_CHARS = 2000, 8000


def show(rollout: Rollout, thoughts: bool = True, budget: int = BUDGET) -> str:
    """The record without system prompts, which are long and the same everywhere."""
    listed = [
        (f"[segment {number} message {index}] {who(segment, message)}: ", message.role == "assistant", text)
        for number, segment in enumerate(rollout.segments)
        for index, message in enumerate(segment.messages)
        if message.role != "system" and ((text := text_of(segment, message, thoughts)) or thoughts)
    ]
    own = [len(text) for _, is_agents, text in listed if is_agents]
    others = [len(text) for _, is_agents, text in listed if not is_agents]
    own_limit = max(LEAST, level(own, budget - sum(min(length, LEAST) for length in others)))
    other_limit = max(LEAST, level(others, budget - sum(min(length, own_limit) for length in own)))
    shown = [start + cut(text, own_limit if is_agents else other_limit) for start, is_agents, text in listed]
    if not thoughts:
        opened = [f"[message {event.message}] {event.detail}" for event in rollout.events if event.kind == "opened"]
        shown.append(f"\nOpened files:\n{cut(chr(10).join(opened), OPENED_CHARS)}")
        shown.append(f"\nDiff:\n{cut(rollout.diff, DIFF_CHARS)}")
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
    """Where there are ids the text is all that was sampled. Other agents' calls are shown next to it."""
    if message.role == "tool":
        return message.text
    calls = [f"calls {call.name} {json.dumps(call.arguments, ensure_ascii=False)}" for call in message.calls]
    if not thoughts:
        return "\n".join(calls)
    return "\n".join(filter(None, [message.text, *(() if segment.ids else calls)]))


def who(segment: Segment, message: Message) -> str:
    if message.role == "tool":
        return "answer" if message.status in (None, "ok") else f"answer ({message.status})"
    if message.role == "assistant":
        return "agent" if segment.is_own(message) else "worked example, not the agent's"
    return message.role


def is_sampled(rollout_id: str, rate: float) -> bool:
    """The same rollouts every time, as many as the rate says."""
    digest = hashlib.blake2b(rollout_id.encode(), digest_size=8).digest()
    return int.from_bytes(digest) < rate * 2**64
