"""Load balancing of samples over ranks.

A sample of n tokens costs a layer of width D about n (12 D + n): its products, and attention over what stands before.
Branches cost a third of that for their own tokens, since they have no backward pass. Greedy: the costliest sample goes
first, to the rank with the least load. Every rank computes the same assignment, so nothing is communicated.
"""

from __future__ import annotations

from collections.abc import Sequence

from offbook.types import Sample


def cost_of(sample: Sample, width: int) -> float:
    tokens = len(sample.ids)
    branches = sum((len(one.inserted) + one.end - one.insert) * (12 * width + one.end) for one in sample.branches)
    return tokens * (12 * width + tokens) + branches / 3


def balanced(samples: Sequence[Sample], ranks: int, width: int) -> list[list[Sample]]:
    """The samples of each rank."""
    shares: list[list[Sample]] = [[] for _ in range(ranks)]
    load = [0.0] * ranks
    for sample in sorted(samples, key=lambda sample: -cost_of(sample, width)):
        rank = load.index(min(load))
        shares[rank].append(sample)
        load[rank] += cost_of(sample, width)
    return shares
