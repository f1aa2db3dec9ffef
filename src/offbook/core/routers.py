"""Where a mixture of experts chooses: its router modules, found by running a few tokens; and its layers by their names.

In transformers a router returns logits, the gates of the chosen experts, and which they are.
"""

import copy
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

TRIED_IDS = (1, 5, 2, 7, 3, 6, 4, 9)
TOP = ("num_experts_per_tok", "top_k_experts")  # experts that a token goes to, by what families call it


@dataclass(frozen=True)
class Mixture:
    """What is known of a mixture of experts before a weight is loaded."""

    layers: tuple[int, ...]  # those that have experts
    num_layers: int  # with those that have none
    top: int  # experts that a token goes to


def mixture_of(config: PreTrainedConfig) -> Mixture | None:
    """None where the model has no experts."""
    settings = config.get_text_config().to_dict()
    top = next((settings[name] for name in TOP if settings.get(name)), 0)
    if not top:
        return None
    with torch.device("meta"):
        meta = AutoModelForCausalLM.from_config(copy.deepcopy(config))
    named = re.findall(r"\.layers\.(\d+)\.\S*\bexperts\.", "\n".join(name for name, _ in meta.named_parameters()))
    layers = tuple(sorted({int(number) for number in named}))
    return Mixture(layers, settings["num_hidden_layers"], top) if layers else None


@torch.no_grad()
def routers_of(model: PreTrainedModel) -> list[nn.Module]:
    """In the order of the layers; none where the model has no experts."""
    settings = model.config.get_text_config().to_dict()
    if not any(top in name for name in settings for top in TOP):
        return []
    found: list[nn.Module] = []

    def look(module: nn.Module, _inputs: Any, output: Any) -> None:
        is_triple = isinstance(output, tuple) and len(output) == 3 and all(isinstance(one, Tensor) for one in output)
        if is_triple and output[2].dtype == torch.long and len(output[2]) == len(TRIED_IDS):
            found.append(module)

    hooks = [module.register_forward_hook(look) for module in model.modules()]
    try:
        model.base_model(input_ids=torch.tensor([TRIED_IDS], device=model.device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return found
