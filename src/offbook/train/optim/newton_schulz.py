"""Orthogonalising matrices: singular vectors kept, singular values brought to about 1.

Every step takes singular values through an odd polynomial, x -> a x + b x^3 + c x^5. The classic way multiplies the
matrix X by a I + b G + c G^2, G = X X^T, and computes G again. The Gram way follows what becomes of G alone, and
multiplies X by all polynomials together: of a wide matrix that is far less work, and all products but two are
symmetric. Rounding errors in G grow from step to step, so after the second step X and G are computed again ("restart").
In bfloat16 that is not enough; in float16 it is, for matrices that are scaled in float32 before.

X is first divided by a bound of its largest singular value. Ours is ||G||_F^(1/2) instead of ||X||_F: G is there
anyway, and on a flat spectrum of 2,048 values they start at 0.15 instead of 0.02.
"""

from __future__ import annotations

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
RESTART = 2  # steps after which the Gram way computes G again
WIDE = 1.5  # columns by rows, from where on the Gram way is less work without a symmetric product
TINY = 1e-20
SMALLEST = 512  # rows, from where on half of a symmetric product can be less time
HOPPER = (9, 0)  # the kernel of symmetric products needs its copy engine


@dataclass
class Method:
    """`tight`: of the two bounds of the largest singular value, the one that needs G. `rms`: of an entry of the update,
    by the learning rate; 0 moves by an orthogonal matrix times sqrt(max(1, rows / columns))."""

    coefficients: Coefficients = YOU
    tight: bool = True
    rms: float = 0.2

    def size(self, rows: int, columns: int) -> float:
        """The factor of an orthogonal matrix, whose own root mean square is max(R, C) ** -0.5."""
        return self.rms * max(rows, columns) ** 0.5 if self.rms else max(1.0, rows / columns) ** 0.5


OURS = Method()
CLASSIC = Method(JORDAN, tight=False, rms=0.0)  # as in torch.optim.Muon, which rounds to bfloat16


@torch.no_grad()
def orthogonalize(
    matrices_NRC: Tensor, method: Method = OURS, precision: torch.dtype | None = None, norm_N: Tensor | None = None
) -> Tensor:
    """In float16 on a GPU and float32 elsewhere by default. `norm_N`: their norms, if they are known."""
    precision = precision or (torch.float16 if matrices_NRC.is_cuda else torch.float32)
    is_wide = matrices_NRC.shape[-2] <= matrices_NRC.shape[-1]
    x = matrices_NRC if is_wide else matrices_NRC.mT
    if not method.tight or (precision == torch.float32 and x.shape[-1] < WIDE * x.shape[-2]):
        out = classic(x, method)
    else:
        out = by_gram(x, method, precision, norm_N)
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


def by_gram(x: Tensor, method: Method, precision: torch.dtype, norm_N: Tensor | None = None) -> Tensor:
    """`x` is wide. Entries of a matrix of norm 1 are too small for float16, so its norm is the root of its rows."""
    if norm_N is None:
        norm_N = torch.linalg.matrix_norm(x, dtype=torch.float32)
    y = (compile_once(_scaled) if x.is_cuda else _scaled)(x, x.shape[-2] ** 0.5 / norm_N.clamp(min=TINY), precision)
    gram = symmetric_product(y, y)
    bound_N = torch.linalg.matrix_norm(gram, dtype=torch.float32).clamp(min=1.0)  # less is 0
    gram.mul_((1 / bound_N)[:, None, None])
    total = None
    for number, (a, b, c) in enumerate(method.coefficients, 1):
        poly = symmetric_product(gram, gram, alpha=c, add=gram, beta=b, diagonal=a)
        total = poly if total is None else symmetric_product(poly, total)
        if number == RESTART:
            y = torch.bmm(total.mul_(bound_N.rsqrt()[:, None, None]), y)
            gram, total = symmetric_product(y, y), None
        elif number < len(method.coefficients):
            gram = symmetric_product(poly, symmetric_product(poly, gram))
    assert total is not None
    return torch.bmm(total, y)


def _scaled(x: Tensor, scale_N: Tensor, precision: torch.dtype) -> Tensor:
    return (x * scale_N[:, None, None]).to(precision).contiguous()


def symmetric_product(
    a: Tensor, b: Tensor, alpha: float = 1.0, add: Tensor | None = None, beta: float = 0.0, diagonal: float = 0.0
) -> Tensor:
    """alpha A B^T + beta C + gamma I of batches [N, R, K], where the result is known to be symmetric (C is, too): on a
    Hopper GPU a Triton kernel computes half of it and mirrors the rest."""
    rows, inner = a.shape[1:]
    is_large = a.is_cuda and a.element_size() == 2 and rows >= SMALLEST and not (rows % 8 or inner % 8)
    if is_large and torch.cuda.get_device_capability(a.device) >= HOPPER:
        from offbook.train.optim.triton_symmetric import half_product

        return half_product(a, b, alpha, add, beta, diagonal)
    if add is None and alpha == 1.0:
        out = torch.bmm(a, b.mT)
    else:
        like = a.new_empty(len(a), rows, rows) if add is None else add
        out = torch.baddbmm(like, a, b.mT, beta=beta if add is not None else 0.0, alpha=alpha)
    if diagonal:
        out.diagonal(dim1=-2, dim2=-1).add_(diagonal)
    return out
