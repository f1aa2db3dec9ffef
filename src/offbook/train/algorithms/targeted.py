"""Targeted feedback: a hint right before the faulty message, the hinted model as teacher for that message only."""

from __future__ import annotations

from offbook.agent.chat import Chat
from offbook.types import Branch, Distill, Hint, Segment, Target


def hint_block(chat: Chat, hint: Hint) -> list[int]:
    """A closed message of its own, so that the header of the target follows it exactly as it did without the hint."""
    return chat.block("user", hint.text) if hint.text else []


def target_key(target: Target) -> str:
    return f"{target.rollout}/{target.segment}/{target.message}"


def hint_branch(
    segment: Segment,
    target: Target,
    hint: Hint,
    chat: Chat,
    weight: float = 1.0,
    distill: Distill = Distill(),  # noqa: B008  (frozen)
) -> Branch:
    """The target as it is read with the hint before it. Only tokens the model sampled are distilled."""
    message = segment.messages[target.message]
    span = message.body, message.body + sum(segment.sampled[message.body : message.end])
    block = hint_block(chat, hint)
    return Branch(message.start, block, (span,), weight, distill, target_key(target))
