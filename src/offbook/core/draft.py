"""A draft head: one layer that guesses what a model will write, so that the model reads several tokens at once.

EAGLE-1's shape (https://arxiv.org/abs/2401.15077), as vLLM loads it for the method `eagle`: the embedding of a token
and the model's last hidden state before it go through one matrix and one Llama layer, without a norm before or after.
What comes out stands for the model's hidden state at that token: the model's own head turns it into a distribution, and
it is the next guess's input. Embedding and head are the model's own and are not stored.

A head's folder, `config.json` and `model.safetensors`, is what vLLM takes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from offbook.types import OffbookError

FOLDER = "draft"  # of a head, in that of its model


class DraftHead(nn.Module):
    """Axes: any number of rows, T tokens, D width."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.config = _shape(model.config)
        width, text = self.config.hidden_size, model.config.get_text_config()
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.layers = nn.ModuleList([LlamaDecoderLayer(self.config, text.num_hidden_layers)])  # numbered behind its own
        self.layers[0].input_layernorm = nn.Identity()
        self.rotary = LlamaRotaryEmbedding(self.config)
        with torch.no_grad():  # at first what comes in goes out: the scale is then the one that the model's head knows
            self.fc.weight.normal_(std=0.02)
            self.fc.weight[:, width:] += torch.eye(width)
            self.layers[0].self_attn.o_proj.weight.zero_()
            self.layers[0].mlp.down_proj.weight.zero_()
        for parameter in self.parameters():  # as from_pretrained does: buffers keep their precision
            parameter.data = parameter.data.to(model.dtype)
        self.to(model.device)

    def forward(self, embedded: Tensor, hidden: Tensor, position: Tensor, **how: Any) -> Tensor:
        """Embeddings of tokens, the states that stand before them, and the positions of these. `how` goes to attention,
        which is causal without it."""
        joined = self.fc(torch.cat([embedded, hidden], dim=-1))
        rotary = self.rotary(joined, position)
        out: Tensor = self.layers[0](joined, attention_mask=None, position_embeddings=rotary, **how)
        return out

    def described(self, model: PreTrainedModel) -> dict[str, Any]:
        """Its config.json."""
        shape = {"architectures": ["LlamaForCausalLM"], "dtype": str(model.dtype).removeprefix("torch.")}
        return {**self.config.to_dict(), **shape}

    def tensors(self) -> dict[str, Tensor]:
        return {name: tensor.detach().contiguous() for name, tensor in self.state_dict().items()}


def save_head(head: DraftHead, model: PreTrainedModel, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(head.described(model), indent=1) + "\n")
    save_file(head.tensors(), folder / "model.safetensors")


def load_head(folder: Path, model: PreTrainedModel) -> DraftHead:
    """In the precision and the place of its model. The folder may be the one that a head's is in."""
    folder = folder / FOLDER if (folder / FOLDER).is_dir() else folder
    head = DraftHead(model)
    try:
        head.load_state_dict(load_file(folder / "model.safetensors"))
    except (OSError, RuntimeError, SafetensorError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[-1].strip()
        fix = "train one with `offbook mtp MODEL` and give it as engine.draft, or leave engine.draft out"
        raise OffbookError(f"there is no draft head of this model in {folder} ({reason}); {fix}") from None
    return head


def _shape(config: PreTrainedConfig) -> LlamaConfig:
    text = config.get_text_config()
    heads = text.num_attention_heads
    shape: Mapping[str, Any] = text.to_dict()
    return LlamaConfig(
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        intermediate_size=text.intermediate_size,
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=shape.get("num_key_value_heads") or heads,
        head_dim=shape.get("head_dim") or text.hidden_size // heads,
        max_position_embeddings=text.max_position_embeddings,
        rms_norm_eps=shape.get("rms_norm_eps", 1e-6),
        rope_parameters=shape.get("rope_parameters"),
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="sdpa",
    )
