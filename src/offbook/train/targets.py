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
from torch.utils._pytree import tree_map

from offbook.train import losses
from offbook.train.head import Objective
from offbook.types import Branch, Likely

VERDICTS = ("", "no_shift", "towards_mistake", "over_limit")  # why a branch does not teach; the first is: it does
TOLD_NATS = 0.01  # a token at which the two agree better than this is not worth telling its likeliest
TOLD_TOKENS = 256  # of a micro-batch: sorting a large vocabulary at every token would cost more than all the rest


class Readings(NamedTuple):
    """Of each target token the sampled one's log-probability and the divergence; where it is largest, the likeliest."""

    student_M: Tensor
    teacher_M: Tensor
    divergence_M: Tensor
    told_P: Tensor  # which tokens these are
    student_top: tuple[Tensor, Tensor]  # log-probabilities and ids [P, K]
    teacher_top: tuple[Tensor, Tensor]

    def on_host(self) -> Readings:
        """On their way there: not to be looked at before the device has been waited for."""
        return tree_map(lambda values: values.to("cpu", non_blocking=True), self)


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
    readers = (student, *teachers)
    parts = []
    for start in range(0, len(ids_M), chunk_rows):
        part = slice(start, start + chunk_rows)
        logits = [head(hidden_MD[part]) for head, hidden_MD in readers]
        parts.append(read(logits, ids_M[part], objective))
    student_M, teacher_M, divergence_M = (torch.cat(column) for column in zip(*parts, strict=True))
    told_P = divergence_M.topk(min(TOLD_TOKENS, chunk_rows, len(ids_M))).indices
    likeliest = [
        logp_PV.topk(top)
        for logp_PV in _log_probabilities([head(hidden[told_P]) for head, hidden in readers], objective)
    ]
    tops = [(values_PK, ids_PK) for values_PK, ids_PK in likeliest]
    return Readings(student_M, teacher_M, divergence_M, told_P, *tops)


def _read_chunk(logits: list[Tensor], ids_M: Tensor, objective: Objective) -> tuple[Tensor, ...]:
    student_MV, teacher_MV = _log_probabilities(logits, objective)
    sampled = [logp_MV.gather(1, ids_M[:, None])[:, 0] for logp_MV in (student_MV, teacher_MV)]
    return *sampled, losses.divergence(student_MV, teacher_MV, objective.direction)


def _log_probabilities(logits: list[Tensor], objective: Objective) -> tuple[Tensor, Tensor]:
    """Of the student, and of its teachers taken together."""
    student, *teachers = (torch.log_softmax(each.float() / objective.temperature, dim=-1) for each in logits)
    return student, losses.log_mix(teachers, objective.shares)


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
    """The readings by the branch's key, as plain numbers."""
    student, teacher, divergence = (values.float().tolist() for values in readings[:3])
    tops = [_by_token(readings.told_P, top, divergence) for top in (readings.student_top, readings.teacher_top)]
    found, start = {}, 0
    for branch, verdict in zip(branches, verdict_B.tolist(), strict=True):
        part = slice(start, start + branch.target_end - branch.target_start)
        start = part.stop
        found[branch.key] = Measured(
            student[part], teacher[part], divergence[part], VERDICTS[verdict], *(likely[part] for likely in tops)
        )
    return found


def _by_token(told_P: Tensor, top: tuple[Tensor, Tensor], divergence: list[float]) -> list[Likely]:
    likely: list[Likely] = [[] for _ in divergence]
    for place, logprobs, ids in zip(told_P.tolist(), *(part.tolist() for part in top), strict=True):
        if divergence[place] > TOLD_NATS:
            likely[place] = list(zip(ids, logprobs, strict=True))
    return likely
