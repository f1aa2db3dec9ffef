"""Attention that reads and writes keys and values in places: of a forward over the next tokens of many rows, and of
one over what rows have that is new.

Axes: R rows that write, W tokens of each, H kv heads, G query heads that share one, L keys, T new tokens, D head width.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from offbook.engine.kernels import kernel_for
from offbook.engine.kv_slots import Places, bucket

# Attention to what rows add: a call more costs as much as so many entries of a mask (the GPU's number is a guess) ...
GPU_CALL, CPU_CALL = 2**20, 2**13
MASK_ENTRIES = 2**26  # ... in one mask there are at most so many,
KEY_ENTRIES = 2**27  # and so many of keys, which are copied where places do not lie side by side
FEWEST = 64  # queries of a part, however long its row is


class NextTokens:
    """A forward of W tokens in each of the first places, each at its own position.

    Or in the places `place_R`: their tokens lie in one flat row. Where no kernel reads each place up to its own token,
    all read the first `length` keys under a mask; the query heads that share a K/V head are then the rows of one query,
    so that no key is repeated.
    """

    def __init__(
        self, places: Places, position_RW: Tensor, length: int, dtype: torch.dtype, place_R: Tensor | None = None
    ):
        self.places, self.position_RW, self.length, self.place_R = places, position_RW, length, place_R
        self.dtype = dtype
        self._index: dict[int, Tensor] = {}
        self._bias: dict[int, Tensor] = {}

    def _where(self, heads: int) -> Tensor:
        """Of each row, head and token among the keys of all, one after the other."""
        if heads not in self._index:
            rows, device = len(self.position_RW), self.position_RW.device
            place_R = torch.arange(rows, device=device) if self.place_R is None else self.place_R
            first_RH = (place_R[:, None] * heads + torch.arange(heads, device=device)) * self.places.length
            self._index[heads] = (first_RH[:, :, None] + self.position_RW[:, None]).flatten()
        return self._index[heads]

    def _mask(self, shared: int) -> Tensor:
        if shared not in self._bias:
            position_RW = self.position_RW
            seen_RWL = torch.arange(self.length, device=position_RW.device) <= position_RW[:, :, None]
            bias_R1WL = torch.zeros_like(seen_RWL, dtype=self.dtype).masked_fill_(~seen_RWL, -math.inf)[:, None]
            self._bias[shared] = bias_R1WL.repeat(1, 1, shared, 1)
        return self._bias[shared]

    def keep_routes(self, layer: int, experts_NK: Tensor) -> None:
        self.places.keep_routes(layer, experts_NK, self._where(1))

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        if self.place_R is not None:
            shape = self.position_RW.shape
            query, key, value = (each[0].unflatten(1, shape).transpose(0, 1) for each in (query, key, value))
        heads = key.shape[1]
        pair = self.places.layer(layer, key, value)
        for kept, new in zip(pair, (key, value), strict=True):
            kept.view(-1, kept.shape[3]).index_copy_(0, self._where(heads), new.reshape(-1, kept.shape[3]))
        if kernel := kernel_for(*pair):
            scale = query.shape[3] ** -0.5 if scaling is None else scaling
            out_RWHD = kernel(query, *pair, self.position_RW, self.place_R, scale)
        else:
            out_RWHD = self._by_mask(query, *pair, scaling)
        return out_RWHD if self.place_R is None else out_RWHD.flatten(0, 1)[None]

    def _by_mask(self, query: Tensor, keys: Tensor, values: Tensor, scaling: float | None) -> Tensor:
        (rows, query_heads, width, size), heads = query.shape, keys.shape[1]
        which, shared = slice(rows) if self.place_R is None else self.place_R, query_heads // heads
        key, value = (kept[which, :, : self.length] for kept in (keys, values))
        query_RHQD = query.reshape(rows, heads, shared * width, size)
        mask = self._mask(1 if width == 1 else shared)  # of one token it is the same for all heads
        out_RHQD = _masked(query_RHQD, key, value, mask, scaling)
        out_RWHGD = out_RHQD.unflatten(2, (shared, width)).permute(0, 3, 1, 2, 4)
        return out_RWHGD.reshape(rows, width, query_heads, -1)


class Part(NamedTuple):
    """Tokens begin:end of a flat row, which go to a place behind the `start` tokens that are there."""

    place: int
    start: int
    begin: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.begin

    @property
    def upto(self) -> int:
        return self.start + self.size


class NewTokens:
    """A forward of many parts in one flat row, each for a place of its own."""

    def __init__(self, places: Places, parts: list[Part], device: torch.device):
        self.places = places
        self.position_T = torch.cat([torch.arange(p.start, p.start + p.end - p.begin) for p in parts]).to(device)
        place_T = torch.cat([torch.full((part.end - part.begin,), part.place) for part in parts])
        self.place_T = place_T.to(device)
        self.fresh: list[tuple[int, int, int]] = []  # begin, end, how many of one length lie there side by side
        self.grown = [part for part in parts if part.start]
        for part in parts:
            if part.start:
                continue
            begin, end, count = self.fresh[-1] if self.fresh else (0, 0, 0)
            if count and end == part.begin and (end - begin) // count == part.end - part.begin:
                self.fresh[-1] = begin, part.end, count + 1
            else:
                self.fresh.append((part.begin, part.end, 1))
        self._index: dict[int, Tensor] = {}
        self._groups: list[_Group] | None = None

    def _where(self, heads: int) -> Tensor:
        if heads not in self._index:
            head_H = torch.arange(heads, device=self.place_T.device)
            first_HT = (self.place_T * heads + head_H[:, None]) * self.places.length
            self._index[heads] = (first_HT + self.position_T).flatten()
        return self._index[heads]

    def keep_routes(self, layer: int, experts_NK: Tensor) -> None:
        self.places.keep_routes(layer, experts_NK, self._where(1))

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        pair = self.places.layer(layer, key, value)
        for kept, new in zip(pair, (key, value), strict=True):
            kept.view(-1, kept.shape[3]).index_copy_(0, self._where(key.shape[1]), new.reshape(-1, kept.shape[3]))
        out_THD = query.new_empty(query.shape[2], query.shape[1], value.shape[3])
        for begin, end, count in self.fresh:
            q, k, v = (each[0, :, begin:end].unflatten(1, (count, -1)).transpose(0, 1) for each in (query, key, value))
            out_THD[begin:end] = _causal(q, k, v, scaling).transpose(1, 2).flatten(0, 1)
        if self._groups is None:  # they are the same in all layers
            shared = query.shape[1] // key.shape[1]
            grown = side_by_side(self.grown, shared, key.shape[1] * key.shape[3], key.is_cuda)
            self._groups = [_Group(self.places.length, parts, shared, query) for parts in grown]
            if sum(map(len, self._groups)) <= MASK_ENTRIES:
                for group in self._groups:
                    group.mask = group.make_mask()
        for group in self._groups:
            out_THD[group.token_N] = group.attend(query, *pair, scaling)
        return out_THD[None]


def side_by_side(parts: list[Part], shared: int, key_entries: int, on_gpu: bool) -> list[list[Part]]:
    """Parts in groups, for each of which attention is one call: together where padding costs less than a call more.

    `shared` query heads have a K/V head together. Parts whose mask would be too large come in several.
    """
    call = GPU_CALL if on_gpu else CPU_CALL
    groups: list[list[Part]] = []
    count = upto = 0  # the most of the last group
    pieces = [piece for part in parts for piece in _pieces(part, MASK_ENTRIES // (shared * part.upto))]
    for part in sorted(pieces, key=lambda part: (bucket(part.size), part.upto)):
        rows = len(groups[-1]) + 1 if groups else 1
        wider, longer = max(count, part.size), max(upto, part.upto)
        apart = (rows - 1) * count * upto + part.size * part.upto + call
        fits = rows * wider * longer * shared <= MASK_ENTRIES and rows * longer * key_entries <= KEY_ENTRIES
        if groups and fits and rows * wider * longer <= apart:
            groups[-1].append(part)
            count, upto = wider, longer
        else:
            groups.append([part])
            count, upto = part.size, part.upto
    return groups


def _pieces(part: Part, size: int) -> list[Part]:
    size = max(size, FEWEST)
    cuts = [*range(0, part.size, size), part.size]
    return [
        Part(part.place, part.start + first, part.begin + first, part.begin + last) for first, last in pairwise(cuts)
    ]


class _Group:
    """Attention of some parts in one call: queries padded to the longest part, keys to the longest row.

    The query heads that share a K/V head are rows of one query, as in NextTokens. A query that is padding is its part's
    last, again. The mask is made for every layer anew, unless it is set: those of long rows are large. Axes: N real
    queries of R parts.
    """

    def __init__(self, length: int, parts: list[Part], shared: int, query: Tensor):
        parts, device = sorted(parts), query.device
        count, upto = max(part.size for part in parts), max(part.upto for part in parts)
        self.length = min(-(-upto // 8) * 8, length)  # masks of other lengths are copied by kernels
        self.shared, self.dtype = shared, query.dtype
        self.mask: Tensor | None = None
        first, numbers = parts[0].place, [part.place for part in parts]
        in_a_row = numbers == list(range(first, first + len(parts)))
        self.place_R = slice(first, first + len(parts)) if in_a_row else torch.tensor(numbers, device=device)
        begin_R, last_R, start_R = torch.tensor([[p.begin, p.end - 1, p.start] for p in parts]).T
        token_RT = torch.minimum(begin_R[:, None] + torch.arange(count), last_R[:, None])
        real_RT = torch.arange(count) <= (last_R - begin_R)[:, None]
        self.token_RT, self.token_N = token_RT.to(device), token_RT[real_RT].to(device)
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
        key, value = (kept[self.place_R, :, : self.length] for kept in (keys, values))
        mask = self.make_mask() if self.mask is None else self.mask
        out_RHQD = _masked(query_RHQD, key, value, mask, scaling)
        out_RTHGD = out_RHQD.unflatten(2, (self.shared, count)).permute(0, 3, 1, 2, 4)
        out = out_RTHGD.reshape(rows * count, query.shape[1], -1)
        return out if self.real_N is None else out[self.real_N]


def _masked(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scaling: float | None) -> Tensor:
    if not query.is_cuda:
        return scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scaling)
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):  # those that take a mask of any shape
        return scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scaling)


def _causal(query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    shared = query.shape[1] // key.shape[1]
    if shared > 1 and query.is_cuda and query.dtype == torch.float32:  # no fused kernel shares heads in this precision
        key, value = (each.repeat_interleave(shared, dim=1) for each in (key, value))
        shared = 1
    return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=shared > 1)
