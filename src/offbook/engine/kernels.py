"""Which kernel does the attention of a few new tokens of each row on a GPU, over all keys of the row's slot.

The Triton kernel (triton_kernels.py) reads a row's own keys and no more, by lengths that the device has, so one CUDA
graph serves every length. It is used after it has given torch's numbers once. torch's own attention reads all slots to
the same length in one piece, and most of a GPU idles: on an H200 a step took three times as long.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

# Queries [R, H G, W, D], keys and values of all slots [S, H, L, D], positions of the tokens [R, W], slots of the rows
# [R], and the scale of a score. Gives [R, W, H G, D], arbitrary for a token at the last position of a slot (scratch).
Kernel = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, float], Tensor]
WIDTHS = (16, 32, 64, 128, 256)
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 2e-3}  # relative to the norm of a query's output
TRIED = (1, 64)  # tokens of a row: a decode step, and a short prefill with the most queries for a program
log = logging.getLogger(__name__)


def kernel_for(keys: Tensor, values: Tensor) -> Kernel | None:
    """The kernel for a layer's keys and values; None if torch has to do it."""
    if not keys.is_cuda or keys.shape[3] not in WIDTHS or keys.dtype not in TOLERANCE or values.shape != keys.shape:
        return None
    return _tried(keys.device, keys.dtype, keys.shape[3])


def by_torch(
    query: Tensor, keys: Tensor, values: Tensor, position_RW: Tensor, slot_R: Tensor, scaling: float
) -> Tensor:
    """The reference."""
    shared = query.shape[1] // keys.shape[1]
    key, value = (kept[slot_R].repeat_interleave(shared, dim=1) for kept in (keys, values))
    sees = torch.arange(keys.shape[2], device=query.device) <= position_RW[:, None, :, None]
    return scaled_dot_product_attention(query, key, value, attn_mask=sees, scale=scaling).transpose(1, 2)


@functools.cache
def _tried(device: torch.device, dtype: torch.dtype, size: int) -> Kernel | None:
    try:
        from offbook.engine.triton_kernels import attend
    except ImportError:
        log.warning("Triton is missing: sampling on this GPU is two to four times slower")
        return None
    try:
        errors = [difference(attend, device, dtype, size, width) for width in TRIED]
    except Exception as problem:  # of a compiler, so of any type; torch is the fallback
        log.warning("attention by torch: %s: %s", type(problem).__name__, str(problem).splitlines()[:1])
        return None
    if not all(error <= TOLERANCE[dtype] for error in errors):
        log.warning("attention by torch: the kernel's errors are %s on %s", errors, device)
        return None
    return attend


def difference(kernel: Kernel, device: torch.device, dtype: torch.dtype, size: int, width: int) -> float:
    """The largest error, relative to the norm of a query's output. The long row's parts are several tiles each."""
    rng = torch.Generator().manual_seed(0)
    length = 6000
    drawn = [torch.randn(*shape, size, generator=rng) for shape in ((2, width, 6), (4, 2, length), (4, 2, length))]
    query, keys, values = (tensor.to(device, dtype) for tensor in drawn)
    query = query.transpose(1, 2)
    position_RW = torch.tensor([[0], [length - 1 - width]], device=device) + torch.arange(width, device=device)
    slot_R = torch.tensor([3, 1], device=device)
    found = kernel(query, keys, values, position_RW, slot_R, 0.1).double()
    wanted = by_torch(query.double(), keys.double(), values.double(), position_RW, slot_R, 0.1)
    return float(((found - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max())
