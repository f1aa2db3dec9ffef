"""State and files of every rollout that a run asks for, until a step has trained on it. A killed run resumes from here.

    requested -> running -> scored -> trained

`failed`: the model was lost; the rollout is requested again. `filtered`: all rewards of its group were equal, and
another task takes the group's place (loop.refill).

OUT/slots/journal.jsonl         append-only, a line per change
OUT/slots/3.1.0/rollout.json    batch 3, second task, first rollout: scored, and in no step yet
OUT/slots/now.json              numbers for the viewer

A step's rollouts are in rollouts/step_00003.jsonl before it is trained, and then leave slots/. After a restart the step
gets the same rollouts again, so its weights are the same.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from offbook.core.runfolder import RunFolder, dump_lines, load_lines
from offbook.tasks.select import Record
from offbook.types import Rollout, Task

State = Literal["requested", "running", "scored", "trained", "filtered"]


@dataclass(slots=True, eq=False)
class Job:
    """One rollout: the request, its state, its result, and its files if it belongs to a run."""

    task: Task
    id: str
    group: str
    folder: Path | None = None
    state: State = "requested"
    rollout: Rollout | None = None  # once scored

    def write(self, rollout: Rollout) -> None:
        assert self.folder is not None
        self.folder.mkdir(parents=True, exist_ok=True)
        part = self.folder / "rollout.part"
        part.write_bytes(dump_lines([rollout]))
        os.replace(part, self.folder / "rollout.json")

    def clear(self) -> None:
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)


@dataclass(slots=True, eq=False)
class Group:
    """The rollouts of one task of a batch."""

    batch: int
    place: int
    task: Task
    jobs: list[Job]
    version: int | None = None  # the oldest that any of them began with
    is_begun: bool = False  # in this process
    is_over: bool = False  # scored, and judged as a group

    @property
    def name(self) -> str:
        return f"step{self.batch}/{self.task.id}"

    @property
    def is_scored(self) -> bool:
        return all(job.rollout for job in self.jobs)

    @property
    def rollouts(self) -> list[Rollout]:
        return [job.rollout for job in self.jobs if job.rollout]


class FilteredGroup(NamedTuple):
    """What a group showed of its task before another one took its place."""

    task: str
    shown: Record


class RolloutBuffer:
    """All groups between their request and their step. Every change of state is a method here.

    `size` rollouts per group. `fingerprint` names the work: rollouts beyond the last checkpoint, of step `done`, are
    removed if they are of another model or of other settings.
    """

    def __init__(self, run: RunFolder, size: int, fingerprint: str = "", done: int = 0):
        self.run = run
        self.size = size
        self.done = done
        self.folder = run.path / "slots"
        starts = [line["fingerprint"] for line in read_journal(run.path) if line["state"] == "started"]
        if starts[-1:] != [fingerprint]:
            shutil.rmtree(self.folder, ignore_errors=True)
            shutil.rmtree(run.path / "harder", ignore_errors=True)
            for step in run.steps():
                if step > done:
                    run.step_file("rollouts", step).unlink()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.waiting: list[Group] = []  # in no step yet, the oldest first
        self.stored: dict[int, list[list[Rollout]]] = {}  # steps that got their rollouts before a restart
        self.next_batch = 1
        self.filtered: list[FilteredGroup] = []  # since the last step
        self.learned: list[FilteredGroup] = []  # before a restart
        self.refills: Counter[int] = Counter()  # groups replaced, by batch
        self.deaths = 0  # of the model
        self.restarts = 0
        self.num_trained = 0
        self.num_filtered = 0
        journal = self.folder / "journal.jsonl"
        if journal.is_file() and not journal.read_bytes().endswith(b"\n"):
            with open(journal, "ab") as file:
                file.write(b"\n")  # ends the line that a kill cut off
        self.note("started", fingerprint=fingerprint)

    def note(self, state: str, **about: Any) -> None:
        note(self.folder, state, **about)

    def show(self, numbers: Mapping[str, float]) -> None:
        """For the viewer."""
        part = self.folder / "now.part"
        part.write_text(json.dumps(numbers))
        os.replace(part, self.folder / "now.json")

    @property
    def counts(self) -> Counter[State]:
        """Rollouts by state."""
        found = Counter(job.state for group in self.waiting for job in group.jobs)
        found["trained"] = self.num_trained
        found["filtered"] = self.num_filtered
        return found

    def request(self, batch: int, tasks: Sequence[Task]) -> list[Group]:
        self.note("requested", batch=batch, tasks=[task.id for task in tasks])
        groups = [self._group(batch, place, task) for place, task in enumerate(tasks)]
        self.waiting += groups
        self.next_batch = batch + 1
        return groups

    def _group(self, batch: int, place: int, task: Task) -> Group:
        name = f"step{batch}/{task.id}"
        folders = [self.folder / f"{batch}.{place}.{number}" for number in range(self.size)]
        jobs = [Job(task, f"{name}/{n}", name, folder) for n, folder in enumerate(folders)]
        return Group(batch, place, task, jobs)

    def running(self, group: Group, version: int) -> None:
        """A resumed rollout keeps the tokens of its older version."""
        group.version = version if group.version is None else min(group.version, version)
        for job in group.jobs:
            if job.state == "requested":
                job.state = "running"
        self.note("running", group=group.name, version=version, began=group.version)

    def scored(self, job: Job, rollout: Rollout) -> None:
        assert job.folder is not None
        job.write(rollout)
        usage = rollout.usage
        self.note("scored", slot=job.folder.name, tokens=usage.sampled_tokens, turns=usage.turns)
        job.rollout = rollout
        job.state = "scored"

    def failed(self, group: Group, why: str, whole: bool) -> None:
        """Request running rollouts again; if `whole`, the group's scored ones too."""
        if whole:
            group.version = None
        for job in group.jobs:
            if job.state == "running" or (whole and job.state == "scored"):
                assert job.folder is not None
                self.note("failed", slot=job.folder.name, why=why)
                job.state = "requested"
                job.rollout = None
                if whole:
                    job.clear()

    def refill(self, group: Group, task: Task) -> Group:
        """Replace a filtered group, in one line of the journal: a kill leaves both changes or none."""
        record = Record.of(group.rollouts)
        place = group.place + 1 + max(one.place for one in self.waiting if one.batch == group.batch)
        about = {"group": group.name, "batch": group.batch, "place": place, "task": task.id}
        self.note("refilled", **about, filtered=group.task.id, shown=asdict(record))
        for job in group.jobs:
            job.state = "filtered"
            job.clear()
        self.num_filtered += self.size
        self.refills[group.batch] += 1
        self.filtered.append(FilteredGroup(group.task.id, record))
        new = self._group(group.batch, place, task)
        self.waiting[self.waiting.index(group)] = new
        return new

    def given(self, step: int, groups: Sequence[Group]) -> None:
        """Hand groups to a step: they are in the step's file before their slots are removed."""
        self.run.write_rollouts(step, [rollout for group in groups for rollout in group.rollouts])
        for group in groups:
            self.note("trained", group=group.name, step=step)
            for job in group.jobs:
                job.state = "trained"
                job.clear()
        self.num_trained += self.size * len(groups)
        self.waiting = [group for group in self.waiting if group not in groups]

    @property
    def taken(self) -> list[str]:
        """The task of each group that was drawn for steps after the last checkpoint, or filtered."""
        stored = [group[0].task for groups in self.stored.values() for group in groups]
        return [*stored, *(one.task for one in self.learned), *(group.task.id for group in self.waiting)]

    def restore(
        self, tasks: Mapping[str, Task], recall: Callable[[list[Rollout]], None] = lambda rollouts: None
    ) -> None:
        """Take over what a killed run has beyond its last checkpoint. Files beat the journal. `recall` gets the
        rollouts of the steps before."""
        lines = list(read_journal(self.run.path))
        self.restarts = sum(line["state"] == "started" for line in lines) - 1
        self.deaths = sum(line["state"] == "died" for line in lines)
        used = Counter[str]()  # groups that a step has, or that were replaced
        for step in self.run.steps():
            rollouts, _ = self.run.rollouts(step)
            groups = [rollouts[start : start + self.size] for start in range(0, len(rollouts), self.size)]
            used.update(group[0].group for group in groups)
            self.num_trained += len(rollouts)
            if step > self.done:
                self.stored[step] = groups
            else:
                recall(rollouts)
        self.next_batch = self.done + 1
        began: dict[str, int] = {}
        requested: list[tuple[int, int, str]] = []
        known = set()
        for line in lines:
            state = line["state"]
            if state == "requested":
                requested += [(line["batch"], place, id) for place, id in enumerate(line["tasks"])]
            elif state == "refilled":
                used[line["group"]] += 1
                self.refills[line["batch"]] += 1
                self.num_filtered += self.size
                self.learned.append(FilteredGroup(line["filtered"], Record(**line["shown"])))
                requested.append((line["batch"], line["place"], line["task"]))
            elif state == "running":
                began[line["group"]] = line["began"]
            elif state == "scored":
                known.add(line["slot"])
        for batch, place, id in requested:
            self.next_batch = max(self.next_batch, batch + 1)
            name = f"step{batch}/{id}"
            if used[name]:
                used[name] -= 1
            elif id in tasks:
                self.waiting.append(self._group(batch, place, tasks[id]))
        self.waiting.sort(key=lambda group: group.batch)
        left = {path.name: path for path in self.folder.iterdir() if path.is_dir()}
        for group in self.waiting:
            group.version = began.get(group.name)
            for job in group.jobs:
                assert job.folder is not None
                left.pop(job.folder.name, None)
                found, _ = load_lines(job.folder / "rollout.json", Rollout)
                if found and job.folder.name in known:
                    job.rollout = found[0]
                    job.state = "scored"
                elif found:
                    self.scored(job, found[0])
        for path in left.values():
            shutil.rmtree(path)


def note(folder: Path, state: str, **about: Any) -> None:
    """Append a line to the journal in one write: a kill leaves the line, none of it, or a torn one at the end."""
    line = {"at": round(time.time(), 3), "state": state, **about}
    with open(folder / "journal.jsonl", "ab", buffering=0) as file:
        file.write(json.dumps(line).encode() + b"\n")


def read_journal(run: Path) -> Iterator[dict[str, Any]]:
    """The lines of a run's journal without torn ones."""
    path = run / "slots" / "journal.jsonl"
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict) and "state" in found:
            yield found
