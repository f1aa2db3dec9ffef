"""Low-precision linear layers, by torchao (the extra `precision`). Trainer and engine use the same ones.

    fp8     E4M3 on tensor cores, a scale for each row that is multiplied, in all three products (torchao's `rowwise`)
    nvfp4   emulated: the forward product of NVFP4 matrices, those of the backward pass of MXFP8 ones

Layers keep their names and parameters, so that masters, checkpoints, adapters, teachers' copies and engines do not know
of it. A weight is quantized each time it is used. Embeddings, the output head, routers, adapters, fused experts (FP8
gave them no gain) and layers whose sizes FP8 does not take stay plain.

NVFP4's activations have a float32 scale for each token. With one for the tensor, as torchao has it, a token's result
depends on its batch, and engine and trainer are a thousand times further apart (docs/results/precision.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from offbook.core.config import LinearConfig
from offbook.core.routers import routers_of
from offbook.types import OffbookError

FP8_CAPABILITY = (8, 9)
ALIGNED = 16  # sizes of FP8 matrices are multiples of it
NVFP4_BLOCK, MXFP8_BLOCK = 16, 32
NVFP4_LARGEST = 6.0 * 448.0  # the largest E2M1 entry under the largest E4M3 scale

Product = Callable[[Tensor, Tensor], Tensor]


class LowLinear(nn.Linear):
    """An nn.Linear but for its product. A layer becomes one by its class."""

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
    """`capability`: of the GPU, None on a CPU. NVFP4 is emulated everywhere, and torch has FP8 for any CPU."""
    if settings.kind != "plain" and find_spec("torchao") is None:
        raise OffbookError(f"train.linear.kind {settings.kind} needs torchao: pip install 'offbook[precision]'")
    if settings.kind == "fp8" and capability is not None and capability < FP8_CAPABILITY:
        have, need = (".".join(map(str, one)) for one in (capability, FP8_CAPABILITY))
        lacking = f"{device} has no FP8 (its compute capability is {have}, and {need} is needed)"
        raise OffbookError(f"{lacking}; leave train.linear.kind plain, or take a newer GPU, as in L4 or H100")


def _low(model: PreTrainedModel) -> list[LowLinear]:
    return [layer for layer in model.modules() if isinstance(layer, LowLinear)]


def product_of(kind: str) -> Product:
    return _Nvfp4.apply if kind == "nvfp4" else _fp8_product()


def _fp8_product() -> Product:
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


class _Nvfp4(torch.autograd.Function):
    """Axes: N rows, M outputs, K inputs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_MK: Tensor) -> Tensor:
        x_NK = x.flatten(0, -2)
        ctx.save_for_backward(x_NK if weight_MK.requires_grad else None, weight_MK)
        product_NM = nvfp4(x_NK, _largest(x_NK, 1)) @ nvfp4(weight_MK, _largest(weight_MK, (0, 1))).t()
        return product_NM.to(x.dtype).unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None]:
        x_NK, weight_MK = ctx.saved_tensors
        to_NM = gradients[0].flatten(0, -2)
        of_x = (mxfp8(to_NM) @ mxfp8(weight_MK.t()).t()).to(to_NM.dtype).unflatten(0, gradients[0].shape[:-1])
        of_weight = None if x_NK is None else (mxfp8(to_NM.t()) @ mxfp8(x_NK.t()).t()).to(weight_MK.dtype)
        return of_x, of_weight


def _largest(x_NK: Tensor, dim: int | tuple[int, int]) -> Tensor:
    return x_NK.float().abs().amax(dim, keepdim=True)


def nvfp4(x_NK: Tensor, largest: Tensor) -> Tensor:
    """What NVFP4 keeps of a matrix. `largest` entries, of rows or of all of it, decide the scale above the blocks'."""
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor

    above = torch.where(largest == 0, 1.0, largest / NVFP4_LARGEST)
    filled = nn.functional.pad(x_NK.float() / above, (0, -x_NK.shape[1] % NVFP4_BLOCK)).contiguous()
    kept: Tensor = NVFP4Tensor.to_nvfp4(filled).dequantize()
    return kept[:, : x_NK.shape[1]] * above


def mxfp8(x_NK: Tensor) -> Tensor:
    """What MXFP8 keeps of a matrix. Block scales are rounded up, so that nothing is clipped (2506.08027)."""
    from torchao.prototype.mx_formats.mx_tensor import MXTensor, ScaleCalculationMode

    filled = nn.functional.pad(x_NK.float(), (0, -x_NK.shape[1] % MXFP8_BLOCK)).contiguous()
    rounded_up = ScaleCalculationMode.RCEIL
    kept: Tensor = MXTensor.to_mx(filled, torch.float8_e4m3fn, MXFP8_BLOCK, rounded_up).dequantize()
    return kept[:, : x_NK.shape[1]]
