"""From hidden states to losses without ever holding the logits of a whole batch.

Rows go through the vocabulary in chunks, and each chunk's gradients are taken at once, in the forward pass: nothing of
size [rows, vocabulary] outlives its chunk, and nothing is computed twice. Axes as in losses.py; D is the width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from offbook.train import losses
from offbook.train.gate import TargetScores, shift_of, verdicts
from offbook.types import Direction, Distill

CHUNK_ENTRIES = 2**25  # logits in one chunk: 220 rows of a vocabulary of 152k, 128 MiB in float32
COMPILED_CHUNK_ENTRIES = 2**27  # fused kernels hold far fewer copies


@dataclass(frozen=True, slots=True)
class Objective:
    """What does not change from token to token of a chunk."""

    ratio_cap: float
    policy: bool  # whether any token of the step carries an RL weight; without, its terms are not computed
    reference_kl: float = 0.0
    distill: Distill = field(default_factory=Distill)
    shares: tuple[float, ...] = (1.0,)  # of the teachers


class Rows(NamedTuple):
    """Tokens whose prediction matters, and what each counts for."""

    ids_N: Tensor
    behaviour_N: Tensor
    advantage_N: Tensor
    rl_weight_N: Tensor
    ce_weight_N: Tensor
    temperature_N: Tensor
    ce_power_N: Tensor
    reference_N: Tensor | None = None  # log-probability under the reference model, where one is held to


class Targets(NamedTuple):
    """Of the first rows, which are targets: what each counts for, and its branch. A branch is whole in its chunk, or it
    has been judged before."""

    weight_M: Tensor
    branch_M: Tensor
    gate_B: Tensor
    open_B: Tensor  # 0 where it is known that a branch may not teach, else 1


class TeacherLogits(NamedTuple):
    """Of the models that a teacher is, with what the branches insert and without. Of a model that is the student itself
    the latter are left out, since they are the student's."""

    hinted: list[Tensor]  # [M, V] each
    plain: list[Tensor]


class Terms(NamedTuple):
    """What a chunk adds up to, differentiable, and what is recorded of its tokens."""

    rl: Tensor
    ce: Tensor
    distill: Tensor
    logp_N: Tensor
    entropy_N: Tensor
    scores: TargetScores | None  # where it has targets


def chunk_terms(logits_NV: Tensor, teacher: TeacherLogits, rows: Rows, targets: Targets, objective: Objective) -> Terms:
    """The first M rows are also distilled, if their branch may teach."""
    logp_NV = log_probabilities([logits_NV], rows.temperature_N)
    logp_N = logp_NV.gather(1, rows.ids_N[:, None])[:, 0]
    rl_N = entropy_N = none = logp_N.detach()[:0]
    if objective.policy:
        advantage_N = rows.advantage_N
        if rows.reference_N is not None:
            advantage_N = advantage_N - objective.reference_kl * losses.k1(logp_N, rows.reference_N)
        gradient_N = losses.policy_gradient(logp_N, rows.behaviour_N, advantage_N, objective.ratio_cap)
        rl_N = rows.rl_weight_N * gradient_N
        entropy_N = -(logp_NV.detach().exp() * logp_NV.detach()).sum(-1)
    ce_N = rows.ce_weight_N * losses.imitation(logp_N, rows.ce_power_N)
    if not teacher.hinted:
        return Terms(rl_N.sum(), ce_N.sum(), none.sum(), logp_N.detach(), entropy_N, None)
    distill, first = objective.distill, slice(len(targets.weight_M))
    student = logits_NV[first].detach(), logp_NV[first]
    streams = rows.ids_N[first], rows.temperature_N[first]
    nats_M, scores = compared(student, teacher, *streams, distill.direction, objective.shares)
    distill_M = _weight(targets, scores) * losses.cap_values(nats_M, distill.cap)
    if distill.token_gate:
        distill_M = distill_M * (scores.moved_M >= distill.token_gate)
    return Terms(rl_N.sum(), ce_N.sum(), distill_M.sum(), logp_N.detach(), entropy_N, scores)


def log_probabilities(logits_NV: list[Tensor], temperature_N: Tensor, shares: tuple[float, ...] = (1.0,)) -> Tensor:
    """Of several models, taken together."""
    each = [torch.log_softmax(logits.float() / temperature_N[:, None], dim=-1) for logits in logits_NV]
    return losses.log_mix(each, shares)


