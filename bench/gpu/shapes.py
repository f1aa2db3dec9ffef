"""Models of known shapes with random weights, made where they are used and in the precision they are used in."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3MoeConfig

from offbook.core.config import LoraConfig, Precision
from offbook.train.lora import make_trainable

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCABULARY = 151_936 if DEVICE == "cuda" else 1_000  # a CPU is for trying whether a bench runs
QWEN3 = {  # width, inner width, layers, heads, heads with keys, width of a head, tied
    "tiny": (64, 128, 2, 4, 2, 16, True),
    "0.6B": (1024, 3072, 28, 16, 8, 128, True),
    "1.7B": (2048, 6144, 28, 16, 8, 128, True),
    "4B": (2560, 9728, 36, 32, 8, 128, True),
    "8B": (4096, 12288, 36, 32, 8, 128, False),
    "32B": (5120, 25600, 64, 64, 8, 128, False),
    "A3B": (2048, 768, 4, 32, 4, 128, True),  # four layers of 30B-A3B; the inner width is an expert's
    "tiny-moe": (64, 32, 2, 4, 2, 16, True),
}
EXPERTS = {"A3B": (128, 8), "tiny-moe": (8, 2)}  # in a layer, and of a token


def make_model(name: str = "0.6B", precision: Precision = "bfloat16", rank: int = 0) -> PreTrainedModel:
    width, inner, layers, heads, shared, head, tied = QWEN3[name]
    torch.manual_seed(0)
    experts, top = EXPERTS.get(name, (0, 0))
    mixture = {"moe_intermediate_size": inner, "num_experts": experts, "num_experts_per_tok": top}
    config = (Qwen3MoeConfig if experts else Qwen3Config)(
        **mixture if experts else {},
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=shared,
        head_dim=head,
        max_position_embeddings=131_072,
        tie_word_embeddings=tied,
    )
    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, precision)).eval()
    make_trainable(model, LoraConfig(rank=rank), "", seed=0)
    return model


@torch.no_grad()
def forget(model: PreTrainedModel, named: dict[str, Any]) -> None:
    """An adapter as it was before any step: a frozen teacher made now is the base alone."""
    for name, master in named.items():
        if "lora_B" in name:
            master.zero_()
            model.get_parameter(name).zero_()


def free_memory() -> None:
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def allocated_gib(peak: bool = False) -> float:
    if DEVICE == "cpu":
        return math.nan
    return (torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()) / 2**30


def wait() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def time_once(step: Callable[[], Any]) -> float:
    wait()
    started = time.monotonic()
    step()
    wait()
    return time.monotonic() - started
