"""Rewards of two of proof.py's arms (rewards.files)."""

from __future__ import annotations

from offbook.types import Rollout, Task


def without_outcome(task: Task, rollout: Rollout) -> float:
    """Takes away what solving earns, so that hints alone teach."""
    return -rollout.reward.parts["outcome"]


def invalid_share(task: Task, rollout: Rollout) -> float:
    """Of the calls. Unlike `broken_calls` it tells ten of thirty from five of thirty."""
    return -rollout.usage.invalid_calls / max(1, rollout.usage.calls)
