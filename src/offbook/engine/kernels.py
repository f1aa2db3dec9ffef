"""Attention of a few new tokens of many rows, each over all that its place holds, in one call.

What a step reads is a row's own keys and no more, by numbers that the device has: a graph of it serves every length. A
Triton kernel on a GPU where it gives the right numbers, which is tried once; elsewhere torch's own, with a mask. With
one query a row that reads all keys in one piece, and most of a GPU waits: on an H200 it was three quarters of a step.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

# Queries [R, H G, W, D], the keys and values of all places [S, H, L, D], the positions of the R x W tokens, which
# places are theirs (the first ones, unless said) and the scale of a score. Gives [R, W, H G, D]. A token at the last
# position of a place is nobody's: what it gets are numbers, and no more can be said of them.
Kernel = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None, float], Tensor]
WIDTHS = (16, 32, 64, 128, 256)
APART = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}  # of the norm, at most
log = logging.getLogger(__name__)


def kernel_for(keys: Tensor, values: Tensor) -> Kernel | None:
    """The one that reads what a layer keeps; None where torch has to."""
    if not keys.is_cuda or keys.shape[3] not in WIDTHS or keys.dtype not in APART or values.shape != keys.shape:
        return None
    return _tried(keys.device, keys.dtype, keys.shape[3])


def by_torch(
    query: Tensor, keys: Tensor, values: Tensor, position_RW: Tensor, place_R: Tensor | None, scaling: float
) -> Tensor:
    """What a kernel is to give."""
    rows, shared = len(query), query.shape[1] // keys.shape[1]
    which = slice(rows) if place_R is None else place_R
    key, value = (kept[which].repeat_interleave(shared, dim=1) for kept in (keys, values))
    sees = torch.arange(keys.shape[2], device=query.device) <= position_RW[:, None, :, None]
    return scaled_dot_product_attention(query, key, value, attn_mask=sees, scale=scaling).transpose(1, 2)


@functools.cache
def _tried(device: torch.device, dtype: torch.dtype, width: int) -> Kernel | None:
    try:
        from offbook.engine.triton_kernels import attend
    except ImportError:
        log.warning("without Triton a GPU reads the keys of a row in one piece: sampling is two to four times slower")
        return None
    rng = torch.Generator().manual_seed(0)
    drawn = (torch.randn(size, generator=rng) for size in ((2, 6, 3, width), (4, 2, 700, width), (4, 2, 700, width)))
    query, keys, values = (tensor.to(device, dtype) for tensor in drawn)
    position_RW = torch.tensor([[0, 1, 2], [500, 501, 502]], device=device)
    place_R = torch.tensor([3, 1], device=device)
    try:
        found = attend(query, keys, values, position_RW, place_R, 0.1).float()
    except Exception as error:  # a compiler's can be of any kind, and torch is always there
        log.warning("torch reads keys: %s: %s", type(error).__name__, str(error).splitlines()[:1])
        return None
    wanted = by_torch(query.float(), keys.float(), values.float(), position_RW, place_R, 0.1)
    apart = float((found - wanted).norm() / wanted.norm())
    if apart <= APART[dtype]:
        return attend
    log.warning("torch reads keys: those of the kernel are %.2g apart from them on %s", apart, device)
    return None
