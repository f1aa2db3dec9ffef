"""Outcome RL over the whole rollout: A = R - mean of the group (Composer 2, section 4.1).

Left out on purpose: division by the group's standard deviation, which blows up small differences in an all-equal
group, and division by length, which rewards long failures. Overlong rollouts keep their reward and are not masked.
Nor are crashed ones, except those that the machine ended and not the agent (`Rollout.fault`): they are in no mean and
teach nothing.

What users ask for is asked for once: such a rollout is a group of one, and has a baseline in the place of the mean.
"""

from __future__ import annotations

from offbook.types import Rollout, Sample


def group_advantage(rewards_G: list[float], baseline: float | None = None) -> list[float]:
    mean = sum(rewards_G) / max(1, len(rewards_G)) if baseline is None else baseline
    return [reward - mean for reward in rewards_G]


def has_gradient(group: list[Rollout], baseline: float | None = None) -> bool:
    """Whether any of its advantages is not 0, without those of rollouts that the machine ended."""
    rewards = {rollout.reward.total for rollout in group if not rollout.fault}
    return len(rewards | ({baseline} if baseline is not None else set())) > 1


def rl_samples(
    group: list[Rollout], temperature: float = 1.0, weight: float = 1.0, baseline: float | None = None
) -> list[list[Sample]]:
    """For each rollout of one group, a sample a segment: the rollout's advantage on every token it sampled.

    A rollout that the machine ended has none. With a weight of 0 there is no RL, only a place for branches.
    """
    rewards = [rollout.reward.total for rollout in group if not rollout.fault]
    advantages = iter(group_advantage(rewards, baseline))
    return [[] if rollout.fault else _samples(rollout, next(advantages), temperature, weight) for rollout in group]


def _samples(rollout: Rollout, advantage: float, temperature: float, weight: float) -> list[Sample]:
    return [
        Sample(
            ids=segment.ids,
            logprobs=segment.logprobs,
            advantage=[advantage if sampled else 0.0 for sampled in segment.sampled],
            rl_weight=[weight * sampled for sampled in segment.sampled],
            temperature=temperature,
            versions=segment.versions,
            routes=segment.routes,
        )
        for segment in rollout.segments
    ]
