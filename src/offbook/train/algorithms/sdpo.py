"""SDPO (self-distillation policy optimisation): the whole response under its feedback.

The feedback stands where the response begins, before the first message that the model sampled, and everything that it
sampled from there on is distilled. Compared with targeted hints the teacher says something about every token, also
about those that were right. It is added to the advantage, or replaces it where the samples carry none.

Left out: a successful sibling's solution as feedback, which gives this instance's answer away (that is SDFT without
data); the failed attempt itself in the teacher's context, which hurts (SDPO, table 6); top-k approximations, since the
divergence is exact here.
"""

from __future__ import annotations

from offbook.agent.chat import Chat
from offbook.train.algorithms.response import first_sampled, response_branches
from offbook.train.algorithms.targeted import hint_block, target_key
from offbook.types import Branch, Distill, Hint, Rollout, Target

RULE = "sdpo"  # what the records call it


def sdpo_branches(
    rollout: Rollout, feedback: Hint, chat: Chat, weight: float, distill: Distill
) -> list[tuple[Target, Branch]]:
    """One for each segment that has sampled tokens; the target names its first sampled message."""
    found = []
    for number, branch in response_branches(rollout, hint_block(chat, feedback), weight, distill).items():
        first = first_sampled(rollout.segments[number])
        target = Target(rollout.id, number, first, RULE, f"{len(branch.spans)} messages")
        branch.key = target_key(target)
        found.append((target, branch))
    return found
