"""alpha A B^T + beta C + gamma I where the result is known to be symmetric: half of it is computed, and mirrored.

A Triton kernel on GPUs that have it and where it gives the right numbers, which is tried once; elsewhere the plain
product. Of the ways that are right, the plain one among them, each shape takes the one that was fastest when it was
first asked for. Both operands are read along their rows, which of a symmetric B are its columns too.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable

import torch
from torch import Tensor

SMALLEST = 512  # rows, from where on half of the work can be less time
TRIED = (2, 640, 320)  # tiles on and off the diagonal, and one that is cut
REPEATS = 3
log = logging.getLogger(__name__)

Product = Callable[[Tensor, Tensor, float, Tensor | None, float, float], Tensor]
Asked = tuple[torch.device, int, int, int, bool]  # what a choice is made for: the batch's shape, and whether it adds
_chosen: dict[Asked, Product] = {}


def symmetric_product(
    a: Tensor, b: Tensor, alpha: float = 1.0, add: Tensor | None = None, beta: float = 0.0, diagonal: float = 0.0
) -> Tensor:
    """Of batches [N, R, K]. `add` is symmetric, too."""
    count, rows, inner = a.shape
    if not a.is_cuda or a.element_size() != 2 or rows < SMALLEST or rows % 8 or inner % 8:
        return plain_product(a, b, alpha, add, beta, diagonal)
    asked = a.device, count, rows, inner, add is not None
    if asked not in _chosen:
        _chosen[asked] = _fastest([plain_product, *kernels_of(a.device)], a, b, add)
    return _chosen[asked](a, b, alpha, add, beta, diagonal)


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


@functools.cache
def kernels_of(device: torch.device) -> list[Product]:
    """The kernel in those of its ways that this GPU and this Triton are right with."""
    try:
        from offbook.train.optim.triton_symmetric import WAYS, half_product
    except ImportError:
        log.warning("Triton is not installed, so symmetric products are computed in full: pip install triton")
        return []
    count, rows, columns = TRIED
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(count, rows, columns, generator=rng).div_(math.sqrt(columns)).to(device, torch.float16)
    gram = plain_product(x, x)
    wanted = plain_product(gram.float(), gram.float(), 0.5, gram.float(), -1.0, 2.0)
    right: list[Product] = []
    for way in WAYS:
        product = functools.partial(half_product, way=way)
        try:
            found = product(product(x, x), gram, 0.5, gram, -1.0, 2.0)
        except Exception as error:  # a compiler's can be of any kind, and the plain product is always there
            log.info("%s: %s: %s", way, type(error).__name__, str(error).splitlines()[:1])
            continue
        apart = float((found.float() - wanted).norm() / wanted.norm())
        if apart < 2e-3:
            right.append(product)
        else:
            log.warning("the symmetric product is off by %.1e of its norm: %s", apart, way)
    if not right:
        log.warning("no symmetric product is right on %s, so they are computed in full", device)
    return right


def _fastest(products: list[Product], a: Tensor, b: Tensor, add: Tensor | None) -> Product:
    """On the operands themselves: how fast a GPU computes depends on the numbers, too."""
    times: dict[Product, float] = {}
    for product in products:
        product(a, b, 1.0, add, 1.0, 0.0)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(REPEATS):
            product(a, b, 1.0, add, 1.0, 0.0)
        end.record()
        end.synchronize()
        times[product] = begin.elapsed_time(end)
    return min(times, key=lambda product: times[product])
