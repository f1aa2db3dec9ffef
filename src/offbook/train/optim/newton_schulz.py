"""Orthogonalising matrices: singular vectors kept, singular values brought to about 1.

Every step takes singular values through an odd polynomial, x -> a x + b x^3 + c x^5. The classic way multiplies the
matrix X by a I + b G + c G^2, G = X X^T, and takes G anew. The Gram way follows what becomes of G alone, and multiplies
X by all polynomials together: of a wide matrix that is far less work, and all products but two are symmetric. What is
rounded in G grows from step to step, so after the second X and G are taken anew ("restart"). In bfloat16 that is not
enough; in float16 it is, for matrices that are scaled in float32 before.

X is first divided by a bound of its largest singular value. Ours is ||G||_F^(1/2) instead of ||X||_F: G is there
anyway, and on a flat spectrum of 2,048 values they start at 0.15 instead of 0.02.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from offbook.train.host import compile_once

Coefficients = tuple[tuple[float, float, float], ...]
# By Jordan et al. (2024): ends between 0.7 and 1.2. By You (2025), one polynomial a step: between 0.98 and 1.15.
JORDAN: Coefficients = ((3.4445, -4.7750, 2.0315),) * 5
YOU: Coefficients = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
WIDE = 1.5  # columns by rows, from where on the Gram way is less work without a symmetric product
LARGEST = 1.3  # singular value that is let through; exact arithmetic ends at 1.15
POWER_STEPS = 6
PROBES = 8
TINY = 1e-20
SMALLEST = 512  # rows, from where on half of a symmetric product can be less time
TRIED = (2, 640, 320)  # tiles on and off the diagonal, and one that is cut
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Method:
    """`tight`: of the two bounds of the largest singular value, the one that needs G. `rms`: what an entry of the
    update is on average, by the learning rate; 0 moves by an orthogonal matrix times sqrt(max(1, rows / columns)).
    `restart`: the number of steps after which G is taken anew."""

    coefficients: Coefficients = YOU
    tight: bool = True
    rms: float = 0.2
    restart: int = 2

    def size(self, rows: int, columns: int) -> float:
        """An orthogonal matrix of this shape is multiplied by it. Its own root mean square is max(R, C) ** -0.5."""
        return self.rms * max(rows, columns) ** 0.5 if self.rms else max(1.0, rows / columns) ** 0.5


OURS = Method()
CLASSIC = Method(JORDAN, tight=False, rms=0.0)  # as in torch.optim.Muon, which rounds to bfloat16


@torch.no_grad()
def orthogonalize(
    matrices_NRC: Tensor, method: Method = OURS, precision: torch.dtype | None = None, norm_N: Tensor | None = None
) -> tuple[Tensor, int]:
    """Each of them, and how many of them took a second, slower attempt. In float16 on a GPU and float32 elsewhere,
    unless told. `norm_N`: their norms, if they are known."""
    precision = precision or (torch.float16 if matrices_NRC.is_cuda else torch.float32)
    is_wide = matrices_NRC.shape[-2] <= matrices_NRC.shape[-1]
    x = matrices_NRC if is_wide else matrices_NRC.mT
    if not method.tight or (precision == torch.float32 and x.shape[-1] < WIDE * x.shape[-2]):
        return _turned(classic(x, method), is_wide), 0
    out, largest_N = by_gram(x, method, precision, norm_N)
    if precision == torch.float32:
        return _turned(out, is_wide), 0
    is_off = ~(largest_N <= LARGEST)  # what is no number is off as well
    count = int(is_off.sum())
    if count:
        out[is_off] = classic(x[is_off], method).to(out.dtype)
    return _turned(out, is_wide), count


def _turned(out: Tensor, is_wide: bool) -> Tensor:
    return out if is_wide else out.mT


def classic(x: Tensor, method: Method) -> Tensor:
    """In float32: slow and safe. `x` is wide."""
    x = x.float() / (torch.linalg.matrix_norm(x.float(), keepdim=True) + 1e-7 * (not method.tight)).clamp(min=TINY)
    for number, (a, b, c) in enumerate(method.coefficients):
        gram = x @ x.mT
        if method.tight and number == 0:
            bound = torch.linalg.matrix_norm(gram, keepdim=True).clamp(min=TINY)
            x, gram = x / bound.sqrt(), gram / bound
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def by_gram(x: Tensor, method: Method, precision: torch.dtype, norm_N: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """And the largest singular value of each, about; in float32 it is not looked for. `x` is wide.

    Entries of a matrix of norm 1 are too small for float16, so its norm is the root of its rows: G's are about 1.
    """
    rows = x.shape[-2]
    if norm_N is None:
        norm_N = torch.linalg.matrix_norm(x, dtype=torch.float32)
    y = (compile_once(_scaled) if x.is_cuda else _scaled)(x, rows**0.5 / norm_N.clamp(min=TINY), precision)
    gram = symmetric_product(y, y)
    bound_N = torch.linalg.matrix_norm(gram, dtype=torch.float32).clamp(min=1.0)  # less is 0
    gram.mul_((1 / bound_N)[:, None, None])
    total, restarted = None, gram
    last = len(method.coefficients) - 1
    for number, (a, b, c) in enumerate(method.coefficients):
        poly = symmetric_product(gram, gram, alpha=c, add=gram, beta=b, diagonal=a)
        total = poly if total is None else symmetric_product(poly, total)
        if number == last:
            break
        if number + 1 == method.restart:
            total.mul_(bound_N.rsqrt()[:, None, None])
            y, total = torch.bmm(total, y), None
            gram = restarted = symmetric_product(y, y)
        else:
            gram = symmetric_product(poly, symmetric_product(poly, gram))
    assert total is not None
    largest_N = torch.ones(len(x), device=x.device)
    if precision != torch.float32:
        largest_N = _largest(total, restarted)
    if method.restart > last:
        total.mul_(bound_N.rsqrt()[:, None, None])
    return torch.bmm(total, y), largest_N


def _scaled(x: Tensor, scale_N: Tensor, precision: torch.dtype) -> Tensor:
    return (x * scale_N[:, None, None]).to(precision).contiguous()


def _largest(total: Tensor, gram: Tensor) -> Tensor:
    """Singular value of Q Y, from Q G Q with the true G = Y Y^T: whatever went wrong in Q shows. By power iteration on
    a few vectors, which are always the same."""
    after = before = _probes(gram.shape[-1], gram.device, gram.dtype).expand(len(gram), -1, -1)
    for _ in range(POWER_STEPS):  # what is right grows by less than 1.33 a step, so that nothing is scaled on the way
        before, after = after, torch.bmm(total, torch.bmm(gram, torch.bmm(total, after)))
    before_NP, after_NP = (torch.linalg.vector_norm(vectors, dim=1, dtype=torch.float32) for vectors in (before, after))
    grown_N = (after_NP / before_NP.clamp(min=TINY)).amax(1)
    return grown_N.nan_to_num(nan=torch.inf).sqrt()


@functools.cache  # a copy to the GPU would wait for all that is computed there
def _probes(rows: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.randn(rows, PROBES, generator=torch.Generator().manual_seed(0)).to(device, dtype)


def symmetric_product(
    a: Tensor, b: Tensor, alpha: float = 1.0, add: Tensor | None = None, beta: float = 0.0, diagonal: float = 0.0
) -> Tensor:
    """alpha A B^T + beta C + gamma I of batches [N, R, K], where the result is known to be symmetric (C is, too): on a
    GPU a Triton kernel computes half of it and mirrors the rest."""
    rows, inner = a.shape[1:]
    if a.is_cuda and a.element_size() == 2 and rows >= SMALLEST and not (rows % 8 or inner % 8):
        half_product = kernel_of(a.device)
        if half_product is not None:
            return half_product(a, b, alpha, add, beta, diagonal)
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


@functools.cache
def kernel_of(device: torch.device) -> Callable[..., Tensor] | None:
    """The kernel, if it computes the right numbers on this GPU; tried once."""
    count, rows, columns = TRIED
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(count, rows, columns, generator=rng).div_(math.sqrt(columns)).to(device, torch.float16)
    gram = plain_product(x, x)
    wanted = plain_product(gram.float(), gram.float(), 0.5, gram.float(), -1.0, 2.0)
    try:
        from offbook.train.optim.triton_symmetric import half_product

        found = half_product(half_product(x, x), gram, 0.5, gram, -1.0, 2.0)
    except Exception as problem:  # Triton is missing, or its compiler fails in any way: the plain product remains
        log.warning("symmetric products are computed in full: %s: %s", type(problem).__name__, str(problem)[:80])
        return None
    error = float((found.float() - wanted).norm() / wanted.norm())
    if error < 2e-3:
        return half_product
    log.warning("symmetric products are computed in full: the kernel is off by %.1e of the norm", error)
    return None


def step_flops(rows: int, columns: int, method: Method = OURS) -> dict[str, float]:
    """Floating-point operations for one matrix: the classic way, the Gram way, and the Gram way with half products."""
    rows, columns = min(rows, columns), max(rows, columns)
    steps = len(method.coefficients)
    wide, square = 2.0 * rows * rows * columns, 2.0 * rows**3
    products = 4 * steps - 6  # as in `by_gram`, whenever it restarts
    return {
        "classic": steps * (2 * wide + square),
        "gram": 4 * wide + products * square,
        "symmetric": 3 * wide + products * square / 2,
    }
