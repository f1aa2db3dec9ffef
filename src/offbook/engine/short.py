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
from offbook.engine.places import Places, bucket
from offbook.engine.prefill import Fill

ROWS, TOKENS = (2, 8), (64, 256)
FEWEST_KEYS = 512  # that are looked at: fewer cost a GPU as much, and each size is a graph more
WORK = 2**39  # tokens x parameters of one at most: some milliseconds of a GPU, where its calls take the host 30
Forward = Callable[[Tensor, Tensor, NextTokens, Tensor], Tensor]  # flat ids and positions, and whose logits are wanted
Size = tuple[int, int, int]  # rows, tokens, keys


class ShortReadings:
    def __init__(self, model: PreTrainedModel, places: Places, graphs: Graphs, forward: Forward):
        config = model.config.get_text_config()
        self.places, self.graphs, self.forward, self.dtype = places, graphs, forward, model.dtype
        self.shared = config.num_attention_heads // (getattr(config, "num_key_value_heads", None) or 1)
        self.parameters = sum(one.numel() for one in model.parameters())
        self.given = torch.zeros(2 * (TOKENS[-1] + 1) * ROWS[-1], dtype=torch.long, device=model.device)
        self.logits_RV = torch.empty(0, 0)

    def size_of(self, fills: list[Fill]) -> Size | None:
        """The least that these fit in, if there is one that costs little."""
        most = max((fill.new for fill in fills), default=0)
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

    def read(self, fills: list[Fill], size: Size) -> Tensor:
        """The logits behind the last token of each."""
        rows, width, _ = size
        top, spare = self.places.length - 1, rows - len(fills)
        ids, positions = [], []
        for fill in fills:
            ids += [*fill.ids[fill.shared :], *[fill.ids[-1]] * (width - fill.new)]
            positions += [*range(fill.shared, len(fill.ids)), *[top] * (width - fill.new)]
        ids += [fills[0].ids[-1]] * (spare * width)
        positions += [top] * (spare * width)
        places = [*(fill.place for fill in fills), *[fills[0].place] * spare]
        last = [*(number * width + fill.new - 1 for number, fill in enumerate(fills)), *[0] * spare]
        given = torch.tensor([*ids, *positions, *places, *last])
        self.given[: len(given)].copy_(given)
        self.graphs.run(size, self._run)
        return self.logits_RV[: len(fills)].clone()

    def _run(self, rows: int, width: int, length: int) -> None:
        count = rows * width
        ids_T, position_T, place_R, last_R, _ = self.given.split(
            [count, count, rows, rows, len(self.given) - 2 * (count + rows)]
        )
        tokens = NextTokens(self.places, position_T.view(rows, width), length, self.dtype, place_R)
        logits_RV = self.forward(ids_T[None], position_T[None], tokens, last_R)
        if not len(self.logits_RV):  # the first time, which no graph is captured from
            self.logits_RV = logits_RV.new_zeros(ROWS[-1], logits_RV.shape[1])
        self.logits_RV[:rows].copy_(logits_RV)
