"""Estimators, confidence intervals and tests. Tasks are the unit, because rollouts of one task are correlated.

A metric is a ratio of two sums over tasks (a mean has ones below). Every task has the same weight, whatever its number
of rollouts. Axes: T tasks, D draws.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from offbook.core.shares import LEVEL, wilson

Floats = npt.NDArray[np.float64]

DRAWS = 4000
MAX_EXACT = 16  # differing tasks up to which all sign assignments are tried
TINY = 1e-12


def pass_at_k(num_rollouts: int, num_solved: int, k: int) -> float:
    """Unbiased chance that one of k rollouts, drawn without replacement, is solved (Chen et al. 2021, eq. 1)."""
    if k > num_rollouts:
        raise ValueError(f"{k} of {num_rollouts} rollouts cannot be drawn")
    return 1.0 - math.comb(num_rollouts - num_solved, k) / math.comb(num_rollouts, k)


@dataclass(frozen=True)
class Ratio:
    """A metric by task: above_T over below_T, both means over the task's rollouts."""

    above_T: Floats
    below_T: Floats
    is_share: bool = False  # of rollouts, with ones below

    @property
    def value(self) -> float | None:
        """None if the denominator is 0: no calls, no added lines."""
        below = float(self.below_T.sum())
        return float(self.above_T.sum()) / below if below else None

    def resampled(self, draws: int) -> Floats:
        """Bootstrap over tasks: the ratio in each draw."""
        num_tasks = len(self.above_T)
        shares = np.full(num_tasks, 1 / num_tasks)
        counts_DT = np.random.default_rng(0).multinomial(num_tasks, shares, size=draws).astype(np.float64)
        return _divided(counts_DT @ self.above_T, counts_DT @ self.below_T)


def interval(ratio: Ratio, draws: int = DRAWS) -> tuple[float, float] | None:
    """Percentile bootstrap over tasks; the rollouts of a task stay together. None for fewer than two tasks.

    If all tasks have the same value the bootstrap is degenerate: None, and for shares of 0 or 1 Wilson's interval with
    tasks as trials.
    """
    num_tasks = len(ratio.above_T)
    if num_tasks < 2:
        return None
    if ratio.is_share and ratio.value in (0.0, 1.0):
        return wilson(round(ratio.value * num_tasks), num_tasks)
    return _percentiles(ratio.resampled(draws))


@dataclass(frozen=True)
class Difference:
    """`other` minus `base`, on the tasks that both have."""

    value: float | None
    interval: tuple[float, float] | None
    p: float | None
    num_tasks: int
    exact: bool  # all assignments were tried, not a sample


def compare_paired(base: Ratio, other: Ratio) -> Difference:
    """Both sides have the same tasks in the same order."""
    num_tasks = len(base.above_T)
    value = None if base.value is None or other.value is None else other.value - base.value
    if value is None or num_tasks < 2:
        return Difference(value, None, None, num_tasks, True)
    around = _percentiles(other.resampled(DRAWS) - base.resampled(DRAWS))  # the same draws of tasks
    p, exact = swap_test(base, other)
    return Difference(value, around, p, num_tasks, exact)


def swap_test(base: Ratio, other: Ratio, draws: int = DRAWS) -> tuple[float, bool]:
    """Two-sided p-value of the paired permutation test over tasks, and whether it is exact.

    For a mean this is the sign-flip test on the tasks' differences.
    """
    gap_above = other.above_T - base.above_T
    gap_below = other.below_T - base.below_T
    differ = (np.abs(gap_above) > TINY) | (np.abs(gap_below) > TINY)
    num_differ = int(differ.sum())
    if not num_differ:
        return 1.0, True
    exact = num_differ <= MAX_EXACT
    if exact:
        swapped_DT = (np.arange(2**num_differ)[:, None] >> np.arange(num_differ)) & 1
    else:
        swapped_DT = np.random.default_rng(0).integers(0, 2, (draws, num_differ))
    moved_above = swapped_DT @ gap_above[differ]
    moved_below = swapped_DT @ gap_below[differ]
    here = _divided(other.above_T.sum() - moved_above, other.below_T.sum() - moved_below)
    there = _divided(base.above_T.sum() + moved_above, base.below_T.sum() + moved_below)
    observed = abs((other.value or 0.0) - (base.value or 0.0))
    as_far = int((np.abs(np.nan_to_num(here - there)) >= observed - TINY).sum())
    # The sample includes the observed assignment, so that p is never 0 (Phipson and Smyth 2010).
    return (as_far / len(swapped_DT), True) if exact else ((as_far + 1) / (draws + 1), False)


def _divided(above_D: Floats, below_D: Floats) -> Floats:
    """NaN where the denominator is 0."""
    return np.divide(above_D, below_D, out=np.full(len(above_D), np.nan), where=below_D != 0)


def _percentiles(values_D: Floats) -> tuple[float, float] | None:
    """None if all draws are equal, or if so many are NaN that an end of the interval may be among them."""
    known = values_D[~np.isnan(values_D)]
    if len(known) < len(values_D) * (1 + LEVEL) / 2 or known.max() - known.min() < TINY:
        return None
    low, high = np.percentile(known, [50 * (1 - LEVEL), 50 * (1 + LEVEL)])
    return float(low), float(high)
