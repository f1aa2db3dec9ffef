"""Effort: the penalty's shape, what counts as spent, and that solving always beats failing."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbook.core.config import ConfigError, EffortConfig, HarnessConfig, RewardsConfig, load_config
from offbook.signals.rewards import compose
from offbook.signals.rewards.behaviour import PARTS
from offbook.signals.rewards.effort import ACT_KINDS, TOKEN_KINDS, Effort, penalty
from offbook.types import Reward, Rollout, Task, Usage

TASK = Task("t", Path(), "", Path("/absent"), Path(), (), (), (), ("read_file", "edit_file", "finish"), "")
EVEN = {**dict.fromkeys(TOKEN_KINDS, 1.0), **dict.fromkeys(ACT_KINDS, 0.0)}
ks = st.floats(0.01, 100)
shares = st.floats(0, 50)
usages = st.builds(
    Usage,
    turns=st.integers(0, 40),
    calls=st.integers(0, 90),
    invalid_calls=st.integers(0, 90),
    **{kind: st.integers(0, 10_000) for kind in TOKEN_KINDS},
)


def rollout(outcome: float, usage: Usage | None = None) -> Rollout:
    made = Rollout("r", "t", "g", TASK.tools, usage=usage or Usage())
    made.reward = Reward({"outcome": outcome})
    return made


def test_hand_worked_numbers() -> None:
    assert penalty(4, k=2) == pytest.approx(math.log(9) / 2)
    assert penalty(0, k=3) == 0
    assert penalty(1e-7, k=5) / 1e-7 == pytest.approx(1, abs=1e-4), "it starts with slope one"


@given(shares, st.floats(0.01, 5), ks)
def test_more_costs_more_and_the_next_token_less(x: float, step: float, k: float) -> None:
    first = penalty(x + step, k) - penalty(x, k)
    second = penalty(x + 2 * step, k) - penalty(x + step, k)
    assert 0 <= second <= first + 1e-9


def test_spent_is_a_weighted_share() -> None:
    weights = {**EVEN, "output_tokens": 0.5, "calls": 0.25, "turns": 0.75}
    effort = Effort(full_tokens=1000, full_turns=10, weights=weights, k=1)
    usage = Usage(thinking_tokens=100, call_tokens=50, output_tokens=200, final_tokens=20, summary_tokens=30)
    assert effort.spent(usage) == pytest.approx((100 + 50 + 100 + 20 + 30) / 1000 / 2)
    assert effort.spent(Usage(calls=4, turns=2)) == pytest.approx((0.25 * 4 + 0.75 * 2) / 10 / 2)
    assert effort.spent(Usage(call_tokens=1000, calls=10, turns=10)) == 1
    assert effort.spent(Usage(call_tokens=1000, calls=99, turns=10)) == 1


@pytest.mark.parametrize("kind", [*TOKEN_KINDS, *ACT_KINDS])
def test_every_kind_counts_in_the_default_configuration(kind: str) -> None:
    (part,) = compose(RewardsConfig(effort=EffortConfig(bound=0.2)), HarnessConfig()).parts
    idle, busy = (part.function(TASK, rollout(1.0, Usage(**{kind: amount}))) for amount in (0, 3))
    assert busy < idle == 0


def test_without_any_weight_nothing_is_spent() -> None:
    effort = Effort(100, 10, dict.fromkeys(EVEN, 0.0), k=1)
    assert effort(TASK, rollout(1.0, Usage(call_tokens=50, turns=3))) == 0


def test_effort_is_off_by_default_and_costs_at_most_its_bound() -> None:
    assert compose(RewardsConfig(), HarnessConfig()).parts == ()
    (part,) = compose(RewardsConfig(effort=EffortConfig(bound=0.2)), HarnessConfig()).parts
    assert (part.name, part.weight) == ("effort", 0.2)
    assert part.function(TASK, rollout(1.0, Usage(call_tokens=10**6, calls=10**3, turns=10**3))) == -1


@given(usages, usages, st.floats(0.01, 0.99), st.floats(0, 0.999))
def test_solving_with_any_effort_beats_failing_with_any_effort(
    long: Usage, short: Usage, bound: float, credit: float
) -> None:
    """Also with partial credit for the failure, also where every call was broken."""
    config = RewardsConfig(effort=EffortConfig(bound=bound))
    rewards = compose(config, HarnessConfig())
    solved, failed = rollout(1.0, long), rollout(credit, short)
    for one in (solved, failed):
        rewards.score(TASK, one)
    assert solved.reward.total > failed.reward.total
    assert solved.reward.total - failed.reward.total >= 1 - credit - 1e-9, "effort never narrows the gap"


@given(usages, usages, st.floats(0, 0.99))
def test_solving_beats_failing_whatever_behaviours_cost(long: Usage, short: Usage, together: float) -> None:
    weights = dict.fromkeys(PARTS, together / len(PARTS))
    rewards = compose(RewardsConfig(weights=weights, effort=EffortConfig(bound=0.2)), HarnessConfig())
    solved, failed = rollout(1.0, long), rollout(0.0, replace(short, invalid_calls=0))
    for one in (solved, failed):
        rewards.score(TASK, one)
    assert solved.reward.total > failed.reward.total


@given(usages, usages)
def test_failing_faster_earns_nothing(one: Usage, other: Usage) -> None:
    (part,) = compose(RewardsConfig(effort=EffortConfig(bound=0.2)), HarnessConfig()).parts
    assert part.function(TASK, rollout(0.0, one)) == part.function(TASK, rollout(0.5, other)) == -1


def test_configuration_reaches_the_part() -> None:
    overrides = {
        "rewards.effort.bound": "0.3",
        "harness.tokens": "100",
        "rewards.effort.weights.calls": "0",
        "rewards.effort.weights.turns": "0",
    }
    config = load_config([], overrides)
    (part,) = compose(config.rewards, config.harness).parts
    assert part.function(TASK, rollout(1.0, Usage(thinking_tokens=50))) == pytest.approx(-math.log(3) / math.log(5))
    with pytest.raises(ConfigError, match=r"rewards\.effort\.weights has no call; there are thinking_tokens"):
        load_config([], {"rewards.effort.weights.call": "1"})
