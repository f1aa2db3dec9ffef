"""SDFT (self-distillation fine-tuning, 2601.19897): the same model, shown a demonstration, is the teacher.

    L = mean over sampled tokens of D(pi_ema(. | x, c, y_<t), pi(. | x, y_<t)),    y from pi(. | x)

What is imitated is not the demonstration c but what the model itself makes of it, on its own rollouts, which is why it
forgets less than cross-entropy on c. It can only teach what the model can take from an example in its context.

Left out: tool answers in the demonstration, which are this rollout's own as soon as it acts; masking of the first
tokens, where a teacher may say that it follows an example: the cap per token bounds what that adds.
"""

from __future__ import annotations

from offbook.agent.chat import Chat
from offbook.train.algorithms.response import response_branches
from offbook.types import Branch, Distill, Rollout

WORDS = "This is an example of how to do it:\n"


def demonstration_block(chat: Chat, demonstration: Rollout) -> list[int]:
    """What its agent wrote, message after message; what it summed up for itself is left out."""
    said = [
        message.text.strip()
        for segment in demonstration.segments
        for number, message in enumerate(segment.messages)
        if segment.is_own(message) and number != segment.summary
    ]
    return chat.block("user", WORDS + "\n".join(said))


def sdft_branches(
    rollout: Rollout, demonstration: Rollout, chat: Chat, weight: float, distill: Distill
) -> dict[int, Branch]:
    """By segment."""
    return response_branches(rollout, demonstration_block(chat, demonstration), weight, distill)
