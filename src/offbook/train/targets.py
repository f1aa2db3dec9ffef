"""What hints do to their messages, measured before anything is differentiated, and which of them may teach.

A hint that hardly moves its message has nothing to teach; one that makes the faulty message likelier teaches the fault.
Both are seen when student and teacher have read the message, all its tokens together, so they are read once for this.

Axes: M tokens of targets, B branches (a target's tokens are neighbours, branch after branch), K likeliest tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from offbook.train import losses
from offbook.train.head import Objective
from offbook.types import Branch, Likely

VERDICTS = ("", "no_shift", "towards_mistake", "over_limit")  # why a branch does not teach; the first is: it does
TOLD_NATS = 0.01  # a token at which the two agree better than this is not worth telling its likeliest


class Readings(NamedTuple):
    """Of each target token: log-probability of the sampled one, divergence, the likeliest ones."""

    student_M: Tensor
    teacher_M: Tensor
    divergence_M: Tensor
    student_top: tuple[Tensor, Tensor]  # log-probabilities and ids [M, K]
    teacher_top: tuple[Tensor, Tensor]


@dataclass(slots=True)
class Measured:
    """What a hint did to the tokens of its target: log-probabilities of the sampled tokens and divergence, each."""

    student: list[float]
    teacher: list[float]
    divergence: list[float]
    skipped: str = ""  # why it did not teach
    student_top: list[Likely] = field(default_factory=list)
    teacher_top: list[Likely] = field(default_factory=list)


@torch.no_grad()
def read_targets(
    student: tuple[nn.Module, Tensor],
    teachers: list[tuple[nn.Module, Tensor]],
    ids_M: Tensor,
    objective: Objective,
    top: int,
    chunk_rows: int,
    compiled: bool,
) -> Readings:
    """`student` and each of the `teachers` are a head and hidden states [M, D]."""
    read = _compiled_chunk if compiled else _read_chunk
    parts = []
    for start in range(0, len(ids_M), chunk_rows):
        part = slice(start, start + chunk_rows)
        logits = [head(hidden_MD[part]) for head, hidden_MD in (student, *teachers)]
        parts.append(read(logits[0], logits[1:], ids_M[part], objective, top))
    columns = zip(*parts, strict=True)
    student_M, teacher_M, divergence_M, *tops = (torch.cat(column) for column in columns)
    return Readings(student_M, teacher_M, divergence_M, (tops[0], tops[1]), (tops[2], tops[3]))


def _read_chunk(
    logits_MV: Tensor, teacher_logits_MV: list[Tensor], ids_M: Tensor, objective: Objective, top: int
) -> tuple[Tensor, ...]:
    student_MV = torch.log_softmax(logits_MV.float() / objective.temperature, dim=-1)
    teacher_MV = losses.log_mix(
        [torch.log_softmax(logits.float() / objective.temperature, dim=-1) for logits in teacher_logits_MV],
        objective.shares,
    )
    sampled = [logp_MV.gather(1, ids_M[:, None])[:, 0] for logp_MV in (student_MV, teacher_MV)]
    divergence_M = losses.divergence(student_MV, teacher_MV, objective.direction)
    return *sampled, divergence_M, *student_MV.topk(top), *teacher_MV.topk(top)


_compiled_chunk = torch.compile(_read_chunk)


@dataclass(frozen=True, slots=True)
class Gate:
    """`nats` is how far a hint has to move its message, all tokens together; 0 lets all pass."""

    nats: float

    def verdicts(self, shift_B: Tensor, gain_B: Tensor, sample_B: Tensor, limit_B: Tensor) -> Tensor:
        """Numbers in VERDICTS. `gain` is how much less likely the hint makes the message; of the branches of one
        sample those that move most teach, at most as many as the limit says. Nothing here waits for the device."""
        verdict_B = torch.zeros_like(sample_B)
        if self.nats:
            verdict_B = torch.where(gain_B <= 0, 2, verdict_B)
            verdict_B = torch.where(shift_B < self.nats, 1, verdict_B)
        score_B = torch.where(verdict_B == 0, shift_B, -torch.inf)
        place_B = torch.arange(len(score_B), device=score_B.device)
        ahead_BB = (score_B[None] > score_B[:, None]) | (
            (score_B[None] == score_B[:, None]) & (place_B[None] < place_B[:, None])
        )
        rank_B = (ahead_BB & (sample_B[None] == sample_B[:, None])).sum(1)
        return torch.where((verdict_B == 0) & (rank_B >= limit_B), 3, verdict_B)


def by_branch(values_M: Tensor, branch_M: Tensor, num_branches: int) -> Tensor:
    """Sums over the tokens of each branch."""
    return torch.zeros(num_branches, device=values_M.device).index_add_(0, branch_M, values_M)


def told(branches: list[Branch], readings: Readings, verdict_B: Tensor) -> dict[str, Measured]:
    """The readings by the branch's key, as plain numbers; this waits for the device."""
    sizes = [branch.target_end - branch.target_start for branch in branches]
    lists = [values.float().cpu().split(sizes) for values in readings[:3]]
    tops = [tuple(part.cpu().split(sizes) for part in top) for top in (readings.student_top, readings.teacher_top)]
    found = {}
    for number, (branch, verdict) in enumerate(zip(branches, verdict_B.tolist(), strict=True)):
        student, teacher, divergence = (parts[number].tolist() for parts in lists)
        likeliest = [
            [
                list(zip(tokens, logprobs, strict=True)) if nats > TOLD_NATS else []
                for tokens, logprobs, nats in zip(
                    ids[number].tolist(), values[number].tolist(), divergence, strict=True
                )
            ]
            for values, ids in tops
        ]
        found[branch.key] = Measured(student, teacher, divergence, VERDICTS[verdict], *likeliest)
    return found
