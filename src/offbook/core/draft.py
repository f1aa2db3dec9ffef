"""A draft head: one layer that guesses what a model will write, so that the model reads several tokens at once.

EAGLE-1's shape (https://arxiv.org/abs/2401.15077), as vLLM loads it for the method `eagle`: the embedding of a token
and the model's last hidden state before it go through one matrix and one Llama layer, without a norm before or after.
What comes out stands for the model's hidden state at that token: the model's own head turns it into a distribution, and
it is the next guess's input. Embedding and head are the model's own and are not stored.

A head's folder, `config.json` and `model.safetensors`, is what vLLM takes.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

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
        return self.layers[0](joined, attention_mask=None, position_embeddings=rotary, **how)

    def tensors(self) -> dict[str, Tensor]:
        return {name: tensor.detach().contiguous() for name, tensor in self.state_dict().items()}


def save_head(head: DraftHead, model: PreTrainedModel, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    shape = {"architectures": ["LlamaForCausalLM"], "dtype": str(model.dtype).removeprefix("torch.")}
    (folder / "config.json").write_text(json.dumps({**head.config.to_dict(), **shape}, indent=1) + "\n")
    save_file(head.tensors(), folder / "model.safetensors")


def _shape(config: PreTrainedConfig) -> LlamaConfig:
    text = config.get_text_config()
    heads = text.num_attention_heads
    shape = text.to_dict()
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
