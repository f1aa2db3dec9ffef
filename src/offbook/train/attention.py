"""Attention for a trunk that keeps its keys and values, and for hint branches that read them.

The trunk is the differentiated forward of whole samples: right-padded rows under a plain causal mask, which needs no
mask tensor, because padding lies after everything that looks back. While it runs, each layer's keys and values are
kept, detached. A branch then scores `hint + message` against the trunk's rows up to where the hint is inserted and its
own rows, at continued positions: exactly what re-encoding prefix + hint + message computes, without the prefix.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig, PreTrainedModel

from offbook.types import OffbookError

NAME = "offbook"


@dataclass(slots=True)
class Trunk:
    """Keys and values of one forward by layer, [rows, kv heads, length, head width], rotary positions applied."""

    keys: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BranchRow:
    """Where one branch lies: tokens start:end of the flat branch input, grown from `insert` tokens of a trunk row."""

    trunk_row: int
    insert: int
    start: int
    end: int


def install(model: PreTrainedModel) -> None:
    """Make `model` take the keyword arguments `trunk` (keep K/V there) and `branches` (read K/V from there)."""
    _refuse_sliding_windows(model.config)
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _no_mask)
    model.set_attn_implementation(NAME)


def _refuse_sliding_windows(config: PretrainedConfig) -> None:
    kinds = set(config.to_dict().get("layer_types") or ["full_attention"])
    if kinds != {"full_attention"}:
        raise OffbookError(
            f"hint branches need full attention in every layer; {config.model_type} has {', '.join(sorted(kinds))}"
        )


def _no_mask(*_: Any, **__: Any) -> None:
    return None


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    trunk: Trunk | None = None,
    branches: list[BranchRow] | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    layer: int = module.layer_idx
    if branches is not None:
        assert trunk is not None
        out = _branch_attention(query, key, value, scaling, trunk.keys[layer], trunk.values[layer], branches)
    else:
        if trunk is not None and layer not in trunk.keys:  # not again when checkpointing recomputes the layer
            trunk.keys[layer], trunk.values[layer] = key.detach(), value.detach()
        out = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2).contiguous(), None


def _branch_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    trunk_key: Tensor,
    trunk_value: Tensor,
    branches: list[BranchRow],
) -> Tensor:
    outs = []
    for row in branches:
        own = slice(row.start, row.end)
        keys = torch.cat([trunk_key[row.trunk_row, :, : row.insert], key[0, :, own]], dim=1)
        values = torch.cat([trunk_value[row.trunk_row, :, : row.insert], value[0, :, own]], dim=1)
        length = row.end - row.start
        mask = torch.ones(length, row.insert + length, dtype=torch.bool, device=query.device).tril(row.insert)
        outs.append(
            scaled_dot_product_attention(
                query[:, :, own], keys[None], values[None], attn_mask=mask, scale=scaling, enable_gqa=True
            )
        )
    return torch.cat(outs, dim=2)
