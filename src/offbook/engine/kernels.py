"""Which kernel does the attention of a decode step on a GPU: one query of each row over all keys of its slot.

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

# Queries [R, H G, 1, D], keys and values of all slots [S, H, L, D], positions [R] of the rows in the first slots, and
# the scale of a score. Gives [R, 1, H G, D]. For a slot without a row (last position) the result is
# arbitrary.
Kernel = Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor]
WIDTHS = (16, 32, 64, 128, 256)
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 2e-3}  # relative to the norm of a query's output
log = logging.getLogger(__name__)


def kernel_for(keys: Tensor, values: Tensor) -> Kernel | None:
    """The kernel for a layer's keys and values; None if torch has to do it."""
    if not keys.is_cuda or keys.shape[3] not in WIDTHS or keys.dtype not in TOLERANCE or values.shape != keys.shape:
        return None
    return _tried(keys.device, keys.dtype, keys.shape[3])


def by_torch(query: Tensor, keys: Tensor, values: Tensor, position_R: Tensor, scaling: float) -> Tensor:
    """The reference."""
    rows, shared = len(query), query.shape[1] // keys.shape[1]
    key, value = (kept[:rows].repeat_interleave(shared, dim=1) for kept in (keys, values))
    sees = torch.arange(keys.shape[2], device=query.device) <= position_R[:, None, None, None]
    return scaled_dot_product_attention(query, key, value, attn_mask=sees, scale=scaling).transpose(1, 2)


@functools.cache
def _tried(device: torch.device, dtype: torch.dtype, size: int) -> Kernel | None:
    try:
        from offbook.engine.triton_kernels import attend
    except ImportError:
        log.warning("Triton is missing: sampling on this GPU is two to four times slower")
        return None
    try:
        error = difference(attend, device, dtype, size)
    except Exception as problem:  # of a compiler, so of any type; torch is the fallback
        log.warning("attention by torch: %s: %s", type(problem).__name__, str(problem).splitlines()[:1])
        return None
    if not error <= TOLERANCE[dtype]:
        log.warning("attention by torch: the kernel's error is %.2g on %s", error, device)
        return None
    return attend


def difference(kernel: Kernel, device: torch.device, dtype: torch.dtype, size: int) -> float:
    """The largest error, relative to the norm of a query's output. The long row's parts are several tiles each."""
    rng, length = torch.Generator().manual_seed(0), 6000
    drawn = [torch.randn(*shape, size, generator=rng) for shape in ((2, 6, 1), (4, 2, length), (4, 2, length))]
    query, keys, values = (tensor.to(device, dtype) for tensor in drawn)
    position_R = torch.tensor([0, length - 2], device=device)
    found = kernel(query, keys, values, position_R, 0.1).double()
    wanted = by_torch(query.double(), keys.double(), values.double(), position_R, 0.1)
    return float(((found - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max())
