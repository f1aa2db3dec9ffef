"""Which token is next: the inverse of the cumulative distribution at a random number of the rollout's own.

Axes: R rows, V vocabulary, K drafted tokens, W of them and one more.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import torch
from torch import Tensor

BELOW_ONE = 1 - 2**-24  # the largest float32 under 1: a double may round up to it


def uniforms(seed: int, key: str, turn: int, count: int) -> Tensor:
    """The random numbers of a message, one per token, whoever else writes at the time."""
    digest = hashlib.blake2b(f"{seed}/{key}/{turn}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest))
    return torch.rand(count, generator=generator, dtype=torch.float64).float().clamp_(max=BELOW_ONE)


def sample(logits_RV: Tensor, uniform_R: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Tokens, and the log-probability of each in the distribution that it was drawn from, in float32."""
    scaled_RV = _scaled(logits_RV, temperature)
    token_R, total_R = draw(scaled_RV.exp(), uniform_R)
    return token_R, scaled_RV.gather(1, token_R[:, None])[:, 0] - total_R.log()


def probabilities(logits: Tensor, temperature: float) -> Tensor:
    return _scaled(logits, temperature).softmax(-1)


def draw(weight_RV: Tensor, uniform_R: Tensor) -> tuple[Tensor, Tensor]:
    """A token of each row in proportion to its weight, and the sum of all weights. Its rounding cannot choose a token
    that has none: no token is taken behind the one that completes the sum."""
    sums_RV = weight_RV.cumsum(-1)
    total_R1 = sums_RV[:, -1:].contiguous()
    drawn_R1 = torch.searchsorted(sums_RV, uniform_R[:, None] * total_R1, right=True)
    token_R1 = torch.minimum(drawn_R1, torch.searchsorted(sums_RV, total_R1))
    return token_R1.clamp_(max=weight_RV.shape[1] - 1)[:, 0], total_R1[:, 0]  # where there are no numbers at all


class Verified(NamedTuple):
    """Of each row the first `kept_R` drafted tokens and one more; what lies behind is nothing."""

    token_RW: Tensor
    logprob_RW: Tensor
    kept_R: Tensor


def verify(
    logits_RWV: Tensor, drafted_RKV: Tensor, draft_RK: Tensor, accept_RK: Tensor, uniform_RW: Tensor, temperature: float
) -> Verified:
    """Rejection sampling (https://arxiv.org/abs/2211.17192, algorithm 1): tokens follow the model's distribution p,
    whatever the distributions q that they were drafted from.

    A drafted token x is kept with probability min(1, p(x) / q(x)). The first that is not is drawn anew in proportion to
    max(p - q, 0), or where all are kept one more from p. Random numbers belong to the place of a token in its message:
    one that was used for a draft behind the first rejected token has decided nothing, and is used again.
    """
    logp_RWV = _scaled(logits_RWV, temperature).log_softmax(-1)
    p_RWV, count = logp_RWV.exp(), draft_RK.shape[1]
    at_RK1 = draft_RK[:, :, None]
    p_RK, q_RK = p_RWV[:, :count].gather(2, at_RK1)[..., 0], drafted_RKV.gather(2, at_RK1)[..., 0]
    kept_R = (accept_RK * q_RK < p_RK).long().cumprod(1).sum(1)
    kept_R11 = kept_R[:, None, None]
    p_RV = p_RWV.take_along_dim(kept_R11, 1)[:, 0]
    q_RV = drafted_RKV.take_along_dim(kept_R11.clamp(max=count - 1), 1)[:, 0]
    left_RV = torch.where(kept_R[:, None] < count, (p_RV - q_RV).clamp(min=0), p_RV)
    left_RV = torch.where(left_RV.sum(-1, keepdim=True) > 0, left_RV, p_RV)  # p is q but for rounding, or q no number
    last_R, _ = draw(left_RV, uniform_RW.gather(1, kept_R[:, None])[:, 0])
    last_R1 = last_R[:, None]
    token_RW = torch.cat([draft_RK, last_R1], dim=1).scatter(1, kept_R[:, None], last_R1)
    logprob_RW = logp_RWV.gather(2, token_RW[:, :, None])[..., 0]
    is_new_RW = torch.arange(count + 1, device=kept_R.device) <= kept_R[:, None]
    return Verified(token_RW, torch.where(is_new_RW, logprob_RW, 0.0), kept_R)


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    """The maximum is taken off before the division, so that temperatures near 0 lose nothing."""
    logits = logits.float()
    scaled = logits - logits.amax(-1, keepdim=True)
    return scaled if temperature == 1.0 else scaled / temperature
