"""The decoder: many rows decoded together on one model, their keys and values kept from turn to turn.

A step is one forward for one token of every row and the sampling of the next one, on tensors that stay in the same
memory. On a GPU it is captured as a CUDA graph per size, and the host looks at the tokens every few steps; what a row
samples past its end until then is discarded. On a CPU the same step runs eagerly, with a look after each.

A short prefill, such as a tool's output for a few rows, is captured, too: a forward is some hundred kernel launches
whatever its size, and for so few tokens those are the cost. It is padded to one of a few sizes.

Everything here belongs to the engine's one thread. Axes: S slots, R rows, W tokens of each, K steps, T new tokens,
L slot length, V vocabulary, N new tokens.

A layer's keys are one tensor [slots, KV heads, length, head width], its values another. A row writes after its own last
token, so nothing is padded, and a session keeps its slot from turn to turn. All slots are as long as the longest row
needs: the budget is slots x length. The last position of a slot is scratch: steps write there for slots without a row,
and short prefills write their padding.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from offbook.core.routers import routers_of
from offbook.engine.attention import NewTokens, NextTokens, Part, bucket, install, unfused
from offbook.types import Routes

PREFILL_TOKENS = 16_384  # in one forward
FUSED_TOKENS = 4_096  # shorter prefills use plain layers: calling compiled ones costs the host more
STEPS = 8  # between two looks, where looking is expensive
FEWEST_ROWS = 8  # of a static step: fewer cost a GPU as much, and each size is one more graph
SHORT_ROWS = (2, 8)  # sizes of a short prefill
SHORT_TOKENS = (64, 256)  # of each row
SHORT_WORK = 2**39  # tokens x parameters at most: some milliseconds of a GPU, where the launches take the host 30
SHORTEST = 256
ROUTES = -1  # and below: "layers" that hold the experts of each token, one per router; they move as keys do
MIN_SHARED = 16  # tokens; a shorter prefix is computed sooner than copied
log = logging.getLogger(__name__)


@dataclass
class KvSlots:
    """The slots, their owners, and the ids whose keys and values they hold."""

    budget: int  # tokens
    count: int = 0
    length: int = 0
    owners: list[Hashable | None] = field(default_factory=list)
    ids: list[list[int]] = field(default_factory=list)
    layers: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def rounded(self, length: int) -> int:
        """Lengths grow by a third or a half, so that slots are seldom resized."""
        return min(bucket(max(length, SHORTEST)), self.budget)

    def resize(self, rows: int, wished: int, length: int) -> None:
        """At least `rows` slots, `wished` if the budget allows, of at least `length`.

        Owners of slots after the last one, or with more tokens than the new length, are evicted.
        """
        length = self.rounded(length)
        if rows * self.length <= self.budget:  # it may be more, from longer rows
            length = max(length, self.length)
        count = min(self.budget // length, max(rows, bucket(wished), self.count))
        kept = min(count, self.count)
        upto = min(length, self.length)
        for layer, pair in list(self.layers.items()):
            keys, values = (old.new_zeros(count, old.shape[1], length, old.shape[3]) for old in pair)
            for new, old in zip((keys, values), pair, strict=True):
                new[:kept, :, :upto] = old[:kept, :, :upto]
            self.layers[layer] = keys, values
        self.owners = [*self.owners[:kept], *[None] * (count - kept)]
        self.ids = [*(ids if len(ids) < length else [] for ids in self.ids[:kept]), *([] for _ in range(count - kept))]
        self.count = count
        self.length = length

    def keep_routes(self, layer: int, experts_NK: Tensor, where_N: Tensor) -> None:
        """`layer` counts the layers with a router."""
        new = experts_NK.to(torch.int16)[None, None]
        kept, _ = self.layer(ROUTES - layer, new, new[..., :0])
        kept.view(-1, kept.shape[3]).index_copy_(0, where_N, new[0, 0])

    def layer(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Zeros at first: what is masked is still multiplied."""
        if layer not in self.layers:
            keys, values = (new.new_zeros(self.count, new.shape[1], self.length, new.shape[3]) for new in (key, value))
            self.layers[layer] = keys, values
        return self.layers[layer]

    def assign(self, owners: list[Hashable], busy: set[int]) -> list[int]:
        """A slot for each owner: the one it has, or the cheapest to evict among those that are not `busy`.

        An owner whose slot is busy gets another one: its client went away and asks again while the first message is
        still being written.
        """
        by_owner = {owner: slot for slot, owner in enumerate(self.owners) if owner is not None and slot not in busy}
        taken = busy | {by_owner[owner] for owner in owners if owner in by_owner}
        found = []

        def price(slot: int) -> tuple[bool, int, int]:
            return self.owners[slot] is not None, len(self.ids[slot]), slot

        for owner in owners:
            slot = by_owner.pop(owner, None)  # once: it may ask twice at the same time
            if slot is None:
                slot = min((slot for slot in range(self.count) if slot not in taken), key=price)
                self.owners[slot] = owner
                self.ids[slot] = []
                taken.add(slot)
            found.append(slot)
        return found

    def swap(self, ones: list[int], others: list[int]) -> None:
        """Swap owners, ids, keys and values of slots pairwise."""
        upto = max((len(self.ids[slot]) for slot in [*ones, *others]), default=0)
        both = self._index([*ones, *others])
        turned = self._index([*others, *ones])
        for tensor in self._tensors() if upto else ():
            tensor[both, :, :upto] = tensor[turned, :, :upto]
        for one, other in zip(ones, others, strict=True):
            self.owners[one], self.owners[other] = self.owners[other], self.owners[one]
            self.ids[one], self.ids[other] = self.ids[other], self.ids[one]

    def copy(self, source: int, targets: list[int], count: int) -> None:
        """Copy the first `count` tokens of a slot to others."""
        index = self._index(targets)
        for tensor in self._tensors():
            tensor[index, :, :count] = tensor[source : source + 1, :, :count]

    def free(self, owners: Iterable[Hashable]) -> None:
        """Free the KV slots of sessions that are closed."""
        gone = set(owners)
        for slot, owner in enumerate(self.owners):
            if owner in gone:
                self.owners[slot] = None
                self.ids[slot] = []

    def _index(self, slots: list[int]) -> Tensor:
        """Made once for all layers: a list would be copied to the device for each."""
        device = next((tensor.device for tensor in self._tensors()), None)
        return torch.tensor(slots, dtype=torch.long, device=device)

    def _tensors(self) -> Iterable[Tensor]:
        return chain.from_iterable(self.layers.values())


