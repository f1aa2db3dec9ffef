"""Keys and values of many rows, each in a place of its own, and the attention that reads and writes them there.

A layer's keys are one tensor [places, kv heads, length, head width], its values another. A row writes behind its own
last token, so nothing is padded, and a place is kept for its owner from turn to turn. All places are as long as the
longest row needs: the budget is spent on places x length. The last position of a place is scratch: what is computed for
a place at which nobody writes goes there, or behind what is kept of its row.

Axes: S places, R rows that write, H kv heads, G query heads that share one, L keys, T new tokens, D head width.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "offbook_places"  # of the attention function; not what the trainer's begin with
SHORTEST = 256
# Attention to what rows add: a call more costs as much as so many entries of a mask (the GPU's number is a guess) ...
GPU_CALL, CPU_CALL = 2**20, 2**13
MASK_ENTRIES = 2**26  # ... in one mask there are at most so many,
KEY_ENTRIES = 2**27  # and so many of keys, which are copied where places do not lie side by side
NO_LAYER = -1  # from here down: experts of the layers with a router, which lie and move as keys do
ROPE_BY_LENGTH = ("dynamic", "longrope")  # a position is encoded otherwise beside a later one, as padding has
FEWEST = 64  # queries of a part, however long its row is
RECOMPILED = 64  # times that a layer is compiled before it is left as it is


def has_plain_attention(model: PreTrainedModel) -> bool:
    """Whether every layer reads all tokens before it and nothing else: no windows, no recurrent state, no soft cap. And
    whether a token's position says how it is encoded, whatever else is in the forward."""
    config = model.config.get_text_config()
    if (getattr(config, "rope_parameters", None) or {}).get("rope_type") in ROPE_BY_LENGTH:
        return False
    kinds = getattr(config, "layer_types", None)
    if kinds is None and getattr(config, "sliding_window", None):
        return False
    capped = any(getattr(config, name, None) for name in ("attn_logit_softcapping", "attention_chunk_size"))
    return model._supports_attention_backend and not capped and set(kinds or ()) <= {"full_attention"}


def install(model: PreTrainedModel, fused: bool = False) -> None:
    """Forwards of `model` take the keyword argument `tokens`; without it they do what they did before.

    `fused`: what lies between matrix products and attention is one kernel, where it was dozens.
    """
    name = f"{NAME}_apart" if fused else NAME
    AttentionInterface.register(name, torch.compiler.disable(_attention) if fused else _attention)
    AttentionMaskInterface.register(name, sdpa_mask)
    model.set_attn_implementation(name)
    if fused:
        limits = torch._dynamo.config  # of a layer's code, which all models of a kind share that a process loads
        limits.recompile_limit = max(limits.recompile_limit, RECOMPILED)
        for layer in model.base_model.layers:
            layer.compile(dynamic=True)


@contextmanager
def unfused(model: PreTrainedModel) -> Iterator[None]:
    """Meanwhile layers run as they are, also those that `install` has compiled."""
    fused = [(layer, layer._compiled_call_impl) for layer in getattr(model.base_model, "layers", ())]
    try:
        for layer, _ in fused:
            layer._compiled_call_impl = None
        yield
    finally:
        for layer, call in fused:
            layer._compiled_call_impl = call


