"""What a step of Muon does to every entry beside the products. It takes as long as memory takes to be read and written,
so each function is one pass: a Triton kernel on a GPU where it gives the right numbers, which is tried once; elsewhere
what torch does."""

from __future__ import annotations

import functools
import logging
from types import ModuleType

import torch
from torch import Tensor

log = logging.getLogger(__name__)


def advance(average: Tensor, gradient: Tensor, momentum: float, out: Tensor) -> Tensor:
    """Of units [N, R, C]: the average moves towards the gradient, `out` is what Nesterov would move by, and its norms
    come back."""
    kernels = _kernels(out.device) if out.is_cuda else None
    if kernels is not None and average.is_contiguous() and gradient.is_contiguous() and out.is_contiguous():
        return kernels.advance(average, gradient, momentum, out)
    return _advance(average, gradient, momentum, out)


def combine(out: Tensor, keep: float, scale_N: Tensor, x: Tensor) -> None:
    """out = keep out + scale x, of units [N, R, C] of any types and strides."""
    kernels = _kernels(out.device) if out.is_cuda else None
    (_combine if kernels is None else kernels.combine)(out, keep, scale_N, x)


def _advance(average: Tensor, gradient: Tensor, momentum: float, out: Tensor) -> Tensor:
    average.lerp_(gradient, 1 - momentum)
    torch.lerp(gradient, average, momentum, out=out)
    return torch.linalg.matrix_norm(out, dtype=torch.float32)


def _combine(out: Tensor, keep: float, scale_N: Tensor, x: Tensor) -> None:
    if keep == 0:
        torch.mul(x, scale_N[:, None, None], out=out)
        return
    if keep != 1:
        out.mul_(keep)
    out.addcmul_(x.to(out.dtype), scale_N[:, None, None].to(out.dtype))


@functools.cache
def _kernels(device: torch.device) -> ModuleType | None:
    try:
        from offbook.train.optim import triton_passes
    except ImportError:
        return None  # symmetric.py says so
    rng = torch.Generator().manual_seed(0)
    average, gradient, out = (torch.randn(2, 96, 200, generator=rng).to(device) for _ in range(3))
    scale_N = torch.tensor([0.5, 2.0], device=device)
    found: list[tuple[Tensor, ...]] = []
    for advances, combines in ((_advance, _combine), (triton_passes.advance, triton_passes.combine)):
        moved, ahead, turned = average.clone(), out.clone(), out.clone()
        half = torch.empty(2, 200, 96, dtype=torch.float16, device=device)
        try:
            norms = advances(moved, gradient, 0.9, ahead)
            combines(half, 0.0, scale_N, ahead.mT)
            combines(turned, 0.5, scale_N, half.mT)
        except Exception as error:  # a compiler's can be of any kind, and torch is always there
            log.warning("passes over memory: %s: %s", type(error).__name__, str(error).splitlines()[:1])
            return None
        found.append((moved, ahead, norms, half, turned))
    if all(torch.allclose(*pair, rtol=2e-3, atol=1e-3) for pair in zip(*found, strict=True)):
        return triton_passes
    log.warning("passes over memory are off on %s, so torch makes them", device)
    return None
