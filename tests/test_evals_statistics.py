"""Estimators, intervals and tests of the bench, against references of a few lines and numbers worked by hand."""

from __future__ import annotations

import itertools
import random
from statistics import mean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbook.evals.statistics import (
    Ratio,
    compare_paired,
    interval,
    pass_at_k,
    swap_test,
    wilson,
)


def of_mean(values: list[float]) -> Ratio:
    return Ratio(np.array(values, dtype=float), np.ones(len(values)))


def test_pass_at_k_by_hand() -> None:
    assert pass_at_k(4, 1, 2) == pytest.approx(0.5), "3 of the 6 pairs have the solved one"
    assert pass_at_k(5, 0, 3) == 0.0
    assert pass_at_k(5, 3, 3) == 1.0 - 0 / 10
    with pytest.raises(ValueError, match="cannot be drawn"):
        pass_at_k(2, 1, 3)


@given(st.integers(1, 8), st.data())
def test_pass_at_k_is_the_mean_over_all_draws(count: int, data: st.DataObject) -> None:
    solved, k = data.draw(st.integers(0, count)), data.draw(st.integers(1, count))
    draws = itertools.combinations([1.0] * solved + [0.0] * (count - solved), k)
    assert pass_at_k(count, solved, k) == pytest.approx(mean(map(max, draws)))


def test_the_interval_is_that_of_a_plain_bootstrap_over_tasks() -> None:
    rng = random.Random(1)
    values = [rng.random() for _ in range(30)]
    reference = sorted(mean(rng.choices(values, k=30)) for _ in range(4000))
    found = interval(of_mean(values))
    assert found is not None
    assert found == pytest.approx((reference[100], reference[3900]), abs=0.012)
    assert interval(of_mean(values)) == found, "seeded"


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(200):
        around = interval(of_mean(list(rng.binomial(1, 0.4, 60))), draws=400)
        assert around
        hits += around[0] <= 0.4 <= around[1]
    assert 0.88 <= hits / 200 <= 0.99


def test_a_ratio_is_of_sums_and_says_nothing_without_a_denominator() -> None:
    calls = Ratio(np.array([1.0, 0.0]), np.array([2.0, 8.0]))
    assert calls.value == pytest.approx(0.1), "not the mean of 1/2 and 0"
    assert Ratio(np.zeros(2), np.zeros(2)).value is None
    assert interval(Ratio(np.zeros(2), np.zeros(2))) is None
    assert interval(of_mean([1.0])) is None, "one task says nothing about others"


def flips(differences: list[float]) -> float:
    """The exact sign-flip test, written out."""
    observed = abs(sum(differences))
    signs = list(itertools.product((-1, 1), repeat=len(differences)))
    far = [abs(sum(s * d for s, d in zip(sign, differences, strict=True))) >= observed - 1e-9 for sign in signs]
    return sum(far) / len(signs)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=2, max_size=8))
def test_few_tasks_are_tested_exactly(pairs: list[tuple[int, int]]) -> None:
    base, other = ([pair[side] / 4 for pair in pairs] for side in (0, 1))
    p, exact = swap_test(of_mean(base), of_mean(other))
    assert exact
    assert p == pytest.approx(flips([b - a for a, b in zip(base, other, strict=True)]))


def test_five_tasks_that_all_got_better_by_hand() -> None:
    difference = compare_paired(of_mean([0.0] * 5), of_mean([1.0] * 5))
    assert (difference.value, difference.p, difference.num_tasks, difference.exact) == (1.0, 2 / 32, 5, True)
    assert difference.interval is None, "drawn again, all five are as they were"


def test_many_tasks_are_sampled_and_never_give_zero() -> None:
    base, other = of_mean([0.0] * 40), of_mean([1.0] * 40)
    p, exact = swap_test(base, other, draws=999)
    assert (p, exact) == (1 / 1000, False)
    rng = random.Random(3)
    differences = [rng.gauss(0.15, 0.5) for _ in range(15)]
    zeros = [0.0] * 15
    exact_p, _ = swap_test(of_mean(zeros), of_mean(differences))
    padded = [*differences, 1e-9, -1e-9]  # 17 that differ: sampled
    sampled_p, was_exact = swap_test(of_mean([*zeros, 0.0, 0.0]), of_mean(padded), draws=20_000)
    assert not was_exact
    assert sampled_p == pytest.approx(exact_p, abs=0.02)


def test_under_no_difference_p_is_small_as_rarely_as_it_should() -> None:
    rng = np.random.default_rng(5)
    small = 0
    for _ in range(300):
        pairs = rng.binomial(2, 0.5, (2, 12)) / 2
        small += swap_test(of_mean(list(pairs[0])), of_mean(list(pairs[1])))[0] <= 0.05
    assert small / 300 <= 0.08


def test_what_is_equal_makes_no_difference() -> None:
    same = of_mean([0.5, 1.0, 0.0])
    difference = compare_paired(same, same)
    assert (difference.value, difference.p) == (0.0, 1.0)
    nothing = compare_paired(Ratio(np.zeros(3), np.zeros(3)), same)
    assert (nothing.value, nothing.p) == (None, None)


def test_all_or_none_has_the_interval_of_wilson() -> None:
    assert wilson(0, 10) == pytest.approx((0.0, 0.27753), abs=1e-5), "z^2 / (10 + z^2) with z = 1.96"
    assert wilson(10, 10) == pytest.approx((0.72247, 1.0), abs=1e-5)
    assert wilson(5, 10) == pytest.approx((0.23659, 0.76341), abs=1e-5)
    ones = np.ones(10)
    assert interval(Ratio(0 * ones, ones, is_share=True)) == wilson(0, 10)
    assert interval(Ratio(ones, ones, is_share=True)) == wilson(10, 10)
    assert interval(Ratio(ones, ones)) is None, "one turn in every rollout is no share"
    assert interval(Ratio(0 * ones, ones + 2)) is None, "no comment in any added line"
    assert interval(Ratio(np.array([500.0, 60.0, 186.0]), np.array([0.0, 0.0, 1.0]))) is None, "a third of the draws"
    some = np.array([1.0] + [0.0] * 9)
    assert interval(Ratio(some, ones, is_share=True)) == interval(of_mean(list(some)))
