"""Outcome RL over the whole rollout: A = R - mean of the group (Composer 2, section 4.1).

Left out on purpose: division by the group's standard deviation, which blows up small differences in an all-equal
group, and division by length, which rewards long failures. Overlong rollouts keep their reward and are not masked.
"""

from __future__ import annotations

from offbook.types import Rollout, Sample


def group_advantage(rewards_G: list[float]) -> list[float]:
    mean = sum(rewards_G) / len(rewards_G)
    return [reward - mean for reward in rewards_G]


def rl_samples(group: list[Rollout], temperature: float = 1.0) -> list[list[Sample]]:
    """For each rollout of one group, a sample a segment: the rollout's advantage on every token it sampled."""
    advantages = group_advantage([rollout.reward.total for rollout in group])
    return [
        [
            Sample(
                ids=segment.ids,
                logprobs=segment.logprobs,
                advantage=[advantage if sampled else 0.0 for sampled in segment.sampled],
                rl_weight=[float(sampled) for sampled in segment.sampled],
                temperature=temperature,
                versions=segment.versions,
            )
            for segment in rollout.segments
        ]
        for rollout, advantage in zip(group, advantages, strict=True)
    ]
