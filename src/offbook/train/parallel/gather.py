"""Gathering sharded tensors, each whole on one rank, for publishing and checkpoints.

No rank has room for all tensors. So every tensor has a holder, and they are gathered one after the other: all ranks
hold one whole tensor at a time, and only its holder keeps it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


def assign_holders(tensors: Mapping[str, Tensor], bundles: Mapping[str, str], ranks: int) -> dict[str, int]:
    """The holder of each tensor, balanced by bytes; a bundle has one holder. Every rank computes the same."""
    sizes: dict[str, int] = {}
    for name, tensor in tensors.items():
        sizes[bundles[name]] = sizes.get(bundles[name], 0) + tensor.numel() * tensor.element_size()
    load = [0] * ranks
    holder = {}
    for bundle in sorted(sizes, key=lambda bundle: -sizes[bundle]):
        holder[bundle] = load.index(min(load))
        load[holder[bundle]] += sizes[bundle]
    return {name: holder[bundles[name]] for name in tensors}


def gathered(tensors: Mapping[str, Tensor], holders: Mapping[str, int]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that this rank holds, on the device. All ranks have to iterate to the end."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    for name, tensor in tensors.items():
        whole = tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()
        if holders[name] == rank:
            yield name, whole
        del whole  # before the next is put together
