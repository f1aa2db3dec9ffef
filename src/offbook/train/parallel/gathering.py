"""Tensors that lie over ranks, each put together on one of them.

Who publishes or keeps weights needs them whole, and no rank has room for all. So every tensor has a holder, and its
rows travel there straight from whoever has them; of replicas, from the copy that the holder is a part of. A round has
one tensor for each holder: a rank never has more than one beside its own parts, however large the model is.

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


def dealt_out(tensors: Mapping[str, Tensor], bundles: Mapping[str, str], ranks: int) -> dict[str, int]:
    """The holder of each, by bytes; those of one bundle have the same. All ranks deal alike."""
    sizes: dict[str, int] = {}
    for name, tensor in tensors.items():
        sizes[bundles[name]] = sizes.get(bundles[name], 0) + tensor.numel() * tensor.element_size()
    load, holder = [0] * ranks, {}
    for bundle in sorted(sizes, key=lambda bundle: -sizes[bundle]):
        holder[bundle] = min(range(ranks), key=load.__getitem__)
        load[holder[bundle]] += sizes[bundle]
    return {name: holder[bundles[name]] for name in tensors}


def gathered(tensors: Mapping[str, Tensor], holders: Mapping[str, int]) -> Iterator[tuple[str, Tensor]]:
    """Those that this rank holds, one by one, on the device. All ranks have to go through it, to its end. Whoever does
    drops each before asking for the next: a loop's variable would keep it until then."""
    hands: dict[int, list[str]] = {}
    for name in tensors:
        hands.setdefault(holders[name], []).append(name)
    for names in zip_longest(*hands.values()):
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
    rank, own = dist.get_rank(), local(tensor)
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
