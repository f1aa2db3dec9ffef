"""Long samples over ranks: each rank of a group runs some of a row's tokens, and gathers the keys and values of all.

A row is cut into twice as many chunks as there are ranks, and rank r takes the chunks r and 2 n - 1 - r: of a causal
mask everybody has as much then. Gathered keys are what branches read, too, so those need nothing more: every rank of
the group reads all of them. After the last layer the hidden states are gathered, and every rank of the group scores all
tokens at 1 / n of the loss; in the backward pass gradients are summed on their way back to whoever computed a token.

Left out: sharing the head's work and the branches among the group, which are small beside layers over a long row; a
kernel that is told where a chunk lies instead of given a mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import pad

from offbook.types import OffbookError


class Context:
    """Ranks that follow one another and have the same samples."""

    def __init__(self, size: int, device: str):
        world = dist.get_world_size()
        if world % size:
            raise OffbookError(f"{world} ranks are no groups of {size} that could share rows")
        self.size = size
        self.group = init_device_mesh(device, (world // size, size), mesh_dim_names=("data", "context")).get_group(1)
        self.rank = dist.get_rank(self.group)

    def filled(self, ids_1T: Tensor) -> Tensor:
        """To chunks of one length."""
        return pad(ids_1T, (0, -ids_1T.shape[1] % (2 * self.size)))

    def places(self, length: int, rank: int, device: torch.device) -> Tensor:
        """Of the tokens that a rank has."""
        chunks = torch.arange(length, device=device).view(2 * self.size, -1)
        return torch.cat([chunks[rank], chunks[-1 - rank]])

    def own(self, length: int, device: torch.device) -> Tensor:
        return self.places(length, self.rank, device)

    def gathered(self, own: Tensor, dim: int) -> Tensor:
        """What all ranks have, in the order of the row. Differentiable."""
        length = own.shape[dim] * self.size
        order = torch.cat([self.places(length, rank, own.device) for rank in range(self.size)])
        return _Gather.apply(own, dim, order, self.group)

    def chunks(self, length: int, device: torch.device) -> Iterator[tuple[int, Tensor]]:
        """Of this rank's two: up to which key of a row its queries see, and a mask of what each of them does."""
        size = length // (2 * self.size)
        for place in (self.rank, 2 * self.size - 1 - self.rank):
            upto = (place + 1) * size
            yield upto, torch.ones(size, upto, dtype=torch.bool, device=device).tril(upto - size)


class _Gather(torch.autograd.Function):
    """All-gather; back, a reduce-scatter."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, dim: int, order: Tensor, group: Any) -> Tensor:
        ctx.about = dim, order, group
        first = own.movedim(dim, 0).contiguous()
        out = first.new_empty(len(order), *first.shape[1:])
        dist.all_gather_into_tensor(out, first, group)
        return out[order.argsort()].movedim(0, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        dim, order, group = ctx.about
        first = gradients[0].movedim(dim, 0)[order].contiguous()
        out = first.new_empty(len(order) // dist.get_world_size(group), *first.shape[1:])
        dist.reduce_scatter_tensor(out, first, group=group)
        return out.movedim(0, dim), None, None, None
