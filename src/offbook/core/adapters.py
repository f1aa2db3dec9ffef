"""Low-rank adapters (LoRA) in the layers of a model, as trainer and engine have them, and as PEFT's files do.

An adapter on a matrix is two matrices. For the fused experts of a layer peft has two for all of them together: one of
[experts x rank, in] and one of [out, rank x experts], in whose columns the expert changes fastest. Here they are
[experts, rank, in] and [experts, out, rank], so that they are cut where the weights under them are, and what is one
matrix to Muon is one expert's. Files have peft's form, and those that others wrote are read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

NAME = "default"  # as peft calls an adapter that is given no name
PREFIX = "base_model.model."  # of every tensor in PEFT's files
FIRST, SECOND = "lora_A", "lora_B"  # of the two matrices, by the order in which they are applied
ON_EXPERTS = re.compile(rf"\.experts\.(base_layer\.)*({FIRST}|{SECOND})\.")
NOT_FOR_VLLM = (
    "vLLM is given no adapters on experts (train.lora.parameters): in which form it reads them differs from model to "
    "model, and others it may leave out without a word; take offbook's own engine, or put adapters on other layers"
)


def adapter_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """The adapter's own, not copies of them, by the names that PEFT's files have."""
    from peft import get_peft_model_state_dict

    own = get_peft_model_state_dict(model, save_embedding_layers=False)
    return {PREFIX + name: tensor for name, tensor in own.items()}


def adapters_on(experts: Any) -> tuple[nn.Module, dict[str, Any]]:
    """A module of experts itself and, by the name of a weight, the adapter on it. Peft puts one around the other."""
    found = {}
    while hasattr(experts, "base_layer"):
        found[experts.parameter_name] = experts
        experts = experts.base_layer
    return experts, found


@torch.no_grad()
def put_experts_first(model: PreTrainedModel) -> None:
    """In the adapters that peft has just put into a model."""
    for name, module in model.named_modules():
        for adapter in adapters_on(module)[1].values() if name.endswith(".experts") else ():
            if adapter.get_param().ndim != 3:
                continue
            for key in (FIRST, SECOND):
                layer = getattr(adapter, key)[NAME]
                first = from_file(f"{name}.{key}.", layer.weight, adapter.num_experts)
                layer.weight = nn.Parameter(first, requires_grad=layer.weight.requires_grad)
            adapter.get_delta_factors = MethodType(_factors, adapter)
            adapter.get_delta_weight = MethodType(_delta, adapter)


def from_file(name: str, tensor: Tensor, experts: int) -> Tensor:
    """One of PEFT's tensors as it is in a model. A tensor for another number of experts stays as it is: comparing
    shapes finds it."""
    if not experts or not ON_EXPERTS.search(name) or tensor.shape[FIRST not in name] % experts:
        return tensor
    if FIRST in name:
        return tensor.unflatten(0, (experts, -1))
    return tensor.unflatten(1, (-1, experts)).permute(2, 0, 1).contiguous()


def num_experts(tensors: Mapping[str, Tensor]) -> int:
    """Of a layer with adapters on them; 0 where there is none."""
    return max((len(one) for name, one in tensors.items() if one.ndim == 3 and ON_EXPERTS.search(name)), default=0)


def to_file(name: str, tensor: Tensor) -> Tensor:
    """The way back."""
    if tensor.ndim != 3 or not ON_EXPERTS.search(name):
        return tensor
    return tensor.flatten(0, 1) if FIRST in name else tensor.permute(1, 2, 0).flatten(1)


def _factors(adapter: Any, name: str) -> tuple[Tensor, Tensor, float]:
    """Of what is added to all experts' weights, which some families have transposed."""
    dtype = adapter.get_param().dtype
    first_ERI, second_EOR = (getattr(adapter, key)[name].weight.to(dtype) for key in (FIRST, SECOND))
    if getattr(adapter.get_base_layer(), "is_transposed", False):
        return first_ERI.mT, second_EOR.mT, adapter.scaling[name]
    return second_EOR, first_ERI, adapter.scaling[name]


def _delta(adapter: Any, name: str) -> Tensor:
    left, right, scale = _factors(adapter, name)
    return left @ right * scale
