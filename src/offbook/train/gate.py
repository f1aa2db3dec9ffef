"""Which hints may teach.

A hint that hardly moves its message has nothing to teach; one that makes the faulty message likelier teaches the fault.
Both show when student and teacher have read the message, all its tokens together. Nothing here waits for the device.

Axes: M tokens of targets, B branches.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

VERDICTS = ("", "no_shift", "towards_mistake", "over_limit")  # why a branch does not teach; the first is: it does


class Shift(NamedTuple):
    """What hints did to their messages, in nats: the divergence, and how much less likely they made them."""

    nats_B: Tensor
    gain_B: Tensor


def shift_of(student_M: Tensor, teacher_M: Tensor, divergence_M: Tensor, branch_M: Tensor, num_branches: int) -> Shift:
    """Sums over the tokens of each branch, from the log-probabilities of the sampled ones and the divergence there."""
    nothing_B = divergence_M.new_zeros(num_branches)
    return Shift(
        nothing_B.index_add(0, branch_M, divergence_M), nothing_B.index_add(0, branch_M, student_M - teacher_M)
    )


def verdicts(shift: Shift, gate: float) -> Tensor:
    """Numbers in VERDICTS. A hint has to move its message by as many nats as `gate`, and away; 0 lets all pass."""
    verdict_B = torch.zeros_like(shift.nats_B, dtype=torch.long)
    if not gate:
        return verdict_B
    verdict_B = torch.where(shift.gain_B <= 0, 2, verdict_B)
    return torch.where(shift.nats_B < gate, 1, verdict_B)


def within_limits(verdict_B: Tensor, shift: Shift, sample_B: Tensor, limit_B: Tensor) -> Tensor:
    """Of the branches of one sample those that move most teach, at most as many as the limit says."""
    score_B = torch.where(verdict_B == 0, shift.nats_B, -torch.inf)
    place_B = torch.arange(len(score_B), device=score_B.device)
    ahead_BB = (score_B[None] > score_B[:, None]) | (
        (score_B[None] == score_B[:, None]) & (place_B[None] < place_B[:, None])
    )
    rank_B = (ahead_BB & (sample_B[None] == sample_B[:, None])).sum(1)
    return torch.where((verdict_B == 0) & (rank_B >= limit_B), 3, verdict_B)