@dataclass(frozen=True, slots=True)
class Fill:
    """The first `shared` tokens of a slot are there or are copied from slot `source`; the others are computed.

    If all are shared, the source ends with the same token and has the logits already.
    """

    slot: int
    ids: list[int]
    shared: int
    source: int | None
    wave: int  # sources are filled in earlier waves


def plan_fills(wanted: Mapping[int, list[int]], kept: Mapping[int, list[int]]) -> list[Fill]:
    """From the ids wanted by slot, and those that slots hold now; in the order of the waves.

    The last token of a row is always computed, or shared as in Fill, since the next one is sampled from its logits.
    Among rows in lexical order the longest prefix that a row shares with any before it is that with the last.
    """
    others = [(ids, slot) for slot, ids in kept.items() if slot not in wanted and ids]
    fills: dict[int, Fill] = {}
    last: Fill | None = None
    for ids, slot in sorted((ids, slot) for slot, ids in wanted.items()):
        shared = min(common_prefix(ids, kept.get(slot, [])), len(ids) - 1)
        source = None
        wave = 0
        for other, at in others:
            count = min(common_prefix(ids, other), len(ids) - 1)
            if count >= shared + MIN_SHARED:
                shared = count
                source = at
        if last is not None:
            count = common_prefix(ids, last.ids)
            if count >= shared + MIN_SHARED or count == len(ids):
                root = last
                while count <= root.shared and root.source in fills:  # the root itself copies these tokens
                    root = fills[root.source]
                shared = count
                source = root.slot
                wave = root.wave + 1
        last = fills[slot] = Fill(slot, ids, shared, source, wave)
    return sorted(fills.values(), key=lambda fill: (fill.wave, fill.slot))


