"""Low-precision linear layers, by torchao (the extra `precision`). Trainer and engine use the same ones.

    fp8     E4M3 on tensor cores, a scale for each row that is multiplied, in all three products (torchao's `rowwise`)
    nvfp4   emulated: both factors are rounded to NVFP4; gradients pass through the rounding

Layers keep their names and parameters, so masters, checkpoints, adapters, teachers' copies and engines see plain ones.
A weight is quantized each time it is used. Embeddings, the output head, routers, adapters, fused experts (FP8 gave them
no gain) and layers whose sizes FP8 does not take stay plain.

NVFP4's activations have a float32 scale for each token. With one for the tensor, as torchao has it, a token's result
depends on its batch, and engine and trainer are a thousand times further apart (docs/results/precision.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from offbook.core.config import LinearConfig
from offbook.core.routers import routers_of
from offbook.types import OffbookError

FP8_CAPABILITY = (8, 9)
ALIGNED = 16  # sizes of FP8 matrices are multiples of it
NVFP4_BLOCK = 16
NVFP4_LARGEST = 6.0 * 448.0  # the largest E2M1 entry under the largest E4M3 scale

Product = Callable[[Tensor, Tensor], Tensor]


class LowLinear(nn.Linear):
    """An nn.Linear with another product. A layer becomes one by its class."""

    product: Product

    def forward(self, input: Tensor) -> Tensor:
        out = self.product(input, self.weight)
        return out if self.bias is None else out + self.bias


def compute_linears(model: PreTrainedModel, settings: LinearConfig) -> None:
    """Let a model's linear layers multiply in this way from now on, whatever they did before."""
    for layer in _low(model):
        layer.__class__ = nn.Linear
    if settings.kind == "plain":
        return
    refuse_lacking(settings, "", None)
    product = product_of(settings.kind)
    routing = {part for router in routers_of(model) for part in router.modules()}
    for name, layer in model.base_model.named_modules():
        is_linear = type(layer) is nn.Linear and layer not in routing and ".lora_" not in name
        if is_linear and not (settings.kind == "fp8" and any(size % ALIGNED for size in layer.weight.shape)):
            layer.__class__, layer.product = LowLinear, product


@contextmanager
def plainly(model: PreTrainedModel) -> Iterator[None]:
    """Compute in the model's own precision inside: for probing what layers do."""
    low = _low(model)
    for layer in low:
        layer.__class__ = nn.Linear
    try:
        yield
    finally:
        for layer in low:
            layer.__class__ = LowLinear


def refuse_lacking(settings: LinearConfig, device: str, capability: tuple[int, int] | None) -> None:
    """`capability`: of the GPU, None on a CPU, for which torch has FP8, too."""
    if settings.kind != "plain" and find_spec("torchao") is None:
        raise OffbookError(f"train.linear.kind {settings.kind} needs torchao: pip install 'offbook[precision]'")
    if settings.kind == "fp8" and capability is not None and capability < FP8_CAPABILITY:
        raise OffbookError(
            f"{device} has no FP8 (compute capability 8.9 and newer); leave train.linear.kind plain, or take a newer "
            "GPU, as in L4 or H100"
        )


def _low(model: PreTrainedModel) -> list[LowLinear]:
    return [layer for layer in model.modules() if isinstance(layer, LowLinear)]


def product_of(kind: str) -> Product:
    if kind == "nvfp4":
        return _nvfp4_product
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import matmul_with_hp_or_float8_args
    from torchao.float8.float8_training_tensor import LinearMMConfig, ScaledMMConfig

    config = Float8LinearConfig.from_recipe_name("rowwise")
    gemms = config.gemm_config_output, config.gemm_config_grad_input, config.gemm_config_grad_weight
    how = LinearMMConfig(*(ScaledMMConfig(use_fast_accum=gemm.use_fast_accum, pad_inner_dim=True) for gemm in gemms))

    def product(x: Tensor, weight_MK: Tensor) -> Tensor:
        if x.is_cuda and x.dtype == torch.float32:  # sums by row are handed over in bfloat16 only
            return product(x.bfloat16(), weight_MK.bfloat16()).float()
        if torch.is_inference_mode_enabled():  # torchao's tensors have no reshape in it
            with torch.inference_mode(False), torch.no_grad():
                return product(x, weight_MK)
        out_NM: Tensor = matmul_with_hp_or_float8_args.apply(x.flatten(0, -2), weight_MK.t(), how, config)
        return out_NM.unflatten(0, x.shape[:-1])

    return product


def _nvfp4_product(x: Tensor, weight_MK: Tensor) -> Tensor:
    """A scale for each token, and one for the weights."""
    x_NK = x.flatten(0, -2)
    rounded_NK = _passing(x_NK, nvfp4(x_NK.detach(), 1))
    rounded_MK = _passing(weight_MK, nvfp4(weight_MK.detach(), (0, 1)))
    return (rounded_NK @ rounded_MK.t()).to(x.dtype).unflatten(0, x.shape[:-1])


def _passing(exact: Tensor, rounded: Tensor) -> Tensor:
    """The rounded value, with the gradient of the exact one."""
    return exact + (rounded - exact.detach()) if exact.requires_grad else rounded


def nvfp4(x_NK: Tensor, dim: int | tuple[int, int]) -> Tensor:
    """What NVFP4 keeps of a matrix. Of the entries along `dim` the largest decides the scale above the blocks'."""
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor

    largest = x_NK.float().abs().amax(dim, keepdim=True)
    above = torch.where(largest == 0, 1.0, largest / NVFP4_LARGEST)
    filled = nn.functional.pad(x_NK.float() / above, (0, -x_NK.shape[1] % NVFP4_BLOCK)).contiguous()
    kept: Tensor = NVFP4Tensor.to_nvfp4(filled).dequantize()
    return (kept[:, : x_NK.shape[1]] * above).to(x_NK.dtype)
