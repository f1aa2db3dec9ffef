"""Samples are distributed over ranks by their cost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbook.train.trainer import balanced, cost_of
from offbook.types import Branch, Sample

WIDTH = 48


@given(st.lists(st.integers(2, 400), min_size=1, max_size=30), st.integers(1, 6))
def test_every_sample_goes_to_one_rank_and_none_has_much_more_than_others(lengths: list[int], ranks: int) -> None:
    samples = [Sample([0] * length) for length in lengths]
    shares = balanced(samples, ranks, WIDTH)
    assert sorted(map(id, samples)) == sorted(id(one) for share in shares for one in share)
    loads = [sum(cost_of(one, WIDTH) for one in share) for share in shares]
    assert max(loads) - min(loads) <= max(cost_of(one, WIDTH) for one in samples)


def test_branches_cost_a_third() -> None:
    plain = Sample([0] * 50)
    hinted = Sample([0] * 50, branches=[Branch(1, [0] * 5, ((2, 4),))])
    assert cost_of(hinted, WIDTH) - cost_of(plain, WIDTH) == pytest.approx(8 * (12 * WIDTH + 4) / 3)
