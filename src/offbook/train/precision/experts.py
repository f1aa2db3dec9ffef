"""Experts in FP8: all of a layer's in one grouped product, rows of tokens and rows of matrices with a scale each.

    forward, gradient of x    codes of both; sums stay in the tensor cores, else the product is slower than a plain one
    gradient of the weights   plain: its sums are over an expert's tokens, which would need scales of their own

Experts are one parameter [E, O, I] a product, as transformers has them. Others (transposed, with biases, of sizes that
tensor cores do not take) stay plain, and so do all where torch has no grouped product in FP8: it has one on Hopper.

Axes: M copies of tokens, sorted by expert, E experts, O outputs, I inputs, N tokens, K experts of each.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from offbook.core.adapters import adapters_on
from offbook.train.precision.formats import ALIGNED
from offbook.train.precision.fp8 import by_rows, scaled_product

WEIGHTS = ("gate_up_proj", "down_proj")
_classes: dict[type[nn.Module], type[nn.Module]] = {}
log = logging.getLogger(__name__)


class LowExperts(nn.Module):
    """What a module of experts computes in FP8. One becomes it by a class of both."""

    def forward(self, hidden_ND: Tensor, chosen_NK: Tensor, gates_NK: Tensor) -> Tensor:
        experts: Any = self
        expert_M, order_M = chosen_NK.flatten().sort(stable=True)
        weights = [getattr(experts, name) for name in WEIGHTS]
        learn = [weight.requires_grad for weight in weights]
        numbers_E = torch.arange(len(weights[0]), device=expert_M.device)
        if len(expert_M) < len(numbers_E) and not torch.is_grad_enabled():  # a few tokens ask a few experts
            weights = [weight[expert_M] for weight in weights]
            expert_M = numbers_E = numbers_E[: len(expert_M)]
        ends_E = torch.searchsorted(expert_M, numbers_E, right=True).int()
        rows_MI = hidden_ND[order_M // chosen_NK.shape[1]]
        inner_MI = experts._apply_gate(fp8_grouped(rows_MI, weights[0], ends_E, learn[0]))
        out_MO = fp8_grouped(inner_MI, weights[1], ends_E, learn[1]) * gates_NK.flatten()[order_M, None]
        back_NKO = torch.empty_like(out_MO).index_copy(0, order_M, out_MO).unflatten(0, chosen_NK.shape)
        return back_NKO.sum(1).to(hidden_ND.dtype)


@torch.library.custom_op("offbook::fp8_grouped", mutates_args=())
def fp8_grouped(x_MI: Tensor, weight_EOI: Tensor, ends_E: Tensor, learns: bool) -> Tensor:
    """Rows up to the first end are multiplied with the first expert's matrix, and so on. `learns`: whether the weight
    does. If not the input is not kept."""
    return _grouped(x_MI, weight_EOI, ends_E)


@torch.library.custom_op("offbook::fp8_grouped_gradient_of_input", mutates_args=())
def _gradient_of_input(to_MO: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
    return _grouped(to_MO, weight_EOI.transpose(1, 2), ends_E)


@torch.library.custom_op("offbook::fp8_grouped_gradient_of_weight", mutates_args=())
def _gradient_of_weight(to_MO: Tensor, x_MI: Tensor, ends_E: Tensor) -> Tensor:
    return nn.functional.grouped_mm(to_MO.t(), x_MI, offs=ends_E)


def _grouped(x_MI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
    experts, outputs = weight_EOI.shape[:2]
    codes_MI, scale_M1 = by_rows(x_MI)
    codes_RI, scale_R1 = by_rows(weight_EOI.flatten(0, 1))  # R rows of all experts
    codes_EOI, scale_EO = codes_RI.unflatten(0, (experts, outputs)), scale_R1.view(experts, outputs)
    if x_MI.is_cuda:
        how = {"offs": ends_E, "out_dtype": torch.bfloat16, "use_fast_accum": True}
        product_MO = torch._scaled_grouped_mm(codes_MI, codes_EOI.transpose(1, 2), scale_M1.flatten(), scale_EO, **how)
    else:
        product_MO = codes_MI.new_zeros(len(codes_MI), outputs, dtype=torch.float32)
        bounds = [0, *ends_E.tolist()]
        for expert, rows in enumerate(map(slice, bounds, bounds[1:])):
            of_expert = codes_EOI[expert], scale_EO[expert, :, None]
            product_MO[rows] = scaled_product(codes_MI[rows], scale_M1[rows], *of_expert, fast=True)
    return product_MO[: len(x_MI)].to(x_MI.dtype).contiguous()


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x_MI, weight_EOI, ends_E, learns = inputs
    ctx.save_for_backward(x_MI if learns else None, weight_EOI, ends_E)


def _gradients(ctx: Any, to_MO: Tensor) -> tuple[Tensor | None, ...]:
    x_MI, weight_EOI, ends_E = ctx.saved_tensors
    of_input = _gradient_of_input(to_MO.contiguous(), weight_EOI, ends_E)  # first: it is what takes copies
    of_weight = None if x_MI is None else _gradient_of_weight(to_MO.contiguous(), x_MI, ends_E)
    return of_input, of_weight, None, None


fp8_grouped.register_fake(lambda x_MI, weight_EOI, *_: x_MI.new_empty(len(x_MI), weight_EOI.shape[1]))
_gradient_of_input.register_fake(lambda to_MO, weight_EOI, _: to_MO.new_empty(len(to_MO), weight_EOI.shape[2]))
_gradient_of_weight.register_fake(
    lambda to_MO, x_MI, ends_E: x_MI.new_empty(len(ends_E), to_MO.shape[1], x_MI.shape[1])
)
fp8_grouped.register_autograd(_gradients, setup_context=_keep)


def experts_of(model: PreTrainedModel) -> Iterator[nn.Module]:
    """Modules of experts that FP8 takes."""
    for name, module in model.named_modules():
        if name.endswith(".experts"):
            experts, _ = adapters_on(module)
            weights = dict(experts.named_parameters())
            sizes = [size for weight in weights.values() for size in weight.shape[1:]]
            is_known = set(weights) == set(WEIGHTS) and len({len(weight) for weight in weights.values()}) == 1
            is_known = is_known and hasattr(experts, "_apply_gate") and not getattr(experts, "is_transposed", False)
            if is_known and not any(size % ALIGNED for size in sizes) and _has_grouped(model.device):
                yield experts


def low_class(of: type[nn.Module]) -> type[nn.Module]:
    """One for all modules of a class: what is compiled for one of them is for the others, too."""
    return _classes.setdefault(of, type(of.__name__, (LowExperts, of), {}))


def _both_passes(to_MO: Tensor, given: list[Tensor]) -> list[Tensor]:
    x_MI, weight_EOI, ends_E = given
    gradients = _gradient_of_input(to_MO, weight_EOI, ends_E), _gradient_of_weight(to_MO, x_MI, ends_E)
    return [_grouped(*given), *gradients]


@functools.cache
def _has_grouped(device: torch.device) -> bool:
    """Whether the product is to be had, and right; tried once."""
    if device.type != "cuda":
        return True
    rng = torch.Generator().manual_seed(0)
    x_MI, weight_EOI, to_MO = (torch.randn(*shape, generator=rng) for shape in ((45, 64), (3, 32, 64), (45, 32)))
    given = [x_MI.bfloat16(), weight_EOI.bfloat16(), torch.tensor([5, 5, 45], dtype=torch.int32)]
    try:
        found, wanted = (
            _both_passes(to_MO.bfloat16().to(where), [one.to(where) for one in given]) for where in (device, "cpu")
        )
        if all(torch.allclose(a.cpu(), b, rtol=0.02, atol=0.2) for a, b in zip(found, wanted, strict=True)):
            return True
        reason = "its products are off"
    except Exception as error:  # of any kind: a GPU that has none, a torch that wants other strides
        reason = str(error).splitlines()[0]
    log.warning("experts stay plain, for FP8 has no grouped product on this GPU: %s", reason)
    return False
