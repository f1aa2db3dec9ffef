"""Linear layers that multiply in a format of their own.

    fp8     every product on the tensor cores: rows of one matrix and columns of the other have a float32 scale each
    nvfp4   emulated: the forward product of NVFP4 matrices, those of the backward pass of MXFP8 ones

The layers of the model stay where they are, with their names and parameters: masters, checkpoints, adapters, copies for
teachers and engines know nothing of it. Nothing is kept from one call to the next, so that a weight is quantized anew
each time it is used, and the backward pass starts from the same inputs as in plain layers.

Left as they are: embeddings and the output head, routers, adapters, and experts that are one fused parameter (as
transformers has them), which would need grouped products.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from offbook.config import LinearConfig
from offbook.linear.formats import E4M3, LEAST_SCALE, Division, Scope, approximate_division, ieee_division, mxfp8, nvfp4
from offbook.routers import routers_of
from offbook.types import OffbookError

Product = Callable[[Tensor, Tensor], Tensor]  # a_NK and b_MK to their products a @ b.T
ALIGNED = 16  # sizes of matrices that _scaled_mm takes on a GPU are multiples of it
FP8_CAPABILITY = (8, 9)


def fp8_product(a_NK: Tensor, b_MK: Tensor) -> Tensor:
    """A GPU adds up in float32 and hands the sums over in bfloat16."""
    count, filler = len(b_MK), -a_NK.shape[1] % ALIGNED
    a, a_scale = _fp8_rows(nn.functional.pad(a_NK, (0, filler)))
    b, b_scale = _fp8_rows(nn.functional.pad(b_MK, (0, filler, 0, -count % ALIGNED)))
    return _scaled_product(a, b, a_scale, b_scale)[:, :count]


@torch.library.custom_op("offbook::scaled_product", mutates_args=())
def _scaled_product(a_NK: Tensor, b_MK: Tensor, a_scale_N1: Tensor, b_scale_M1: Tensor) -> Tensor:
    """An operator of its own, for it needs rows in memory one after the other, and a compiler may lay them out anew."""
    out = torch.bfloat16 if a_NK.is_cuda else torch.float32
    return torch._scaled_mm(
        a_NK.contiguous(), b_MK.contiguous().t(), a_scale_N1.contiguous(), b_scale_M1.contiguous().t(), out_dtype=out
    )


@_scaled_product.register_fake
def _(a_NK: Tensor, b_MK: Tensor, a_scale_N1: Tensor, b_scale_M1: Tensor) -> Tensor:
    return a_NK.new_empty(len(a_NK), len(b_MK), dtype=torch.bfloat16 if a_NK.is_cuda else torch.float32)


def _fp8_rows(x_NK: Tensor) -> tuple[Tensor, Tensor]:
    """No row is too small for a scale of its own: gradients are divided by the tokens of a whole step. One of zeros has
    the least that there is."""
    scale_N1 = (x_NK.abs().amax(1, keepdim=True).float() / E4M3.largest).clamp(min=LEAST_SCALE)
    return (x_NK.float() / scale_N1).to(torch.float8_e4m3fn).contiguous(), scale_N1


def nvfp4_product(a_NK: Tensor, b_MK: Tensor, scope: Scope, divide: Division) -> Tensor:
    """Of activations and weights. These are the same in every batch: theirs is one scale for the tensor."""
    return nvfp4(a_NK, scope, divide) @ nvfp4(b_MK, "tensor", divide).t()


def mxfp8_product(a_NK: Tensor, b_MK: Tensor) -> Tensor:
    return mxfp8(a_NK) @ mxfp8(b_MK).t()


def products_of(settings: LinearConfig) -> tuple[Product, Product]:
    """That of the forward pass, and that of both in the backward pass."""
    if settings.kind == "fp8":
        return fp8_product, fp8_product
    divide = ieee_division if settings.division == "ieee" else approximate_division
    return partial(nvfp4_product, scope=settings.scale, divide=divide), mxfp8_product


class _Multiplied(torch.autograd.Function):
    """Whether the weight learns is told by whoever has the parameter, and the input's gradient is always made: a
    compiler that traces this has been wrong about `ctx.needs_input_grad`, which is a gradient of zero without a word
    (pytorch issue 159299), and leaves out by itself what nobody needs."""

    @staticmethod
    def forward(ctx: Any, x_NK: Tensor, weight_MK: Tensor, learns: bool, forward: Product, backward: Product) -> Tensor:
        ctx.save_for_backward(x_NK if learns else None, weight_MK)
        ctx.learns, ctx.product = learns, backward
        return forward(x_NK, weight_MK).to(x_NK.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (to_NM,), (x_NK, weight_MK) = gradients, ctx.saved_tensors
        of_x = ctx.product(to_NM, weight_MK.t()).to(to_NM.dtype)
        of_weight = ctx.product(to_NM.t(), x_NK.t()).to(weight_MK.dtype) if ctx.learns else None
        return of_x, of_weight, None, None, None


class LowLinear(nn.Linear):
    """An nn.Linear but for its product. One becomes the other by its class."""

    settings: LinearConfig

    def forward(self, input: Tensor) -> Tensor:
        learns = self.weight.requires_grad
        product_NM = _Multiplied.apply(input.flatten(0, -2), self.weight, learns, *products_of(self.settings))
        out = product_NM.unflatten(0, input.shape[:-1])
        return out if self.bias is None else out + self.bias


def compute_linears(model: PreTrainedModel, settings: LinearConfig) -> None:
    """From now on, whatever they did before."""
    for layer in _low(model):
        layer.__class__ = nn.Linear
    for layer in _linears(model) if settings.kind != "plain" else ():
        layer.__class__, layer.settings = LowLinear, settings


@contextmanager
def plainly(model: PreTrainedModel) -> Iterator[None]:
    """Meanwhile in the model's own precision: for whoever looks at what a model computes, and not how exactly."""
    low = _low(model)
    for layer in low:
        layer.__class__ = nn.Linear
    try:
        yield
    finally:
        for layer in low:
            layer.__class__ = LowLinear


def refuse_lacking(settings: LinearConfig, device: str, capability: tuple[int, int] | None) -> None:
    """`capability`: of a GPU that is here. NVFP4 is emulated, and torch has FP8 for any CPU."""
    if settings.kind == "fp8" and capability is not None and capability < FP8_CAPABILITY:
        have, need = (".".join(map(str, one)) for one in (capability, FP8_CAPABILITY))
        told = f"{device} has no FP8 (its compute capability is {have}, and {need} is needed)"
        raise OffbookError(f"{told}; leave train.linear.kind plain, or take a newer GPU, as in L4 or H100")


def _linears(model: PreTrainedModel) -> Iterator[nn.Linear]:
    routing = {part for router in routers_of(model) for part in router.modules()}
    for name, layer in model.base_model.named_modules():
        if type(layer) is nn.Linear and layer not in routing and ".lora_" not in name:
            yield layer


def _low(model: PreTrainedModel) -> list[LowLinear]:
    return [layer for layer in model.modules() if isinstance(layer, LowLinear)]
