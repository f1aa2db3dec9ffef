"""Small real things for the tests: a tokenizer, models of a few thousand parameters, samples."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import settings
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from offbook.tokens import ChatFormat, byte_chat

torch.set_num_threads(1)
settings.register_profile("offbook", deadline=None)  # no test is timed
settings.load_profile("offbook")


@pytest.fixture(scope="session")
def chat() -> ChatFormat:
    """Bytes and the four marks: it spells anything."""
    return byte_chat()


def tiny_model(kind: str = "qwen3", vocabulary: int = 300, seed: int = 0) -> PreTrainedModel:
    """Random weights, scaled up so that attention is far from uniform and mistakes in it show."""
    torch.manual_seed(seed)
    shape = {
        "vocab_size": vocabulary,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "tie_word_embeddings": kind == "qwen3",
    }
    model = Qwen3ForCausalLM(Qwen3Config(**shape)) if kind == "qwen3" else LlamaForCausalLM(LlamaConfig(**shape))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4)
    return model.eval()


def random_ids(rng: random.Random, count: int, vocabulary: int = 300) -> list[int]:
    return [rng.randrange(vocabulary) for _ in range(count)]
