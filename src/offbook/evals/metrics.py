"""Metrics of an evaluation. A rollout becomes a row of numbers; a metric is a ratio of two sums of them.

All are reported together: a policy that solves more may also talk less, make unrequested edits, hit the turn limit, or
work only in the terminal.
"""

from __future__ import annotations

import math
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from offbook.evals.statistics import Ratio, interval, pass_at_k
from offbook.signals.rewards.behaviour import question, terminal_only
from offbook.signals.trajectory import Trajectory
from offbook.signals.trajectory.diff import COMMENT
from offbook.types import Rollout, Task, is_test_file

UNKNOWN = "unknown"
NOTHING = "-"


@dataclass(frozen=True)
class Row:
    """One rollout, as numbers."""

    id: str
    task: str
    suite: str
    difficulty: str
    stop: str
    numbers: dict[str, float]
    flags: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Metric:
    """`above` over `below`, both names of a row's numbers; without `below` it is a mean over rollouts."""

    key: str
    label: str
    above: str = ""
    below: str = ""
    scale: float = 1.0
    better: str = ""  # higher, lower, or neither
    percent: bool = False

    @property
    def heading(self) -> str:
        """The label with the direction that is better, where one is."""
        return self.label + {"higher": " ↑", "lower": " ↓"}.get(self.better, "")


_TABLE = tomllib.loads(Path(__file__).with_name("metrics.toml").read_text())["metric"]
METRICS = {row["key"]: Metric(**row) for row in _TABLE}
USAGE = (  # what a row takes from a rollout's usage as it is
    *("turns", "calls", "invalid_calls", "seconds", "cost"),
    *("thinking_tokens", "call_tokens", "final_tokens", "summary_tokens", "output_tokens"),
)
QUIET = ("reward", "summary_tokens", "cost", "crashed")  # left out of tables where they say nothing


def row_of(rollout: Rollout, task: Task | None, suite: str = UNKNOWN) -> Row:
    """Without the task, difficulty and two behaviours are unknown."""
    usage = asdict(rollout.usage)
    files = Trajectory(rollout, task).diff
    product = [file for file in files if file.path.endswith(".py") and not is_test_file(file.path)]
    code = [line for file in product for line in file.added.values() if line.strip()]
    numbers = {
        "solved": float(rollout.solved),
        "handed_in": handed_in(float(rollout.solved), rollout.stop),
        "reward": rollout.reward.total,
        "tokens": usage["sampled_tokens"],
        **{name: usage[name] for name in USAGE},
        "edit_lines": sum(len(file.added) + len(file.removed) for file in files),
        "edited": float(bool(rollout.changed)),
        "comment_lines": sum(bool(COMMENT.match(line)) for line in code),
        "code_lines": len(code),
        "test_edit": float(any(is_test_file(path) for path in rollout.changed)),
        "flagged": float(bool(rollout.flags)),
        "crashed": float(rollout.stop == "crash"),
    }
    if task:
        numbers["question"] = float(question(task, rollout) < 0)
        numbers["terminal_only"] = float(terminal_only(task, rollout) <= -1)
    difficulty = task.difficulty if task else UNKNOWN
    flags = Counter(flag.kind for flag in rollout.flags)
    return Row(rollout.id, rollout.task, suite, difficulty, rollout.stop, numbers, dict(flags))


def handed_in(solved: float, stop: str) -> float:
    """Count a solution only where the agent ended the rollout itself, and not where a limit did."""
    return solved if stop in ("finish", "answer") else 0.0


def sizes_up_to(num_rollouts: int) -> list[int]:
    """The k of pass@k: 2, 4, 8 ... and all of them."""
    return sorted({*(2**power for power in range(1, num_rollouts.bit_length())), num_rollouts} - {0, 1})


