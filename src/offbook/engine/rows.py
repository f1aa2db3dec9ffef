"""Messages in the making, and what a step finds and leaves of them.

Axes: S places, L tokens of one, W tokens that a step with drafts reads, D width.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from offbook.engine.speculate import Drafting
from offbook.types import Routes


@dataclass(slots=True, eq=False)
class Row:
    """A message in the making."""

    owner: Hashable  # for whom keys and values are kept
    prompt_ids: list[int]
    max_tokens: int
    uniforms: Tensor
    draws: Tensor | None = None  # [2, tokens]: with a draft head, the random numbers of its drafts and of their fate
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    abandoned: bool = False  # nobody waits any more
    over: bool = False
    routes: Routes | None = None  # of the first tokens, as far as older weights or earlier messages have read them

    @property
    def need(self) -> int:
        return len(self.prompt_ids) + max(1, self.max_tokens)  # one is drawn in any case

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
    draft_SL: Tensor  # from here on of no size without a draft head
    accept_SL: Tensor
    window_SW: Tensor  # what the last step added, and the states before each of these tokens, for the head to read
    hidden_SWD: Tensor
    back_S: Tensor  # which of the window is the last

    @classmethod
    def empty(cls, count: int, length: int, device: torch.device, drafting: Drafting | None) -> Carried:
        token_S, position_S, count_S, back_S = torch.zeros(4, count, dtype=torch.long, device=device)
        uniform_SL = torch.zeros(count, length, device=device)
        width, wide, drawn = (drafting.count + 1, drafting.width, length) if drafting else (0, 0, 0)
        draft_SL, accept_SL = torch.zeros(2, count, drawn, device=device)
        window_SW = torch.zeros(count, width, dtype=torch.long, device=device)
        hidden_SWD = torch.zeros(count, width, wide, dtype=drafting.dtype if drafting else None, device=device)
        random = uniform_SL, draft_SL, accept_SL
        return cls(token_S, position_S.add_(length - 1), count_S, *random, window_SW, hidden_SWD, back_S)

    def tensors(self) -> tuple[Tensor, ...]:
        random = self.uniform_SL, self.draft_SL, self.accept_SL
        return self.token_S, self.position_S, self.count_S, *random, self.window_SW, self.hidden_SWD, self.back_S

    def take_over(self, old: Carried, busy: int) -> None:
        for mine, theirs in zip(self.tensors(), old.tensors(), strict=True):
            upto = [slice(busy), *(slice(min(pair)) for pair in zip(mine.shape[1:], theirs.shape[1:], strict=True))]
            mine[tuple(upto)] = theirs[tuple(upto)]
