"""Products in FP8: E4M3 codes of both matrices, and a float32 scale for each row that is multiplied.

    x_NK w_MK^T      forward              rows of x, rows of w
    g_NM w_MK        gradient of x        rows of g, columns of w
    g_NM^T x_NK      gradient of w        columns of g, columns of x

Codes of columns are stored turned: tensor cores read FP8 along what is summed. Kernels of our own make codes on a GPU
where they give those of torch, which is tried once; elsewhere torch makes them.

What is needed of x by rows and by columns is made at once, and of g, too. For the backward pass the codes of columns
are kept, and not x. Making them is an operator of its own: a compiled layer does it once for all that read the same x.
Codes of w by columns are made where the gradient of x is, inside of its operator: no compiler can move them to the
forward pass, which would keep them.
"""

from __future__ import annotations

import functools
import logging
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from offbook.train.precision.formats import ALIGNED, E4M3, LEAST_SCALE

log = logging.getLogger(__name__)


def torch_rows(x_NK: Tensor) -> tuple[Tensor, Tensor]:
    """No row is too small for a scale of its own: gradients are divided by the tokens of a whole step. One of zeros has
    the least that there is."""
    x_NK = nn.functional.pad(x_NK, (0, -x_NK.shape[1] % ALIGNED, 0, -len(x_NK) % ALIGNED))
    scale_N1 = (x_NK.abs().amax(1, keepdim=True).float() / E4M3.largest).clamp(min=LEAST_SCALE)
    return (x_NK.float() / scale_N1).to(torch.float8_e4m3fn).contiguous(), scale_N1.contiguous()


def scaled_product(a_NK: Tensor, a_scale_N1: Tensor, b_MK: Tensor, b_scale_M1: Tensor, fast: bool) -> Tensor:
    """A GPU hands sums over in bfloat16. `fast` leaves them in the tensor cores, which have 14 bits for them."""
    if not a_NK.is_cuda:  # torch 2.11 has no scales by row there
        return (a_NK.float() * a_scale_N1) @ (b_MK.float() * b_scale_M1).t()
    scales = a_scale_N1, b_scale_M1.t()
    return torch._scaled_mm(a_NK, b_MK.t(), *scales, out_dtype=torch.bfloat16, use_fast_accum=fast)


