"""What ranks agree on before a step, so that none of them waits for a collective that another never starts.

Every rank has samples of its own. All of them run as many micro-batches as the one that has most, ask every teacher
with weights of its own as often, and differentiate the same parts of the loss in the same order; a rank with nothing to
do there does it on one token of weight 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import zip_longest
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from offbook.train.head import Counts
from offbook.types import Distill, Sample

T = TypeVar("T")
PATIENCE = timedelta(days=7)  # timeout while rank 0 collects rollouts, or another one writes


@dataclass
class Plan:
    """Of a step: its denominators, and of each micro-batch the distillation settings of its branches."""

    counts: Counts
    ways: list[frozenset[Distill]]

    @classmethod
    def of(cls, counts: Counts, batches: Sequence[Sequence[Sample]]) -> Plan:
        ways = [frozenset(branch.distill for one in samples for branch in one.branches) for samples in batches]
        return cls(counts, ways)

    def __add__(self, other: Plan) -> Plan:
        both = zip_longest(self.ways, other.ways, fillvalue=frozenset[Distill]())
        return Plan(self.counts + other.counts, [own | its for own, its in both])


@dataclass
class Ranks:
    """`mesh` has all ranks of the training, in dimensions `replicate` and `shard`; None is this process alone.
    `experts` has the same ranks in dimensions `replicate`, `shard` and `ep`, if experts are distributed."""

    mesh: DeviceMesh | None = None
    experts: DeviceMesh | None = None

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
        return balanced(samples, dist.get_world_size(), width)[dist.get_rank()]

    def summed(self, means: Mapping[str, float]) -> dict[str, float]:
        """Figures of all ranks, each a share of the whole already."""
        total: dict[str, float] = {}
        for each in self.gathered(dict(means)):
            for name, value in each.items():
                total[name] = total.get(name, 0.0) + value
        return total


ALONE = Ranks()


@torch.no_grad()
def total_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Over all entries on all ranks, in float32. Replicated tensors count once."""
    parts: dict[tuple[DeviceMesh | None, tuple[int, ...]], list[Tensor]] = {}
    for tensor in tensors:
        if isinstance(tensor, DTensor):
            cut = tuple(number for number, placement in enumerate(tensor.placements) if not placement.is_replicate())
            parts.setdefault((tensor.device_mesh, cut), []).append(tensor.to_local())
        else:
            parts.setdefault((None, ()), []).append(tensor)
    squares = []
    for (mesh, cut), own in parts.items():
        # torch.nn.utils.get_total_norm would round the norm of each tensor in bfloat16
        square = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(own, 2.0, dtype=torch.float32))).square()
        for number in cut:
            assert mesh is not None
            dist.all_reduce(square, group=mesh.get_group(number))
        squares.append(square)
    return torch.stack(squares).sum().sqrt() if squares else torch.zeros(())


def cost_of(sample: Sample, width: int) -> float:
    """A sample of n tokens costs a layer of width D about n (12 D + n): its products, and attention over what stands
    before. Branches cost a third of that for their own tokens, since they have no backward pass."""
    tokens = len(sample.ids)
    branches = sum((len(one.inserted) + one.end - one.insert) * (12 * width + one.end) for one in sample.branches)
    return tokens * (12 * width + tokens) + branches / 3


def balanced(samples: Sequence[Sample], ranks: int, width: int) -> list[list[Sample]]:
    """The samples of each rank: the costliest sample goes first, to the rank with the least load. Every rank computes
    the same."""
    shares: list[list[Sample]] = [[] for _ in range(ranks)]
    load = [0.0] * ranks
    for sample in sorted(samples, key=lambda sample: -cost_of(sample, width)):
        rank = load.index(min(load))
        shares[rank].append(sample)
        load[rank] += cost_of(sample, width)
    return shares


def assign_holders(tensors: Mapping[str, Tensor], bundles: Mapping[str, str], ranks: int) -> dict[str, int]:
    """The rank that gets each tensor whole, balanced by bytes; a bundle has one holder. All ranks compute the same."""
    sizes: dict[str, int] = {}
    for name, tensor in tensors.items():
        sizes[bundles[name]] = sizes.get(bundles[name], 0) + tensor.nbytes
    load = [0] * ranks
    holder = {}
    for bundle in sorted(sizes, key=lambda bundle: -sizes[bundle]):
        holder[bundle] = load.index(min(load))
        load[holder[bundle]] += sizes[bundle]
    return {name: holder[bundles[name]] for name in tensors}


def gathered(tensors: Mapping[str, Tensor], holders: Mapping[str, int]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that this rank holds, on the device. All ranks have to iterate to the end, and hold one whole
    tensor at a time: no rank has room for all."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    for name, tensor in tensors.items():
        whole = tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()
        if holders[name] == rank:
            yield name, whole
        del whole  # before the next is put together
