"""Attention for base sequences that hand their KV cache on, and for branches that read it.

The base is a forward of whole samples that lie end to end in one row, each under a causal mask of its own, which needs
no mask tensor. A branch scores what it inserts and the tokens after that against its sample's keys up to there and its
own, at continued positions: exactly what re-encoding all of it computes, without the prefix. Axes: F base tokens, L
branch tokens of all branches in one row.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from offbook.train.host import BLOCK, compile_once, round_length, sent

if TYPE_CHECKING:
    from offbook.train.batches import Packed

Pair = tuple[Tensor, Tensor]  # keys and values
MASK_SIZE = 1 << 26  # entries of the mask of branches that are read together
FEW = 8  # on a GPU the number of branches in a call is a multiple of it
PARTS = 4  # a branch's keys are read in this many parallel parts, or all would wait for the longest prefix
NOT_PLAIN = ("sliding_window", "softcap", "s_aux")  # arguments of layers that are not plain attention
# Fastest first on an H200. Only the last one holds the whole square of scores.
KERNELS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
FLASH_WIDTH = 256  # of a head, at most
PREFIX = "offbook-"
_numbers = itertools.count()


@dataclass
class BranchRow:
    """The place of one branch: tokens start:end of the flat branch input, grown from `insert` tokens of the base that
    begin at its token `base`. Behind the message of the last there may be filler."""

    base: int
    insert: int
    start: int
    end: int


class BranchGroup(NamedTuple):
    """Branches that are read side by side, filled up to the longest. N branches, L of their tokens, K of the base's."""

    own_NL: Tensor  # places in the flat branch input; filler is the branch's last token once more
    base_NK: Tensor  # places in the base; filler is not seen
    mask_N1LS: Tensor  # what each token sees: K of the base, L of its own branch
    is_own_M: Tensor  # which of the N * L are no filler


class BranchBlocks(NamedTuple):
    """What all branches together see, as masks for the fused kernel."""

    far: BlockMask  # of the base, in parts
    near: BlockMask  # of the branches themselves


@dataclass
class LayerKV:
    """One layer's keys and values [1, kv heads, F, head width], rotary positions applied, on their way to its branches.

    Only while they are `wanted`: recomputation in the backward pass must not keep them again.
    """

    reading: BranchBlocks | list[BranchGroup] | None = None  # how its branches are read
    only: bool = False  # nothing else of this layer is needed: its attention over the base is not computed
    wanted: bool = True
    plain: bool = True  # whether the layer asked for nothing but a causal mask
    base: Pair | tuple[()] = ()


def install(model: PreTrainedModel) -> None:
    """Make the layers of `model` take the keyword arguments of `_attention`. transformers knows attention functions by
    names that all models share, so each model gets a name of its own. A copy of one keeps its name: a compiled layer is
    compiled again for each that it meets."""
    if model.config._attn_implementation.startswith(PREFIX):
        return
    name = f"{PREFIX}{next(_numbers)}"
    AttentionInterface.register(name, _attention)
    AttentionMaskInterface.register(name, lambda *_, **__: None)
    model.set_attn_implementation(name)


@torch.compiler.disable  # a compiled layer is two graphs with this in between; the kernels below are fast already
def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    kv: LayerKV | None = None,
    reads: bool = False,
    packed: Packed | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """`reads`: the row is branches, and `kv` has the keys of their base. `packed`: the sequences of the row."""
    if kv is not None:
        kv.plain = kv.plain and all(others.get(name) is None for name in NOT_PLAIN)
        if kv.wanted and not reads:
            kv.base = key.detach(), value.detach()
    if kv is not None and reads:
        out = _read(query, key, value, scaling, kv)
    elif kv is not None and kv.only:
        out = value[:, :1, :1].expand(*query.shape[:3], value.shape[3])  # it is not used
    elif packed is not None:
        out = attend_apart(query, key, value, packed, scaling)
    else:
        out = attend(query, key, value, None, scaling)
    return out.transpose(1, 2).contiguous(), None


def attend_apart(query: Tensor, key: Tensor, value: Tensor, packed: Packed, scaling: float | None) -> Tensor:
    """Causal attention within each sequence of a row [1, H, F, D]: in one call where a kernel takes their bounds, else
    one call for neighbours of equal length."""
    whole = (query, key, value)
    runs = [(length, len(list(members))) for length, members in itertools.groupby(packed.lengths)]
    if len(runs) == 1:
        out_FHD = _attend_rows(whole, len(packed.lengths), scaling)
    elif _takes_bounds(query, key, value):
        flat = (tensor[0].transpose(0, 1) for tensor in whole)
        longest = max(packed.lengths)
        bounds = packed.bounds, packed.bounds, longest, longest, 0.0, True, False
        out_FHD = torch.ops.aten._flash_attention_forward(*flat, *bounds, scale=scaling)[0]
    else:
        parts = zip(*(tensor.split([length * count for length, count in runs], dim=2) for tensor in whole), strict=True)
        each = zip(parts, runs, strict=True)
        out_FHD = torch.cat([_attend_rows(part, count, scaling) for part, (_, count) in each])
    return out_FHD.transpose(0, 1)[None]


