"""Gathering sharded tensors, each whole on one rank, for publishing and checkpoints.

No rank has room for all tensors. So every tensor has a holder, and its rows are sent there directly from the ranks that
have them; of replicas, from the one that the holder belongs to. A round has one tensor for each holder: a rank never
holds more than one gathered tensor besides its own shards.

Left out: tensors that are cut by columns, which nothing here does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product, zip_longest

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

from offbook.train.optim.units import local


def assign_holders(tensors: Mapping[str, Tensor], bundles: Mapping[str, str], ranks: int) -> dict[str, int]:
    """The holder of each tensor, balanced by bytes; a bundle has one holder. Every rank computes the same."""
    sizes: dict[str, int] = {}
    for name, tensor in tensors.items():
        sizes[bundles[name]] = sizes.get(bundles[name], 0) + tensor.numel() * tensor.element_size()
    load, holder = [0] * ranks, {}
    for bundle in sorted(sizes, key=lambda bundle: -sizes[bundle]):
        holder[bundle] = min(range(ranks), key=load.__getitem__)
        load[holder[bundle]] += sizes[bundle]
    return {name: holder[bundles[name]] for name in tensors}


def gathered(tensors: Mapping[str, Tensor], holders: Mapping[str, int]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that this rank holds, on the device. All ranks have to iterate to the end. Drop each tensor
    before asking for the next: a loop variable would keep it until then."""
    queues: dict[int, list[str]] = {}
    for name in tensors:
        queues.setdefault(holders[name], []).append(name)
    for names in zip_longest(*queues.values()):
        mine = _round({name: tensors[name] for name in names if name}, holders)
        while mine:
            yield mine.pop()


def _round(tensors: Mapping[str, Tensor], holders: Mapping[str, int]) -> list[tuple[str, Tensor]]:
    """A tensor for each holder; this rank's, if it has one."""
    works: list[dist.P2POp] = []
    found = [(name, _begin(tensor.detach(), holders[name], works)) for name, tensor in tensors.items()]
    for sent in dist.batch_isend_irecv(works) if works else ():
        sent.wait()
    return [(name, whole) for name, whole in found if whole is not None]


def _begin(tensor: Tensor, holder: int, works: list[dist.P2POp]) -> Tensor | None:
    """What this rank has to do for one tensor. Returns the room for all of it, on its holder."""
    rank, own = dist.get_rank() if dist.is_initialized() else 0, local(tensor)
    if not isinstance(tensor, DTensor):
        return own if rank == holder else None
    rows = _rows(tensor, holder)
    if rank != holder:
        if rank in rows:
            works.append(dist.P2POp(dist.isend, own.contiguous(), holder))
        return None
    whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=own.device)
    for sender, part in rows.items():
        if sender == rank:
            whole[part].copy_(own)
        else:
            works.append(dist.P2POp(dist.irecv, whole[part], sender))
    return whole


def _rows(tensor: DTensor, holder: int) -> dict[int, slice]:
    """By rank, of those that have some which the holder needs."""
    grid, placements = tensor.device_mesh.mesh, tensor.placements
    home = (grid == holder).nonzero()[0].tolist()
    choices = [
        [at] if one.is_replicate() else range(size) for at, one, size in zip(home, placements, grid.shape, strict=True)
    ]
    found = {}
    for place in product(*choices):
        shape, start = _compute_local_shape_and_global_offset(tensor.shape, grid.shape, list(place), placements)
        assert shape[1:] == tensor.shape[1:], "cut by columns"
        if shape[0]:
            found[int(grid[place])] = slice(start[0], start[0] + shape[0])
    return found
