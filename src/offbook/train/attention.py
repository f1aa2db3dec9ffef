"""Attention for a trunk that hands on its keys and values, and for hint branches that read them.

The trunk is a forward of whole samples: right-padded rows under a plain causal mask, which needs no mask tensor,
because padding lies after everything that looks back. A branch scores `hint + message` against the trunk's rows up to
where the hint is inserted and its own rows, at continued positions: exactly what re-encoding prefix + hint + message
computes, without the prefix. Axes: B rows, T trunk tokens, L branch tokens of all branches in one flat row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

NAME = "offbook"
BLOCK = 128
# Fastest first on the GPUs at hand; only what can run the inputs is taken.
KERNELS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass(frozen=True, slots=True)
class BranchRow:
    """Where one branch lies: tokens start:end of the flat branch input, grown from `insert` tokens of a trunk row."""

    trunk_row: int
    insert: int
    start: int
    end: int


@dataclass(slots=True)
class Handover:
    """One layer's keys and values [B, kv heads, T, head width], rotary positions applied, on their way to its branches.

    Only while they are `wanted`: recomputation in the backward pass must not keep them again.
    """

    branches: list[BranchRow]
    blocks: BlockMask | None = None  # the branches as a mask for the fused kernel
    last: bool = False  # nobody reads what the trunk itself makes of them
    wanted: bool = True
    keys: Tensor | None = None
    values: Tensor | None = None

    def close(self) -> None:
        self.wanted, self.keys, self.values = False, None, None


def install(model: PreTrainedModel) -> None:
    """Make the layers of `model` take the keyword argument `handover`."""
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _no_mask)
    model.set_attn_implementation(NAME)


def _no_mask(*_: Any, **__: Any) -> None:
    return None


@torch.compiler.disable  # a compiled layer is two graphs with this in between; the kernels below are fast already
def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    handover: Handover | None = None,
    reads: bool = False,
    **_: Any,
) -> tuple[Tensor, None]:
    if reads:
        assert handover is not None
        out = _read(query, key, value, scaling, handover)
    else:
        if handover is not None and handover.wanted:
            handover.keys, handover.values = key.detach(), value.detach()
        out = torch.zeros_like(query) if handover and handover.last else _causal(query, key, value, scaling)
    return out.transpose(1, 2).contiguous(), None


def _causal(query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    if query.device.type != "cuda":
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
    with sdpa_kernel(KERNELS, set_priority=True):
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)


def _read(query: Tensor, key: Tensor, value: Tensor, scaling: float | None, handover: Handover) -> Tensor:
    trunk_key, trunk_value = handover.keys, handover.values
    assert trunk_key is not None
    assert trunk_value is not None
    if handover.blocks is not None:
        keys, values = _flat(trunk_key, key), _flat(trunk_value, value)
        options = {"USE_TMA": torch.cuda.get_device_capability(query.device) >= (9, 0)}
        return compiled_flex(
            query, keys, values, block_mask=handover.blocks, scale=scaling, enable_gqa=True, kernel_options=options
        )
    out = torch.empty_like(query)
    for row in handover.branches:
        own = slice(row.start, row.end)
        keys = torch.cat([trunk_key[row.trunk_row, :, : row.insert], key[0, :, own]], dim=1)
        values = torch.cat([trunk_value[row.trunk_row, :, : row.insert], value[0, :, own]], dim=1)
        length = row.end - row.start
        mask = torch.ones(length, row.insert + length, dtype=torch.bool, device=query.device).tril(row.insert)
        out[:, :, own] = scaled_dot_product_attention(
            query[:, :, own], keys[None], values[None], attn_mask=mask, scale=scaling, enable_gqa=True
        )
    return out


def _flat(trunk: Tensor, own: Tensor) -> Tensor:
    """[B, H, T, D] and [1, H, L, D] as [1, H, B * T + L, D]: the trunk's rows one after the other, then the branches.

    Token by token in memory, as projections leave them: copying that is several times faster than sorting by head.
    """
    return torch.cat([trunk.transpose(1, 2).flatten(0, 1), own[0].transpose(0, 1)]).transpose(0, 1)[None]


compiled_flex = torch.compile(flex_attention)


def branch_blocks(branches: list[BranchRow], rows: int, length: int, device: torch.device) -> BlockMask:
    """The mask of all branches over `_flat` keys, by blocks: which a block of queries skips, sees whole, sees in part.

    Built from the rows' bounds, since the mask itself would have L * (B * T + L) entries.
    """
    trunk, total = rows * length, max(row.end for row in branches)
    branches = sorted(branches, key=lambda row: row.start)
    bounds = [[row.trunk_row * length, row.trunk_row * length + row.insert, trunk + row.start] for row in branches]
    sizes = torch.tensor([row.end - row.start for row in branches], device=device)
    low_L, high_L, own_L = (
        torch.tensor(bounds, device=device).repeat_interleave(sizes, dim=0, output_size=total).unbind(1)
    )
    last_L = trunk + torch.arange(total, device=device)
    start_K = torch.arange(0, trunk + total, BLOCK, device=device)
    end_K = (start_K + BLOCK).clamp(max=trunk + total)

    def seen(low: Tensor, high: Tensor) -> Tensor:  # of each key block: none 0, some 1, all 2
        low, high = low[:, None], high[:, None]
        return ((low < high) & (low < end_K) & (high > start_K)).int() + ((low <= start_K) & (high >= end_K)).int()

    seen_LK = torch.maximum(seen(low_L, high_L), seen(own_L, last_L + 1))
    pad = -total % BLOCK
    most_QK = nn.functional.pad(seen_LK, (0, 0, 0, pad)).unflatten(0, (-1, BLOCK)).amax(1)
    least_QK = nn.functional.pad(seen_LK, (0, 0, 0, pad), value=2).unflatten(0, (-1, BLOCK)).amin(1)
    full_QK = least_QK == 2

    def visible(_b: Tensor, _h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return ((k >= low_L[q]) & (k < high_L[q])) | ((k >= own_L[q]) & (k <= q + trunk))

    tables = [_table(blocks_QK) for blocks_QK in ((most_QK > 0) & ~full_QK, full_QK)]
    return BlockMask.from_kv_blocks(
        *tables[0], *tables[1], BLOCK_SIZE=BLOCK, mask_mod=visible, seq_lengths=(total, trunk + total)
    )


def _table(blocks_QK: Tensor) -> tuple[Tensor, Tensor]:
    """How many key blocks each query block has, and which, those first."""
    order = blocks_QK.int().argsort(dim=1, descending=True, stable=True)
    return blocks_QK.sum(1).int()[None, None], order.int()[None, None]