class Tokens(Protocol):
    """What a forward is over, for its attention."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor: ...


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    tokens: Tokens | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    if tokens is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **others)
    layer: int = module.layer_idx
    return tokens.attend(layer, query, key, value, scaling), None


@dataclass
class Places:
    """Who has which place, and the ids whose keys and values lie there."""

    budget: int  # tokens
    count: int = 0
    length: int = 0
    owners: list[Hashable | None] = field(default_factory=list)
    ids: list[list[int]] = field(default_factory=list)
    lost: dict[Hashable, list[int]] = field(default_factory=dict)  # what owners had before others needed the room
    layers: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def rounded(self, length: int) -> int:
        """Lengths grow by a third or a half, so that places seldom move."""
        return min(bucket(max(length, SHORTEST)), self.budget)

    def has_room(self, rows: int, length: int) -> bool:
        return rows <= self.count and length <= self.length

    def arrange(self, rows: int, wished: int, length: int) -> None:
        """At least `rows` places, `wished` if the budget allows, of at least `length`, for there is no room.

        Those who are kept behind the last place, or at more length, lose what they have.
        """
        length = self.rounded(length)
        if rows * self.length <= self.budget:  # it may be more, from longer rows
            length = max(length, self.length)
        count = min(self.budget // length, max(rows, bucket(wished), self.count))
        kept, upto = min(count, self.count), min(length, self.length)
        for layer, pair in list(self.layers.items()):
            keys, values = (old.new_zeros(count, old.shape[1], length, old.shape[3]) for old in pair)
            for new, old in zip((keys, values), pair, strict=True):
                new[:kept, :, :upto] = old[:kept, :, :upto]
            self.layers[layer] = keys, values
        for place, ids in enumerate(self.ids):
            if place >= kept or len(ids) >= length:
                self._lose(place)
        self.owners = [*self.owners[:kept], *[None] * (count - kept)]
        self.ids = [*(ids if len(ids) < length else [] for ids in self.ids[:kept]), *([] for _ in range(count - kept))]
        self.count, self.length = count, length

    def keep_routes(self, layer: int, experts_NK: Tensor, where_N: Tensor) -> None:
        """Of the layers that have a router, in the order of their own."""
        new = experts_NK.to(torch.int16)[None, None]
        kept, _ = self.layer(NO_LAYER - layer, new, new[..., :0])
        kept.view(-1, kept.shape[3]).index_copy_(0, where_N, new[0, 0])

    def layer(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Zeros at first: what is masked is still multiplied."""
        if layer not in self.layers:
            keys, values = (new.new_zeros(self.count, new.shape[1], self.length, new.shape[3]) for new in (key, value))
            self.layers[layer] = keys, values
        return self.layers[layer]

    def seat(self, owners: list[Hashable], busy: set[int]) -> list[int]:
        """A place for each: the one it has, or else one where nobody writes. None of what is kept moves for it.

        Where places are short, whoever has the least to lose does. `busy`: where others write.
        """
        by_owner = {owner: place for place, owner in enumerate(self.owners) if owner is not None}
        taken = busy | {by_owner[owner] for owner in owners if owner in by_owner}
        for owner in owners:
            if owner not in by_owner:
                by_owner[owner] = place = self._free(taken)
                self._lose(place)
                self.owners[place], self.ids[place] = owner, []
                taken.add(place)
        return [by_owner[owner] for owner in owners]

    def _lose(self, place: int) -> None:
        if (owner := self.owners[place]) is not None and self.ids[place]:
            self.lost[owner] = self.ids[place]

    def _free(self, taken: set[int]) -> int:
        def price(place: int) -> tuple[bool, int, int]:
            return self.owners[place] is not None, len(self.ids[place]), place

        return min((place for place in range(self.count) if place not in taken), key=price)

    def swap(self, ones: list[int], others: list[int]) -> None:
        """Each of the first with its counterpart: all that is kept of both."""
        upto = max((len(self.ids[place]) for place in [*ones, *others]), default=0)
        both, turned = (self._index(places) for places in ([*ones, *others], [*others, *ones]))
        for tensor in self._tensors() if upto else ():
            tensor[both, :, :upto] = tensor[turned, :, :upto]
        for one, other in zip(ones, others, strict=True):
            self.owners[one], self.owners[other] = self.owners[other], self.owners[one]
            self.ids[one], self.ids[other] = self.ids[other], self.ids[one]

    def copy(self, source: int, targets: list[int], count: int) -> None:
        """The first `count` tokens of a place to others."""
        index = self._index(targets)
        for tensor in self._tensors():
            tensor[index, :, :count] = tensor[source : source + 1, :, :count]

    def forget(self, owners: Iterable[Hashable]) -> None:
        gone = set(owners)
        for owner in gone:
            self.lost.pop(owner, None)
        for place, owner in enumerate(self.owners):
            if owner in gone:
                self.owners[place], self.ids[place] = None, []

    def clean(self, place: int) -> None:
        """Behind what is kept: numbers that are none would spoil whoever comes next, masked or not."""
        for tensor in self._tensors():
            tensor[place, :, len(self.ids[place]) :] = 0

    def _index(self, places: list[int]) -> Tensor:
        """Once for all layers: a list would go to the device with each of them."""
        device = next((tensor.device for tensor in self._tensors()), None)
        return torch.tensor(places, dtype=torch.long, device=device)

    def _tensors(self) -> Iterable[Tensor]:
        return chain.from_iterable(self.layers.values())


