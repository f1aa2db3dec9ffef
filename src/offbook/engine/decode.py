"""Many rows written side by side on one model, their keys and values kept from turn to turn.

A step is one forward for one token of every row and the drawing of the next one, on tensors that stay where they are:
on a GPU it is captured as a CUDA graph for each size it comes in, and the host looks at the tokens every few steps.
What a row writes behind its end until then is thrown away. Elsewhere the same step runs as it is, a look after each.

With a draft head a step reads one token of every row and those that the head has drafted behind it, and keeps as many
as rejection sampling lets it: offbook.engine.speculate.

All of it belongs to the engine's one thread. Axes: S places, R rows that write, K steps, W tokens that one reads, V
vocabulary.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from itertools import groupby
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from offbook.core.routers import routers_of
from offbook.engine.attention import NewTokens, NextTokens, Part
from offbook.engine.graphs import Graphs
from offbook.engine.kv_slots import NO_LAYER, SHORTEST, Places, bucket, install, unfused
from offbook.engine.prefill import Fill, common_prefix, plan_fills
from offbook.engine.rows import Carried, Row
from offbook.engine.sampling import sample, verify
from offbook.engine.short import FEWEST_KEYS, ShortReadings
from offbook.engine.speculate import Drafting
from offbook.types import Routes

PREFILL_TOKENS = 16_384  # in one forward
FUSED_TOKENS = 4_096  # fewer are read by plain layers: to call compiled ones takes the host longer
STEPS = 8  # between two looks, where looking is dear; tokens, where a step may write several
FEWEST_ROWS = 8  # of a static step: fewer cost a GPU as much, and each size is a graph more
T = TypeVar("T")
Table = list[list[list[T]]]
Ends = dict[int, tuple[Tensor, Tensor]]  # by place: the logits and the states behind its last token
log = logging.getLogger(__name__)


class Decoder:
    """`static`: steps and short readings come in few sizes, with several steps between two looks.

    `version` is that of the weights now in the model.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        stop_ids: frozenset[int],
        temperature: float,
        budget: int,
        static: bool,
        drafting: Drafting | None = None,
    ):
        self.model, self.stop_ids, self.temperature, self.static = model, stop_ids, temperature, static
        self.longest = 0  # tokens that a row may need, as far as that is known
        self.graphs = Graphs(static and model.device.type == "cuda")
        fused = self.graphs.on and hasattr(model.base_model, "layers")
        install(model, fused)
        self.drafting = drafting
        self._again = 1 if drafting else 0  # what a head keeps of a token depends on the next one
        self._hidden = torch.empty(0)  # the last states of the last forward, for a head
        if drafting:
            drafting.install(fused)
            model.base_model.register_forward_hook(self._note_hidden)
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
        self._carried = Carried.empty(0, 0, self.model.device, self.drafting)
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
        self._clean()
        self._most = max(self._most, wished)
        count, length = len(self.running) + len(rows), max(row.need for row in [*self.running, *rows])
        if not self.places.has_room(count, length):
            if self.static and max(count, wished) * self.places.rounded(self.longest) <= self.places.budget:
                length = max(length, self.longest)  # at once: graphs know where places are, and are lost when they move
            self._close_ranks(wholly=True)  # there may be fewer places afterwards: the first ones stay
            self.places.arrange(count, wished, length)
            self._allot()
        busy = {place for place, row in enumerate(self.rows) if row is not None}
        by_place = dict(zip(self.places.seat([row.owner for row in rows], busy), rows, strict=True))
        places = sorted(by_place)
        seated = [by_place[place] for place in places]
        had_room = not self.tokens_reread
        logits_RV = self._read({place: row.prompt_ids for place, row in by_place.items()})
        if had_room and self.tokens_reread:
            longest = max(self.longest, *(row.need for row in [*self.running, *rows]))
            log.warning(
                "the engine holds keys and values of %d tokens, too few for %d rollouts at once: what they lose is read"
                " again (reread_tokens in metrics.jsonl); raise engine.kv_tokens to %d",
                *(self.places.budget, self._most, self._most * bucket(max(longest, SHORTEST))),
            )
        carried, device = self._carried, self.model.device
        new = torch.tensor(places, device=device)
        uniform_RL = pad_sequence([row.uniforms for row in seated], batch_first=True)
        carried.uniform_SL[new, : uniform_RL.shape[1]] = uniform_RL.to(device)
        token_R, logprob_R = sample(logits_RV, carried.uniform_SL[new, 0], self.temperature)
        carried.token_S[new], carried.count_S[new] = token_R, 1
        carried.position_S[new] = torch.tensor([len(row.prompt_ids) for row in seated], device=device)
        if self.drafting:
            draws = [row.draws.T for row in seated if row.draws is not None]
            draws_RL2 = pad_sequence(draws, batch_first=True).to(device)
            for drawn_SL, draws_RL in zip((carried.draft_SL, carried.accept_SL), draws_RL2.unbind(2), strict=True):
                drawn_SL[new, : draws_RL.shape[1]] = draws_RL
            carried.window_SW[new, 0] = token_R
        self.rows += [None] * (places[-1] + 1 - len(self.rows))
        for place, row in by_place.items():
            self.rows[place] = row
        self._take(places, [token_R[:, None].tolist()], [logprob_R[:, None].tolist()], [[1] * len(seated)])

    @torch.inference_mode()
    def step(self) -> None:
        """One token more for every row, or several."""
        self._close_ranks()
        if not self.rows:
            return
        running, held, width = self.running, len(self.rows), self._token_KSW.shape[2]
        left = max(row.max_tokens - len(row.ids) for row in running)
        steps = min(-(-STEPS // width), left) if self.static else 1  # what is written behind an end is thrown away
        rows = min(_size(held), self.places.count) if self.static else held
        length = self._rounded(max(len(row.prompt_ids) + len(row.ids) for row in running) + steps * width)
        self._number.zero_()
        for _ in range(steps):
            self.graphs.run((rows, length), self._step)
        tokens, logprobs = self._token_KSW[:steps, :held].tolist(), self._logprob_KSW[:steps, :rows].tolist()
        self._take(range(held), tokens, logprobs, self._new_KS[:steps, :held].tolist())

    @torch.inference_mode()
    def renew(self, version: int) -> None:
        """After new weights: what is kept was computed by the old ones. Rows that write have theirs computed again, so
        that each of their tokens has the probability that the weights of its version give it after all before it."""
        self.version = version
        self._close_ranks(wholly=True)  # first: whoever moves takes along what its place has
        self.places.ids = [[] for _ in range(self.places.count)]
        self.places.lost.clear()
        if self.rows:
            for place, row in enumerate(self.running):
                row.routes = self._routes_of(place, row)
            self._read({place: row.fed for place, row in enumerate(self.running)})
            if self.drafting:
                self._carried.window_SW[:, 0] = self._carried.token_S

    def _allot(self) -> None:
        count, length, device = self.places.count, self.places.length, self.model.device
        carried = Carried.empty(count, length, device, self.drafting)
        if self.rows:
            carried.take_over(self._carried, len(self.rows))
        self._carried = carried
        width = self.drafting.count + 1 if self.drafting else 1
        self._token_KSW = torch.zeros(STEPS, count, width, dtype=torch.long, device=device)
        self._logprob_KSW = torch.zeros(STEPS, count, width, device=device)
        self._new_KS = torch.ones(STEPS, count, dtype=torch.long, device=device)  # how many of the W
        self._number = torch.zeros(1, dtype=torch.long, device=device)  # of the step since the last look
        self.graphs.forget()
        self._short = ShortReadings(self.model, self.places, self.graphs, self._ends, self._again)

    def _rounded(self, length: int) -> int:
        """Keys that a step looks at: all, where each row reads its own alone; else, where each size is a graph, eight
        from a power of two to the next."""
        if self.places.own_keys:
            return self.places.length
        size = max(FEWEST_KEYS, (1 << length.bit_length()) // 16) if self.static else 32
        return min(-(-length // size) * size, self.places.length)

    def _read(self, wanted: dict[int, list[int]]) -> Tensor:
        """Ids to places. Returns the logits behind the last token of each, in the order of the places."""
        ends: Ends = {}
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
        places = sorted(wanted)
        if self.drafting:
            self._carried.hidden_SWD[places, 0] = torch.stack([ends[place][1] for place in places])
            self._carried.back_S[places] = 0
        return torch.stack([ends[place][0] for place in places])

    def _compute(self, fills: list[Fill], ends: Ends) -> None:
        """Prefill, in forwards of many rows' tokens side by side."""
        if self.static and (size := self._short.size_of(fills)):
            logits_RV, hidden_RD = self._short.read(fills, size)
            ends.update({fill.place: (logits_RV[row], hidden_RD[row]) for row, fill in enumerate(fills)})
            self.tokens_prefilled += sum(fill.new for fill in fills)
            return
        ids: list[int] = []
        following: list[int] = []
        parts: list[Part] = []
        for fill in fills:
            for start in range(fill.start(self._again), len(fill.ids), PREFILL_TOKENS):
                new = fill.ids[start : start + PREFILL_TOKENS]
                if len(ids) + len(new) > PREFILL_TOKENS:
                    self._forward(ids, following, parts, ends)
                    ids, following, parts = [], [], []
                parts.append(Part(fill.place, start, len(ids), len(ids) + len(new)))
                ids += new
                following += [*fill.ids[start + 1 : start + 1 + len(new)], 0][: len(new)]  # 0: not known yet
        if ids:
            self._forward(ids, following, parts, ends)

    def _forward(self, ids: list[int], following: list[int], parts: list[Part], ends: Ends) -> None:
        """The last logits and states of every part go to `ends`; of a row in several parts those of the last stay."""
        device = self.model.device
        tokens = NewTokens(self.places, parts, device)
        last_P = torch.tensor([part.end - 1 for part in parts], device=device)
        both_2T = torch.tensor([ids, following], device=device)
        with nullcontext() if len(ids) >= FUSED_TOKENS else unfused(self.model):
            logits_PV, hidden_PD = self._ends(both_2T, tokens.position_T[None], tokens, last_P)
        for part, logits_V, hidden_D in zip(parts, logits_PV, hidden_PD, strict=True):
            ends[part.place] = logits_V, hidden_D
        self.tokens_prefilled += len(ids)

    def _ends(
        self, both_2T: Tensor, position_1T: Tensor, tokens: NewTokens | NextTokens, last_P: Tensor
    ) -> tuple[Tensor, Tensor]:
        """A flat row and the token behind each of its own, by model and head: logits and, with a head, states behind
        some of them."""
        logits_PV = self._run(both_2T[:1], position_1T, tokens, logits_to_keep=last_P)[0]
        if sum(layer >= 0 for layer in self.places.layers) < self.model.config.get_text_config().num_hidden_layers:
            raise RuntimeError(f"{type(self.model).__name__} hides its keys and values from the local engine")
        if not self.drafting:
            return logits_PV, logits_PV[:, :0]
        hidden_1TD = self._hidden
        self.drafting.read(both_2T[1:], hidden_1TD, position_1T, tokens)
        return logits_PV, hidden_1TD[0, last_P]

    def _step(self, rows: int, length: int) -> None:
        """Nothing here depends on a value of a tensor, and nothing is left behind but in the same memory."""
        carried = self._carried
        token_R, position_R, count_R = (tensor[:rows] for tensor in carried.tensors()[:3])
        if not self.drafting:
            logits_RV = self._next(token_R[:, None], position_R[:, None], length)[:, -1]
            uniform_R = carried.uniform_SL[:rows].gather(1, count_R[:, None])[:, 0]
            drawn_R, logprob_R = sample(logits_RV, uniform_R, self.temperature)
            self._keep(rows, drawn_R[:, None], logprob_R[:, None], torch.ones_like(count_R))
            return
        top = self.places.length - 1
        along_W = torch.arange(self.drafting.count + 1, device=token_R.device)
        of_RW = (count_R[:, None] + along_W).clamp(max=top)  # of the tokens to come, in their messages
        random = (drawn_SL[:rows].gather(1, of_RW) for drawn_SL in (carried.draft_SL, carried.accept_SL))
        draft_RK, accept_RK = (drawn_RW[:, :-1] for drawn_RW in random)
        window = carried.window_SW[:rows], carried.hidden_SWD[:rows], carried.back_S[:rows]
        drafted = self.drafting.draft(*window, position_R, draft_RK, self.places, length, self.temperature)
        ids_RW = torch.cat([token_R[:, None], drafted.token_RK], dim=1)
        logits_RWV = self._next(ids_RW, (position_R[:, None] + along_W).clamp(max=top), length)
        uniform_RW = carried.uniform_SL[:rows].gather(1, of_RW)
        fate = verify(logits_RWV, drafted.q_RKV, drafted.token_RK, accept_RK, uniform_RW, self.temperature)
        for kept, new in zip(window, (fate.token_RW, self._hidden, fate.kept_R), strict=True):
            kept.copy_(new)
        self._keep(rows, fate.token_RW, fate.logprob_RW, fate.kept_R + 1)

    def _next(self, ids_RW: Tensor, position_RW: Tensor, length: int) -> Tensor:
        return self._run(ids_RW, position_RW, NextTokens(self.places, position_RW, length, self._dtype))

    def _run(self, ids: Tensor, position: Tensor, tokens: NewTokens | NextTokens, **how: Any) -> Tensor:
        """Logits. The mask has four axes: it is taken as it is, and attention is told otherwise what is seen."""
        self._tokens, mask = tokens, ids.new_zeros(1, 1, 1, 1)
        told = {"attention_mask": mask, "use_cache": False, "tokens": tokens, **how}
        logits: Tensor = self.model(input_ids=ids, position_ids=position, **told).logits
        return logits

    def _keep(self, rows: int, token_RW: Tensor, logprob_RW: Tensor, new_R: Tensor) -> None:
        """What a step gave, until the host looks."""
        for kept, new in (
            (self._token_KSW, token_RW),
            (self._logprob_KSW, logprob_RW),
            (self._new_KS, new_R),
        ):
            kept[:, :rows].index_copy_(0, self._number, new[None])
        self._number += 1
        token_R, position_R, count_R = (tensor[:rows] for tensor in self._carried.tensors()[:3])
        token_R.copy_(token_RW.gather(1, new_R[:, None] - 1)[:, 0])
        for counted_R in (position_R, count_R):
            counted_R.add_(new_R).clamp_(max=self.places.length - 1)

    def _take(
        self, places: Sequence[int], tokens_KRW: Table[int], logprobs_KRW: Table[float], new_KR: list[list[int]]
    ) -> None:
        """Tokens to the rows of these places. Those that ended leave what they fed for their next turn.

        The log-probabilities are also of places that write for nobody: what these leave may be no numbers, too.
        """
        self._spoilt |= not math.isfinite(sum(sum(map(sum, logprobs)) for logprobs in logprobs_KRW))
        for at, place in enumerate(places):
            row = self.rows[place]
            if row is None:
                continue
            for tokens_RW, logprobs_RW, new_R in zip(tokens_KRW, logprobs_KRW, new_KR, strict=True):
                if self.drafting and row.ids:  # the first token was not drafted
                    self.drafting.note(new_R[at] - 1)
                for token, logprob in zip(tokens_RW[at][: new_R[at]], logprobs_RW[at], strict=False):
                    row.ids.append(token)
                    row.logprobs.append(logprob)
                    if self._is_whole(row):
                        break
                if self._is_whole(row):
                    break
            new = len(row.ids) - len(row.versions)
            row.versions += [self.version] * new
            self.tokens_sampled += new
            if self._is_whole(row) or row.abandoned:
                self.rows[place], row.over = None, True
                row.routes = self._routes_of(place, row)
                # Of what the last step added, the head has not read the states.
                sound = len(row.fed) - (self.drafting.count if self.drafting else 0)
                self.places.ids[place] = row.fed[: max(0, sound)] if math.isfinite(sum(row.logprobs)) else []

    def _is_whole(self, row: Row) -> bool:
        return row.ids[-1] in self.stop_ids or len(row.ids) >= row.max_tokens

    def _note_hidden(self, _base: nn.Module, _inputs: Any, output: Any) -> None:
        self._hidden = output.last_hidden_state

    @torch.compiler.disable
    def _note_routes(self, layer: int, _router: nn.Module, _inputs: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
        if self._tokens is not None:
            self._tokens.keep_routes(layer, output[2])

    def _routes_of(self, place: int, row: Row) -> Routes | None:
        """Of what it has fed. A token keeps those of the forward that sampled the one behind it."""
        if not self._routers:
            return None
        kept = [
            self.places.layers[NO_LAYER - layer][0][place, 0, : len(row.fed)] for layer in range(len(self._routers))
        ]
        routes_TLK = torch.stack(kept, dim=1).cpu()
        _, layers, top = routes_TLK.shape
        known = row.routes.unpack() if row.routes else b""
        return Routes.pack(layers, top, known + routes_TLK.numpy().tobytes()[len(known) :])

    def _close_ranks(self, wholly: bool = False) -> None:
        """Rows that write to the first places. Not for each that ends: moving what it keeps has its price too."""
        held, size = len(self.rows), len(self.running)
        few = _size(held) < 2 * _size(size) if self.static else (held - size) * 8 < held
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


def _size(rows: int) -> int:
    """Rows of a static step."""
    return bucket(max(rows, FEWEST_ROWS))
