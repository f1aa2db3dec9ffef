"""Work on tensors that stay where they are, in a few sizes: on a GPU each size is a CUDA graph."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

log = logging.getLogger(__name__)


class Graphs:
    """Nothing of the work may depend on a value of a tensor, and what it gives has to lie in the same memory."""

    def __init__(self, on: bool):
        self.on = on
        self._refused: set[tuple[int, ...]] = set()  # sizes that cannot be captured
        self.forget()

    def forget(self) -> None:
        """The tensors have moved."""
        self._pool = torch.cuda.graph_pool_handle() if self.on else None
        self._captured: dict[tuple[int, ...], torch.cuda.CUDAGraph | None] = {}

    def run(self, size: tuple[int, ...], work: Callable[..., None]) -> None:
        """A size that comes a second time is captured: the first time was the warm-up that a capture needs."""
        if not self.on or size in self._refused or size not in self._captured:
            self._captured[size] = None
            work(*size)
            return
        graph = self._captured[size]
        if graph is None:
            graph = self._captured[size] = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                    work(*size)
            except RuntimeError as error:  # some models ask the device for numbers on their way
                log.warning("steps of the size %s run without a CUDA graph: %s", size, str(error).splitlines()[0])
                self._refused.add(size)
                work(*size)
                return
        graph.replay()
