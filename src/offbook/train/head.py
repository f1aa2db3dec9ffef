"""From hidden states to losses without ever holding the logits of a whole batch.

Rows go through the vocabulary in chunks, and each chunk's gradients are taken at once, in the forward pass: nothing of
size [rows, vocabulary] outlives its chunk, and nothing is computed twice. Axes as in losses.py; D is the width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from offbook.train import losses
from offbook.train.gate import shift_of, verdicts

CHUNK_ENTRIES = 2**25  # logits in one chunk: 220 rows of a vocabulary of 152k, 128 MiB in float32
COMPILED_CHUNK_ENTRIES = 2**27  # fused kernels hold far fewer copies


@dataclass(frozen=True, slots=True)
class Objective:
    """What does not change from token to token."""

    temperature: float
    ratio_cap: float
    direction: losses.Direction
    token_cap: float
    entry_cap: float
    importance_cap: float
    shares: tuple[float, ...]  # of the teachers
    gate: float  # that a branch has to pass in the chunk it is scored in
    policy: bool  # whether any token of the step carries an RL weight; without, its terms are not computed


class Rows(NamedTuple):
    """Tokens whose prediction matters, and what each counts for."""

    ids_N: Tensor
    behaviour_N: Tensor
    advantage_N: Tensor
    rl_weight_N: Tensor
    ce_weight_N: Tensor


class Lessons(NamedTuple):
    """Of the first rows, which are targets: what each counts for, and its branch. A branch is whole in its chunk, or it
    has been judged before."""

    weight_M: Tensor
    branch_M: Tensor
    taught_B: Tensor  # 0 where it is known that a branch may not teach, else 1


class Reading(NamedTuple):
    """Of each target token the sampled one's log-probability, by student and teacher, and the divergence."""

    student_M: Tensor
    teacher_M: Tensor
    divergence_M: Tensor


class Terms(NamedTuple):
    """What a chunk adds up to, differentiable, and what is recorded of its tokens."""

    rl: Tensor
    ce: Tensor
    hint: Tensor
    logp_N: Tensor
    entropy_N: Tensor
    reading: Reading | None  # where it has targets


def chunk_terms(
    logits_NV: Tensor,
    teacher_logits_MV: list[Tensor],
    rows: Rows,
    lessons: Lessons,
    objective: Objective,
) -> Terms:
    """The first M rows are also distilled, if their branch may teach."""
    logp_NV = torch.log_softmax(logits_NV.float() / objective.temperature, dim=-1)
    logp_N = logp_NV.gather(1, rows.ids_N[:, None])[:, 0]
    rl_N = entropy_N = none = logp_N.detach()[:0]
    if objective.policy:
        gradient_N = losses.policy_gradient(logp_N, rows.behaviour_N, rows.advantage_N, objective.ratio_cap)
        rl_N = rows.rl_weight_N * gradient_N
        entropy_N = -(logp_NV.detach().exp() * logp_NV.detach()).sum(-1)
    ce_N = -rows.ce_weight_N * logp_N
    if not teacher_logits_MV:
        return Terms(rl_N.sum(), ce_N.sum(), none.sum(), logp_N.detach(), entropy_N, None)
    targets = slice(len(lessons.weight_M))
    teacher_logp_MV = log_probabilities(teacher_logits_MV, objective, objective.shares)
    nats_M = losses.divergence(logp_NV[targets], teacher_logp_MV, objective.direction, objective.entry_cap)
    whole_M = nats_M.detach()
    if objective.entry_cap:
        whole_M = losses.divergence(logp_NV[targets].detach(), teacher_logp_MV, objective.direction)
    reading = reading_of(logp_N.detach()[targets], teacher_logp_MV, whole_M, rows.ids_N[targets])
    hint_M = _weight(lessons, reading, objective.gate) * losses.cap_values(nats_M, objective.token_cap)
    if objective.importance_cap:
        hint_M = hint_M * losses.importance(reading.student_M, rows.behaviour_N[targets], objective.importance_cap)
    return Terms(rl_N.sum(), ce_N.sum(), hint_M.sum(), logp_N.detach(), entropy_N, reading)


def log_probabilities(logits_MV: list[Tensor], objective: Objective, shares: tuple[float, ...]) -> Tensor:
    """Of several, taken together."""
    each = [torch.log_softmax(logits.float() / objective.temperature, dim=-1) for logits in logits_MV]
    return losses.log_mix(each, shares)


def reading_of(student_M: Tensor, teacher_logp_MV: Tensor, divergence_M: Tensor, ids_M: Tensor) -> Reading:
    return Reading(student_M, teacher_logp_MV.gather(1, ids_M[:, None])[:, 0], divergence_M)


def _weight(lessons: Lessons, reading: Reading, gate: float) -> Tensor:
    shift = shift_of(*reading, lessons.branch_M, len(lessons.taught_B))
    taught_B = lessons.taught_B * (verdicts(shift, gate) == 0)
    return lessons.weight_M * taught_B[lessons.branch_M]


compiled_chunk_terms = torch.compile(chunk_terms)


def in_chunks(
    hidden_ND: Tensor, head: nn.Module, loss_of: Callable[[Tensor, slice], Tensor], chunks: list[slice]
) -> Tensor:
    """The sum of `loss_of(logits of some rows, which rows)` over chunks of rows, as one node of the graph."""
    trained = [parameter for parameter in head.parameters() if parameter.requires_grad]
    return _InChunks.apply(hidden_ND, head, loss_of, chunks, *trained)


class _InChunks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        head: nn.Module,
        loss_of: Callable[[Tensor, slice], Tensor],
        chunks: list[slice],
        *trained: Tensor,
    ) -> Tensor:
        total = torch.zeros((), device=hidden_ND.device)
        hidden_grad_ND = torch.zeros_like(hidden_ND)
        grads = [torch.zeros((), device=hidden_ND.device) for _ in trained]
        for number, part in enumerate(chunks):
            with torch.enable_grad():
                hidden = hidden_ND[part].detach().requires_grad_()
                loss = loss_of(head(hidden), part)
            hidden_grad_ND[part], *found = torch.autograd.grad(loss, [hidden, *trained])
            for place, grad in enumerate(found):  # summed in float32: many small chunks vanish in bfloat16
                grads[place] = grads[place].add_(grad) if number else grad.float()
            total += loss.detach()
        ctx.save_for_backward(
            hidden_grad_ND,
            *(grad.to(like.dtype).expand_as(like) for grad, like in zip(grads, trained, strict=True)),
        )
        return total

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        hidden_grad_ND, *grads = ctx.saved_tensors
        scaled_ND, *scaled = (outer[0].to(grad.dtype) * grad for grad in (hidden_grad_ND, *grads))
        return scaled_ND, None, None, None, *scaled
