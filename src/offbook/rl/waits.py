"""What a step waited for while its rollouts were sampled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from offbook.types import Rollout

SLOW_S = 60.0  # of sampling: a step that takes longer says what it waited for
SHOWN_S = 1.0  # shorter parts are left out


def waits(groups: Sequence[Sequence[Rollout]], rollout_s: float, in_lockstep: bool) -> dict[str, Any]:
    """Where the time of the rollout went that ended last, and the longest call of all; in words if it was long."""
    rollouts = [rollout for group in groups for rollout in group]
    last = max(rollouts, key=_seconds)
    called = max(rollouts, key=lambda one: one.usage.longest_call_seconds)
    usage = last.usage
    parts = {
        "slot": usage.slot_seconds,
        "model": usage.model_seconds - usage.summary_seconds,
        "summary": usage.summary_seconds,
        "tools": usage.seconds - usage.model_seconds,
        "scoring": usage.scoring_seconds,
    }
    found: dict[str, Any] = {f"slowest/{name}_s": seconds for name, seconds in parts.items()}
    found |= {
        "longest_call_s": called.usage.longest_call_seconds,
        "timeouts": sum(one.usage.timeouts for one in rollouts),
    }
    if rollout_s > SLOW_S:
        words = {
            "slot": "waiting for a slot",
            "model": "model, and tools of others (lockstep)" if in_lockstep else "model",
            "summary": "summaries",
        }
        spent = [f"{words.get(name, name)} {seconds:.0f} s" for name, seconds in parts.items() if seconds >= SHOWN_S]
        found["waited_for"] = f"waited {rollout_s:.0f} s for rollouts; last was {last.id}: {', '.join(spent)}"
        if called.usage.longest_call_seconds >= SHOWN_S:
            call = f"`{called.usage.longest_call}` of {called.id}"
            found["waited_for"] += f"; longest call: {called.usage.longest_call_seconds:.0f} s for {call}"
        if found["timeouts"]:
            found["waited_for"] += f"; commands ended by harness.command_s: {found['timeouts']}"
    return found


def _seconds(rollout: Rollout) -> float:
    usage = rollout.usage
    return usage.slot_seconds + usage.seconds + usage.scoring_seconds
