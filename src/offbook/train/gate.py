"""Which branches may teach.

A branch that hardly moves its target has nothing to teach; one that makes what was sampled likelier teaches the fault.
Both show when student and teacher have scored the target, all its tokens together. Nothing here waits for the device.

Axes: M target tokens, B branches.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

VERDICTS = ("", "no_shift", "towards_mistake", "over_limit")  # why a branch does not teach; the first is: it does


class Shift(NamedTuple):
    """What branches do to their targets, in nats: the divergence, and how much less likely what was sampled becomes."""

    nats_B: Tensor
    gain_B: Tensor


def shift_of(student_M: Tensor, teacher_M: Tensor, divergence_M: Tensor, branch_M: Tensor, num_branches: int) -> Shift:
    """Sums over the tokens of each branch, from the log-probabilities of the sampled ones and the divergence there."""
    nothing_B = divergence_M.new_zeros(num_branches)
    return Shift(
        nothing_B.index_add(0, branch_M, divergence_M), nothing_B.index_add(0, branch_M, student_M - teacher_M)
    )


def verdicts(shift: Shift, gate_B: Tensor) -> Tensor:
    """Numbers in VERDICTS. A branch has to move its target by as many nats as its gate, and away; 0 lets all pass."""
    verdict_B = torch.where(shift.gain_B <= 0, 2, 0)
    verdict_B = torch.where(shift.nats_B < gate_B, 1, verdict_B)
    return torch.where(gate_B > 0, verdict_B, 0)


def within_places(verdict_B: Tensor, shift: Shift, contest_B: Tensor, places_B: Tensor) -> Tensor:
    """Of the branches of one contest those that move most teach, at most as many as there are places."""
    score_B = torch.where(verdict_B == 0, shift.nats_B, -torch.inf)
    order_B = torch.arange(len(score_B), device=score_B.device)
    ahead_BB = (score_B[None] > score_B[:, None]) | (
        (score_B[None] == score_B[:, None]) & (order_B[None] < order_B[:, None])
    )
    rank_B = (ahead_BB & (contest_B[None] == contest_B[:, None])).sum(1)
    return torch.where((verdict_B == 0) & (rank_B >= places_B), 3, verdict_B)
