"""The loss components as pure functions. Each returns a value a token; the trainer divides their sum by a global count.

Axes: N tokens that carry weight, V vocabulary entries.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Direction = Literal["forward", "reverse", "jsd"]


def policy_gradient(logp_N: Tensor, behaviour_logp_N: Tensor, advantage_N: Tensor, ratio_cap: float) -> Tensor:
    """REINFORCE with a truncated importance weight: -min(pi / mu, cap) * A * log pi, the weight not differentiated.

    On-policy the weight is 1. There is no trust-region clip that zeroes gradients, no division by the length of the
    rollout and none by the spread of its group (Composer 2, section 4.1).
    """
    ratio_N = torch.exp(logp_N.detach() - behaviour_logp_N).clamp(max=ratio_cap)
    return -ratio_N * advantage_N * logp_N


def divergence(student_logp_NV: Tensor, teacher_logp_NV: Tensor, direction: Direction) -> Tensor:
    """Exact divergence over the whole vocabulary at each token, in nats. The teacher is a constant.

    forward: KL(teacher || student); reverse: KL(student || teacher); jsd: Jensen-Shannon, bounded by log 2.
    """
    teacher_logp_NV = teacher_logp_NV.detach()
    if direction == "forward":
        return _kl(teacher_logp_NV, student_logp_NV)
    if direction == "reverse":
        return _kl(student_logp_NV, teacher_logp_NV)
    half = torch.log(torch.tensor(0.5, dtype=student_logp_NV.dtype, device=student_logp_NV.device))
    middle_logp_NV = torch.logaddexp(student_logp_NV, teacher_logp_NV) + half
    return 0.5 * (_kl(student_logp_NV, middle_logp_NV) + _kl(teacher_logp_NV, middle_logp_NV))


def _kl(logp_NV: Tensor, logq_NV: Tensor) -> Tensor:
    return (logp_NV.exp() * (logp_NV - logq_NV)).sum(-1)


def cap_tokens(divergence_N: Tensor, cap: float) -> Tensor:
    """No token counts for more than `cap` nats. The surplus is scaled away instead of clamped, because a clamp would
    take the gradient from the very tokens where student and teacher disagree most."""
    return divergence_N * (cap / divergence_N.detach().clamp(min=cap))
