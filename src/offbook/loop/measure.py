"""Numbers about rollouts: what a training step reports and what an evaluation says."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

from offbook.types import Rollout


def summarize(groups: list[list[Rollout]]) -> dict[str, float]:
    """Means over all rollouts, but invalid calls per 100 calls, and drift and events as they are: each one counts."""
    rollouts = [rollout for group in groups for rollout in group]
    count = len(rollouts)
    stops = Counter(rollout.stop for rollout in rollouts)
    events = Counter(event.kind for rollout in rollouts for event in rollout.events)
    flags = Counter(flag.kind for rollout in rollouts for flag in rollout.flags)
    return {
        "rollouts": count,
        "solved": sum(rollout.solved for rollout in rollouts) / count,
        "reward": sum(rollout.reward.total for rollout in rollouts) / count,
        **reward_parts(rollouts),
        "invalid_per_100": invalid_per_100(rollouts),
        "turns": sum(rollout.usage.turns for rollout in rollouts) / count,
        "tokens": sum(rollout.usage.sampled_tokens for rollout in rollouts) / count,
        "summaries": sum(rollout.usage.summaries for rollout in rollouts) / count,
        "drift": sum(rollout.usage.drift for rollout in rollouts),
        **{f"stop/{reason}": number / count for reason, number in sorted(stops.items())},
        **{f"events/{kind}": number for kind, number in sorted(events.items())},
        "flagged": sum(bool(rollout.flags) for rollout in rollouts) / count,
        **{f"flags/{kind}": number for kind, number in sorted(flags.items())},
    }


def reward_parts(rollouts: list[Rollout]) -> dict[str, float]:
    """The mean of each part, before its weight. A rollout without it counts as 0."""
    names = dict.fromkeys(name for rollout in rollouts for name in rollout.reward.parts)
    return {
        f"reward/{name}": sum(rollout.reward.parts.get(name, 0.0) for rollout in rollouts) / len(rollouts)
        for name in names
    }


def invalid_per_100(rollouts: list[Rollout]) -> float:
    calls = sum(rollout.usage.calls for rollout in rollouts)
    return 100 * sum(rollout.usage.invalid_calls for rollout in rollouts) / calls if calls else 0.0


def bootstrap(
    groups: list[list[Rollout]], statistic: Callable[[list[Rollout]], float], seed: int = 0, draws: int = 1000
) -> tuple[float, float]:
    """95% interval of a statistic. Tasks are drawn again, not rollouts: those of one task are not independent."""
    rng = random.Random(seed)
    values = sorted(
        statistic([rollout for group in rng.choices(groups, k=len(groups)) for rollout in group]) for _ in range(draws)
    )
    return values[int(0.025 * draws)], values[int(0.975 * draws) - 1]


def solved_share(rollouts: list[Rollout]) -> float:
    return sum(rollout.solved for rollout in rollouts) / len(rollouts)
