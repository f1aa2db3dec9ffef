"""Which token is next: the inverse of the cumulative distribution at a random number of its rollout.

Axes: R rows, V vocabulary.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

BELOW_ONE = 1 - 2**-24  # the largest float32 under 1: a double may round up to it


def uniforms(seed: int, key: str, turn: int, count: int) -> Tensor:
    """The random numbers of a message, one per token: they do not depend on the other rows of a batch."""
    digest = hashlib.blake2b(f"{seed}/{key}/{turn}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest))
    return torch.rand(count, generator=generator, dtype=torch.float64).float().clamp_(max=BELOW_ONE)


def sample(logits_RV: Tensor, uniform_R: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Tokens, and the log-probability of each in the distribution that it was drawn from, in float32.

    Rounding cannot choose a token without probability: no token is taken behind the one that completes the sum.
    """
    logits_RV = logits_RV.float()
    scaled_RV = logits_RV - logits_RV.amax(-1, keepdim=True)  # before the division, so that none is lost near 0
    if temperature != 1.0:
        scaled_RV = scaled_RV / temperature
    sums_RV = scaled_RV.exp().cumsum(-1)
    total_R1 = sums_RV[:, -1:].contiguous()
    drawn_R1 = torch.searchsorted(sums_RV, uniform_R[:, None] * total_R1, right=True)
    token_R1 = torch.minimum(drawn_R1, torch.searchsorted(sums_RV, total_R1))
    token_R1 = token_R1.clamp_(max=logits_RV.shape[1] - 1)  # where there are no numbers at all
    return token_R1[:, 0], scaled_RV.gather(1, token_R1)[:, 0] - total_R1[:, 0].log()