@torch.library.custom_op("offbook::fp8_quantize", mutates_args=())
def quantize(x_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of rows. Both sizes are filled up to what _scaled_mm takes."""
    return by_rows(x_NK)


@torch.library.custom_op("offbook::fp8_quantize_both", mutates_args=())
def quantize_both(x_NK: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """And of columns."""
    kernels = _kernels(x_NK.device) if x_NK.is_cuda else None
    return (*torch_rows(x_NK), *torch_rows(x_NK.t())) if kernels is None else kernels.both_ways(x_NK)


# Operators with a gradient of their own, and not an autograd.Function: where both passes of one call the same operator,
# torch 2.11 compiles its backward pass to zeros, without a word.
@torch.library.custom_op("offbook::fp8_linear", mutates_args=())
def fp8_linear(
    x_NK: Tensor, weight_MK: Tensor,
    codes_NK: Tensor, scale_N1: Tensor, codes_KN: Tensor | None = None, scale_K1: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """x is here for its gradient alone, and its codes by columns for that of the weight, where this learns. Sums are a
    token's alone, and fast, as in NVIDIA's Transformer Engine."""
    weight_codes_MK, weight_scale_M1 = by_rows(weight_MK)
    product = scaled_product(codes_NK, scale_N1, weight_codes_MK, weight_scale_M1, fast=True)
    return _cut(product, len(x_NK), len(weight_MK), x_NK.dtype)


@torch.library.custom_op("offbook::fp8_gradient_of_input", mutates_args=())
def _gradient_of_input(codes_NM: Tensor, scale_N1: Tensor, weight_MK: Tensor, rows: int) -> Tensor:
    kernels = _kernels(weight_MK.device) if weight_MK.is_cuda else None
    codes_KM, scale_K1 = torch_rows(weight_MK.t()) if kernels is None else kernels.by_columns(weight_MK)
    product = scaled_product(codes_NM, scale_N1, codes_KM, scale_K1, fast=False)
    return _cut(product, rows, weight_MK.shape[1], weight_MK.dtype)


@torch.library.custom_op("offbook::fp8_gradient_of_weight", mutates_args=())
def _gradient_of_weight(
    codes_MN: Tensor, scale_M1: Tensor, codes_KN: Tensor, scale_K1: Tensor, weight_MK: Tensor
) -> Tensor:
    """Sums are over all tokens, and kept in float32."""
    product = scaled_product(codes_MN, scale_M1, codes_KN, scale_K1, fast=False)
    return _cut(product, len(weight_MK), weight_MK.shape[1], weight_MK.dtype)


def by_rows(x_NK: Tensor) -> tuple[Tensor, Tensor]:
    kernels = _kernels(x_NK.device) if x_NK.is_cuda else None
    return torch_rows(x_NK) if kernels is None else kernels.by_rows(x_NK)


def _like_rows(x_NK: Tensor) -> tuple[Tensor, Tensor]:
    rows, inner = (size + -size % ALIGNED for size in x_NK.shape)
    return x_NK.new_empty(rows, inner, dtype=torch.float8_e4m3fn), x_NK.new_empty(rows, 1, dtype=torch.float32)


def _cut(product: Tensor, rows: int, columns: int, like: torch.dtype) -> Tensor:
    return product[:rows, :columns].to(like).contiguous()


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, weight_MK, _, _, codes_KN, scale_K1 = inputs
    ctx.save_for_backward(weight_MK, codes_KN, scale_K1)


def _gradients(ctx: Any, to_NM: Tensor) -> tuple[Tensor | None, ...]:
    weight_MK, codes_KN, scale_K1 = ctx.saved_tensors
    of_weight = None
    if codes_KN is None:
        codes_NM, scale_N1 = quantize(to_NM)
    else:
        codes_NM, scale_N1, codes_MN, scale_M1 = quantize_both(to_NM)
        of_weight = _gradient_of_weight(codes_MN, scale_M1, codes_KN, scale_K1, weight_MK)
    return _gradient_of_input(codes_NM, scale_N1, weight_MK, len(to_NM)), of_weight, None, None, None, None


quantize.register_fake(_like_rows)
quantize_both.register_fake(lambda x_NK: (*_like_rows(x_NK), *_like_rows(x_NK.t())))
fp8_linear.register_fake(lambda x, weight, *_: x.new_empty(len(x), len(weight)))
_gradient_of_input.register_fake(lambda _, __, weight, rows: weight.new_empty(rows, weight.shape[1]))
_gradient_of_weight.register_fake(lambda *given: torch.empty_like(given[-1], memory_format=torch.contiguous_format))
fp8_linear.register_autograd(_gradients, setup_context=_keep)


@functools.cache
def _kernels(device: torch.device) -> ModuleType | None:
    try:
        from offbook.train.precision import triton_fp8
    except ImportError:
        log.warning("Triton is not installed, so FP8 is slower than plain layers: pip install triton")
        return None
    tried = torch.randn(150, 333, generator=torch.Generator().manual_seed(0)).bfloat16()
    wanted = *torch_rows(tried), *torch_rows(tried.t())  # on the CPU: a GPU divides by a constant's reciprocal
    tried = tried.to(device)
    try:
        found = *triton_fp8.both_ways(tried), *triton_fp8.by_rows(tried), *triton_fp8.by_columns(tried)
    except Exception as error:  # a compiler's can be of any kind, and torch is always there
        log.warning("quantizing to FP8: %s: %s", type(error).__name__, str(error).splitlines()[:1])
        return None
    if all(torch.equal(a.float().cpu(), b.float()) for a, b in zip(found, wanted * 2, strict=True)):
        return triton_fp8
    log.warning("quantizing to FP8 is off on %s, so torch does it, and FP8 is slower than plain layers", device)
    return None
