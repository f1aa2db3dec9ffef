"""Which branches may teach.

A branch that hardly moves its target has nothing to teach; one that makes what was sampled likelier teaches the fault.
Both are seen twice: from the student to the teacher, which is what would be taught, and from the teacher without what
the branch inserts to the teacher with it, which is what the insertion does. A student that has drifted away from its
teacher is far from it whatever is inserted; and a teacher that is no better than the student holds it back.
Nothing here waits for the device.

Axes: M target tokens, B branches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from offbook.train.host import sent
from offbook.types import Branch

VERDICTS = ("", "no_shift", "towards_mistake", "over_limit")  # why a branch does not teach; the first is: it does


class TargetScores(NamedTuple):
    """Of each target token the sampled one's log-probability, by the student, by the teacher, and by the teacher
    without what the branch inserts; and the divergence of the teacher from both others."""

    student_M: Tensor
    teacher_M: Tensor
    plain_M: Tensor
    divergence_M: Tensor
    moved_M: Tensor


class Shift(NamedTuple):
    """What branches do to their targets, nats per token: the divergence, and how much less likely what was sampled
    becomes. From the student, and from the teacher without the insertion."""

    nats_B: Tensor
    gain_B: Tensor
    own_nats_B: Tensor
    own_gain_B: Tensor

    @property
    def least_B(self) -> Tensor:
        """What both agree on."""
        return torch.minimum(self.nats_B, self.own_nats_B)


def shift_of(scores: TargetScores, branch_M: Tensor, num_branches: int) -> Shift:
    """Means over the tokens of each branch."""
    nothing_B = scores.divergence_M.new_zeros(num_branches)
    sizes_B = nothing_B.index_add(0, branch_M, torch.ones_like(scores.divergence_M)).clamp(min=1)

    def mean_B(values_M: Tensor) -> Tensor:
        return nothing_B.index_add(0, branch_M, values_M) / sizes_B

    return Shift(
        mean_B(scores.divergence_M),
        mean_B(scores.student_M - scores.teacher_M),
        mean_B(scores.moved_M),
        mean_B(scores.plain_M - scores.teacher_M),
    )


def decided(shift: Shift, branches: Sequence[Branch]) -> Tensor:
    """The verdict on each branch, where all branches of their contests are here."""
    names = list(dict.fromkeys(branch.contest for branch in branches))
    rows = [
        [
            branch.distill.gate,
            names.index(branch.contest),
            branch.distill.places if branch.contest and branch.distill.places else math.inf,
        ]
        for branch in branches
    ]
    gate_B, contest_B, places_B = sent(torch.tensor(rows), shift.nats_B.device).unbind(1)
    return within_places(verdicts(shift, gate_B), shift, contest_B, places_B)


def verdicts(shift: Shift, gate_B: Tensor) -> Tensor:
    """Numbers in VERDICTS. A branch has to move its target by as many nats per token as its gate, and away; 0 lets all
    pass."""
    verdict_B = torch.where(torch.minimum(shift.gain_B, shift.own_gain_B) <= 0, 2, 0)
    verdict_B = torch.where(shift.least_B < gate_B, 1, verdict_B)
    return torch.where(gate_B > 0, verdict_B, 0)


def within_places(verdict_B: Tensor, shift: Shift, contest_B: Tensor, places_B: Tensor) -> Tensor:
    """Of the branches of one contest those that move most teach, at most as many as there are places."""
    score_B = torch.where(verdict_B == 0, shift.least_B, -torch.inf)
    order_B = torch.arange(len(score_B), device=score_B.device)
    ahead_BB = (score_B[None] > score_B[:, None]) | (
        (score_B[None] == score_B[:, None]) & (order_B[None] < order_B[:, None])
    )
    rank_B = (ahead_BB & (contest_B[None] == contest_B[:, None])).sum(1)
    return torch.where((verdict_B == 0) & (rank_B >= places_B), 3, verdict_B)
