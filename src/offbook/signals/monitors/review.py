"""Stored work looked at again: a run folder with its drift, or a file of trajectories."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from offbook.core.runfolder import RunFolder
from offbook.signals.monitors import drift
from offbook.signals.monitors.facts import attempt
from offbook.signals.monitors.worker import Worker
from offbook.signals.trajectory.formats import read_trajectories
from offbook.types import Flag, Rollout, Task


@dataclass(frozen=True, slots=True)
class Flagged:
    step: int | None  # None outside of a run
    rollout: str
    task: str
    flag: Flag


@dataclass(slots=True)
class Review:
    source: str
    tasks: dict[str, Task] = field(default_factory=dict)
    rollouts: int = 0
    flagged: int = 0
    unreadable: int = 0
    had_monitors: bool = False
    without_tree: int = 0  # rollouts whose task is not at hand: less is known about those
    findings: list[Flagged] = field(default_factory=list)
    series: dict[str, list[drift.Point]] = field(default_factory=dict)
    alarms: list[drift.Alarm] = field(default_factory=list)
    worker: Worker = field(default_factory=Worker)

    def by_kind(self) -> dict[str, list[Flagged]]:
        """The most frequent kind first."""
        found: dict[str, list[Flagged]] = {}
        for finding in self.findings:
            found.setdefault(finding.flag.kind, []).append(finding)
        return dict(sorted(found.items(), key=lambda item: -len(item[1])))

    def add(self, step: int | None, rollout: Rollout) -> None:
        """Findings again where the task is given, or where the run had no monitors."""
        task = self.tasks.get(rollout.task)
        if task is not None or not self.had_monitors:
            again = [one for one in self.worker.check(task, rollout) if attempt(one) not in rollout.flags]
            rollout.flags = [*dict.fromkeys([*rollout.flags, *again])]
            self.without_tree += task is None
        self.rollouts += 1
        self.flagged += bool(rollout.flags)
        self.findings += [Flagged(step, rollout.id, rollout.task, flag) for flag in rollout.flags]


def review_run(folder: RunFolder, tasks: dict[str, Task]) -> Review:
    review = Review(str(folder.path), tasks)
    with suppress(tomllib.TOMLDecodeError, UnicodeDecodeError):
        config = tomllib.loads(folder.config_file.read_text())
        review.had_monitors = bool(config.get("monitors", {}).get("on", False))

    def steps() -> Iterator[tuple[int, list[Rollout]]]:
        for step in folder.steps():
            rollouts, unreadable = folder.rollouts(step)
            review.unreadable += unreadable
            for rollout in rollouts:
                review.add(step, rollout)
            yield step, rollouts

    review.series, review.alarms = drift.watch(steps())
    return review


def review_file(path: Path, tasks: dict[str, Task]) -> Review:
    """Rollouts of any agent, without a run around them."""
    loaded = read_trajectories(path)
    review = Review(str(path), tasks, unreadable=loaded.unreadable)
    for rollout in loaded.rollouts:
        review.add(None, rollout)
    return review
