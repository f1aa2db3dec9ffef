"""Stored work looked at again: a run folder with its drift, or a file of trajectories."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from offbook.core.runfolder import RunFolder
from offbook.signals.monitors import drift
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
    rollouts: int = 0
    flagged: int = 0
    unreadable: int = 0
    without_tree: int = 0  # rollouts whose task is not at hand: less is known about those
    findings: list[Flagged] = field(default_factory=list)
    series: dict[str, list[drift.Point]] = field(default_factory=dict)
    alarms: list[drift.Alarm] = field(default_factory=list)

    def by_kind(self) -> dict[str, list[Flagged]]:
        """The most frequent kind first."""
        counts = Counter(finding.flag.kind for finding in self.findings)
        return {
            kind: [finding for finding in self.findings if finding.flag.kind == kind]
            for kind, _ in counts.most_common()
        }

    def add(self, step: int | None, rollout: Rollout, flags: Sequence[Flag]) -> None:
        self.rollouts += 1
        self.flagged += bool(flags)
        self.findings += [Flagged(step, rollout.id, rollout.task, flag) for flag in flags]


def review_run(folder: RunFolder, tasks: dict[str, Task] | None = None) -> Review:
    """The flags of the run, found again where its tasks are given, or where it ran without monitors."""
    review = Review(str(folder.path))
    known = tasks or {}
    watched, worker = _had_monitors(folder), Worker()

    def steps() -> Iterator[tuple[int, list[Rollout]]]:
        for step in folder.steps():
            rollouts, unreadable = folder.rollouts(step)
            review.unreadable += unreadable
            for rollout in rollouts:
                task = known.get(rollout.task)
                if task is not None or not watched:
                    rollout.flags = [*dict.fromkeys([*rollout.flags, *worker.check(task, rollout)])]
                    review.without_tree += task is None
                review.add(step, rollout, rollout.flags)
            yield step, rollouts

    review.series, review.alarms = drift.watch(steps())
    return review


def review_file(path: Path, tasks: dict[str, Task] | None = None) -> Review:
    """Rollouts of any agent, without a run around them."""
    loaded = read_trajectories(path)
    review, worker = Review(str(path), unreadable=loaded.unreadable), Worker()
    for rollout in loaded.rollouts:
        task = (tasks or {}).get(rollout.task)
        review.without_tree += task is None
        review.add(None, rollout, [*dict.fromkeys([*rollout.flags, *worker.check(task, rollout)])])
    return review


def _had_monitors(folder: RunFolder) -> bool:
    try:
        return bool(tomllib.loads(folder.config_file.read_text()).get("monitors", {}).get("on", False))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError):
        return False
