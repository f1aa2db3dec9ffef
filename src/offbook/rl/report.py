"""What is said about rollouts: their numbers, what a step waited for, and why it had nothing to learn from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from shlex import quote
from typing import Any

from offbook.core.config import Config
from offbook.signals.monitors.policy import WITHHELD
from offbook.signals.trajectory import Trajectory
from offbook.types import Rollout

LIMITS = {"turns": "turns", "tokens": "tokens", "context": "context", "wall": "wall_s"}  # keys of harness, by the end
SLOW_S = 60.0  # of sampling: a step that takes longer says what it waited for


def summarize(groups: list[list[Rollout]]) -> dict[str, float]:
    """Means over all rollouts, but invalid calls per 100 calls, and drift and events as they are: each one counts."""
    rollouts = [rollout for group in groups for rollout in group]
    stops = Counter(rollout.stop for rollout in rollouts)
    events = Counter(event.kind for rollout in rollouts for event in rollout.events)
    flags = Counter(flag.kind for rollout in rollouts for flag in rollout.flags)
    parts = dict.fromkeys(name for rollout in rollouts for name in rollout.reward.parts)

    def mean(value: Callable[[Rollout], float]) -> float:
        return sum(map(value, rollouts)) / len(rollouts)

    return {
        "rollouts": len(rollouts),
        "solved": mean(lambda one: one.solved),
        "reward": mean(lambda one: one.reward.total),
        **{f"reward/{name}": mean(lambda one: one.reward.parts.get(name, 0.0)) for name in parts},  # noqa: B023
        "invalid_per_100": invalid_per_100(rollouts),
        **shares_without(rollouts),
        "turns": mean(lambda one: one.usage.turns),
        "tokens": mean(lambda one: one.usage.sampled_tokens),
        "summaries": mean(lambda one: one.usage.summaries),
        "drift": sum(rollout.usage.drift for rollout in rollouts),
        "machine_faults": mean(lambda one: one.struck),
        "groups_lost": sum(all(rollout.fault for rollout in group) for group in groups),
        **{f"stop/{reason}": number / len(rollouts) for reason, number in sorted(stops.items())},
        **{f"events/{kind}": number for kind, number in sorted(events.items())},
        "flagged": mean(lambda one: bool(one.flags)),
        **{f"flags/{kind}": number for kind, number in sorted(flags.items())},
    }


def invalid_per_100(rollouts: list[Rollout]) -> float:
    calls = sum(rollout.usage.calls for rollout in rollouts)
    return 100 * sum(rollout.usage.invalid_calls for rollout in rollouts) / calls if calls else 0.0


def shares_without(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Shares of rollouts that made no readable call, changed no file, and ran no tests."""
    each = [Trajectory(rollout) for rollout in rollouts]
    counts = {
        "no_call": sum(not any(use.ran for use in one.uses) for one in each),
        "no_edit": sum(one.changed_nothing for one in each),
        "no_test_run": sum(not any(use.runs_tests for use in one.uses) for one in each),
    }
    return {name: count / max(1, len(each)) for name, count in counts.items()}


SHAPING = ("effort", "unfinished")  # rewards that say how the work ends, and not whether it is any good


def has_signal(row: Mapping[str, Any], config: Config) -> bool:
    """Whether rewards, hints or other teachers taught anything in a step with these metrics.

    Where nothing is solved and rewards differ by effort and handing in alone, they teach to give up: in seven steps
    a model went from 12 turns to 4, most rollouts without an edit (docs/results/repositories.md).
    """
    parts = {name.removeprefix("reward/") for name in row if name.startswith("reward/")}
    teaches_work = row.get("reward/outcome", 1.0) > 0 or not parts <= {"outcome", WITHHELD, *SHAPING}
    if config.train.rl_weight and row["groups_with_gradient"] and teaches_work:
        return True
    others = [name for name in row if name.endswith("/signal_tokens") and not name.startswith("rl/")]
    is_punished = config.feedback.control == "constant_negative" and row["hinted_targets"]
    return bool("ce/loss" in row or is_punished or any(row[name] for name in others))


