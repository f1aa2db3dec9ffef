"""Attention of the local engine: installed in a transformers model, it reads and writes keys and values in KV slots.

Two kinds of forwards: NextTokens is as many tokens for each of some slots (a decode step or a short prefill), NewTokens
is a flat row of many rows' new tokens (any other prefill). Without either, the model does what it did before.

On a GPU the attention of a few new tokens of each row is a Triton kernel (triton_kernels.py). It reads a row's own keys
and no more, by lengths that the device has, so one CUDA graph serves every length. It is used after it has given
torch's numbers once. torch's own attention reads all slots to the same length in one piece, and most of a GPU idles: on
an H200 a step took three times as long.

Axes: S slots, R rows, W tokens of each, H KV heads, G query heads that share one, Q queries that do (G W), L keys,
T new tokens, D head width.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

if TYPE_CHECKING:
    from offbook.engine.decode import KvSlots

NAME = "offbook_slots"  # of the attention function; must not start with the trainer's names
RECOMPILED = 64  # times that a layer is compiled before torch falls back to eager
# Prefill behind kept tokens: one call of attention more costs as much as so many mask entries (GPU_CALL is a guess) ...
GPU_CALL = 2**20
CPU_CALL = 2**13
MASK_ENTRIES = 2**26  # ... a mask has at most so many,
KEY_ENTRIES = 2**27  # and the keys of one call, which are copied unless their slots are consecutive
FEWEST = 64  # queries of a part, however long its row is


# Queries [R, H G, W, D], keys and values of all slots [S, H, L, D], positions of the tokens [R, W], slots of the rows
# [R], and the scale of a score. Gives [R, W, H G, D], arbitrary for a token at the last position of a slot (scratch).
Kernel = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, float], Tensor]
WIDTHS = (16, 32, 64, 128, 256)
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 2e-3}  # relative to the norm of a query's output
TRIED = (1, 64)  # tokens of a row: a decode step, and a short prefill with the most queries for a program
log = logging.getLogger(__name__)


def install(model: PreTrainedModel, fused: bool = False) -> None:
    """Make forwards of `model` take the keyword argument `tokens`.

    `fused` compiles the layers: one kernel instead of dozens between matrix products and attention.
    """
    name = f"{NAME}_fused" if fused else NAME
    AttentionInterface.register(name, torch.compiler.disable(_attention) if fused else _attention)
    AttentionMaskInterface.register(name, sdpa_mask)
    model.set_attn_implementation(name)
    if fused:
        limits = torch._dynamo.config  # the limit is per code object, which all models of a kind share
        limits.recompile_limit = max(limits.recompile_limit, RECOMPILED)
        for layer in model.base_model.layers:
            layer.compile(dynamic=True)


@contextmanager
def unfused(model: PreTrainedModel) -> Iterator[None]:
    """Run layers eagerly in here, also those that `install` has compiled."""
    fused = [(layer, layer._compiled_call_impl) for layer in getattr(model.base_model, "layers", ())]
    try:
        for layer, _ in fused:
            layer._compiled_call_impl = None
        yield
    finally:
        for layer, call in fused:
            layer._compiled_call_impl = call


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    tokens: NextTokens | NewTokens | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    if tokens is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **others)
    layer: int = module.layer_idx
    return tokens.attend(layer, query, key, value, scaling), None


class _SlotTokens:
    """The new tokens of a forward, whose keys and values are written to slots."""

    def __init__(self, slots: KvSlots):
        self.slots = slots
        self._index: dict[int, Tensor] = {}

    def _places(self, heads: int) -> Tensor:
        """Index of each new key, in the order of the model's keys, into the flattened keys of all slots."""
        raise NotImplementedError

    def _where(self, heads: int) -> Tensor:
        if heads not in self._index:
            self._index[heads] = self._places(heads).flatten()
        return self._index[heads]

    def keep_routes(self, layer: int, experts_NK: Tensor) -> None:
        self.slots.keep_routes(layer, experts_NK, self._where(1))

    def _stored(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values of a layer, with the new ones."""
        pair = self.slots.layer(layer, key, value)
        for kept, new in zip(pair, (key, value), strict=True):
            kept.view(-1, kept.shape[3]).index_copy_(0, self._where(key.shape[1]), new.reshape(-1, kept.shape[3]))
        return pair


class NextTokens(_SlotTokens):
    """A forward of W tokens in each of some slots, each token at its own position.

    A decode step is one token in each of the first slots. A short prefill is several in the slots `slot_R`: their
    queries, keys and values come as one flat row. Without a kernel that reads each slot up to its own token, all read
    the first `length` keys under a mask; the query heads that share a KV head are then the rows of one query, so that
    no key is repeated.
    """

    def __init__(
        self, slots: KvSlots, position_RW: Tensor, length: int, dtype: torch.dtype, slot_R: Tensor | None = None
    ):
        super().__init__(slots)
        self.position_RW = position_RW
        self.length = length
        self.dtype = dtype
        self.is_flat = slot_R is not None
        self.slot_R = torch.arange(len(position_RW), device=position_RW.device) if slot_R is None else slot_R
        self._mask_R1QL: Tensor | None = None

    def _places(self, heads: int) -> Tensor:
        head_H = torch.arange(heads, device=self.slot_R.device)
        first_RH = (self.slot_R[:, None] * heads + head_H) * self.slots.length
        return first_RH[:, :, None] + self.position_RW[:, None]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        if self.is_flat:
            shape = self.position_RW.shape
            query, key, value = (each[0].unflatten(1, shape).transpose(0, 1) for each in (query, key, value))
        pair = self._stored(layer, key, value)
        if kernel := kernel_for(*pair):
            scale = query.shape[3] ** -0.5 if scaling is None else scaling
            out_RWHD = kernel(query, *pair, self.position_RW, self.slot_R, scale)
        else:
            out_RWHD = self._by_mask(query, *pair, scaling)
        return out_RWHD.flatten(0, 1)[None] if self.is_flat else out_RWHD

    def _by_mask(self, query: Tensor, keys: Tensor, values: Tensor, scaling: float | None) -> Tensor:
        (rows, query_heads, width, size), heads = query.shape, keys.shape[1]
        shared = query_heads // heads
        if self._mask_R1QL is None:
            seen_RWL = torch.arange(self.length, device=query.device) <= self.position_RW[:, :, None]
            bias_R1WL = torch.zeros_like(seen_RWL, dtype=self.dtype).masked_fill_(~seen_RWL, -math.inf)[:, None]
            self._mask_R1QL = bias_R1WL if width == 1 else bias_R1WL.repeat(1, 1, shared, 1)
        slots = self.slot_R if self.is_flat else slice(rows)  # a slice copies no keys
        key, value = (kept[slots, :, : self.length] for kept in (keys, values))
        query_RHQD = query.reshape(rows, heads, shared * width, size)
        out_RHQD = _masked(query_RHQD, key, value, self._mask_R1QL, scaling)
        out_RWHGD = out_RHQD.unflatten(2, (shared, width)).permute(0, 3, 1, 2, 4)
        return out_RWHGD.reshape(rows, width, query_heads, -1)


class Part(NamedTuple):
    """Tokens begin:end of a flat row, which go into a slot after the `start` tokens it holds."""

    slot: int
    start: int
    begin: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.begin

    @property
    def upto(self) -> int:
        return self.start + self.size


class NewTokens(_SlotTokens):
    """A forward of many parts in one flat row, each for its own slot."""

    def __init__(self, slots: KvSlots, parts: list[Part], device: torch.device):
        super().__init__(slots)
        self.position_T = torch.cat([torch.arange(p.start, p.start + p.end - p.begin) for p in parts]).to(device)
        slot_T = torch.cat([torch.full((part.end - part.begin,), part.slot) for part in parts])
        self.slot_T = slot_T.to(device)
        self.fresh: list[tuple[int, int, int]] = []  # begin, end, how many parts of equal length
        self.grown = [part for part in parts if part.start]
        for part in parts:
            if part.start:
                continue
            begin, end, count = self.fresh[-1] if self.fresh else (0, 0, 0)
            if count and end == part.begin and (end - begin) // count == part.end - part.begin:
                self.fresh[-1] = begin, part.end, count + 1
            else:
                self.fresh.append((part.begin, part.end, 1))
        self._groups: list[_Group] | None = None

    def _places(self, heads: int) -> Tensor:
        head_H = torch.arange(heads, device=self.slot_T.device)
        return (self.slot_T * heads + head_H[:, None]) * self.slots.length + self.position_T

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        pair = self._stored(layer, key, value)
        out_THD = query.new_empty(query.shape[2], query.shape[1], value.shape[3])
        for begin, end, count in self.fresh:
            q, k, v = (each[0, :, begin:end].unflatten(1, (count, -1)).transpose(0, 1) for each in (query, key, value))
            out_THD[begin:end] = _causal(q, k, v, scaling).transpose(1, 2).flatten(0, 1)
        if self._groups is None:  # the same in all layers
            shared = query.shape[1] // key.shape[1]
            grown = grouped(self.grown, shared, key.shape[1] * key.shape[3], key.is_cuda)
            self._groups = [_Group(self.slots.length, parts, shared, query) for parts in grown]
            if sum(map(len, self._groups)) <= MASK_ENTRIES:
                for group in self._groups:
                    group.mask = group.make_mask()
        for group in self._groups:
            out_THD[group.token_N] = group.attend(query, *pair, scaling)
        return out_THD[None]


def bucket(number: int) -> int:
    """The next number with at most two bits: 1, 2, 3, 4, 6, 8, 12, 16, 24 ..."""
    power = 1 << max(0, number - 1).bit_length()
    return power * 3 // 4 if power >= 4 and number <= power * 3 // 4 else power


def grouped(parts: list[Part], shared: int, key_entries: int, on_gpu: bool) -> list[list[Part]]:
    """Parts in groups of one attention call each: together if the padding costs less than another call.

    `shared` query heads have one KV head. Parts whose mask would be too large are split.
    """
    call = GPU_CALL if on_gpu else CPU_CALL
    groups: list[list[Part]] = []
    count = upto = 0  # the most of the last group
    pieces = [piece for part in parts for piece in _pieces(part, MASK_ENTRIES // (shared * part.upto))]
    for part in sorted(pieces, key=lambda part: (bucket(part.size), part.upto)):
        rows = len(groups[-1]) + 1 if groups else 1
        wider = max(count, part.size)
        longer = max(upto, part.upto)
        separate = (rows - 1) * count * upto + part.size * part.upto + call
        fits = rows * wider * longer * shared <= MASK_ENTRIES and rows * longer * key_entries <= KEY_ENTRIES
        if groups and fits and rows * wider * longer <= separate:
            groups[-1].append(part)
            count = wider
            upto = longer
        else:
            groups.append([part])
            count = part.size
            upto = part.upto
    return groups


def _pieces(part: Part, size: int) -> list[Part]:
    size = max(size, FEWEST)
    cuts = [*range(0, part.size, size), part.size]
    return [
        Part(part.slot, part.start + first, part.begin + first, part.begin + last) for first, last in pairwise(cuts)
    ]


class _Group:
    """Attention of some parts in one call: queries padded to the longest part, keys to the longest row.

    The query heads that share a KV head are rows of one query, as in NextTokens. Padding repeats a part's last query.
    The mask is made again in every layer unless it is set: those of long rows are large. Axes: N real queries, R parts.
    """

    def __init__(self, length: int, parts: list[Part], shared: int, query: Tensor):
        parts = sorted(parts)
        device = query.device
        count = max(part.size for part in parts)
        upto = max(part.upto for part in parts)
        self.length = min(-(-upto // 8) * 8, length)  # masks of other lengths are copied by kernels
        self.shared = shared
        self.dtype = query.dtype
        self.mask: Tensor | None = None
        first = parts[0].slot
        numbers = [part.slot for part in parts]
        in_a_row = numbers == list(range(first, first + len(parts)))
        self.slot_R = slice(first, first + len(parts)) if in_a_row else torch.tensor(numbers, device=device)
        begin_R, last_R, start_R = torch.tensor([[p.begin, p.end - 1, p.start] for p in parts]).T
        token_RT = torch.minimum(begin_R[:, None] + torch.arange(count), last_R[:, None])
        real_RT = torch.arange(count) <= (last_R - begin_R)[:, None]
        self.token_RT = token_RT.to(device)
        self.token_N = token_RT[real_RT].to(device)
        self.real_N = None if bool(real_RT.all()) else real_RT.flatten().nonzero()[:, 0].to(device)
        self.position_RT = (token_RT + (start_R - begin_R)[:, None]).to(device)

    def __len__(self) -> int:
        """Entries of its mask."""
        return self.token_RT.numel() * self.shared * self.length

    def make_mask(self) -> Tensor:
        hidden_RTL = torch.arange(self.length, device=self.position_RT.device) > self.position_RT[:, :, None]
        bias_RTL = torch.zeros_like(hidden_RTL, dtype=self.dtype).masked_fill_(hidden_RTL, -math.inf)
        return bias_RTL.repeat(1, self.shared, 1)[:, None]

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scaling: float | None) -> Tensor:
        rows, count = self.token_RT.shape
        query_HGRTD = query[0][:, self.token_RT].unflatten(0, (-1, self.shared))
        query_RHQD = query_HGRTD.permute(2, 0, 1, 3, 4).flatten(2, 3)
        key, value = (kept[self.slot_R, :, : self.length] for kept in (keys, values))
        mask = self.make_mask() if self.mask is None else self.mask
        out_RHQD = _masked(query_RHQD, key, value, mask, scaling)
        out_RTHGD = out_RHQD.unflatten(2, (self.shared, count)).permute(0, 3, 1, 2, 4)
        out = out_RTHGD.reshape(rows * count, query.shape[1], -1)
        return out if self.real_N is None else out[self.real_N]


def _masked(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scaling: float | None) -> Tensor:
    if not query.is_cuda:
        return scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scaling)
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):  # these take a mask of any shape
        return scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scaling)


def _causal(query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    shared = query.shape[1] // key.shape[1]
    if shared > 1 and query.is_cuda and query.dtype == torch.float32:  # no fused kernel shares heads in this precision
        key, value = (each.repeat_interleave(shared, dim=1) for each in (key, value))
        shared = 1
    return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=shared > 1)


def kernel_for(keys: Tensor, values: Tensor) -> Kernel | None:
    """The kernel for a layer's keys and values; None if torch has to do it."""
    if not keys.is_cuda or keys.shape[3] not in WIDTHS or keys.dtype not in TOLERANCE or values.shape != keys.shape:
        return None
    return _tried(keys.device, keys.dtype, keys.shape[3])


def by_torch(
    query: Tensor, keys: Tensor, values: Tensor, position_RW: Tensor, slot_R: Tensor, scaling: float
) -> Tensor:
    """The reference."""
    shared = query.shape[1] // keys.shape[1]
    key, value = (kept[slot_R].repeat_interleave(shared, dim=1) for kept in (keys, values))
    sees = torch.arange(keys.shape[2], device=query.device) <= position_RW[:, None, :, None]
    return scaled_dot_product_attention(query, key, value, attn_mask=sees, scale=scaling).transpose(1, 2)


@functools.cache
def _tried(device: torch.device, dtype: torch.dtype, size: int) -> Kernel | None:
    try:
        from offbook.engine.triton_kernels import attend
    except ImportError:
        log.warning("Triton is missing: sampling on this GPU is two to four times slower")
        return None
    try:
        errors = [difference(attend, device, dtype, size, width) for width in TRIED]
    except Exception as problem:  # of a compiler, so of any type; torch is the fallback
        log.warning("attention by torch: %s: %s", type(problem).__name__, str(problem).splitlines()[:1])
        return None
    if not all(error <= TOLERANCE[dtype] for error in errors):
        log.warning("attention by torch: the kernel's errors are %s on %s", errors, device)
        return None
    return attend


def difference(kernel: Kernel, device: torch.device, dtype: torch.dtype, size: int, width: int) -> float:
    """The largest error, relative to the norm of a query's output. The long row's parts are several tiles each."""
    rng = torch.Generator().manual_seed(0)
    length = 6000
    drawn = [torch.randn(*shape, size, generator=rng) for shape in ((2, width, 6), (4, 2, length), (4, 2, length))]
    query, keys, values = (tensor.to(device, dtype) for tensor in drawn)
    query = query.transpose(1, 2)
    position_RW = torch.tensor([[0], [length - 1 - width]], device=device) + torch.arange(width, device=device)
    slot_R = torch.tensor([3, 1], device=device)
    found = kernel(query, keys, values, position_RW, slot_R, 0.1).double()
    wanted = by_torch(query.double(), keys.double(), values.double(), position_RW, slot_R, 0.1)
    return float(((found - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max())
