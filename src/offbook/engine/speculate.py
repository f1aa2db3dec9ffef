"""Speculative decoding: a draft head writes a few tokens ahead, the model reads them all at once, and rejection
sampling (offbook.engine.sampling.verify) keeps as many as leave the model's distribution exactly what it is.

The head's keys and values lie in the places of the rows, as one layer more, and move and are shared with the model's.
They are as good as the states that they are made of: those that a draft made of its own guesses are written again when
the model has read the tokens. Axes: R rows, K drafted tokens, W as many and one more, D width, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from offbook.core.draft import DraftHead
from offbook.core.output import output_of
from offbook.engine.attention import NewTokens, NextTokens
from offbook.engine.kv_slots import Places
from offbook.engine.sampling import draw, probabilities


class Drafted(NamedTuple):
    token_RK: Tensor
    q_RKV: Tensor  # the distributions that they were drawn from


class Drafting:
    """A head that drafts `count` tokens per step, and what became of them: how often a draft of each depth was looked
    at, and how often it was kept."""

    def __init__(self, model: PreTrainedModel, head: DraftHead, count: int):
        self.model, self.head, self.count = model, head, count
        self.width, self.dtype = head.config.hidden_size, model.dtype
        self.output = output_of(model)
        self.looked_at, self.kept = [0] * count, [0] * count

    def install(self, fused: bool) -> None:
        """The head attends as the model does, and its layer is compiled where the model's are: it runs for every token
        that is drafted, in kernels so small that their number is what they cost."""
        self.head.config._attn_implementation = self.model.config._attn_implementation
        for layer in self.head.layers if fused else ():
            layer.compile(dynamic=True)

    def note(self, kept: int) -> None:
        """Of one row and step. None is looked at behind one that was not kept."""
        for depth in range(min(kept + 1, self.count)):
            self.looked_at[depth] += 1
            self.kept[depth] += depth < kept

    def read(
        self, following_1T: Tensor, hidden_1TD: Tensor, position_1T: Tensor, tokens: NewTokens | NextTokens
    ) -> None:
        """A prompt: states of its tokens, and the token behind each."""
        self._head(following_1T, hidden_1TD, position_1T, tokens)

    def draft(
        self,
        window_RW: Tensor,
        hidden_RWD: Tensor,
        back_R: Tensor,
        position_R: Tensor,
        uniform_RK: Tensor,
        places: Places,
        length: int,
        temperature: float,
    ) -> Drafted:
        """First it reads what the last step added, the last of which is at `back_R` of the window and goes to
        `position_R`: what lies behind that is written over before anyone looks at it."""
        top = places.length - 1
        along_W = torch.arange(window_RW.shape[1], device=window_RW.device)
        position_RW = ((position_R - 1 - back_R)[:, None] + along_W).clamp(max=top)
        position_RW = torch.where(position_R[:, None] < top, position_RW, top)  # nobody writes there
        tokens = NextTokens(places, position_RW, length, self.dtype)
        state_RWD = self._head(window_RW, hidden_RWD, position_RW, tokens)
        state_R1D = state_RWD.take_along_dim(back_R[:, None, None], 1)
        drafted, distributions = [], []
        for number in range(self.count):
            q_RV = probabilities(self.output(state_R1D[:, 0]), temperature)
            token_R, _ = draw(q_RV, uniform_RK[:, number])
            drafted.append(token_R)
            distributions.append(q_RV)
            if number + 1 < self.count:
                position_R1 = (position_R + number).clamp(max=top)[:, None]
                tokens = NextTokens(places, position_R1, length, self.dtype)
                state_R1D = self._head(token_R[:, None], state_R1D, position_R1, tokens)
        return Drafted(torch.stack(drafted, 1), torch.stack(distributions, 1))

    def _head(self, ids: Tensor, hidden: Tensor, position: Tensor, tokens: NewTokens | NextTokens) -> Tensor:
        embedded = self.model.get_input_embeddings()(ids)
        state: Tensor = self.head(embedded, hidden, position, tokens=tokens)
        return state