def why_no_signal(groups: Sequence[Sequence[Rollout]], config: Config) -> str:
    """The likely cause of a step whose groups are all alike, and what would help."""
    rollouts = [rollout for group in groups for rollout in group if not rollout.fault]
    if not rollouts:
        return "the machine or the model's server ended every rollout; offbook doctor looks at this machine"
    solved = sum(rollout.solved for rollout in rollouts)
    if solved == len(rollouts):
        return f"all {solved} rollouts solved their task; take harder tasks: offbook tasks make REPOSITORY --level gone"
    if solved:
        return (
            f"each task was solved by all of its rollouts or by none ({solved} of {len(rollouts)} rollouts); more "
            f"rollouts a task show a difference: --train.group_size {2 * config.train.group_size}"
        )
    model, source = quote(config.model), quote(config.tasks.source)
    data = source if source.startswith("pocket") else f"demos:{source}"
    sft = f"offbook sft --model {model} --data {data} shows the model how"
    fit = f"offbook fit {model} --tasks.source {source} finds out how this model calls tools"
    without = {name: round(share * len(rollouts)) for name, share in shares_without(rollouts).items()}
    ends = Counter(rollout.stop for rollout in rollouts)
    stop = max(LIMITS, key=lambda stop: ends[stop])  # type: ignore[index]
    crash = next((rollout.cause for rollout in rollouts if rollout.stop == "crash"), "")
    withheld = sum(WITHHELD in rollout.reward.parts for rollout in rollouts)
    causes = (
        (ends["crash"], f"crashed ({crash})", "offbook view shows them"),
        (without["no_call"], "made no call that can be read", f"{fit}, or {sft}"),
        (withheld, "lost their reward to a monitor's finding", "offbook view shows what was found"),
        (ends[stop], f"were cut off by harness.{LIMITS[stop]}", f"raise it, or {sft}"),  # type: ignore[index]
        (without["no_edit"], "made calls and changed no file", sft),
        (
            len(rollouts),
            "were not solved, and most of them edited files: the tests never pass",
            f"take easier tasks: offbook tasks make REPOSITORY --level stub; or {sft}",
        ),
    )
    count, cause, help = next(each for each in causes if 2 * each[0] > len(rollouts))
    return f"{count} of {len(rollouts)} rollouts {cause}; {help}"


def waits(groups: Sequence[Sequence[Rollout]], rollout_s: float, in_lockstep: bool) -> dict[str, Any]:
    """Where the time of the slowest rollout went, and the longest call of all; in words if the step took long."""
    rollouts = [rollout for group in groups for rollout in group]

    def parts(rollout: Rollout) -> dict[str, float]:
        usage = rollout.usage
        return {
            "slot": usage.slot_seconds,
            "model": usage.model_seconds - usage.summary_seconds,
            "summary": usage.summary_seconds,
            "tools": usage.seconds - usage.model_seconds,
            "scoring": usage.scoring_seconds,
        }

    last = max(rollouts, key=lambda one: sum(parts(one).values()))
    called = max(rollouts, key=lambda one: one.usage.longest_call_seconds)
    spent = parts(last)
    found: dict[str, Any] = {
        **{f"slowest/{name}_s": seconds for name, seconds in spent.items()},
        "longest_call_s": called.usage.longest_call_seconds,
        "timeouts": sum(one.usage.timeouts for one in rollouts),
    }
    if rollout_s > SLOW_S:
        others = " (in lockstep with others' tools)" if in_lockstep else ""
        words = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in spent.items() if seconds >= 1)
        call = f"`{called.usage.longest_call}` of {called.id}, {called.usage.longest_call_seconds:.0f} s"
        found["waited_for"] = (
            f"waited {rollout_s:.0f} s for rollouts; last was {last.id}: {words}{others}; longest call: {call}"
        )
    return found
