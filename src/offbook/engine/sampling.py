"""Which token is next: the inverse of the cumulative distribution at a random number of its rollout.

Axes: R rows, V vocabulary.
"""

from __future__ import annotations

import hashlib

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


def draw(weight_RV: Tensor, uniform_R: Tensor) -> tuple[Tensor, Tensor]:
    """A token of each row in proportion to its weight, and the sum of all weights. Its rounding cannot choose a token
    that has none: no token is taken behind the one that completes the sum."""
    sums_RV = weight_RV.cumsum(-1)
    total_R1 = sums_RV[:, -1:].contiguous()
    drawn_R1 = torch.searchsorted(sums_RV, uniform_R[:, None] * total_R1, right=True)
    token_R1 = torch.minimum(drawn_R1, torch.searchsorted(sums_RV, total_R1))
    return token_R1.clamp_(max=weight_RV.shape[1] - 1)[:, 0], total_R1[:, 0]  # where there are no numbers at all


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    """The maximum is taken off before the division, so that temperatures near 0 lose nothing."""
    logits = logits.float()
    scaled = logits - logits.amax(-1, keepdim=True)
    return scaled if temperature == 1.0 else scaled / temperature