def common_prefix(one: list[int], other: list[int]) -> int:
    """Slices are compared in C: bisection is faster than token by token."""
    low = 0
    high = min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    while high - low > 1:  # one[:low] is common, one[:high] is not
        middle = (low + high) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low


@dataclass(slots=True, eq=False)
class Row:
    """A message in the making."""

    owner: Hashable  # the session whose keys and values are kept
    prompt_ids: list[int]
    max_tokens: int
    uniforms: Tensor
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    abandoned: bool = False  # its rollout does not wait any more
    over: bool = False
    routes: Routes | None = None  # of the first tokens, as far as older weights or earlier messages computed them

    @property
    def need(self) -> int:
        return len(self.prompt_ids) + max(1, self.max_tokens)  # one token is sampled in any case

    @property
    def fed(self) -> list[int]:
        """The tokens that have keys and values: the last one sampled has not been read yet."""
        return [*self.prompt_ids, *self.ids[:-1]]


class Decoder:
    """`static`: steps and short prefills come in few sizes, with several steps between two looks at the tokens.

    `version` is the policy version of the weights in the model.
    """

    def __init__(self, model: PreTrainedModel, stop_ids: frozenset[int], temperature: float, budget: int, static: bool):
        self.model = model
        self.stop_ids = stop_ids
        self.temperature = temperature
        self.static = static
        self.longest = 0  # tokens that a row may need, if known
        self.use_graphs = static and model.device.type == "cuda"
        install(model, self.use_graphs and hasattr(model.base_model, "layers"))
        self.version = 0
        self.tokens_sampled = 0
        self.tokens_prefilled = 0
        self.slots = KvSlots(budget)
        self._routers = routers_of(model)
        self._tokens: NewTokens | NextTokens | None = None  # of the current forward
        self._parameters = model.num_parameters()
        short = SHORT_ROWS[-1], 2 * SHORT_TOKENS[-1] + 2
        self._short_input = torch.zeros(short, dtype=torch.long, device=model.device)  # always in the same memory
        for layer, router in enumerate(self._routers):
            router.register_forward_hook(partial(self._note_routes, layer))
        self.reset()

    def reset(self) -> None:
        """Drop all rows, all keys and values, and their memory."""
        self.rows: list[Row | None] = []  # by slot; None: the row has ended, and what steps compute there is discarded
        self.slots = KvSlots(self.slots.budget)
        self._allocate()

    @property
    def running(self) -> list[Row]:
        return [row for row in self.rows if row is not None]

    def _fitting(self, rows: list[Row]) -> int:
        """How many of these, from the first on, fit next to the running ones."""
        need = max([0, *(row.need for row in self.running)])
        busy = len(self.running)
        for count, row in enumerate(rows):
            need = max(need, row.need)
            if (busy + count + 1) * self.slots.rounded(need) > self.slots.budget:
                return count
        return len(rows)

    @torch.inference_mode()
    def admit(self, rows: list[Row], wished: int, closed: Iterable[Hashable] = ()) -> None:
        """Prefill the prompts of the first rows that fit, and sample their first tokens. `wished`: slots to keep, if
        the budget allows. `closed`: sessions whose slots are free now."""
        self.slots.free(closed)
        rows = rows[: self._fitting(rows)]
        if not rows:
            return
        count = len(self.running) + len(rows)
        length = max(row.need for row in [*self.running, *rows])
        if count > self.slots.count or length > self.slots.length:
            if self.static and max(count, wished) * self.slots.rounded(self.longest) <= self.slots.budget:
                length = max(length, self.longest)  # at once: resizing moves the memory, which loses all graphs
            self._compact(wholly=True)  # there may be fewer slots afterwards, and the first ones stay
            self.slots.resize(count, wished, length)
            self._allocate()
        busy = {slot for slot, row in enumerate(self.rows) if row is not None}
        by_slot = dict(zip(self.slots.assign([row.owner for row in rows], busy), rows, strict=True))
        slots = sorted(by_slot)
        new_rows = [by_slot[slot] for slot in slots]
        logits_RV = self._read({slot: row.prompt_ids for slot, row in by_slot.items()})
        device = self.model.device
        new = torch.tensor(slots, device=device)
        uniform_RL = pad_sequence([row.uniforms for row in new_rows], batch_first=True)
        self._uniform_SL[new, : uniform_RL.shape[1]] = uniform_RL.to(device)
        token_R, logprob_R = sample(logits_RV, self._uniform_SL[new, 0], self.temperature)
        self._token_S[new] = token_R
        self._count_S[new] = 1
        self._position_S[new] = torch.tensor([len(row.prompt_ids) for row in new_rows], device=device)
        self.rows += [None] * (slots[-1] + 1 - len(self.rows))
        for slot, row in by_slot.items():
            self.rows[slot] = row
        self._take(slots, [token_R.tolist()], [logprob_R.tolist()])

    @torch.inference_mode()
    def step(self) -> None:
        """Sample one more token for every row, or STEPS of them."""
        self._compact()
        if not self.rows:
            return
        running = self.running
        held = len(self.rows)
        left = max(row.max_tokens - len(row.ids) for row in running)
        steps = min(STEPS, left) if self.static else 1
        rows = min(_static_rows(held), self.slots.count) if self.static else held
        length = self._rounded(max(len(row.prompt_ids) + len(row.ids) for row in running) + steps)
        self._number.zero_()
        for _ in range(steps):
            self._run(self._step, rows, length)
        self._take(range(held), self._token_KS[:steps, :held].tolist(), self._logprob_KS[:steps, :rows].tolist())

    @torch.inference_mode()
    def renew(self, version: int) -> None:
        """After new weights: drop everything the old ones computed. Running rows are prefilled again, so that each of
        their tokens has the probability that the weights of its version give it after all tokens before it."""
        self.version = version
        self._compact(wholly=True)  # first: a row that moves takes the keys of its slot along
        self.slots.ids = [[] for _ in range(self.slots.count)]
        if self.rows:
            for slot, row in enumerate(self.running):
                row.routes = self._routes_of(slot, row)
            self._read({slot: row.fed for slot, row in enumerate(self.running)})

    def _allocate(self) -> None:
        """What rows carry from step to step, by slot, always in the same memory because graphs know where it is.

        The position of a slot without a row is its last one.
        """
        count = self.slots.count
        length = self.slots.length
        device = self.model.device
        busy = len(self.rows)
        token_S, position_S, count_S = torch.zeros(3, count, dtype=torch.long, device=device)
        uniform_SL = torch.zeros(count, length, device=device)
        position_S.add_(length - 1)
        if busy:
            upto = min(length, self._uniform_SL.shape[1])
            token_S[:busy] = self._token_S[:busy]
            position_S[:busy] = self._position_S[:busy]
            count_S[:busy] = self._count_S[:busy]
            uniform_SL[:busy, :upto] = self._uniform_SL[:busy, :upto]
        self._token_S: Tensor = token_S
        self._position_S: Tensor = position_S
        self._count_S: Tensor = count_S
        self._uniform_SL: Tensor = uniform_SL
        self._token_KS = torch.zeros(STEPS, count, dtype=torch.long, device=device)
        self._logprob_KS = torch.zeros(STEPS, count, device=device)
        self._number = torch.zeros(1, dtype=torch.long, device=device)  # of the step since the last look
        self._pool = torch.cuda.graph_pool_handle() if self.use_graphs else None
        self._graphs: dict[tuple[int, ...], torch.cuda.CUDAGraph | None] = {}
        self._not_capturable = set[tuple[int, ...]]()
        self._short_logits: dict[tuple[int, ...], Tensor] = {}  # of the last short prefill of each size

    def _rounded(self, length: int) -> int:
        """Keys that a step looks at. A static step looks at all: the kernel reads each row's own only."""
        return self.slots.length if self.static else min(-(-length // 32) * 32, self.slots.length)

    def _read(self, wanted: dict[int, list[int]]) -> Tensor:
        """Prefill ids into slots. Returns the logits after the last token of each, in the order of the slots."""
        logits: dict[int, Tensor] = {}
        fills = plan_fills(wanted, dict(enumerate(self.slots.ids)))
        for _, wave in groupby(fills, key=lambda fill: fill.wave):
            new = list(wave)
            copies = sorted((fill.source, fill.shared, fill.slot) for fill in new if fill.source is not None)
            for (source, shared), same in groupby(copies, key=lambda copy: copy[:2]):
                self.slots.copy(source, [slot for _, _, slot in same], shared)
            self._compute([fill for fill in new if fill.shared < len(fill.ids)], logits)
            seen = sum(layer > ROUTES for layer in self.slots.layers)
            if seen < self.model.config.get_text_config().num_hidden_layers:
                raise RuntimeError(f"{type(self.model).__name__} hides its keys and values from the local engine")
            for fill in new:
                self.slots.ids[fill.slot] = fill.ids
                if fill.source is not None and fill.shared == len(fill.ids):
                    logits[fill.slot] = logits[fill.source]
        return torch.stack([logits[slot] for slot in sorted(wanted)])

    def _compute(self, fills: list[Fill], logits: dict[int, Tensor]) -> None:
        """Prefill: at once if it is short, else in forwards of at most PREFILL_TOKENS tokens of many rows."""
        size = self._short_size(fills)
        if size:
            self._prefill_short(fills, size, logits)
            return
        ids: list[int] = []
        parts: list[Part] = []
        for fill in fills:
            for start in range(fill.shared, len(fill.ids), PREFILL_TOKENS):
                new = fill.ids[start : start + PREFILL_TOKENS]
                if len(ids) + len(new) > PREFILL_TOKENS:
                    self._prefill(ids, parts, logits)
                    ids = []
                    parts = []
                parts.append(Part(fill.slot, start, len(ids), len(ids) + len(new)))
                ids += new
        if ids:
            self._prefill(ids, parts, logits)

    def _prefill(self, ids: list[int], parts: list[Part], logits: dict[int, Tensor]) -> None:
        """The last logits of every part; of a row in several parts those of the last part stay."""
        device = self.model.device
        tokens = NewTokens(self.slots, parts, device)
        last_P = torch.tensor([part.end - 1 for part in parts], device=device)
        id_1T = torch.tensor([ids], device=device)
        with nullcontext() if len(ids) >= FUSED_TOKENS else unfused(self.model):
            logits_PV = self._forward(id_1T, tokens.position_T[None], tokens, logits_to_keep=last_P)[0]
        for part, logits_V in zip(parts, logits_PV, strict=True):
            logits[part.slot] = logits_V
        self.tokens_prefilled += len(ids)

    def _short_size(self, fills: list[Fill]) -> tuple[int, int] | None:
        """Rows and tokens of each of the smallest short prefill that these fit in, if it is a cheap one."""
        longest = max((len(fill.ids) - fill.shared for fill in fills), default=0)
        if not self.static or not 0 < longest <= SHORT_TOKENS[-1] or len(fills) > SHORT_ROWS[-1]:
            return None
        rows = next(rows for rows in SHORT_ROWS if rows >= len(fills))
        width = next(width for width in SHORT_TOKENS if width >= longest)
        return None if rows * width * self._parameters > SHORT_WORK else (rows, width)

    def _prefill_short(self, fills: list[Fill], size: tuple[int, int], logits: dict[int, Tensor]) -> None:
        """Padding goes to the scratch position of its row's slot, rows of padding to that of the first row's."""
        rows, width = size
        scratch = self.slots.length - 1
        given: list[list[int]] = []  # of each row: ids, positions, slot, index of its last token
        for row, fill in enumerate(fills):
            new = fill.ids[fill.shared :]
            padding = width - len(new)
            ids = [*new, *new[-1:] * padding]
            positions = [*range(fill.shared, len(fill.ids)), *[scratch] * padding]
            given.append([*ids, *positions, fill.slot, row * width + len(new) - 1])
        first = fills[0]
        empty = [*first.ids[-1:] * width, *[scratch] * width, first.slot, 0]
        given += [empty] * (rows - len(fills))
        self._short_input[:rows, : 2 * width + 2].copy_(torch.tensor(given))
        self._run(self._short_forward, *size)
        logits_RV = self._short_logits[size][: len(fills)].clone()
        for fill, logits_V in zip(fills, logits_RV, strict=True):
            logits[fill.slot] = logits_V
        self.tokens_prefilled += sum(len(fill.ids) - fill.shared for fill in fills)

    def _short_forward(self, rows: int, width: int) -> None:
        """Captured, as `_step`. A graph writes its logits where its capture did."""
        given = self._short_input[:rows, : 2 * width + 2]
        id_RW, position_RW, slot_R1, last_R1 = given.split([width, width, 1, 1], dim=1)
        position_RW = position_RW.contiguous()
        slot_R = slot_R1[:, 0].contiguous()
        last_R = last_R1[:, 0].contiguous()
        tokens = NextTokens(self.slots, position_RW, self.slots.length, self.model.dtype, slot_R)
        logits_1RV = self._forward(id_RW.reshape(1, -1), position_RW.view(1, -1), tokens, logits_to_keep=last_R)
        self._short_logits[rows, width] = logits_1RV[0]

    def _run(self, work: Callable[..., None], *size: int) -> None:
        """A size that comes a second time is captured: the first time was the warm-up that a capture needs."""
        if not self.use_graphs or size in self._not_capturable or size not in self._graphs:
            self._graphs[size] = None
            work(*size)
            return
        graph = self._graphs[size]
        if graph is None:
            graph = self._graphs[size] = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                    work(*size)
            except RuntimeError as error:  # some models read values from the device on their way
                log.warning("forwards of the size %s run without a CUDA graph: %s", size, str(error).splitlines()[0])
                self._not_capturable.add(size)
                work(*size)
                return
        graph.replay()

    def _step(self, rows: int, length: int) -> None:
        """No control flow depends on a tensor's value, and all results are written in place: it can be captured."""
        token_R = self._token_S[:rows]
        position_R = self._position_S[:rows]
        count_R = self._count_S[:rows]
        tokens = NextTokens(self.slots, position_R[:, None], length, self.model.dtype)
        logits_RV = self._forward(token_R[:, None], position_R[:, None], tokens)[:, -1]
        uniform_R = self._uniform_SL[:rows].gather(1, count_R[:, None])[:, 0]
        drawn_R, logprob_R = sample(logits_RV, uniform_R, self.temperature)
        self._token_KS[:, :rows].index_copy_(0, self._number, drawn_R[None])
        self._logprob_KS[:, :rows].index_copy_(0, self._number, logprob_R[None])
        self._number += 1
        token_R.copy_(drawn_R)
        position_R.add_(1).clamp_(max=self.slots.length - 1)
        count_R.add_(1).clamp_(max=self.slots.length - 1)

    def _forward(self, ids: Tensor, position: Tensor, tokens: NewTokens | NextTokens, **how: Any) -> Tensor:
        """Logits. The mask has four axes so that transformers passes it through; `tokens` says what is seen."""
        self._tokens = tokens
        mask = ids.new_zeros(1, 1, 1, 1)
        logits: Tensor = self.model(
            input_ids=ids, position_ids=position, attention_mask=mask, use_cache=False, tokens=tokens, **how
        ).logits
        return logits

    def _take(self, slots: Sequence[int], tokens_KR: list[list[int]], logprobs_KR: list[list[float]]) -> None:
        """Append sampled tokens to the rows of these slots. Rows that end keep their slot for their next turn."""
        for at, slot in enumerate(slots):
            row = self.rows[slot]
            if row is None:
                continue
            for tokens_R, logprobs_R in zip(tokens_KR, logprobs_KR, strict=True):
                row.ids.append(tokens_R[at])
                row.logprobs.append(logprobs_R[at])
                if self._is_whole(row):
                    break
            new = len(row.ids) - len(row.versions)
            if not math.isfinite(sum(row.logprobs[-new:])):  # the KV cache has NaNs, too, which leak through masks
                raise RuntimeError("a token's log-probability is not finite; the weights or the precision are broken")
            row.versions += [self.version] * new
            self.tokens_sampled += new
            if self._is_whole(row) or row.abandoned:
                self.rows[slot] = None
                row.over = True
                row.routes = self._routes_of(slot, row)
                self.slots.ids[slot] = row.fed

    def _is_whole(self, row: Row) -> bool:
        return row.ids[-1] in self.stop_ids or len(row.ids) >= row.max_tokens

    @torch.compiler.disable
    def _note_routes(self, layer: int, _router: nn.Module, _inputs: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
        if self._tokens is not None:
            self._tokens.keep_routes(layer, output[2])

    def _routes_of(self, slot: int, row: Row) -> Routes | None:
        """Experts of the tokens it fed. A token keeps those of the forward that sampled the one after it."""
        if not self._routers:
            return None
        kept = [self.slots.layers[ROUTES - layer][0][slot, 0, : len(row.fed)] for layer in range(len(self._routers))]
        routes_TLK = torch.stack(kept, dim=1).cpu()
        _, layers, top = routes_TLK.shape
        known = row.routes.unpack() if row.routes else b""
        return Routes.pack(layers, top, known + routes_TLK.numpy().tobytes()[len(known) :])

    def _compact(self, wholly: bool = False) -> None:
        """Move running rows to the first slots. Not after each row that ends: moving its keys has a price too."""
        held = len(self.rows)
        size = len(self.running)
        few = _static_rows(held) < 2 * _static_rows(size) if self.static else (held - size) * 8 < held
        if size == held or (size and few and not wholly):
            return
        gaps = [slot for slot in range(size) if self.rows[slot] is None]
        movers = [slot for slot in range(size, held) if self.rows[slot] is not None]
        for gap, mover in zip(gaps, movers, strict=True):
            row = self.rows[gap] = self.rows[mover]
            assert row is not None
            self.slots.ids[mover] = row.fed
        self.slots.swap(gaps, movers)
        if gaps:
            for tensor in (self._token_S, self._position_S, self._count_S, self._uniform_SL):
                tensor[gaps] = tensor[movers]
        self._position_S[size:held] = self.slots.length - 1
        del self.rows[size:]


def sample(logits_RV: Tensor, uniform_R: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Tokens by the inverse of the cumulative distribution at a random number of each row, and the log-probability of
    each in the distribution that it was drawn from, in float32.

    Rounding cannot choose a token without probability: no token is taken behind the one that completes the sum.
    """
    logits_RV = logits_RV.float()
    scaled_RV = logits_RV - logits_RV.amax(-1, keepdim=True)  # before the division, so that none is lost near 0
    if temperature != 1.0:
        scaled_RV = scaled_RV / temperature
    sums_RV = scaled_RV.exp().cumsum(-1)
    total_R1 = sums_RV[:, -1:].contiguous()
    drawn_R1 = torch.searchsorted(sums_RV, uniform_R[:, None] * total_R1, right=True)
    token_R1 = torch.minimum(drawn_R1, torch.searchsorted(sums_RV, total_R1))
    token_R1 = token_R1.clamp_(max=logits_RV.shape[1] - 1)  # where there are no numbers at all
    return token_R1[:, 0], scaled_RV.gather(1, token_R1)[:, 0] - total_R1[:, 0].log()


def _static_rows(rows: int) -> int:
    return bucket(max(rows, FEWEST_ROWS))