def _attend_rows(whole: tuple[Tensor, ...], count: int, scaling: float | None) -> Tensor:
    query, key, value = (tensor[0].unflatten(1, (count, -1)).transpose(0, 1) for tensor in whole)
    return attend(query, key, value, None, scaling).transpose(1, 2).flatten(0, 1)


def _takes_bounds(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether flash attention runs these inputs. Called by itself it does not fill up heads of odd widths."""
    width = query.shape[3]
    is_half = query.dtype in (torch.bfloat16, torch.float16)
    return query.is_cuda and is_half and width % 8 == 0 and width <= FLASH_WIDTH and value.shape[3] == width


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None) -> Tensor:
    """Queries [B, H, L, D] over keys that some heads may share, causal without a mask; on a GPU by a fused kernel."""
    how: dict[str, Any] = {"attn_mask": mask, "is_causal": mask is None, "scale": scaling, "enable_gqa": True}
    if not query.is_cuda:
        return scaled_dot_product_attention(query, key, value, **how)
    if query.dtype == torch.float32:  # in which no fused kernel knows heads that share keys
        groups = query.shape[1] // key.shape[1]
        key, value = (shared.repeat_interleave(groups, dim=1) for shared in (key, value))
    is_rare = query.shape[2] % BLOCK or key.shape[2] % BLOCK  # cuDNN plans 50 ms for each new length
    with sdpa_kernel(KERNELS[1:] if is_rare else KERNELS, set_priority=True):
        return scaled_dot_product_attention(query, key, value, **how)


def _read(query: Tensor, key: Tensor, value: Tensor, scaling: float | None, kv: LayerKV) -> Tensor:
    if isinstance(kv.reading, BranchBlocks):
        options = _kernel_options(query.device)
        return compile_once(in_parts)(query, kv.base, (key, value), kv.reading, scaling, options)
    out = query.new_empty(*query.shape[:3], value.shape[3])
    for group in kv.reading or ():
        keys, values = (
            torch.cat([base[0, :, group.base_NK], own[0, :, group.own_NL]], dim=2).transpose(0, 1)
            for base, own in zip(kv.base, (key, value), strict=True)
        )
        read_NHLD = attend(query[0, :, group.own_NL].transpose(0, 1), keys, values, group.mask_N1LS, scaling)
        own_M = group.own_NL.flatten()[group.is_own_M]
        out[0, :, own_M] = read_NHLD.transpose(0, 1).flatten(1, 2)[:, group.is_own_M]
    return out


def branch_groups(branches: list[BranchRow], length: int, device: torch.device) -> list[BranchGroup]:
    """Branches of like prefixes together, so that a layer takes few calls with little filler; `length`: of the base."""
    groups: list[list[BranchRow]] = []
    for row in sorted(branches, key=lambda row: -row.insert):
        if not groups or _mask_size([*groups[-1], row]) > MASK_SIZE:
            groups.append([])
        groups[-1].append(row)
    return [_group(rows, length, device) for rows in groups]


def _mask_size(rows: list[BranchRow]) -> int:
    longest = max(row.end - row.start for row in rows)
    return len(rows) * longest * (max(row.insert for row in rows) + longest)


def _group(rows: list[BranchRow], length: int, device: torch.device) -> BranchGroup:
    bounds = torch.tensor([[row.start, row.end - row.start, row.insert, row.base] for row in rows])
    longest, most = (round_length(int(bounds[:, column].max()), device) for column in (1, 2))
    is_own_M = (torch.arange(longest) < bounds[:, 1:2]).flatten().nonzero()[:, 0]
    if device.type == "cuda":  # few numbers of branches, as few lengths: kernels are planned for each
        bounds = torch.cat([bounds, bounds[-1:].expand(-len(bounds) % FEW, -1)])
    start_N1, size_N1, insert_N1, base_N1 = sent(bounds, device).T[:, :, None]
    token_L, key_K = torch.arange(longest, device=device), torch.arange(most, device=device)
    at_NL = torch.minimum(token_L, size_N1 - 1)
    far_NLK = (key_K < insert_N1)[:, None].expand(-1, longest, -1)
    near_NLL = token_L <= at_NL[:, :, None]
    return BranchGroup(
        own_NL=start_N1 + at_NL,
        base_NK=(base_N1 + key_K).clamp(max=length - 1),
        mask_N1LS=torch.cat([far_NLK, near_NLL], dim=2)[:, None],
        is_own_M=sent(is_own_M, device),
    )


@functools.cache
def _kernel_options(device: torch.device) -> dict[str, Any]:
    """The fastest of those tried on an H200. Scaling queries beforehand rounds them once more, to no harm: against
    float32 a bfloat16 model is off by as much either way. Lengths are whole blocks on a GPU (`round_length`), which
    the compiler cannot know once it has met two of them."""
    hopper = torch.cuda.get_device_capability(device) >= (9, 0)
    tiles = {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "num_stages": 3}
    return {"USE_TMA": hopper, "PRESCALE_QK": True, "IS_DIVISIBLE": True, **tiles}


def in_parts(
    query: Tensor, far: Pair, near: Pair, blocks: BranchBlocks, scaling: float | None, options: dict[str, Any]
) -> Tensor:
    """Attention over the base's keys, of which each part has its share, and over the branches' own, put together."""
    settings = {"scale": scaling, "enable_gqa": True, "kernel_options": options, "return_aux": AuxRequest(lse=True)}
    parts = [tensor.expand(PARTS, -1, -1, -1) for tensor in (query, *far)]
    far_PHLD, far_aux = flex_attention(*parts, block_mask=blocks.far, **settings)
    near_1HLD, near_aux = flex_attention(query, *near, block_mask=blocks.near, **settings)
    share_SHL = torch.softmax(torch.cat([far_aux.lse, near_aux.lse]), dim=0)
    far_HLD = (share_SHL[:-1, ..., None] * far_PHLD).sum(0)
    return (far_HLD + share_SHL[-1, ..., None] * near_1HLD[0])[None].to(query.dtype)


def branch_blocks(branches: list[BranchRow], length: int, device: torch.device) -> BranchBlocks:
    branches = sorted(branches, key=lambda row: row.start)
    bounds = [[row.base, row.base + row.insert, row.start] for row in branches]
    sizes = torch.tensor([row.end - row.start for row in branches])
    low_L, high_L, own_L = sent(torch.tensor(bounds).repeat_interleave(sizes, dim=0), device).unbind(1)
    behind_L = torch.arange(1, len(own_L) + 1, device=device)
    return BranchBlocks(_blocks(low_L, high_L, length, PARTS), _blocks(own_L, behind_L, len(own_L), 1))


def _blocks(low_L: Tensor, high_L: Tensor, num_keys: int, parts: int) -> BlockMask:
    """Where each query sees keys low:high, by blocks: which a block of queries skips, sees whole, sees in part.

    Built from the bounds, since the mask itself would have L * num_keys entries. What a block of queries sees is dealt
    out to the parts, to each as much as to the others. The mask takes two numbers a query and nothing a key: whatever
    registers it needs, the kernel holds for whole blocks as well.
    """
    device, total = low_L.device, len(low_L)
    start_K = torch.arange(0, num_keys, BLOCK, device=device)
    end_K = (start_K + BLOCK).clamp(max=num_keys)
    low_L1, high_L1 = low_L[:, None], high_L[:, None]
    some_LK = (low_L1 < high_L1) & (low_L1 < end_K) & (high_L1 > start_K)
    all_LK = (low_L1 <= start_K) & (high_L1 >= end_K)
    pad = (0, 0, 0, -total % BLOCK)
    seen_QK = nn.functional.pad(some_LK, pad).unflatten(0, (-1, BLOCK)).any(1)
    full_QK = nn.functional.pad(all_LK, pad, value=True).unflatten(0, (-1, BLOCK)).all(1)
    before_QK = seen_QK.cumsum(1) - 1
    part_QK = before_QK * parts // seen_QK.sum(1, keepdim=True).clamp(min=1)
    numbers_P11 = torch.arange(parts + 1, device=device)[:, None, None]
    mine_PQK = part_QK == numbers_P11[:-1]
    edges_PL = ((part_QK < numbers_P11).sum(2) * BLOCK).repeat_interleave(BLOCK, dim=1)[:, :total]
    low_PL, high_PL = torch.maximum(low_L, edges_PL[:-1]).int(), torch.minimum(high_L, edges_PL[1:]).int()

    def visible(part: Tensor, _head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k >= low_PL[part, q]) & (k < high_PL[part, q])

    tables = [_table(mine_PQK & blocks_QK) for blocks_QK in (seen_QK & ~full_QK, full_QK)]
    return BlockMask.from_kv_blocks(
        *tables[0], *tables[1], BLOCK_SIZE=BLOCK, mask_mod=visible, seq_lengths=(total, num_keys)
    )


def _table(blocks_PQK: Tensor) -> tuple[Tensor, Tensor]:
    """How many key blocks each query block has in each part, and which, those first."""
    order = blocks_PQK.int().argsort(dim=2, descending=True, stable=True)
    return blocks_PQK.sum(2).int()[:, None], order.int()[:, None]
