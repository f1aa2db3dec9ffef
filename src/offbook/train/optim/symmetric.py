"""alpha A B^T + beta C + gamma I where the result is known to be symmetric: half of it is computed, and mirrored.

A Triton kernel on GPUs that have it and where it gives the right numbers, which is tried once; elsewhere the plain
product. Both operands are read along their rows, which of a symmetric B are its columns too.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable

import torch
from torch import Tensor

SMALLEST = 512  # rows, from where on half of the work is less time
TRIED = (2, 640, 320)  # tiles on and off the diagonal, and one that is cut
log = logging.getLogger(__name__)


def symmetric_product(
    a: Tensor, b: Tensor, alpha: float = 1.0, add: Tensor | None = None, beta: float = 0.0, diagonal: float = 0.0
) -> Tensor:
    """Of batches [N, R, K]. `add` is symmetric, too."""
    if a.is_cuda and a.shape[1] >= SMALLEST and (kernel := kernel_of(a.device)) is not None:
        return kernel(a, b, alpha, add, beta, diagonal)
    return plain_product(a, b, alpha, add, beta, diagonal)


def plain_product(
    a: Tensor, b: Tensor, alpha: float = 1.0, add: Tensor | None = None, beta: float = 0.0, diagonal: float = 0.0
) -> Tensor:
    if add is None and alpha == 1.0:
        out = torch.bmm(a, b.mT)
    else:
        like = a.new_empty(len(a), a.shape[1], a.shape[1]) if add is None else add
        out = torch.baddbmm(like, a, b.mT, beta=beta if add is not None else 0.0, alpha=alpha)
    if diagonal:
        out.diagonal(dim1=-2, dim2=-1).add_(diagonal)
    return out


Product = Callable[[Tensor, Tensor, float, Tensor | None, float, float], Tensor]


@functools.cache
def kernel_of(device: torch.device) -> Product | None:
    """The fastest way of loading tiles that this GPU and this Triton are right with."""
    try:
        from offbook.train.optim.triton_symmetric import half_product
    except ImportError:
        log.warning("Triton is not installed, so symmetric products are computed in full: pip install triton")
        return None
    count, rows, columns = TRIED
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(count, rows, columns, generator=rng).div_(math.sqrt(columns)).to(device, torch.float16)
    gram = plain_product(x, x)
    wanted = plain_product(gram.float(), gram.float(), 0.5, gram.float(), -1.0, 2.0)
    for descriptors in (torch.cuda.get_device_capability(device) >= (9, 0), False):
        product = functools.partial(half_product, descriptors=descriptors)
        try:
            found = product(product(x, x), gram, 0.5, gram, -1.0, 2.0)
            apart = float((found.float() - wanted).norm() / wanted.norm())
        except Exception as error:  # a compiler's can be of any kind, and the plain product is always there
            log.warning("the symmetric product: %s: %s", type(error).__name__, str(error).splitlines()[:1])
            continue
        if apart < 2e-3:
            return product
        log.warning("the symmetric product is off by %.1e of its norm", apart)
    return None
