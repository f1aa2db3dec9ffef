"""Short readings: what a turn adds to a few rows, in few sizes, each with padding.

A forward is some hundred calls of the host's, whatever it is over. An agent's turn adds a tool's answer to one row or a
few, and for so little those calls are what it costs; from a CUDA graph they are one. Padding is the row's last token
again, whole rows of it the first row's: it goes to where a place is scratch, and no place gets numbers of another.
Axes: R rows, W tokens of each, T all of these, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from offbook.engine.attention import MASK_ENTRIES, NextTokens
from offbook.engine.graphs import Graphs
from offbook.engine.kv_slots import Places, bucket
from offbook.engine.prefill import Fill

ROWS, TOKENS = (2, 8), (64, 256)
FEWEST_KEYS = 512  # that are looked at: fewer cost a GPU as much, and each size is a graph more
WORK = 2**39  # tokens x parameters of one at most: some milliseconds of a GPU, where its calls take the host 30
# Of a flat row its ids and those behind them, positions, and the tokens behind which logits and states are wanted.
Forward = Callable[[Tensor, Tensor, NextTokens, Tensor], tuple[Tensor, Tensor]]
Size = tuple[int, int, int]  # rows, tokens, keys


class ShortReadings:
    def __init__(self, model: PreTrainedModel, places: Places, graphs: Graphs, forward: Forward, again: int):
        """`again`: of the tokens that are there, how many are read once more."""
        config = model.config.get_text_config()
        self.places, self.graphs, self.forward, self.dtype = places, graphs, forward, model.dtype
        self.again = again
        self.shared = config.num_attention_heads // (getattr(config, "num_key_value_heads", None) or 1)
        self.parameters = sum(one.numel() for one in model.parameters())
        self.given = torch.zeros((3 * TOKENS[-1] + 2) * ROWS[-1], dtype=torch.long, device=model.device)
        self.found: tuple[Tensor, ...] = ()  # logits and states of each row

    def size_of(self, fills: list[Fill]) -> Size | None:
        """The least that these fit in, if there is one that costs little."""
        most = max((len(fill.ids) - fill.start(self.again) for fill in fills), default=0)
        if not 0 < most <= TOKENS[-1] or len(fills) > ROWS[-1]:
            return None
        rows = next(rows for rows in ROWS if rows >= len(fills))
        width = next(width for width in TOKENS if width >= most)
        if rows * width * self.parameters > WORK:
            return None
        if self.places.own_keys:
            return rows, width, self.places.length
        length = min(bucket(max(FEWEST_KEYS, *(len(fill.ids) for fill in fills))), self.places.length)
        return (rows, width, length) if rows * width * length * self.shared <= MASK_ENTRIES else None

    def read(self, fills: list[Fill], size: Size) -> tuple[Tensor, Tensor]:
        """Logits and states behind the last token of each."""
        rows, width, _ = size
        top, spare = self.places.length - 1, rows - len(fills)
        ids, following, positions, last = list[int](), list[int](), list[int](), list[int]()
        for fill in fills:
            start = fill.start(self.again)
            filler = width - (len(fill.ids) - start)
            last.append(len(ids) + width - filler - 1)
            ids += [*fill.ids[start:], *[fill.ids[-1]] * filler]
            following += [*fill.ids[start + 1 :], *[0] * (filler + 1)]  # 0: not known yet
            positions += [*range(start, len(fill.ids)), *[top] * filler]
        ids += [fills[0].ids[-1]] * (spare * width)
        following += [0] * (spare * width)
        positions += [top] * (spare * width)
        places = [*(fill.place for fill in fills), *[fills[0].place] * spare]
        given = torch.tensor([*ids, *following, *positions, *places, *last, *[0] * spare])
        self.given[: len(given)].copy_(given)
        self.graphs.run(size, self._run)
        logits_RV, hidden_RD = (found[: len(fills)].clone() for found in self.found)
        return logits_RV, hidden_RD

    def _run(self, rows: int, width: int, length: int) -> None:
        count = rows * width
        both_X, position_T, place_R, last_R, _ = self.given.split(
            [2 * count, count, rows, rows, len(self.given) - 3 * count - 2 * rows]
        )
        tokens = NextTokens(self.places, position_T.view(rows, width), length, self.dtype, place_R)
        found = self.forward(both_X.view(2, count), position_T[None], tokens, last_R)
        if not self.found:  # the first time, which no graph is captured from
            self.found = tuple(each.new_zeros(ROWS[-1], each.shape[1]) for each in found)
        for kept, new in zip(self.found, found, strict=True):
            kept[:rows].copy_(new)
