"""What became of every rollout that a run asked for, in files: a run that was killed resumes from here.

requested -> running -> scored -> grouped -> trained; or failed, where the work was lost, and then requested again; or
filtered, where all rewards of the group were equal and another task takes its place (dynamic sampling, loop.refill).

OUT/slots/journal.jsonl         append-only, a line per change; the last line may be torn
OUT/slots/3.1.0/rollout.json    batch 3, second task, first rollout: scored, and in no step yet
OUT/slots/3.1.0/turn-2.json     the same rollout while it runs, as it was between two turns,
OUT/slots/3.1.0/sandbox/            and its sandbox as it was then (kept when the process ends: one writer per folder)
OUT/slots/now.json              how many rollouts are in which state, for the viewer

A step's rollouts are in rollouts/step_00003.jsonl before it is trained; then their slots are removed. After a restart a
step gets the same rollouts again, so its weights are the same.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import ConfigDict, TypeAdapter

from offbook.agent.harness import RolloutCheckpoint
from offbook.core.runfolder import RunFolder, dump_lines, load_lines
from offbook.sandbox import BwrapSandbox, Sandbox, open_sandbox
from offbook.sandbox.folders import remove_tree
from offbook.tasks.select import Record
from offbook.types import Rollout, Task

State = Literal["requested", "running", "scored", "grouped", "trained", "failed", "filtered"]
BLOCK = 4096  # bytes
log = logging.getLogger(__name__)
CHECKPOINT = TypeAdapter(
    list[RolloutCheckpoint], config=ConfigDict(ser_json_inf_nan="constants")
)  # of one, as in runfolder.py


@dataclass(slots=True)
class RolloutRecord:
    """One rollout: its state and its files."""

    folder: Path
    id: str
    note: Callable[..., None]  # of the journal
    state: State = "requested"

    @property
    def sandbox(self) -> Path:
        """The folder of its sandbox."""
        self.folder.mkdir(parents=True, exist_ok=True)
        return self.folder / "sandbox"

    def checkpoint(self) -> RolloutCheckpoint | None:
        """The last state that was kept; None if there is none."""
        try:
            note = json.loads((self.folder / "sandbox" / "sandbox.json").read_bytes())["note"]
            return CHECKPOINT.validate_json((self.folder / note).read_bytes())[0]
        except (OSError, ValueError, KeyError):
            self.clear()
            return None

    async def keep(self, sandbox: Sandbox, checkpoint: RolloutCheckpoint) -> None:
        """The turn's file comes first, the snapshot names it: after a kill in between, the turn before counts."""
        assert isinstance(sandbox, BwrapSandbox)
        usage = checkpoint.rollout.usage
        name = f"turn-{usage.turns + usage.summaries}.json"
        (self.folder / name).write_bytes(CHECKPOINT.dump_json([checkpoint]))
        await sandbox.snapshot(name)
        self.note("turn", slot=self.folder.name, turn=usage.turns + usage.summaries)
        for old in self.folder.glob("turn-*.json"):
            if old.name != name:
                old.unlink()

    def scored(self) -> Rollout | None:
        rollouts, _ = load_lines(self.folder / "rollout.json", Rollout)
        return rollouts[0] if rollouts else None

    def write(self, rollout: Rollout) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        part = self.folder / "rollout.part"
        part.write_bytes(dump_lines([rollout]))
        os.replace(part, self.folder / "rollout.json")
        for left in self.folder.glob("turn-*.json"):
            left.unlink()
        if (self.folder / "sandbox").exists():
            remove_tree(str(self.folder / "sandbox"))

    def clear(self) -> None:
        if self.folder.exists():
            remove_tree(str(self.folder))


@dataclass(slots=True, eq=False)
class Group:
    """The rollouts of one task of a batch. `version` is the oldest that any of them began with."""

    batch: int
    place: int
    task: Task
    seats: list[RolloutRecord]
    version: int | None = None
    rollouts: dict[int, Rollout] = field(default_factory=dict)  # the scored ones, by number
    is_begun: bool = False  # in this process

    @property
    def name(self) -> str:
        return f"step{self.batch}/{self.task.id}"

    @property
    def is_over(self) -> bool:
        """All are scored and settled."""
        return self.seats[0].state == "grouped"

    def in_order(self) -> list[Rollout]:
        return [self.rollouts[number] for number in range(len(self.seats))]


