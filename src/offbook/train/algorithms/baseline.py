"""What a rollout that has no group is compared with: the others of its kind.

The baseline of a rollout is the mean reward of all other rollouts of its kind, those of earlier cycles with less
weight, drawn towards the mean of all kinds while there are few. Its own reward is not in it, so the gradient stays
unbiased.

Left out: a value model. With a few hundred sessions per cycle and a handful of kinds a mean is as good, and its error
is known.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

FADE = 0.5  # of what is carried from one cycle to the next
PRIOR = 4.0  # rollouts' worth of weight that the mean of all kinds has


@dataclass(frozen=True, slots=True)
class Carried:
    """Of earlier cycles: the sum of the rewards of each kind, and their weight."""

    sums: Mapping[str, float] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)


def baselines(rewards_N: Sequence[float], kinds_N: Sequence[str], carried: Carried) -> tuple[list[float], Carried]:
    """One for each rollout, and what the next cycle is told of all of them."""
    sums, weights = defaultdict(float, carried.sums), defaultdict(float, carried.weights)
    for reward, kind in zip(rewards_N, kinds_N, strict=True):
        sums[kind] += reward
        weights[kind] += 1.0
    total, weight = sum(sums.values()), sum(weights.values())
    found = []
    for reward, kind in zip(rewards_N, kinds_N, strict=True):
        overall = (total - reward) / (weight - 1.0) if weight > 1.0 else reward  # alone it teaches nothing
        found.append((sums[kind] - reward + PRIOR * overall) / (weights[kind] - 1.0 + PRIOR))
    faded = Carried(*({kind: FADE * value for kind, value in each.items()} for each in (sums, weights)))
    return found, faded
