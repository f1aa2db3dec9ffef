"""Where a mixture of experts chooses: its router modules, found by running a few tokens.

In transformers a router returns logits, the gates of the chosen experts, and which they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

TRIED_IDS = (1, 5, 2, 7, 3, 6, 4, 9)


@torch.no_grad()
def routers_of(model: PreTrainedModel) -> list[nn.Module]:
    """In the order of the layers; none where the model has no experts."""
    told = model.config.get_text_config().to_dict()
    if not any("num_experts_per_tok" in name or "top_k_experts" in name for name in told):
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
