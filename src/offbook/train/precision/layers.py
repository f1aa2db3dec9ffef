"""Linear layers that multiply in a format of their own.

    fp8     every product on the tensor cores: rows of one matrix and columns of the other have a float32 scale each
    nvfp4   emulated: the forward product of NVFP4 matrices, those of the backward pass of MXFP8 ones

The layers of the model stay where they are, with their names and parameters: masters, checkpoints, adapters, copies for
teachers and engines know nothing of it. Nothing is kept from one call to the next, so that a weight is quantized anew
each time it is used.

Left as they are: embeddings and the output head, routers, adapters, and in NVFP4 experts that are one fused parameter
(as transformers has them). In FP8 these are multiplied by grouped products: experts.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from offbook.core.config import LinearConfig
from offbook.core.routers import routers_of
from offbook.train.precision.experts import LowExperts, experts_of, low_class
from offbook.train.precision.formats import Division, Scope, approximate_division, ieee_division, mxfp8, nvfp4
from offbook.train.precision.fp8 import fp8_linear, quantize, quantize_both
from offbook.types import OffbookError

FP8_CAPABILITY = (8, 9)


def nvfp4_product(a_NK: Tensor, b_MK: Tensor, scope: Scope, divide: Division) -> Tensor:
    """Of activations and weights. These are the same in every batch: theirs is one scale for the tensor."""
    return nvfp4(a_NK, scope, divide) @ nvfp4(b_MK, "tensor", divide).t()


def mxfp8_product(a_NK: Tensor, b_MK: Tensor) -> Tensor:
    return mxfp8(a_NK) @ mxfp8(b_MK).t()


# Operators with a gradient of their own, and not an autograd.Function: where both passes of one call the same operator,
# torch 2.11 compiles its backward pass to zeros, without a word.
@torch.library.custom_op("offbook::nvfp4_linear", mutates_args=())
def _nvfp4_linear(x_NK: Tensor, weight_MK: Tensor, learns: bool, scale: str, division: str) -> Tensor:
    """`learns`: whether the weight does. If not the input is not kept."""
    divide = ieee_division if division == "ieee" else approximate_division
    return nvfp4_product(x_NK, weight_MK, cast(Scope, scale), divide).to(x_NK.dtype).contiguous()


@torch.library.custom_op("offbook::mxfp8_gradient", mutates_args=())
def _mxfp8_gradient(a_NK: Tensor, b_MK: Tensor) -> Tensor:
    return mxfp8_product(a_NK, b_MK).to(a_NK.dtype).contiguous()


def _like_product(a_NK: Tensor, b_MK: Tensor, *_: object) -> Tensor:
    return a_NK.new_empty(len(a_NK), len(b_MK))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x_NK, weight_MK, ctx.learns, *_ = inputs
    ctx.save_for_backward(x_NK if ctx.learns else None, weight_MK)


def _gradients(ctx: Any, to_NM: Tensor) -> tuple[Tensor | None, ...]:
    x_NK, weight_MK = ctx.saved_tensors
    of_weight = _mxfp8_gradient(to_NM.t(), x_NK.t()).to(weight_MK.dtype) if ctx.learns else None
    return _mxfp8_gradient(to_NM, weight_MK.t()), of_weight, None, None, None


_nvfp4_linear.register_fake(_like_product)
_mxfp8_gradient.register_fake(_like_product)
_nvfp4_linear.register_autograd(_gradients, setup_context=_keep)


class LowLinear(nn.Linear):
    """An nn.Linear but for its product. One becomes the other by its class."""

    settings: LinearConfig

    def forward(self, input: Tensor) -> Tensor:
        how, learns, x_NK = self.settings, self.weight.requires_grad, input.flatten(0, -2)
        if how.kind == "fp8":
            quantized = quantize_both if learns and torch.is_grad_enabled() else quantize
            product_NM = fp8_linear(x_NK, self.weight, *quantized(x_NK.detach()))
        else:
            product_NM = _nvfp4_linear(x_NK, self.weight, learns, how.scale, how.division)
        out = product_NM.unflatten(0, input.shape[:-1])
        return out if self.bias is None else out + self.bias


def compute_linears(model: PreTrainedModel, settings: LinearConfig) -> None:
    """From now on, whatever they did before."""
    for layer in _low(model):
        layer.__class__ = _plain(layer)
    for layer in _linears(model) if settings.kind != "plain" else ():
        layer.__class__, layer.settings = LowLinear, settings
    for experts in experts_of(model) if settings.kind == "fp8" else ():
        experts.__class__ = low_class(type(experts))


@contextmanager
def plainly(model: PreTrainedModel) -> Iterator[None]:
    """Meanwhile in the model's own precision: for whoever looks at what a model computes, and not how exactly."""
    low = [(layer, type(layer)) for layer in _low(model)]
    for layer, _ in low:
        layer.__class__ = _plain(layer)
    try:
        yield
    finally:
        for layer, kind in low:
            layer.__class__ = kind


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


def _low(model: PreTrainedModel) -> list[nn.Module]:
    return [layer for layer in model.modules() if isinstance(layer, (LowLinear, LowExperts))]


def _plain(low: nn.Module) -> type[nn.Module]:
    return nn.Linear if isinstance(low, LowLinear) else type(low).__bases__[1]