def compared(
    student: tuple[Tensor, Tensor],
    teacher: TeacherLogits,
    ids_M: Tensor,
    temperature_M: Tensor,
    direction: Direction,
    shares: tuple[float, ...],
) -> tuple[Tensor, TargetScores]:
    """The divergence of the teacher from the student, differentiable, and all that is known of the targets. Of the
    student: its logits and what follows from them."""

    def sampled_M(logp_MV: Tensor) -> Tensor:
        return logp_MV.detach().gather(1, ids_M[:, None])[:, 0]

    logits_MV, logp_MV = student
    teacher_logp_MV = log_probabilities(teacher.hinted, temperature_M, shares)
    nats_M = losses.divergence(logp_MV, teacher_logp_MV, direction)
    plain_M, moved_M = sampled_M(logp_MV), nats_M.detach()
    if teacher.plain:
        models = [*teacher.plain, logits_MV][: len(teacher.hinted)]
        plain_logp_MV = log_probabilities(models, temperature_M, shares)
        plain_M, moved_M = sampled_M(plain_logp_MV), losses.divergence(plain_logp_MV, teacher_logp_MV, direction)
    scores = TargetScores(sampled_M(logp_MV), sampled_M(teacher_logp_MV), plain_M, nats_M.detach(), moved_M)
    return nats_M, scores


def _weight(targets: Targets, scores: TargetScores) -> Tensor:
    shift = shift_of(scores, targets.branch_M, len(targets.open_B))
    open_B = targets.open_B * (verdicts(shift, targets.gate_B) == 0)
    return targets.weight_M * open_B[targets.branch_M]


Losses = dict[str, Tensor]  # by part; what is differentiated is their sum


def in_chunks(
    hidden_ND: Tensor,
    head: nn.Module,
    losses_of: Callable[[Tensor, slice], Losses],
    chunks: list[slice],
    apart: tuple[str, ...] = (),
) -> tuple[Tensor, ...]:
    """The sum of `losses_of(logits of some rows, which rows)` over chunks of rows, as one node of the graph.

    With `apart` one sum for each of these parts and no others, so that each can be differentiated by itself. That costs
    one more pass back through the head a part.
    """
    trained = [parameter for parameter in head.parameters() if parameter.requires_grad]
    return _InChunks.apply(hidden_ND, head, losses_of, chunks, apart, *trained)


class _InChunks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        head: nn.Module,
        losses_of: Callable[[Tensor, slice], Losses],
        chunks: list[slice],
        apart: tuple[str, ...],
        *trained: Tensor,
    ) -> tuple[Tensor, ...]:
        sums = [_Sum(hidden_ND) for _ in apart or ("all",)]
        for part in chunks:
            with torch.enable_grad():
                hidden = hidden_ND[part].detach().requires_grad_()
                losses = losses_of(head(hidden), part)
                whole = sum(losses.values(), torch.zeros((), device=hidden.device))
            wanted = [losses.get(name) for name in apart] if apart else [whole]
            there = [(one, loss) for one, loss in zip(sums, wanted, strict=True) if loss is not None]
            for number, (one, loss) in enumerate(there, 1):
                one.add(loss, torch.autograd.grad(loss, [hidden, *trained], retain_graph=number < len(there)), part)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*(grad for one in sums for grad in one.gradients(trained)))
        return tuple(one.total for one in sums)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor | None) -> tuple[Tensor | None, ...]:
        size = len(ctx.saved_tensors) // len(outer)
        found: list[Tensor] = []
        for number, factor in enumerate(outer):
            if factor is None:  # another part is being differentiated
                continue
            scaled = [factor.to(grad.dtype) * grad for grad in ctx.saved_tensors[number * size : (number + 1) * size]]
            found = [ours.add_(more) for ours, more in zip(found, scaled, strict=True)] if found else scaled
        return found[0], None, None, None, None, *found[1:]


class _Sum:
    """A loss over all chunks, with its gradients."""

    def __init__(self, hidden_ND: Tensor):
        self.total = torch.zeros((), device=hidden_ND.device)
        self.hidden_grad_ND = torch.zeros_like(hidden_ND)
        self.grads: list[Tensor] = []

    def add(self, loss: Tensor, grads: tuple[Tensor, ...], part: slice) -> None:
        self.total += loss.detach()
        self.hidden_grad_ND[part] = grads[0]
        if self.grads:
            for mine, grad in zip(self.grads, grads[1:], strict=True):
                mine.add_(grad)
        else:  # summed in float32: many small chunks vanish in bfloat16
            self.grads = [grad.float() for grad in grads[1:]]

    def gradients(self, trained: tuple[Tensor, ...]) -> list[Tensor]:
        """Of the hidden states, then of what is trained of the head."""
        grads = self.grads or [torch.zeros((), device=like.device) for like in trained]
        of_head = [grad.to(like.dtype).expand_as(like) for grad, like in zip(grads, trained, strict=True)]
        return [self.hidden_grad_ND, *of_head]
