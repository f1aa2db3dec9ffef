"""What can be said of a measurement: estimators, intervals, tests. Tasks are the unit: rollouts of one are alike.

A metric is a ratio of two sums over tasks (a mean has ones below). Every task counts the same, however many rollouts it
has. Axes: T tasks, D draws.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

import numpy as np
import numpy.typing as npt

from offbook.core.shares import LEVEL, wilson

Floats = npt.NDArray[np.float64]

DRAWS = 4000
MAX_EXACT = 16  # tasks that differ: up to so many, every assignment of signs is tried
TINY = 1e-12


def pass_at_k(num_rollouts: int, num_solved: int, k: int) -> float:
    """The chance that one of k rollouts, drawn without putting back, is solved (Chen et al. 2021, eq. 1): unbiased."""
    if k > num_rollouts:
        raise ValueError(f"{k} of {num_rollouts} rollouts cannot be drawn")
    return 1.0 - math.comb(num_rollouts - num_solved, k) / math.comb(num_rollouts, k)


def best_of_k(values: Sequence[float], k: int) -> float:
    """The mean of the best of k values, over all ways to draw k of them: unbiased. Of zeros and ones it is pass@k."""
    if k > len(values):
        raise ValueError(f"{k} of {len(values)} values cannot be drawn")
    ways = math.comb(len(values), k)
    return sum(value * math.comb(rank, k - 1) for rank, value in enumerate(sorted(values))) / ways


@dataclass(frozen=True, slots=True)
class Ratio:
    """A metric task by task: above_T over below_T, both means over the task's rollouts."""

    above_T: Floats
    below_T: Floats
    is_share: bool = False  # of rollouts, with ones below

    @property
    def value(self) -> float | None:
        """None where there is nothing to divide by: no calls, no added lines."""
        below = float(self.below_T.sum())
        return float(self.above_T.sum()) / below if below else None


def interval(ratio: Ratio, seed: int = 0, draws: int = DRAWS) -> tuple[float, float] | None:
    """Percentile bootstrap over tasks; the rollouts of a task stay together. None for fewer than two tasks.

    Where all tasks are alike they are so drawn again, which says nothing about others: None, and for a share of none or
    of all the interval of Wilson, with tasks for trials.
    """
    num_tasks = len(ratio.above_T)
    if num_tasks < 2:
        return None
    if ratio.is_share and ratio.value in (0.0, 1.0):
        return wilson(round(ratio.value * num_tasks), num_tasks)
    counts_DT = _resampled(len(ratio.above_T), seed, draws)
    return _percentiles(_divided(counts_DT @ ratio.above_T, counts_DT @ ratio.below_T))


def newcombe(base_T: Floats, other_T: Floats) -> tuple[float, float]:
    """The score interval of the difference of two shares on the same tasks (Newcombe 1998, method 10).

    From Wilson's intervals of both and their correlation phi, which has a continuity correction: results that are the
    same task by task leave room for others that are not.
    """
    num_tasks = len(base_T)
    both, neither = float((base_T * other_T).sum()), float(((1 - base_T) * (1 - other_T)).sum())
    one, another = float((base_T * (1 - other_T)).sum()), float(((1 - base_T) * other_T).sum())
    apart = both * neither - one * another
    apart = apart if apart < 0 else max(0.0, apart - num_tasks / 2)
    spread = math.sqrt((both + one) * (another + neither) * (both + another) * (one + neither))
    phi = apart / spread if spread else 0.0
    first, second = float(base_T.mean()), float(other_T.mean())
    (low_1, high_1), (low_2, high_2) = (wilson(num_tasks * share, num_tasks) for share in (first, second))

    def reach(here: float, there: float) -> float:
        return math.sqrt(max(0.0, here**2 - 2 * phi * here * there + there**2))

    value = second - first
    return value - reach(second - low_2, high_1 - first), value + reach(high_2 - second, first - low_1)


@dataclass(frozen=True, slots=True)
class Difference:
    """`other` less `base`, on the tasks that both have."""

    value: float | None
    interval: tuple[float, float] | None
    p: float | None
    num_tasks: int
    exact: bool  # every assignment was tried; else a sample of them


def compare_paired(base: Ratio, other: Ratio) -> Difference:
    """The same tasks in the same order on both sides. Shares that differ alike in all have Newcombe's interval."""
    num_tasks = len(base.above_T)
    value = None if base.value is None or other.value is None else other.value - base.value
    if value is None or num_tasks < 2:
        return Difference(value, None, None, num_tasks, True)
    counts_DT = _resampled(num_tasks, 0, DRAWS)
    sides = [_divided(counts_DT @ side.above_T, counts_DT @ side.below_T) for side in (base, other)]
    around = _percentiles(sides[1] - sides[0])
    if around is None and base.is_share and other.is_share:
        around = newcombe(base.above_T, other.above_T)
    p, exact = swap_test(base, other)
    return Difference(value, around, p, num_tasks, exact)


def swap_test(base: Ratio, other: Ratio, draws: int = DRAWS) -> tuple[float, bool]:
    """Two-sided p of "it makes no difference which side a task's results are on", and whether it is exact.

    Of a mean this is the sign-flip test on the differences of the tasks.
    """
    gap_above, gap_below = other.above_T - base.above_T, other.below_T - base.below_T
    differ = (np.abs(gap_above) > TINY) | (np.abs(gap_below) > TINY)
    num_differ = int(differ.sum())
    if not num_differ:
        return 1.0, True
    exact = num_differ <= MAX_EXACT
    if exact:
        swapped_DT = (np.arange(2**num_differ)[:, None] >> np.arange(num_differ)) & 1
    else:
        swapped_DT = np.random.default_rng(0).integers(0, 2, (draws, num_differ))
    moved_above, moved_below = swapped_DT @ gap_above[differ], swapped_DT @ gap_below[differ]
    here = _divided(other.above_T.sum() - moved_above, other.below_T.sum() - moved_below)
    there = _divided(base.above_T.sum() + moved_above, base.below_T.sum() + moved_below)
    observed = abs((other.value or 0.0) - (base.value or 0.0))
    as_far = int((np.abs(np.nan_to_num(here - there)) >= observed - TINY).sum())
    # A sample has the observed assignment in it, or its p could be 0 (Phipson and Smyth 2010).
    return (as_far / len(swapped_DT), True) if exact else ((as_far + 1) / (draws + 1), False)


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float | None]:
    """Over seeds. One value has no deviation."""
    return fmean(values), stdev(values) if len(values) > 1 else None


def _resampled(num_tasks: int, seed: int, draws: int) -> Floats:
    """How often each task is drawn."""
    rng = np.random.default_rng(seed)
    return rng.multinomial(num_tasks, np.full(num_tasks, 1 / num_tasks), size=draws).astype(np.float64)


def _divided(above_D: Floats, below_D: Floats) -> Floats:
    """Not a number for draws without anything to divide by."""
    return np.divide(above_D, below_D, out=np.full(len(above_D), np.nan), where=below_D != 0)


def _percentiles(values_D: Floats) -> tuple[float, float] | None:
    """None where all draws are the same, or where so many are none that an end of the interval may be among them."""
    known = values_D[~np.isnan(values_D)]
    if len(known) < len(values_D) * (1 + LEVEL) / 2 or known.max() - known.min() < TINY:
        return None
    low, high = np.percentile(known, [50 * (1 - LEVEL), 50 * (1 + LEVEL)])
    return float(low), float(high)
