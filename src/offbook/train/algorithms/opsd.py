"""OPSD (on-policy self-distillation, 2601.18734): the same model, shown the reference solution, is the teacher.

    L = mean over sampled tokens of D(pi_T(. | x, s, y_<t), pi(. | x, y_<t)),    y from pi(. | x)

The solution s stands in a message of its own before the first that the student sampled, and the teacher's weights are
those that the run began with, as in the paper, unless the configuration names others.

Left out: the paper's clipping of single vocabulary entries (a cap per token does it here: losses.divergence says why);
a prompt that asks the teacher to restate the solution first, since nothing is sampled from it.
"""

from __future__ import annotations

from offbook.agent.chat import Chat
from offbook.train.algorithms.response import response_branches
from offbook.types import Branch, Distill, Rollout

WORDS = "For reference, a change that solves this:\n"


def reference_block(chat: Chat, solution: str) -> list[int]:
    """`solution` is a diff."""
    return chat.block("user", WORDS + solution.strip())


def opsd_branches(rollout: Rollout, solution: str, chat: Chat, weight: float, distill: Distill) -> dict[int, Branch]:
    """By segment."""
    return response_branches(rollout, reference_block(chat, solution), weight, distill)
