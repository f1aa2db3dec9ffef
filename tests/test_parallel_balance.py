"""Samples balanced out to ranks by what they cost."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from offbook.train.parallel.balance import balanced, cost_of
from offbook.types import Branch, Sample

WIDTH = 64


def sample_of(length: int, contest: str = "") -> Sample:
    return Sample([0] * length, branches=[Branch(1, [0] * 5, ((2, 4),), contest=contest)] if contest else [])


@given(st.lists(st.tuples(st.integers(4, 5000), st.sampled_from(["", "", "a", "b"])), max_size=40), st.integers(1, 9))
def test_every_sample_is_dealt_once_and_contests_stay_together(shapes: list[tuple[int, str]], ranks: int) -> None:
    samples = [sample_of(*shape) for shape in shapes]
    hands = balanced(samples, ranks, WIDTH)
    assert len(hands) == ranks
    assert sorted(id(one) for hand in hands for one in hand) == sorted(map(id, samples))
    for contest in ("a", "b"):
        holders = [hand for hand in hands if any(one.branches and one.branches[0].contest == contest for one in hand)]
        assert len(holders) <= 1


def test_ranks_have_about_as_much_to_do() -> None:
    rng = random.Random(0)
    samples = [sample_of(int(200 * 2 ** (5 * rng.random()))) for _ in range(128)]  # 200 to 6,400 tokens
    costs = [sum(cost_of(one, WIDTH) for one in hand) for hand in balanced(samples, 8, WIDTH)]
    assert max(costs) / (sum(costs) / 8) < 1.02
    in_turn = [sum(cost_of(one, WIDTH) for one in samples[rank::8]) for rank in range(8)]
    assert max(in_turn) / (sum(in_turn) / 8) > 1.1


def test_contests_that_a_third_sample_joins_are_one() -> None:
    both = Sample([0] * 50, branches=[Branch(1, [0], ((2, 4),), contest=name) for name in ("a", "b")])
    hands = balanced([sample_of(40, "a"), sample_of(40, "b"), both], 3, WIDTH)
    assert sorted(map(len, hands)) == [0, 0, 3]
