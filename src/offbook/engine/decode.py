"""Many rows written side by side on one model, their keys and values kept from turn to turn.

A step is one forward for one token of every row and the drawing of the next one, on tensors that stay where they are:
on a GPU it is captured as a CUDA graph for each size it comes in, and the host looks at the tokens every few steps.
What a row writes behind its end until then is thrown away. Elsewhere the same step runs as it is, a look after each.

All of it belongs to the engine's one thread. Axes: S places, R rows that write, K steps, V vocabulary.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from offbook.engine.places import NO_LAYER, SHORTEST, NewTokens, NextTokens, Part, Places, bucket, install
from offbook.engine.prefill import Fill, common_prefix, plan_fills
from offbook.engine.sampling import sample
from offbook.routers import routers_of
from offbook.types import Routes

PREFILL_TOKENS = 16_384  # in one forward
STEPS = 8  # between two looks, where looking is dear
log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Row:
    """A message in the making."""

    owner: Hashable  # for whom keys and values are kept
    prompt_ids: list[int]
    max_tokens: int
    uniforms: Tensor
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    abandoned: bool = False  # nobody waits any more
    over: bool = False
    routes: Routes | None = None  # of what was fed

    @property
    def need(self) -> int:
        return len(self.prompt_ids) + self.max_tokens

    @property
    def fed(self) -> list[int]:
        """The tokens that have keys and values: the last one sampled has not been read yet."""
        return [*self.prompt_ids, *self.ids[:-1]]


@dataclass(slots=True)
class Carried:
    """What rows carry from step to step, by place, always in the same memory: graphs know where it is.

    The position of a place at which nobody writes is the last one.
    """

    token_S: Tensor
    position_S: Tensor
    count_S: Tensor  # of tokens drawn
    uniform_SL: Tensor

    @classmethod
    def empty(cls, count: int, length: int, device: torch.device) -> Carried:
        token_S, position_S, count_S = torch.zeros(3, count, dtype=torch.long, device=device)
        return cls(token_S, position_S.add_(length - 1), count_S, torch.zeros(count, length, device=device))

    def tensors(self) -> tuple[Tensor, ...]:
        return self.token_S, self.position_S, self.count_S, self.uniform_SL

    def take_over(self, old: Carried, busy: int) -> None:
        length = min(self.uniform_SL.shape[1], old.uniform_SL.shape[1])
        for mine, theirs in zip(self.tensors()[:3], old.tensors()[:3], strict=True):
            mine[:busy] = theirs[:busy]
        self.uniform_SL[:busy, :length] = old.uniform_SL[:busy, :length]


class Decoder:
    """`static`: steps come in few sizes, several between two looks. `graphs`: each size is a CUDA graph.

    `version` is that of the weights now in the model.
    """

    def __init__(self, model: PreTrainedModel, stop_ids: frozenset[int], temperature: float, budget: int, static: bool):
        self.model, self.stop_ids, self.temperature, self.static = model, stop_ids, temperature, static
        self.longest = 0  # tokens that a row may need, as far as that is known
        self.graphs = static and model.device.type == "cuda"
        install(model, fused=self.graphs and hasattr(model.base_model, "layers"))
        self._dtype = model.dtype
        self.version = 0
        self.tokens_sampled = self.tokens_prefilled = 0
        self.tokens_reread = 0  # of those prefilled: kept before, and lost for want of room
        self._most = 0  # rollouts that were open at once
        self.places = Places(budget)
        self._routers = routers_of(model)
        self._tokens: NewTokens | NextTokens | None = None  # that a forward is over
        for layer, router in enumerate(self._routers):
            router.register_forward_hook(partial(self._note_routes, layer))
        self.reset()

    def reset(self) -> None:
        """Nothing is kept, nobody writes, and no memory is held."""
        self._carried = Carried.empty(0, 0, self.model.device)
        self.rows: list[Row | None] = []  # by place; None: it has ended, and its place writes on for nobody
        self.places = Places(self.places.budget)
        self._spoilt = False  # numbers that are none may lie in a place
        self._allot()

    @property
    def running(self) -> list[Row]:
        return [row for row in self.rows if row is not None]

    def fitting(self, rows: list[Row]) -> int:
        """How many of these, from the first on, have a place beside those that write."""
        need, busy = max([0, *(row.need for row in self.running)]), len(self.running)
        for count, row in enumerate(rows):
            need = max(need, row.need)
            if (busy + count + 1) * self.places.rounded(need) > self.places.budget:
                return count
        return len(rows)

    @torch.inference_mode()
    def admit(self, rows: list[Row], wished: int) -> None:
        """They read their prompts and have their first tokens. `wished`: places to keep, where there is room."""
        if not rows:
            return
        self._close_ranks(wholly=True)
        self._clean()
        busy, self._most = len(self.rows), max(self._most, wished)
        if self.places.arrange(busy + len(rows), wished, max(row.need for row in [*self.running, *rows])):
            self._allot()
        self.places.seat(busy, [row.owner for row in rows])
        by_owner = {row.owner: row for row in rows}
        new = slice(busy, busy + len(rows))
        seated = [by_owner[owner] for owner in self.places.owners[new]]
        had_room = not self.tokens_reread
        logits_RV = self._read({busy + number: row.prompt_ids for number, row in enumerate(seated)})
        if had_room and self.tokens_reread:
            longest = max(self.longest, *(row.need for row in [*self.running, *rows]))
            log.warning(
                "the engine holds keys and values of %d tokens, too few for %d rollouts at once: what they lose is read"
                " again (reread_tokens in metrics.jsonl); raise engine.kv_tokens to %d",
                *(self.places.budget, self._most, self._most * bucket(max(longest, SHORTEST))),
            )
        carried, device = self._carried, self.model.device
        uniform_RL = pad_sequence([row.uniforms for row in seated], batch_first=True)
        carried.uniform_SL[new, : uniform_RL.shape[1]] = uniform_RL.to(device)
        token_R, logprob_R = sample(logits_RV, carried.uniform_SL[new, 0], self.temperature)
        carried.token_S[new], carried.count_S[new] = token_R, 1
        carried.position_S[new] = torch.tensor([len(row.prompt_ids) for row in seated], device=device)
        self.rows += seated
        self._take(busy, [token_R.tolist()], [logprob_R.tolist()])

    @torch.inference_mode()
    def step(self) -> None:
        """One token more for every row, or several."""
        self._close_ranks()
        if not self.rows:
            return
        running, held = self.running, len(self.rows)
        steps = min(STEPS, max(row.max_tokens - len(row.ids) for row in running)) if self.static else 1
        rows = min(bucket(held), self.places.count) if self.static else held
        length = self._rounded(max(len(row.prompt_ids) + len(row.ids) for row in running) + steps)
        self._number.zero_()
        for _ in range(steps):
            self._run(rows, length)
        self._take(0, self._token_KS[:steps, :held].tolist(), self._logprob_KS[:steps, :rows].tolist())

    @torch.inference_mode()
    def renew(self, version: int) -> None:
        """After new weights: what is kept was computed by the old ones. Rows that write have theirs computed again, so
        that each of their tokens has the probability that the weights of its version give it after all before it."""
        self.version = version
        self._close_ranks(wholly=True)  # first: whoever moves takes along what its place has
        self.places.ids = [[] for _ in range(self.places.count)]
        self.places.lost.clear()
        if self.rows:
            self._read({place: row.fed for place, row in enumerate(self.running)})

    def _allot(self) -> None:
        count, length, device = self.places.count, self.places.length, self.model.device
        carried = Carried.empty(count, length, device)
        if self.rows:
            carried.take_over(self._carried, len(self.rows))
        self._carried = carried
        self._token_KS = torch.zeros(STEPS, count, dtype=torch.long, device=device)
        self._logprob_KS = torch.zeros(STEPS, count, device=device)
        self._number = torch.zeros(1, dtype=torch.long, device=device)  # of the step since the last look
        self._captured: dict[tuple[int, int], torch.cuda.CUDAGraph | None] = {}
        self._pool = torch.cuda.graph_pool_handle() if self.graphs else None

    def _rounded(self, length: int) -> int:
        """Keys that a step looks at: in eight sizes from each power of two to the next where each is a graph."""
        size = max(256, (1 << length.bit_length()) // 16) if self.static else 32
        return min(-(-length // size) * size, self.places.length)

    def _read(self, wanted: dict[int, list[int]]) -> Tensor:
        """Ids to places. Returns the logits behind the last token of each, in the order of the places."""
        ends: dict[int, Tensor] = {}
        fills = plan_fills(wanted, dict(enumerate(self.places.ids)))
        for fill in fills:
            lost = self.places.lost.pop(self.places.owners[fill.place], [])
            self.tokens_reread += max(0, common_prefix(fill.ids, lost) - fill.shared)
        for _, wave in groupby(fills, key=lambda fill: fill.wave):
            new = list(wave)
            copies = sorted((fill.source, fill.shared, fill.place) for fill in new if fill.source is not None)
            for (source, shared), same in groupby(copies, key=lambda copy: copy[:2]):
                self.places.copy(source, [place for _, _, place in same], shared)
            self._compute([fill for fill in new if fill.shared < len(fill.ids)], ends)
            for fill in new:
                self.places.ids[fill.place] = fill.ids
                if fill.source is not None and fill.shared == len(fill.ids):
                    ends[fill.place] = ends[fill.source]
        return torch.stack([ends[place] for place in sorted(wanted)])

    def _compute(self, fills: list[Fill], ends: dict[int, Tensor]) -> None:
        """Prefill, in forwards of many rows' tokens side by side."""
        ids: list[int] = []
        parts: list[Part] = []
        for fill in fills:
            for start in range(fill.shared, len(fill.ids), PREFILL_TOKENS):
                new = fill.ids[start : start + PREFILL_TOKENS]
                if len(ids) + len(new) > PREFILL_TOKENS:
                    self._forward(ids, parts, ends)
                    ids, parts = [], []
                parts.append(Part(fill.place, start, len(ids), len(ids) + len(new)))
                ids += new
        if ids:
            self._forward(ids, parts, ends)

    def _forward(self, ids: list[int], parts: list[Part], ends: dict[int, Tensor]) -> None:
        """The last logits of every part go to `ends`; of a row in several parts those of the last one stay."""
        device = self.model.device
        tokens = self._tokens = NewTokens(self.places, parts, device)
        logits_PV = self.model(
            input_ids=torch.tensor([ids], device=device),
            position_ids=tokens.position_T[None],
            attention_mask=torch.zeros(1, 1, 1, 1, device=device),  # four axes: taken as it is, and looked at by nobody
            logits_to_keep=torch.tensor([part.end - 1 for part in parts], device=device),
            use_cache=False,
            tokens=tokens,
        ).logits[0]
        if sum(layer >= 0 for layer in self.places.layers) < self.model.config.get_text_config().num_hidden_layers:
            raise RuntimeError(f"{type(self.model).__name__} hides its keys and values from the local engine")
        ends.update(zip((part.place for part in parts), logits_PV, strict=True))
        self.tokens_prefilled += len(ids)

    def _run(self, rows: int, length: int) -> None:
        """A size that comes a second time is captured: the first time was the warm-up that a capture needs."""
        size = rows, length
        if not self.graphs or size not in self._captured:
            self._captured[size] = None
            self._step(rows, length)
            return
        graph = self._captured[size]
        if graph is None:
            graph = self._captured[size] = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                    self._step(rows, length)
            except RuntimeError as error:  # some models ask the device for numbers on their way
                log.warning("decoding without CUDA graphs: %s", str(error).splitlines()[0])
                self.graphs = False
                self._step(rows, length)
                return
        graph.replay()

    def _step(self, rows: int, length: int) -> None:
        """Nothing here depends on a value of a tensor, and nothing is left behind but in the same memory."""
        carried, top = self._carried, self.places.length - 1
        token_R, position_R, count_R = (tensor[:rows] for tensor in carried.tensors()[:3])
        tokens = self._tokens = NextTokens(self.places, position_R, length, self._dtype)
        logits_RV = self.model(
            input_ids=token_R[:, None],
            position_ids=position_R[:, None],
            attention_mask=tokens.bias_R11L,
            use_cache=False,
            tokens=tokens,
        ).logits[:, -1]
        uniform_R = carried.uniform_SL[:rows].gather(1, count_R[:, None])[:, 0]
        drawn_R, logprob_R = sample(logits_RV, uniform_R, self.temperature)
        self._token_KS[:, :rows].index_copy_(0, self._number, drawn_R[None])
        self._logprob_KS[:, :rows].index_copy_(0, self._number, logprob_R[None])
        self._number += 1
        token_R.copy_(drawn_R)
        position_R.add_(1).clamp_(max=top)
        count_R.add_(1).clamp_(max=top)

    def _take(self, first: int, tokens_KR: list[list[int]], logprobs_KR: list[list[float]]) -> None:
        """Tokens to their rows, from place `first` on. Those that ended leave what they fed for their next turn.

        The log-probabilities are also of places that write for nobody: what these leave may be no numbers, too.
        """
        self._spoilt |= not math.isfinite(sum(map(sum, logprobs_KR)))
        for place in range(first, len(self.rows)):
            row = self.rows[place]
            if row is None:
                continue
            for tokens, logprobs in zip(tokens_KR, logprobs_KR, strict=True):
                row.ids.append(tokens[place - first])
                row.logprobs.append(logprobs[place - first])
                if row.ids[-1] in self.stop_ids or len(row.ids) >= row.max_tokens:
                    break
            new = len(row.ids) - len(row.versions)
            row.versions += [self.version] * new
            self.tokens_sampled += new
            if row.ids[-1] in self.stop_ids or len(row.ids) >= row.max_tokens or row.abandoned:
                self.rows[place], row.over = None, True
                row.routes = self._routes_of(place, len(row.fed))
                self.places.ids[place] = row.fed if math.isfinite(sum(row.logprobs)) else []

    @torch.compiler.disable
    def _note_routes(self, layer: int, _router: nn.Module, _inputs: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
        if self._tokens is not None:
            self._tokens.keep_routes(layer, output[2])

    def _routes_of(self, place: int, count: int) -> Routes | None:
        if not self._routers:
            return None
        kept = [self.places.layers[NO_LAYER - layer][0][place, 0, :count] for layer in range(len(self._routers))]
        routes_TLK = torch.stack(kept, dim=1).cpu()
        _, layers, top = routes_TLK.shape
        return Routes.pack(layers, top, routes_TLK.numpy().tobytes())

    def _close_ranks(self, wholly: bool = False) -> None:
        """Rows that write to the first places. Not for each that ends: moving what it keeps has its price too."""
        held, size = len(self.rows), len(self.running)
        few = bucket(size) == bucket(held) if self.static else (held - size) * 8 < held
        if size == held or (size and few and not wholly):
            return
        self._clean()  # first: behind what moves in, a place stays as it is
        gaps = [place for place in range(size) if self.rows[place] is None]
        movers = [place for place in range(size, held) if self.rows[place] is not None]
        for gap, mover in zip(gaps, movers, strict=True):
            row = self.rows[gap] = self.rows[mover]
            assert row is not None
            self.places.ids[mover] = row.fed
        self.places.swap(gaps, movers)
        if gaps:
            for tensor in self._carried.tensors():
                tensor[gaps] = tensor[movers]
        self._carried.position_S[size:held] = self.places.length - 1
        del self.rows[size:]

    def _clean(self) -> None:
        """Places at which no row writes. A row without numbers that goes on says so again with its next token."""
        if self._spoilt:
            self._spoilt = False
            for place in range(self.places.count):
                if place >= len(self.rows) or self.rows[place] is None:
                    self.places.clean(place)