def ratios(rows: Iterable[Row]) -> dict[str, tuple[Metric, Ratio]]:
    """Every metric that all of these rows know, task by task.

    Sorted by task, so that results do not depend on the order in which rollouts ended.
    """
    by_task: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row.task):
        by_task.setdefault(row.task, []).append(row)
    groups = list(by_task.values())
    if not groups:
        return {}
    known = set.intersection(*({*row.numbers} for group in groups for row in group))
    means = {
        name: np.array([sum(row.numbers[name] for row in group) / len(group) for group in groups]) for name in known
    }
    ones = np.ones(len(groups))
    found = {}
    for key, metric in METRICS.items():
        if {metric.above, metric.below or metric.above} <= known:
            below = means[metric.below] if metric.below else ones
            is_share = metric.percent and not metric.below
            found[key] = metric, Ratio(metric.scale * means[metric.above], below, is_share)
    for k in sizes_up_to(min(map(len, groups))):
        passed = [pass_at_k(len(group), sum(row.numbers["solved"] >= 1 for row in group), k) for group in groups]
        found[f"pass@{k}"] = metric_of(f"pass@{k}"), Ratio(np.array(passed), ones, is_share=True)
    return found


def measure(rows: Sequence[Row]) -> dict[str, Any]:
    """Every metric with its interval, the same by difficulty, and what was counted."""
    known = {key: ratio for key, (_, ratio) in ratios(rows).items() if ratio.value is not None}
    flags: Counter[str] = Counter()
    for row in rows:
        flags.update(row.flags)
    return {
        **{key: ratio.value for key, ratio in known.items()},
        "intervals": {key: interval(ratio) for key, ratio in known.items()},
        "rollouts": len(rows),
        "tasks": len({row.task for row in rows}),
        **{f"stop/{stop}": number / len(rows) for stop, number in sorted(Counter(row.stop for row in rows).items())},
        **{f"flags/{kind}": number for kind, number in sorted(flags.items())},
        "by_difficulty": _by_bucket(rows, "difficulty"),
        "by_suite": _by_bucket(rows, "suite"),
    }


def _by_bucket(rows: Sequence[Row], attribute: str) -> dict[str, Any]:
    """A few metrics per difficulty or suite."""
    described = {}
    for bucket in sorted({getattr(row, attribute) for row in rows}):
        inside = [row for row in rows if getattr(row, attribute) == bucket]
        found = ratios(inside)
        described[bucket] = {
            "tasks": len({row.task for row in inside}),
            **{key: found[key][1].value for key in ("solved", "turns", "tokens", "invalid_per_100", "edit_rate")},
            "solved_ci": interval(found["solved"][1]),
        }
    return described


def show(metric: Metric, value: float | None) -> str:
    """Format with significant digits."""
    if value is None or not math.isfinite(value):
        return NOTHING
    if metric.percent:
        return f"{100 * value:.1f}%"
    size = abs(value)
    if size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if size >= 10 else f"{value:.2f}" if size >= 0.1 or not value else f"{value:.2g}"


def show_change(metric: Metric, value: float | None) -> str:
    """The change of a percentage is in points."""
    shown = show(metric, value)
    if shown == NOTHING:
        return shown
    sign = "+" if value and value > 0 else ""
    return sign + (f"{shown.removesuffix('%')} points" if metric.percent else shown)


def show_interval(metric: Metric, around: Sequence[float] | None, nothing: str = NOTHING) -> str:
    if not around:
        return nothing
    low, high = (show(metric, end).removesuffix("%") for end in around)
    return f"[{low}, {high}]"


def shown_keys(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Metrics that a table shows: those that some result has, without QUIET ones that are zero everywhere."""
    passes = dict.fromkeys(key for result in results for key in result if key.startswith("pass@"))
    keys = [key for key in dict.fromkeys(["solved", *passes, *METRICS]) if any(key in result for result in results)]
    if all(result.get("reward") == result.get("solved") for result in results):
        keys.remove("reward")
    return [key for key in keys if key not in QUIET or any(result.get(key) for result in results)]


def metric_of(key: str) -> Metric:
    """Also of pass@k, where k depends on the number of rollouts."""
    is_pass = key.startswith("pass@")
    return METRICS.get(key) or Metric(key, key, better="higher" if is_pass else "", percent=is_pass)
