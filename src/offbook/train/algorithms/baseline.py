"""What a rollout that has no group is compared with: the others of its kind.

The baseline of a rollout is the mean reward of all other rollouts of its kind, drawn towards the mean of all kinds
while there are few. Its own reward is not in it, so the gradient stays unbiased.

Left out: a value model. With a few hundred sessions per cycle and a handful of kinds a mean is as good, and its error
is known.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

PRIOR = 4.0  # rollouts' worth of weight that the mean of all kinds has


def baselines(rewards_N: Sequence[float], kinds_N: Sequence[str]) -> list[float]:
    """One for each rollout."""
    sums: dict[str, float] = defaultdict(float)
    weights: dict[str, float] = defaultdict(float)
    for reward, kind in zip(rewards_N, kinds_N, strict=True):
        sums[kind] += reward
        weights[kind] += 1.0
    total, weight = sum(sums.values()), sum(weights.values())
    found = []
    for reward, kind in zip(rewards_N, kinds_N, strict=True):
        overall = (total - reward) / (weight - 1.0) if weight > 1.0 else reward  # alone it teaches nothing
        found.append((sums[kind] - reward + PRIOR * overall) / (weights[kind] - 1.0 + PRIOR))
    return found
