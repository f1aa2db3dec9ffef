"""Keys and values of many rows, each in a place of its own; engine/attention.py reads and writes them there.

A layer's keys are one tensor [places, kv heads, length, head width], its values another. A row writes behind its own
last token, so nothing is padded, and a place is kept for its owner from turn to turn. All places are as long as the
longest row needs: the budget is spent on places x length. The last position of a place is scratch: what is computed for
a place at which nobody writes goes there, or behind what is kept of its row.

Axes: N new tokens, K experts of each.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from offbook.engine.kernels import kernel_for

NAME = "offbook_places"  # of the attention function; not what the trainer's begin with
SHORTEST = 256
NO_LAYER = -1  # from here down: experts of the layers with a router, which lie and move as keys do
OWN_WAYS = ("diffllama", "doge")  # of attention, that they ask the usual function for with other arguments
ROPE_BY_LENGTH = ("dynamic", "longrope")  # a position is encoded otherwise beside a later one, as padding has
RECOMPILED = 64  # times that a layer is compiled before it is left as it is


def has_plain_attention(model: PreTrainedModel) -> bool:
    """Whether every layer reads all tokens before it and nothing else: no windows, no recurrent state, no soft cap, no
    sinks. And whether a token's position says how it is encoded, whatever else is in the forward."""
    config = model.config.get_text_config()
    has_sinks = any(name.endswith("sinks") for name, _ in model.named_parameters())
    if has_sinks or config.model_type in OWN_WAYS:
        return False
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

    @property
    def own_keys(self) -> bool:
        """Whether a step reads of each place what it holds and no more: then one graph serves all lengths."""
        kept = [pair for layer, pair in self.layers.items() if layer > NO_LAYER]
        return bool(kept) and all(kernel_for(*pair) is not None for pair in kept)

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
