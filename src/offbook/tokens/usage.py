"""What the tokens of a rollout were for."""

from __future__ import annotations

from bisect import bisect_right

from offbook.tokens.chat import Chat
from offbook.types import Segment, Usage


def count_tokens(segments: list[Segment], chat: Chat, usage: Usage) -> None:
    usage.sampled_tokens = sum(sum(segment.sampled) for segment in segments)
    usage.prompt_tokens = sum(len(segment.ids) for segment in segments) - usage.sampled_tokens
    for segment in segments:
        for index, message in enumerate(segment.messages):
            if message.role == "tool":
                usage.output_tokens += message.body_end - message.body
            if message.role != "assistant":
                continue
            sampled = sum(segment.sampled[message.body : message.end])
            if not sampled:  # said before, or by somebody else
                continue
            if index == segment.summary:
                usage.summary_tokens += sampled
            elif message.calls:
                thinking = _tokens_before(chat, segment.ids[message.body : message.body_end], message.calls[0].start)
                usage.thinking_tokens += thinking
                usage.call_tokens += sampled - thinking
            else:
                usage.final_tokens += sampled


def _tokens_before(chat: Chat, ids: list[int], offset: int) -> int:
    """How many of the tokens end at or before a place in their text."""
    return bisect_right(range(1, len(ids) + 1), offset, key=lambda count: len(chat.decode(ids[:count])))
