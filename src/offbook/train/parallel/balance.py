"""Load balancing of samples over ranks.

A sample of n tokens costs a layer of width D about n (12 D + n): its products, and attention over what stands before.
Branches cost a third of that for their own tokens, since they have no backward pass. Samples whose branches compete for
places stay together, as they would in one process. Greedy: the costliest bundle goes first, to the rank with the least
load. Every rank computes the same assignment, so nothing is communicated.
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
    bundles = sorted(_bundles(samples), key=lambda bundle: -sum(cost_of(one, width) for one in bundle))
    for bundle in bundles:
        rank = min(range(ranks), key=load.__getitem__)
        shares[rank] += bundle
        load[rank] += sum(cost_of(one, width) for one in bundle)
    return shares


def _bundles(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Those that have a contest in common, also through a third one."""
    bundles: list[tuple[set[str], list[Sample]]] = []
    for sample in samples:
        contests = {branch.contest for branch in sample.branches if branch.contest}
        near = [bundle for bundle in bundles if bundle[0] & contests]
        bundles = [bundle for bundle in bundles if not bundle[0] & contests]
        members = [one for bundle in near for one in bundle[1]]
        bundles.append((contests.union(*(bundle[0] for bundle in near)), [*members, sample]))
    return [members for _, members in bundles]
