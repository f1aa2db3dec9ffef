"""Units that lie on several ranks: each goes to one owner, is orthogonalised there, and comes back.

Every rank knows all shapes, so all of them make the same plan. A unit that one rank holds alone is its own. The others
go, the costliest first, to the rank with the least work. Tensors travel in rounds in which an owner gets no more units
than it has room for; on GPUs in bfloat16, and directions come back in float16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from offbook.train.optim.units import Block, local
from offbook.types import OffbookError


@dataclass(frozen=True, slots=True)
class Unit:
    parameter: Tensor
    rows: tuple[int, ...]  # that each rank of the group has of it
    own: tuple[slice, slice]  # rows and columns of this rank's part, in its part of the parameter
    owner: int = 0


@dataclass(frozen=True, slots=True)
class Exchange:
    """Units of one shape over one group of ranks, by owner."""

    block: Block
    group: Any
    units: list[Unit]

    def rounds(self, room: int) -> Iterator[Exchange]:
        """So that no owner has more than `room` units in a round. As many on every rank."""
        owners = range(dist.get_world_size(self.group))
        queues = [[unit for unit in self.units if unit.owner == owner] for owner in owners]
        for start in range(0, max(map(len, queues)), room):
            yield replace(self, units=[unit for queue in queues for unit in queue[start : start + room]])

    def to_owners(self, pieces: Sequence[Tensor]) -> Callable[[], Tensor]:
        """Send the pieces of all units. The result waits for the units [N, R, C] that are owned here."""
        arriving = self._travel(pieces, torch.bfloat16, is_back=False)
        mine = self._mine()
        like = local(self.units[0].parameter)

        def units() -> Tensor:
            by_rank = [
                part.view(-1, self.block[1]).split([unit.rows[rank] for unit in mine])
                for rank, part in enumerate(arriving())
            ]
            whole = [torch.cat(parts) for parts in zip(*by_rank, strict=True)]
            return torch.stack(whole).to(like.dtype) if whole else like.new_empty(0, *self.block)

        return units

    def to_holders(self, directions_NRC: Tensor) -> Callable[[], Sequence[Tensor]]:
        """Send the directions of the units that are owned here. The result waits for the pieces of all units."""
        cut = [direction_RC.split(unit.rows) for direction_RC, unit in zip(directions_NRC, self._mine(), strict=True)]
        pieces = [part for of_rank in zip(*cut, strict=True) for part in of_rank]
        arriving = self._travel(pieces, torch.float16, is_back=True)
        rows = [unit.rows[dist.get_rank(self.group)] for unit in self.units]
        return lambda: torch.cat(arriving()).view(-1, self.block[1]).split(rows)

    def _mine(self) -> list[Unit]:
        return [unit for unit in self.units if unit.owner == dist.get_rank(self.group)]

    def _travel(self, pieces: Sequence[Tensor], wire: torch.dtype, is_back: bool) -> Callable[[], Sequence[Tensor]]:
        """Pieces to owners, or back to holders. The result waits for those that come here, by rank."""
        ranks, width = range(dist.get_world_size(self.group)), self.block[1]
        to_owner = [0 for _ in ranks]
        for unit in self.units:
            to_owner[unit.owner] += unit.rows[dist.get_rank(self.group)] * width
        from_holder = [sum(unit.rows[rank] for unit in self._mine()) * width for rank in ranks]
        sent, received = (from_holder, to_owner) if is_back else (to_owner, from_holder)
        like = local(self.units[0].parameter)
        wire = wire if like.is_cuda else like.dtype
        flat = torch.cat([like.new_empty(0, dtype=wire), *(piece.to(wire).flatten() for piece in pieces)])
        got = like.new_empty(sum(received), dtype=wire)
        work = dist.all_to_all_single(got, flat, received, sent, self.group, async_op=True)

        def arrived() -> Sequence[Tensor]:
            work.wait()
            return got.split(received)

        return arrived


def plan_exchanges(parameters: Sequence[Tensor], blocks: Mapping[Tensor, Block]) -> list[Exchange]:
    """All units of parameters that are cut by rows, with their owners."""
    found: dict[tuple[Any, Block], list[Unit]] = {}
    load: dict[Any, list[int]] = {}
    for parameter in sorted(parameters, key=lambda one: -_cost(blocks[one])):  # stable: the same on all ranks
        group, block = _group(parameter), blocks[parameter]
        busy = load.setdefault(group, [0] * dist.get_world_size(group))
        for unit in _units_in(parameter, block):
            holders = [rank for rank, count in enumerate(unit.rows) if count]
            owner = holders[0] if len(holders) == 1 else busy.index(min(busy))
            busy[owner] += _cost(block)
            found.setdefault((group, block), []).append(replace(unit, owner=owner))
    return [
        Exchange(block, group, sorted(units, key=lambda unit: unit.owner)) for (group, block), units in found.items()
    ]


def holds_whole_units(parameter: Tensor, block: Block) -> bool:
    """Whether no unit lies on two ranks. The same answer on all of them."""
    if not isinstance(parameter, DTensor):
        return True
    cut = [placement for placement in parameter.placements if not placement.is_replicate()]
    is_by_rows = {getattr(placement, "dim", None) for placement in cut} == {0}  # also of a strided shard
    if not cut or (parameter.ndim == 3 and is_by_rows):
        return True
    if len(cut) > 1 or not is_by_rows:
        raise OffbookError(f"Muon takes matrices that are sharded by rows over one mesh dimension, not {cut}")
    if dist.get_world_size(_group(parameter)) == 1:
        return True
    is_wide = block[1] == parameter.shape[1]
    return is_wide and all(sum(map(bool, unit.rows)) == 1 for unit in _units_in(parameter, block))


def _units_in(parameter: Tensor, block: Block) -> Iterator[Unit]:
    group, total = _group(parameter), parameter.shape[0]
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    size = -(-total // ranks)  # rows of a rank, by the rule of torch.chunk, which DTensor follows
    bounds = [(min(each * size, total), min(each * size + size, total)) for each in range(ranks)]
    for top in range(0, total, block[0]):
        rows = tuple(max(0, min(high, top + block[0]) - max(low, top)) for low, high in bounds)
        first = max(0, top - bounds[rank][0])
        for left in range(0, parameter.shape[1], block[1]):
            yield Unit(parameter, rows, (slice(first, first + rows[rank]), slice(left, left + block[1])))


def _group(parameter: Tensor) -> Any:
    """Of the ranks over which its rows are cut."""
    assert isinstance(parameter, DTensor)
    cut = next(number for number, placement in enumerate(parameter.placements) if not placement.is_replicate())
    return parameter.device_mesh.get_group(cut)


def _cost(block: Block) -> int:
    return block[0] * block[1] * min(block)
