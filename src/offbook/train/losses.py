"""The loss components as pure functions. Each returns a value a token; the trainer divides their sum by a global count.

Axes: N tokens that carry weight, M tokens of targets, V vocabulary entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

Direction = Literal["forward", "reverse", "jsd"]


def importance(logp_N: Tensor, behaviour_logp_N: Tensor, cap: float) -> Tensor:
    """min(pi / mu, cap), not differentiated. On-policy it is 1."""
    return torch.exp(logp_N.detach() - behaviour_logp_N).clamp(max=cap)


def policy_gradient(logp_N: Tensor, behaviour_logp_N: Tensor, advantage_N: Tensor, ratio_cap: float) -> Tensor:
    """REINFORCE with a truncated importance weight: -min(pi / mu, cap) * A * log pi.

    There is no trust-region clip that zeroes gradients, no division by the length of the rollout and none by the
    spread of its group (Composer 2, section 4.1).
    """
    return -importance(logp_N, behaviour_logp_N, ratio_cap) * advantage_N * logp_N


def divergence(
    student_logp_MV: Tensor, teacher_logp_MV: Tensor, direction: Direction, entry_cap: float = 0.0
) -> Tensor:
    """Exact divergence over the whole vocabulary at each token, in nats. The teacher is a constant.

    forward: KL(teacher || student); reverse: KL(student || teacher); jsd: Jensen-Shannon, bounded by log 2.
    With an `entry_cap`, no vocabulary entry counts for more than that many nats; 0 is no cap.
    """
    entries_MV = _entries(student_logp_MV, teacher_logp_MV.detach(), direction)
    return (cap_values(entries_MV, entry_cap) if entry_cap else entries_MV).sum(-1)


def _entries(student_logp_MV: Tensor, teacher_logp_MV: Tensor, direction: Direction) -> Tensor:
    if direction == "forward":
        return _kl(teacher_logp_MV, student_logp_MV)
    if direction == "reverse":
        return _kl(student_logp_MV, teacher_logp_MV)
    half = torch.log(torch.tensor(0.5, dtype=student_logp_MV.dtype, device=student_logp_MV.device))
    middle_logp_MV = torch.logaddexp(student_logp_MV, teacher_logp_MV) + half
    return 0.5 * (_kl(student_logp_MV, middle_logp_MV) + _kl(teacher_logp_MV, middle_logp_MV))


def _kl(logp_MV: Tensor, logq_MV: Tensor) -> Tensor:
    return logp_MV.exp() * (logp_MV - logq_MV)


def cap_values(values: Tensor, cap: float) -> Tensor:
    """No value counts for more than `cap`. The surplus is scaled away instead of clamped, because a clamp would take
    the gradient from the very tokens, or entries, where student and teacher disagree most."""
    return values * (cap / values.detach().clamp(min=cap))


def log_mix(logps_MV: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    """The distribution proportional to the product of p_i ** share_i: what lies between teachers in logits."""
    if len(logps_MV) == 1:
        return logps_MV[0]
    return (
        torch.stack([share * logp_MV for share, logp_MV in zip(shares, logps_MV, strict=True)]).sum(0).log_softmax(-1)
    )
