"""FP8 linear layers, by torchao (the extra `precision`). Trainer and engine use the same ones.

E4M3 on tensor cores, a scale for each row that is multiplied, in all three products (torchao's `rowwise`). Layers keep
their names and parameters, so masters, checkpoints, adapters, teachers' copies and engines see plain ones. A weight is
quantized each time it is used. Embeddings, the output head, routers, adapters, fused experts (FP8 gave them no gain)
and layers whose sizes FP8 does not take stay plain.
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
    product = fp8_product()
    routing = {part for router in routers_of(model) for part in router.modules()}
    for name, layer in model.base_model.named_modules():
        is_linear = type(layer) is nn.Linear and layer not in routing and ".lora_" not in name
        if is_linear and not any(size % ALIGNED for size in layer.weight.shape):
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
    if settings.kind == "plain":
        return
    if find_spec("torchao") is None:
        raise OffbookError(f"train.linear.kind {settings.kind} needs torchao: pip install 'offbook[precision]'")
    if capability is not None and capability < FP8_CAPABILITY:
        raise OffbookError(
            f"{device} has no FP8 (compute capability 8.9 and newer); leave train.linear.kind plain, or take a newer "
            "GPU, as in L4 or H100"
        )


def _low(model: PreTrainedModel) -> list[LowLinear]:
    return [layer for layer in model.modules() if isinstance(layer, LowLinear)]


def fp8_product() -> Product:
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
