"""Units that lie on several ranks: each goes to one owner, is orthogonalised there, and comes back.

Every rank knows all shapes, so all of them plan alike and nothing is said beforehand. A unit that one rank holds alone
is its own. The others go, the costliest first, to the rank that has least to do. Tensors travel in rounds in which an
owner gets no more units than it has room for; in bfloat16 on GPUs, whose directions come back in float16.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from offbook.train.optim.newton_schulz import step_flops
from offbook.train.optim.units import Block, local, row_bounds, row_shard

Held = tuple[Tensor, slice, slice]  # a parameter, and rows and columns of what this rank has of it


@dataclass(frozen=True, slots=True)
class Unit:
    parameter: Tensor
    rows: tuple[int, ...]  # that each rank of the group has of it; none is 0
    at: Held | None  # what this rank has
    owner: int


@dataclass(slots=True)
class Exchange:
    """Units of one shape over one group of ranks."""

    block: Block
    group: Any
    rank: int
    units: list[Unit] = field(default_factory=list)

    def rounds(self, room: int) -> list[list[int]]:
        """Numbers of units, so that no owner has more than `room` in a round. As many on every rank."""
        seen: dict[int, int] = defaultdict(int)
        rounds: dict[int, list[int]] = defaultdict(list)
        for number, unit in enumerate(self.units):
            rounds[seen[unit.owner] // room].append(number)
            seen[unit.owner] += 1
        return [rounds[number] for number in sorted(rounds)]

    def held(self, units: list[int]) -> Iterator[Held]:
        """What this rank has of them, by owner."""
        for number in self._by_owner(units):
            if (at := self.units[number].at) is not None:
                yield at

    def _by_owner(self, units: list[int]) -> list[int]:
        return sorted(units, key=lambda number: self.units[number].owner)

    def _sizes(self, units: list[int]) -> tuple[list[int], list[int]]:
        """Entries that go from here to each owner, and that come here from each rank."""
        ranks = dist.get_world_size(self.group)
        to_owner, from_rank = [0] * ranks, [0] * ranks
        for unit in (self.units[number] for number in units):
            to_owner[unit.owner] += unit.rows[self.rank] * self.block[1]
            if unit.owner == self.rank:
                for rank, rows in enumerate(unit.rows):
                    from_rank[rank] += rows * self.block[1]
        return to_owner, from_rank

    def to_owners(self, units: list[int], pieces: list[Tensor]) -> Callable[[], Tensor]:
        """Set pieces going. What is returned waits for those of the units that are owned here."""
        to_owner, from_rank = self._sizes(units)
        like = local(self.units[units[0]].parameter)
        wire = torch.bfloat16 if like.is_cuda else like.dtype
        sent = torch.cat([piece.to(wire).flatten() for piece in pieces] or [like.new_empty(0, dtype=wire)])
        got = like.new_empty(sum(from_rank), dtype=wire)
        work = dist.all_to_all_single(got, sent, from_rank, to_owner, self.group, async_op=True)

        def arrived() -> Tensor:
            work.wait()
            mine = [self.units[number] for number in self._by_owner(units) if self.units[number].owner == self.rank]
            units_NRC = like.new_empty(len(mine), *self.block)
            for rank, part in enumerate(got.split(from_rank)):
                rows = [unit.rows[rank] for unit in mine]
                for unit_RC, unit, piece in zip(units_NRC, mine, self._cut(part, rows), strict=True):
                    before = sum(unit.rows[:rank])
                    unit_RC[before : before + unit.rows[rank]] = piece
            return units_NRC

        return arrived

    def to_holders(self, units: list[int], directions_NRC: Tensor) -> Callable[[], list[Tensor]]:
        """Set directions going. What is returned waits for those of the pieces that are held here."""
        from_owner, to_rank = self._sizes(units)
        mine = [self.units[number] for number in self._by_owner(units) if self.units[number].owner == self.rank]
        parts = [
            direction_RC[sum(unit.rows[:rank]) :][: unit.rows[rank]].flatten()
            for rank in range(len(to_rank))
            for direction_RC, unit in zip(directions_NRC, mine, strict=True)
        ]
        like = local(self.units[units[0]].parameter)
        wire = torch.float16 if like.is_cuda else like.dtype
        sent = torch.cat(parts).to(wire) if parts else like.new_empty(0, dtype=wire)
        got = like.new_empty(sum(from_owner), dtype=wire)
        work = dist.all_to_all_single(got, sent, from_owner, to_rank, self.group, async_op=True)

        def arrived() -> list[Tensor]:
            work.wait()
            rows = [self.units[number].rows[self.rank] for number in self._by_owner(units)]
            return [piece for piece in self._cut(got, rows) if len(piece)]

        return arrived

    def _cut(self, flat: Tensor, rows: list[int]) -> tuple[Tensor, ...]:
        return flat.view(-1, self.block[1]).split(rows)


def plan_exchanges(parameters: list[Tensor], blocks: Mapping[Tensor, Block]) -> list[Exchange]:
    """All units of parameters that are cut by rows, with their owners."""
    exchanges: dict[tuple[Any, Block], Exchange] = {}
    load: dict[Any, list[float]] = {}
    costliest = sorted(parameters, key=lambda one: -step_flops(*blocks[one])["gram"])  # stable: alike on all ranks
    for alone in (True, False):
        for parameter in costliest:
            assert isinstance(parameter, DTensor)
            dimension, block = row_shard(parameter), blocks[parameter]
            assert dimension is not None
            group = parameter.device_mesh.get_group(dimension)
            ranks, rank = dist.get_world_size(group), dist.get_rank(group)
            busy = load.setdefault(group, [0.0] * ranks)
            exchange = exchanges.setdefault((group, block), Exchange(block, group, rank))
            for rows, at in _pieces(parameter, block, ranks, rank):
                holders = [number for number, count in enumerate(rows) if count]
                if (len(holders) == 1) == alone:
                    owner = holders[0] if alone else min(range(ranks), key=busy.__getitem__)
                    busy[owner] += step_flops(*block)["gram"]
                    exchange.units.append(Unit(parameter, rows, at, owner))
    return list(exchanges.values())


def _pieces(parameter: Tensor, block: Block, ranks: int, rank: int) -> Iterator[tuple[tuple[int, ...], Held | None]]:
    """Of each unit: the rows that each rank has, and where this rank has its own."""
    bounds = row_bounds(parameter.shape[0], ranks)
    for top in range(0, parameter.shape[0], block[0]):
        spans = [(max(low, top), min(high, top + block[0])) for low, high in bounds]
        rows = tuple(max(0, high - low) for low, high in spans)
        own = slice(spans[rank][0] - bounds[rank][0], spans[rank][1] - bounds[rank][0])
        for left in range(0, parameter.shape[1], block[1]):
            yield rows, (parameter, own, slice(left, left + block[1])) if rows[rank] else None
