"""Which experts vLLM sent a rollout's tokens to, kept as the local engine keeps them.

vLLM returns an array [tokens, layers, experts of a token]: a row for each token that a request has read, from the first
that was asked for, and so all but the last that it sampled; of all layers, with zeros for those that have no experts.

A token keeps the experts of the forward that sampled the one behind it, also where newer weights read it again: its
log-probability is not of those. So a message asks only for tokens beyond what the messages before it have read.
"""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import numpy.typing as npt

from offbook.core.routers import Mixture
from offbook.types import Routes


class Trail:
    """The experts of one rollout. After an invalid answer it records no more, because routes have no gaps."""

    def __init__(self, mixture: Mixture | None):
        self._mixture = mixture
        self._ids: list[int] = []
        self._parts: list[npt.NDArray[np.int16]] = []

    def first_unknown(self, prompt_ids: list[int]) -> int | None:
        """The first token to ask for; None for a dense model. A prompt with another beginning starts over."""
        if prompt_ids[: len(self._ids)] != self._ids:
            self._ids = []
            self._parts = []
        return None if self._mixture is None else max(0, len(self._ids) - 1)

    def add(self, prompt_ids: list[int], sampled: list[int], answer: bytes) -> None:
        """Of a request; ValueError if its answer cannot be right. One that was ended before it sampled has none."""
        first = self.first_unknown(prompt_ids)
        if self._mixture is None or first is None or not sampled:
            return
        mixture = self._mixture
        self._mixture = None
        tokens = len(prompt_ids) + len(sampled) - 1 - first
        if not answer:
            raise ValueError("none came; it gives them on a GPU, with --enable-return-routed-experts")
        shape = tokens, mixture.num_layers, mixture.top
        experts_TLK: npt.NDArray[Any] = np.load(io.BytesIO(answer), allow_pickle=False)
        if experts_TLK.shape != shape or experts_TLK.dtype.kind not in "iu":
            raise ValueError(f"{experts_TLK.dtype} {experts_TLK.shape} came and not whole numbers {shape}")
        self._parts.append(experts_TLK[:, mixture.layers].astype(np.int16))
        self._ids = [*prompt_ids, *sampled]
        self._mixture = mixture

    @property
    def routes(self) -> Routes | None:
        if self._mixture is None or not self._parts:
            return None
        ids = b"".join(part.tobytes() for part in self._parts)
        return Routes.pack(len(self._mixture.layers), self._mixture.top, ids)