def bucket(number: int) -> int:
    """The next number with at most two bits: 1, 2, 3, 4, 6, 8, 12, 16, 24 ..."""
    power = 1 << max(0, number - 1).bit_length()
    return power * 3 // 4 if power >= 4 and number <= power * 3 // 4 else power


class NextTokens:
    """A forward of W tokens in each of the first places, each at its own position, over the first `length` keys.

    Or in the places `place_R`: their tokens lie in one flat row. The query heads that share a K/V head are the rows of
    one query: no key is repeated.
    """

    def __init__(
        self, places: Places, position_RW: Tensor, length: int, dtype: torch.dtype, place_R: Tensor | None = None
    ):
        self.places, self.position_RW, self.length, self.place_R = places, position_RW, length, place_R
        seen_RWL = torch.arange(length, device=position_RW.device) <= position_RW[:, :, None]
        self.bias_R1WL = torch.zeros_like(seen_RWL, dtype=dtype).masked_fill_(~seen_RWL, -math.inf)[:, None]
        self._index: dict[int, Tensor] = {}
        self._bias: dict[int, Tensor] = {1: self.bias_R1WL}

    def _where(self, heads: int) -> Tensor:
        """Of each row, head and token among the keys of all, one after the other."""
        if heads not in self._index:
            rows, device = len(self.position_RW), self.position_RW.device
            place_R = torch.arange(rows, device=device) if self.place_R is None else self.place_R
            first_RH = (place_R[:, None] * heads + torch.arange(heads, device=device)) * self.places.length
            self._index[heads] = (first_RH[:, :, None] + self.position_RW[:, None]).flatten()
        return self._index[heads]

    def _mask(self, shared: int) -> Tensor:
        if self.position_RW.shape[1] == 1:  # the same for all heads
            return self.bias_R1WL
        if shared not in self._bias:
            self._bias[shared] = self.bias_R1WL.repeat(1, 1, shared, 1)
        return self._bias[shared]

    def keep_routes(self, layer: int, experts_NK: Tensor) -> None:
        self.places.keep_routes(layer, experts_NK, self._where(1))

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        if self.place_R is not None:
            shape = self.position_RW.shape
            query, key, value = (each[0].unflatten(1, shape).transpose(0, 1) for each in (query, key, value))
        rows, heads, width, _ = key.shape
        pair = self.places.layer(layer, key, value)
        for kept, new in zip(pair, (key, value), strict=True):
            kept.view(-1, kept.shape[3]).index_copy_(0, self._where(heads), new.reshape(-1, kept.shape[3]))
        which = slice(rows) if self.place_R is None else self.place_R
        keys, values = (kept[which, :, : self.length] for kept in pair)
        shared = query.shape[1] // heads
        query_RHQD = query.reshape(rows, heads, shared * width, query.shape[3])
        out_RHQD = _masked(query_RHQD, keys, values, self._mask(shared), scaling)
        out_RWHGD = out_RHQD.unflatten(2, (shared, width)).permute(0, 3, 1, 2, 4)
        return out_RWHGD.reshape(
            *((rows, width) if self.place_R is None else (1, -1)), query.shape[1], out_RHQD.shape[3]
        )


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
