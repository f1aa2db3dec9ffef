"""Low-rank adapters (LoRA) in the layers of a model, as trainer and engine have them, and as PEFT's files do."""

from torch import Tensor
from transformers import PreTrainedModel

NAME = "default"  # as peft calls an adapter that is given no name
PREFIX = "base_model.model."  # of every tensor in PEFT's files


def adapter_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """The adapter's own, not copies of them, by the names that PEFT's files have."""
    from peft import get_peft_model_state_dict

    own = get_peft_model_state_dict(model, save_embedding_layers=False)
    return {PREFIX + name: tensor for name, tensor in own.items()}
