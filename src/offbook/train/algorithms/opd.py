"""OPD (on-policy distillation; GKD, 2306.13649, with lambda = 1): another model teaches on the student's own rollouts.

    L = mean over sampled tokens of D(teacher(. | x, y_<t), student(. | x, y_<t)),    y from the student

The teacher reads exactly what the student read. Its vocabulary has to be the student's.

Left out: rollouts of the teacher mixed in (GKD's lambda < 1; `offbook sft` imitates those); the log-ratio of the
sampled token as a reward (it is the same divergence with more noise); teachers with another tokenizer.
"""

from __future__ import annotations

from offbook.train.algorithms.response import response_branches
from offbook.types import Branch, Distill, Rollout

OTHER = "other"  # what the trainer calls that teacher


def opd_branches(rollout: Rollout, weight: float, distill: Distill) -> dict[int, Branch]:
    """By segment."""
    return response_branches(rollout, [], weight, distill)