class FilteredGroup(NamedTuple):
    """What a group showed of its task before another one took its place."""

    task: str
    shown: Record


class RolloutBuffer:
    """Every rollout between its request and its step. All changes of state go through here, and into the journal.

    `size` rollouts per group. Only rollouts that are in no step yet are in memory. `fingerprint` names the work: what
    is here of other work is dropped (`forget_other_work`).
    """

    def __init__(self, run: RunFolder, size: int, keeps_turns: bool = False, fingerprint: str = ""):
        self.run, self.size, self.keeps_turns = run, size, keeps_turns
        self.folder = run.path / "slots"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.waiting: list[Group] = []  # in no step yet, the oldest first
        self.stored: dict[int, list[list[Rollout]]] = {}  # steps that got their rollouts before a restart
        self.next_batch = 1
        self.filtered: list[FilteredGroup] = []  # since the last step
        self.learned: dict[int, list[FilteredGroup]] = {}  # by the step that learned from them
        self.refills: Counter[int] = Counter()  # groups replaced, by batch
        self.deaths: Counter[str] = Counter()  # of the model, or of the monitors' worker
        self.restarts = 0  # of the run
        self.counts: Counter[State] = Counter()  # rollouts by state; trained ones stay counted
        self.sampled: dict[int, int] = {}  # rollouts by length, see `add_length`
        self.trained: dict[int, int] = {}
        self._used: Counter[str] = Counter()  # groups of earlier steps; until `restore`
        self._regrouped: Counter[str] = Counter()  # groups in no step that the journal has as grouped already
        self._journal = open(self.folder / "journal.jsonl", "a+b", buffering=0)  # noqa: SIM115 as long as this lives
        self._drop_torn_line()
        self.note("started", fingerprint=fingerprint)

    def _drop_torn_line(self) -> None:
        """A killed process may have left one at the end. What it was about is found in the files."""
        end = whole = self._journal.seek(0, os.SEEK_END)
        while whole:
            start = max(0, whole - BLOCK)
            self._journal.seek(start)
            newline = self._journal.read(whole - start).rfind(b"\n")
            if newline >= 0:
                whole = start + newline + 1
                break
            whole = start
        if whole < end:
            log.warning("the last line of %s was torn (%d bytes) and is dropped", self._journal.name, end - whole)
            self._journal.truncate(whole)

    def close(self) -> None:
        self._journal.close()

    def note(self, state: str, **about: Any) -> None:
        """One write per line: a killed process leaves the line, none of it, or a torn one at the very end."""
        self._journal.write(json.dumps({"at": round(time.time(), 3), "state": state, **about}).encode() + b"\n")

    def show(self, numbers: Mapping[str, float]) -> None:
        """For the viewer."""
        part = self.folder / "now.part"
        part.write_text(json.dumps(numbers))
        os.replace(part, self.folder / "now.json")

    def request(self, batch: int, tasks: Sequence[Task]) -> list[Group]:
        self.note("requested", batch=batch, tasks=[task.id for task in tasks])
        groups = [self._group(batch, place, task) for place, task in enumerate(tasks)]
        self.waiting += groups
        self.next_batch = batch + 1
        return groups

    def _group(self, batch: int, place: int, task: Task) -> Group:
        seats = [
            RolloutRecord(self.folder / f"{batch}.{place}.{number}", f"step{batch}/{task.id}/{number}", self.note)
            for number in range(self.size)
        ]
        self.counts["requested"] += self.size
        return Group(batch, place, task, seats)

    def _move(self, seat: RolloutRecord, state: State) -> None:
        self.counts[seat.state] -= 1
        self.counts[state] += 1
        seat.state = state

    def running(self, group: Group, version: int) -> None:
        """Those that are not over. A resumed rollout keeps the tokens of its older version."""
        group.version = version if group.version is None else min(group.version, version)
        for seat in group.seats:
            if seat.state == "requested":
                self._move(seat, "running")
        self.note("running", group=group.name, version=version, began=group.version)

    def scored(self, group: Group, number: int, rollout: Rollout, known: bool = False) -> None:
        """`known`: it is on file and in the journal already."""
        seat = group.seats[number]
        tokens = rollout.usage.sampled_tokens
        if not known:
            seat.write(rollout)
            self.note("scored", slot=seat.folder.name, tokens=tokens, turns=rollout.usage.turns)
            add_length(self.sampled, tokens)
        group.rollouts[number] = rollout
        self._move(seat, "scored")

    def grouped(self, group: Group) -> None:
        """All rollouts of the group are scored."""
        for seat in group.seats:
            self._move(seat, "grouped")
        if self._regrouped[group.name] > 0:  # before a restart
            self._regrouped[group.name] -= 1
        else:
            self.note("grouped", group=group.name)

    def failed(self, group: Group, why: str, whole: bool) -> None:
        """Rollouts that were running are requested again. `whole`: so are the scored ones of the group."""
        group.version = None if whole else group.version
        for number, seat in enumerate(group.seats):
            if seat.state == "running" or (whole and seat.state == "scored"):
                self._move(seat, "failed")
                self.note("failed", slot=seat.folder.name, why=why)
                self._move(seat, "requested")
                rollout = group.rollouts.pop(number, None)
                if rollout:
                    add_length(self.sampled, rollout.usage.sampled_tokens, -1)
                if whole:
                    seat.clear()

    def refill(self, group: Group, place: int, task: Task) -> Group:
        """Replace a filtered group by one of another task, in one line: a kill leaves both changes or none. The line
        also has what the filtered group showed."""
        record = Record.of(group.in_order())
        about = {"task": task.id, "filtered": group.task.id, "reward": group.rollouts[0].reward.total}
        self.note("refilled", group=group.name, batch=group.batch, place=place, **about, shown=asdict(record))
        for seat in group.seats:
            self._move(seat, "filtered")
            seat.clear()
        new = self._group(group.batch, place, task)
        self.refills[group.batch] += 1
        self.filtered.append(FilteredGroup(group.task.id, record))
        self.waiting[self.waiting.index(group)] = new
        return new

    def given(self, step: int, groups: Sequence[Group]) -> None:
        """To a step: first the rollouts are in its file, then their slots are removed."""
        self.run.write_rollouts(step, [rollout for group in groups for rollout in group.in_order()])
        for group in groups:
            self.note("trained", group=group.name, step=step)
            for seat, rollout in zip(group.seats, group.in_order(), strict=True):
                self._move(seat, "trained")
                add_length(self.trained, rollout.usage.sampled_tokens)
                seat.clear()
        self.waiting = [group for group in self.waiting if group not in groups]

    def already(self, rollouts: Iterable[Rollout]) -> None:
        """Rollouts of an earlier step."""
        for rollout in rollouts:
            self.counts["trained"] += 1
            add_length(self.trained, rollout.usage.sampled_tokens)
            if rollout.id.endswith("/0"):
                self._used[rollout.group] += 1

    def lengths(self) -> dict[str, int]:
        """Percentiles of all sampled and all trained rollouts: where the latter are shorter, long rollouts are passed
        over. Upper ends of buckets."""
        found = {}
        for what, lengths in (("sampled", self.sampled), ("trained", self.trained)):
            for percent in (50, 90) if lengths else ():
                found[f"lengths/{what}_p{percent}"] = quantile(lengths, percent / 100)
        return found

    def taken(self) -> list[str]:
        """The task of each group that was drawn for steps after the last checkpoint, or filtered."""
        stored = [group[0].task for groups in self.stored.values() for group in groups]
        filtered = [one.task for one in chain(self.filtered, *self.learned.values())]
        return [*stored, *filtered, *(group.task.id for group in self.waiting)]

    def restore(self, done: int, tasks: Mapping[str, Task]) -> None:
        """What a killed run has beyond its last checkpoint, the step `done`.

        Files beat the journal: a line that is missing for a file is written, so that the counts agree. Slots that a
        step has taken over are removed, if a kill left them.
        """
        lines = list(read_journal(self.run.path))
        self.restarts = sum(line["state"] == "started" for line in lines) - 1
        self.deaths = Counter(line.get("who", "model") for line in lines if line["state"] == "died")
        self._restore_steps(done, lines)
        refilled = [line for line in lines if line["state"] == "refilled"]
        self._used.update(line["group"] for line in refilled)
        self.refills = Counter(line["batch"] for line in refilled)
        self.learned = _learned(lines, done)
        self.filtered = self.learned.pop(done + 1, [])
        self.next_batch = done + 1
        lengths: dict[str, int] = {}
        began: dict[str, int] = {}
        for line in lines:
            if line["state"] == "scored":
                lengths[line["slot"]] = line["tokens"]
            elif line["state"] == "failed":
                lengths.pop(line["slot"], None)
            elif line["state"] == "grouped":
                self._regrouped[line["group"]] += 1
            elif line["state"] == "running":
                began[line["group"]] = line["began"]
            elif line["state"] == "requested":
                self._restore_groups(line["batch"], list(enumerate(line["tasks"])), tasks)
            elif line["state"] == "refilled":
                self._restore_groups(line["batch"], [(line["place"], line["task"])], tasks)
        for tokens in lengths.values():
            add_length(self.sampled, tokens)
        self.waiting.sort(key=lambda group: group.batch)
        for group in self.waiting:
            group.version = began.get(group.name)
            for number, seat in enumerate(group.seats):
                if rollout := seat.scored():
                    self.scored(group, number, rollout, known=seat.folder.name in lengths)

    def _restore_steps(self, done: int, lines: Sequence[Mapping[str, Any]]) -> None:
        """Rollouts that the steps after the checkpoint were given."""
        trained = Counter((line["group"], line["step"]) for line in lines if line["state"] == "trained")
        step = done + 1
        while step in self.run.steps():
            rollouts, _ = self.run.rollouts(step)
            groups = [rollouts[start : start + self.size] for start in range(0, len(rollouts), self.size)]
            self.stored[step] = groups
            self._used.update(group[0].group for group in groups)
            missing = Counter((group[0].group, step) for group in groups) - trained
            for name, _ in missing.elements():
                self.note("trained", group=name, step=step)
            step += 1

    def _restore_groups(self, batch: int, placed: Iterable[tuple[int, str]], tasks: Mapping[str, Task]) -> None:
        """Groups that were requested, unless a step has them or another group took their place."""
        self.next_batch = max(self.next_batch, batch + 1)
        for place, id in placed:
            name = f"step{batch}/{id}"
            if self._used[name]:
                self._used[name] -= 1
                self._regrouped[name] -= 1
                for left in self.folder.glob(f"{batch}.{place}.*"):
                    remove_tree(str(left))
            elif id in tasks:
                self.waiting.append(self._group(batch, place, tasks[id]))


