"""The loss components as pure functions. Each returns a value a token; the trainer divides their sum by a global count.

Axes: N tokens that carry weight, M target tokens, V vocabulary entries.
"""

from __future__ import annotations

import torch
from torch import Tensor

from offbook.types import Direction


def importance(logp_N: Tensor, behaviour_logp_N: Tensor, cap: float) -> Tensor:
    """min(pi / mu, cap), not differentiated. On-policy it is 1."""
    return torch.exp(logp_N.detach() - behaviour_logp_N).clamp(max=cap)


def policy_gradient(logp_N: Tensor, behaviour_logp_N: Tensor, advantage_N: Tensor, ratio_cap: float) -> Tensor:
    """REINFORCE with a truncated importance weight: -min(pi / mu, cap) * A * log pi.

    There is no trust-region clip that zeroes gradients, no division by the length of the rollout and none by the
    spread of its group (Composer 2, section 4.1).
    """
    return -importance(logp_N, behaviour_logp_N, ratio_cap) * advantage_N * logp_N


def divergence(student_logp_MV: Tensor, teacher_logp_MV: Tensor, direction: Direction) -> Tensor:
    """Exact divergence over the whole vocabulary at each token, in nats. The teacher is a constant.

    forward: KL(teacher || student); reverse: KL(student || teacher); jsd: Jensen-Shannon, bounded by log 2.
    Left out: a cap on single entries. What an entry adds to the softmax's gradient only means something together with
    all others; scaled one by one they push tokens up that the teacher wants down.
    """
    teacher_logp_MV = teacher_logp_MV.detach()
    if direction == "forward":
        return _kl(teacher_logp_MV, student_logp_MV)
    if direction == "reverse":
        return _kl(student_logp_MV, teacher_logp_MV)
    half = torch.log(torch.tensor(0.5, dtype=student_logp_MV.dtype, device=student_logp_MV.device))
    middle_logp_MV = torch.logaddexp(student_logp_MV, teacher_logp_MV) + half
    entries_MV = _entries(student_logp_MV, middle_logp_MV) + _entries(teacher_logp_MV, middle_logp_MV)
    return (0.5 * entries_MV).sum(-1)


def _kl(logp_MV: Tensor, logq_MV: Tensor) -> Tensor:
    return _entries(logp_MV, logq_MV).sum(-1)


def _entries(logp_MV: Tensor, logq_MV: Tensor) -> Tensor:
    return logp_MV.exp() * (logp_MV - logq_MV)


def cap_values(values: Tensor, cap: float) -> Tensor:
    """No value counts for more than `cap`. The surplus is scaled away instead of clamped, because a clamp would take
    the gradient from the very tokens where student and teacher disagree most."""
    return values * (cap / values.detach().clamp(min=cap)) if cap < torch.inf else values
