"""SDPO (self-distillation policy optimisation): the whole response under its feedback.

The feedback stands where the response begins, before the first message that the model sampled, and everything that it
sampled from there on is distilled. Compared with targeted hints the teacher says something about every token, also
about those that were right. It is added to the advantage, or replaces it where the samples carry none.

Left out: a successful sibling's solution as feedback, which gives this instance's answer away; the failed attempt
itself in the teacher's context, which hurts (SDPO, table 6); top-k approximations, since the divergence is exact here.
"""

from __future__ import annotations

from offbook.algo.targeted import hint_block, target_key
from offbook.tokens import Chat
from offbook.types import Branch, Distill, Hint, Rollout, Segment, Target

RULE = "sdpo"  # what the records call it


def sdpo_branches(
    rollout: Rollout, feedback: Hint, chat: Chat, weight: float, distill: Distill
) -> list[tuple[Target, Branch]]:
    """One for each segment that has sampled tokens; the target names its first sampled message."""
    found = []
    for number, segment in enumerate(rollout.segments):
        if spans := sampled_spans(segment):
            first = next(index for index, message in enumerate(segment.messages) if message.end > spans[0][0])
            target = Target(rollout.id, number, first, RULE, f"{len(spans)} messages")
            block, start = hint_block(chat, feedback), segment.messages[first].start
            found.append((target, Branch(start, block, spans, weight, distill, target_key(target))))
    return found


def sampled_spans(segment: Segment) -> tuple[tuple[int, int], ...]:
    """Runs of tokens that the model sampled."""
    shifted = zip([False, *segment.sampled], [*segment.sampled, False], strict=True)
    edges = [place for place, (before, here) in enumerate(shifted) if before != here]
    return tuple(zip(edges[::2], edges[1::2], strict=True))
