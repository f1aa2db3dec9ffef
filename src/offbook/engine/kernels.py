"""Attention of a few new tokens of many rows, each over all that its place holds, in one call.

What a step reads is a row's own keys and no more, by numbers that the device has: a graph of it serves every length. A
Triton kernel on a GPU where it gives the right numbers, which is tried once; elsewhere torch's own, with a mask. With
one query a row that reads all keys in one piece, and most of a GPU waits: on an H200 a step took three times as long.
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
APART = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 2e-3}  # of a query's norm, at most
TRIED = ((1, None), (64, [3, 1]))  # tokens of a row, and places: a step's, and a short reading's with the most queries
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
def _tried(device: torch.device, dtype: torch.dtype, size: int) -> Kernel | None:
    try:
        from offbook.engine.triton_kernels import attend
    except ImportError:
        log.warning("without Triton a GPU reads the keys of a row in one piece: sampling is two to four times slower")
        return None
    for width, place_R in TRIED:
        try:
            apart = _apart(attend, device, dtype, size, width, place_R)
        except Exception as error:  # a compiler's can be of any kind, and torch is always there
            log.warning("torch reads keys: %s: %s", type(error).__name__, str(error).splitlines()[:1])
            return None
        if not apart <= APART[dtype]:
            log.warning("torch reads keys: the kernel is %.2g apart from it on %s", apart, device)
            return None
    return attend


def _apart(
    kernel: Kernel, device: torch.device, dtype: torch.dtype, size: int, width: int, place_R: list[int] | None
) -> float:
    """From torch, by the norm of a query's output, at the most. A row is so long that its parts are several tiles."""
    rng, length = torch.Generator().manual_seed(0), 6000
    drawn = [torch.randn(*shape, size, generator=rng) for shape in ((2, width, 6), (4, 2, length), (4, 2, length))]
    query, keys, values = (tensor.to(device, dtype) for tensor in drawn)
    position_RW = torch.tensor([[0], [length - 1 - width]], device=device) + torch.arange(width, device=device)
    places = None if place_R is None else torch.tensor(place_R, device=device)
    query = query.transpose(1, 2)
    found = kernel(query, keys, values, position_RW, places, 0.1).double()
    wanted = by_torch(query.double(), keys.double(), values.double(), position_RW, places, 0.1)
    return float(((found - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max())