def _learned(lines: Iterable[Mapping[str, Any]], done: int) -> dict[int, list[FilteredGroup]]:
    """Filtered groups by the step that learned from them, the next one to get its rollouts. Steps beyond the last
    checkpoint are done again, and the first of them learns all of theirs."""
    found: dict[int, list[FilteredGroup]] = {}
    given = 0
    for line in lines:
        if line["state"] == "trained":
            given = max(given, line["step"])
        elif line["state"] == "refilled":
            one = FilteredGroup(line["filtered"], Record(**line["shown"]))
            found.setdefault(min(given, done) + 1, []).append(one)
    return found


def add_length(lengths: dict[int, int], tokens: int, count: int = 1) -> None:
    """In buckets of an eighth of a power of two."""
    size = max(1, (1 << tokens.bit_length()) // 16)
    end = -(-tokens // size) * size
    lengths[end] = lengths.get(end, 0) + count


def quantile(lengths: Mapping[int, int], share: float) -> int:
    left = share * sum(lengths.values())
    for end in sorted(lengths):
        left -= lengths[end]
        if left <= 0:
            return end
    return 0


def forget_other_work(run: RunFolder, done: int, fingerprint: str) -> None:
    """Remove rollouts beyond the last checkpoint if they are of another model or of other settings."""
    fingerprints = [line["fingerprint"] for line in read_journal(run.path) if line["state"] == "started"]
    if fingerprints[-1:] == [fingerprint]:
        return
    for path in (run.path / "slots", run.path / "harder"):
        if path.exists():
            remove_tree(str(path))
    for step in run.steps():
        if step > done:
            (run.path / "rollouts" / f"step_{step:05d}.jsonl").unlink()


async def holds_sandboxes(folder: Path) -> bool:
    """Whether the file system can hold a sandbox."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        async with await open_sandbox(Path(__file__).parent, place=folder / "sandbox") as sandbox:
            return not (await sandbox.exec("touch ~/here", 20.0)).exit_code
    except OSError:
        return False


def read_journal(folder: Path) -> Iterator[dict[str, Any]]:
    """The lines of the journal; torn ones are skipped."""
    path = folder / "slots" / "journal.jsonl"
    if not path.is_file():
        return
    with open(path, "rb") as file:
        for line in file:
            try:
                found = json.loads(line)
            except ValueError:
                continue
            if isinstance(found, dict) and "state" in found:
                yield found
