"""What Muon orthogonalises as one matrix.

A parameter is cut into blocks of one shape, its units. A projection of many heads is as many matrices as heads, which
have nothing to do with one another but lie in one tensor: queries, keys and values by rows, what heads are joined with
by columns. Experts are a matrix each, and where gate and up are fused they are two. Everything else that is a matrix
is one unit. Tables (embeddings, the head), norms, biases and convolutions are none: they are AdamW's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig

from offbook.types import OffbookError

Block = tuple[int, int]  # rows and columns of a unit
TABLES = ("embed", "lm_head", "wte", "wpe")
# By the name of the layer: what of the configuration is a head's width, its parts added up; the first that is there.
ROWS = {
    "q_proj": (("qk_nope_head_dim", "qk_rope_head_dim"), ("head_dim",)),
    "k_proj": (("head_dim",),),
    "v_proj": (("head_dim",),),
    "qkv_proj": (("head_dim",),),
    "q_b_proj": (("qk_nope_head_dim", "qk_rope_head_dim"),),
    "kv_b_proj": (("qk_nope_head_dim", "v_head_dim"),),
}
COLUMNS = {"o_proj": (("v_head_dim",), ("head_dim",))}
FUSED = "gate_up_proj"


def units_of(
    named_parameters: Iterable[tuple[str, Tensor]], config: PreTrainedConfig | None = None
) -> dict[str, Block]:
    """The shape of each matrix's units, by name. Without `config` nothing is known of heads: they stay together."""
    sizes: dict[str, Any] = {}
    if config is not None:
        text = config.get_text_config()
        sizes = {name: value for name, value in text.to_dict().items() if isinstance(value, int)}
        if "num_attention_heads" in sizes and not sizes.get("head_dim"):
            sizes["head_dim"] = sizes["hidden_size"] // sizes["num_attention_heads"]
    found = {}
    for name, parameter in named_parameters:
        is_expert = parameter.ndim == 3 and ".experts." in name
        is_matrix = parameter.ndim == 2 and not any(table in name for table in TABLES)
        if name.endswith("bias") or not (is_expert or is_matrix):  # of many experts a bias has two dimensions
            continue
        found[name] = _block(name, parameter.shape[-2], parameter.shape[-1], sizes)
    return found


def _block(name: str, rows: int, columns: int, sizes: Mapping[str, int]) -> Block:
    layer = name.removesuffix(".weight").rpartition(".")[2]
    if layer == FUSED and rows % 2 == 0:
        return rows // 2, columns
    if height := _width(ROWS.get(layer, ()), sizes):
        return (height if rows % height == 0 else rows), columns
    if width := _width(COLUMNS.get(layer, ()), sizes):
        return rows, (width if columns % width == 0 else columns)
    return rows, columns


def _width(choices: Iterable[tuple[str, ...]], sizes: Mapping[str, int]) -> int:
    return next((sum(sizes[part] for part in parts) for parts in choices if all(map(sizes.get, parts))), 0)


def as_units(tensor: Tensor, block: Block) -> Tensor:
    """[N, rows, columns] of the units that it holds, a view: what is written there is written to `tensor`."""
    rows, columns = block
    if columns == tensor.shape[-1]:
        return tensor.view(-1, rows, columns)
    return tensor.view(tensor.shape[0], -1, columns).transpose(0, 1)


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def row_group(tensor: Tensor) -> Any:
    """The ranks over which the rows of a matrix are cut; None if they are not. The same on all ranks."""
    if not isinstance(tensor, DTensor) or tensor.ndim == 3:  # experts are cut by expert
        return None
    cut = [number for number, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    if not cut:
        return None
    if len(cut) > 1 or not tensor.placements[cut[0]].is_shard(0):
        cuts = tensor.placements
        raise OffbookError(f"Muon takes matrices that are sharded by rows over one mesh dimension, not {cuts}")
    return tensor.device_mesh.get_group(cut[0])


def rows_of_ranks(tensor: Tensor) -> list[int]:
    """By the rule of torch.chunk, which DTensor follows."""
    ranks = dist.get_world_size(row_group(tensor))
    size = -(-tensor.shape[0] // ranks)
    return [min(max(tensor.shape[0] - rank * size, 0), size) for rank in range(ranks)]


def holds_whole_units(tensor: Tensor, block: Block) -> bool:
    """Whether no unit is on two ranks. The same answer on all of them."""
    if row_group(tensor) is None:
        return True
    rows = rows_of_ranks(tensor)
    return len(rows) == 1 or (block[1] == tensor.shape[1] and not any(count % block[0] for count in rows))
