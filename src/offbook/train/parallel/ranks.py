"""What ranks have to agree on before a step, so that none of them waits for a collective that another never starts.

Every rank has samples of its own. All of them run as many micro-batches as the one that has most, ask every teacher
with weights of its own as often, and differentiate the same parts of the loss in the same order; whoever has nothing to
do there does it on one token that counts for nothing. A fault in one rank's samples is raised on all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import zip_longest
from math import gcd
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from offbook.train.head import Counts
from offbook.train.parallel.balance import balanced
from offbook.train.parallel.context import Context
from offbook.types import Branch, OffbookError, Sample

T = TypeVar("T")
PATIENCE = timedelta(days=7)  # that ranks have while rank 0 collects rollouts, or another one writes
FILLER = Sample(ids=[0, 0])
IDLE = Branch(1, [0], ((1, 2),))  # of any sample, for nobody


@dataclass(frozen=True, slots=True)
class Micro:
    """A micro-batch, as far as it decides what is computed: how often each teacher is asked, by the name of its
    weights, the parts of the loss, and whether branches ride along."""

    asked: Counter[str] = field(default_factory=Counter)
    parts: tuple[str, ...] = ()
    rides: bool = False

    def joined(self, other: Micro) -> Micro:
        parts = tuple(sorted({*self.parts, *other.parts}))
        return Micro(self.asked | other.asked, parts, self.rides or other.rides)


@dataclass(frozen=True, slots=True)
class Plan:
    counts: Counts
    micro: list[Micro]
    judged: list[Micro]  # before these, without gradients: contests across micro-batches
    bounds: dict[str, float]  # of parts of the loss, where they have one
    fault: Exception | None = None

    def joined(self, other: Plan) -> Plan:
        micro, judged = (
            [one.joined(two) for one, two in zip_longest(*both, fillvalue=Micro())]
            for both in ((self.micro, other.micro), (self.judged, other.judged))
        )
        return Plan(self.counts + other.counts, micro, judged, self.bounds | other.bounds, self.fault or other.fault)


@dataclass(frozen=True, slots=True)
class Ranks:
    """`mesh` has all ranks of the training, in dimensions `replicate` and `shard`; None is this process alone.
    `experts` has the same ranks in dimensions `replicate`, `shard` and `ep`, where experts are dealt out."""

    mesh: DeviceMesh | None = None
    experts: DeviceMesh | None = None
    context: Context | None = None  # those that share rows, and so have the same samples

    @property
    def sharing(self) -> int:
        return self.context.size if self.context is not None else 1

    @property
    def distinct(self) -> int:
        """The first so many ranks have all weights, and others repeat them. Where experts have another number of
        replicas than the rest some are repeated among these, too."""
        if self.mesh is None:
            return 1
        replicas = self.mesh.size(0), (self.experts or self.mesh).size(0)
        return self.mesh.size() // gcd(*replicas)

    def gathered(self, own: T) -> list[T]:
        if self.mesh is None:
            return [own]
        found: list[T] = [own] * dist.get_world_size()
        dist.all_gather_object(found, own)
        return found

    def share_of(self, samples: Sequence[Sample], width: int) -> list[Sample]:
        """This rank's, where every rank has the samples of all."""
        if self.mesh is None:
            return list(samples)
        number, of = dist.get_rank() // self.sharing, dist.get_world_size() // self.sharing
        return balanced(samples, of, width)[number]

    def spread(self, cost: float) -> dict[str, float]:
        """The largest cost of a rank by the mean: how long others wait."""
        costs = self.gathered(cost)
        return {"ranks/cost_spread": max(costs) * len(costs) / max(sum(costs), 1.0)} if len(costs) > 1 else {}

    def agreed(self, own: Plan) -> Plan:
        plans = self.gathered(own)
        first, *others = plans[:: self.sharing]
        for number, plan in enumerate(plans):
            if plan.counts != plans[number - number % self.sharing].counts:
                raise OffbookError("ranks that share rows were given different samples; give them the same")
        for other in others:
            first = first.joined(other)
        return first

    def summed(self, means: Mapping[str, float]) -> dict[str, float]:
        """Figures of all ranks, each a share of the whole already."""
        total: dict[str, float] = {}
        for each in self.gathered(dict(means))[:: self.sharing]:
            for name, value in each.items():
                total[name] = total.get(name, 0.0) + value
        return total


ALONE = Ranks()


@torch.no_grad()
def total_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Over all entries, wherever they are, in float32. What is replicated counts once."""
    whole = [tensor for tensor in tensors if not isinstance(tensor, DTensor)]
    squares = []
    if whole:
        squares.append(_norm(whole).square())
    sharded: dict[tuple[DeviceMesh, tuple[int, ...]], list[Tensor]] = {}
    for tensor in tensors:
        if isinstance(tensor, DTensor):
            cut = tuple(number for number, placement in enumerate(tensor.placements) if not placement.is_replicate())
            sharded.setdefault((tensor.device_mesh, cut), []).append(tensor.to_local())
    for (mesh, cut), parts in sharded.items():
        square = _norm(parts).square()
        for number in cut:
            dist.all_reduce(square, group=mesh.get_group(number))
        squares.append(square)
    return torch.stack(squares).sum().sqrt() if squares else torch.zeros(())


def _norm(tensors: Sequence[Tensor]) -> Tensor:
    """torch.nn.utils.get_total_norm would round the norm of each tensor in bfloat16."""
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(tensors, 2.0, dtype=torch.float32)))
