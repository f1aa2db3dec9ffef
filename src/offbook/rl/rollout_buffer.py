"""What became of every rollout that a run asked for, in files: whoever is killed goes on from here.

requested -> running -> scored -> grouped -> trained; or failed, where the work was lost, and then requested again; or
aside, where all were worth the same and another task takes the group's place (loop.refill).

OUT/slots/journal.jsonl         a line for every change, only ever added to; the last one may be torn
OUT/slots/3.1.0/rollout.json    of batch 3, its second task, the first rollout: scored, and in no step yet
OUT/slots/3.1.0/turn-2.json     the same, not over yet, as it was between two turns,
OUT/slots/3.1.0/sandbox/            and its sandbox as it was then (nobody clears that: a run folder has one writer)
OUT/slots/now.json              how many are where, for the viewer

A step's rollouts are in rollouts/step_00003.jsonl before it is trained; then their slots go. What a step was given it
gets again after a restart, so its weights are those that they would have been.
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

from offbook.agent.harness import Midway
from offbook.core.runfolder import RunFolder, dump_lines, load_lines
from offbook.sandbox import BwrapSandbox, Sandbox, open_sandbox
from offbook.sandbox.folders import remove_tree
from offbook.tasks.select import Record
from offbook.types import Rollout, Task

State = Literal["requested", "running", "scored", "grouped", "trained", "failed", "aside"]
BLOCK = 4096  # bytes
log = logging.getLogger(__name__)
MIDWAY = TypeAdapter(list[Midway], config=ConfigDict(ser_json_inf_nan="constants"))  # of one, as in runfolder.py


@dataclass(slots=True)
class RolloutRecord:
    """The files of one rollout."""

    folder: Path
    id: str
    note: Callable[..., None]  # of the journal
    state: State = "requested"

    @property
    def sandbox(self) -> Path:
        """Where its sandbox lives."""
        self.folder.mkdir(parents=True, exist_ok=True)
        return self.folder / "sandbox"

    def midway(self) -> Midway | None:
        """As it was when it was last kept."""
        try:
            note = json.loads((self.folder / "sandbox" / "sandbox.json").read_bytes())["note"]
            return MIDWAY.validate_json((self.folder / note).read_bytes())[0]
        except (OSError, ValueError, KeyError):
            self.clear()
            return None

    async def keep(self, sandbox: Sandbox, midway: Midway) -> None:
        """The turn's file comes first, the snapshot names it: killed in between, the turn before is what counts."""
        assert isinstance(sandbox, BwrapSandbox)
        usage = midway.rollout.usage
        name = f"turn-{usage.turns + usage.summaries}.json"
        (self.folder / name).write_bytes(MIDWAY.dump_json([midway]))
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
    rollouts: dict[int, Rollout] = field(default_factory=dict)  # that are scored, by number

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
    """`size` rollouts per group. Only those that are in no step yet are in memory."""

    def __init__(self, run: RunFolder, size: int, keeps_turns: bool = False, fingerprint: str = ""):
        self.run, self.size, self.keeps_turns = run, size, keeps_turns
        self.folder = run.path / "slots"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.counts: Counter[State] = Counter()  # how many slots are in each state; those that left by training stay
        self.sampled: dict[int, int] = {}  # rollouts by length, see `add_length`
        self.trained: dict[int, int] = {}
        self.used: Counter[str] = Counter()  # groups of steps from before; until all is recalled
        self.regrouped: Counter[str] = Counter()  # groups in no step yet that the journal has as grouped from before
        self._journal = open(self.folder / "journal.jsonl", "a+b", buffering=0)  # noqa: SIM115 as long as this lives
        self._drop_torn_line()
        self.note("started", fingerprint=fingerprint)

    def _drop_torn_line(self) -> None:
        """Which a process that was killed may have left at the end. What it tells of is looked up in the files."""
        end = whole = self._journal.seek(0, os.SEEK_END)
        while whole:
            start = max(0, whole - BLOCK)
            self._journal.seek(start)
            if (at := self._journal.read(whole - start).rfind(b"\n")) >= 0:
                whole = start + at + 1
                break
            whole = start
        if whole < end:
            log.warning("the last line of %s was torn (%d bytes) and is dropped", self._journal.name, end - whole)
            self._journal.truncate(whole)

    def close(self) -> None:
        self._journal.close()

    def note(self, state: str, **about: Any) -> None:
        """One write a line: a process that is killed leaves the line or none of it, or a torn one at the very end."""
        self._journal.write(json.dumps({"at": round(time.time(), 3), "state": state, **about}).encode() + b"\n")

    def show(self, numbers: Mapping[str, float]) -> None:
        """For the viewer."""
        part = self.folder / "now.part"
        part.write_text(json.dumps(numbers))
        os.replace(part, self.folder / "now.json")

    def request(self, batch: int, tasks: Sequence[Task]) -> list[Group]:
        self.note("requested", batch=batch, tasks=[task.id for task in tasks])
        return [self.group(batch, place, task) for place, task in enumerate(tasks)]

    def group(self, batch: int, place: int, task: Task) -> Group:
        name, ids = f"{batch}.{place}", [f"step{batch}/{task.id}/{number}" for number in range(self.size)]
        seats = [RolloutRecord(self.folder / f"{name}.{number}", id, self.note) for number, id in enumerate(ids)]
        self.counts["requested"] += self.size
        return Group(batch, place, task, seats)

    def _move(self, seat: RolloutRecord, state: State) -> None:
        self.counts[seat.state] -= 1
        self.counts[state] += 1
        seat.state = state

    def running(self, group: Group, version: int) -> None:
        """Those that are not over. A rollout that goes on from before has tokens of its own, older version."""
        group.version = version if group.version is None else min(group.version, version)
        for seat in group.seats:
            if seat.state == "requested":
                self._move(seat, "running")
        self.note("running", group=group.name, version=version, began=group.version)

    def scored(self, group: Group, number: int, rollout: Rollout, known: bool = False) -> None:
        """`known`: it is on file and in the journal from before."""
        seat, tokens = group.seats[number], rollout.usage.sampled_tokens
        if not known:
            seat.write(rollout)
            self.note("scored", slot=seat.folder.name, tokens=tokens, turns=rollout.usage.turns)
            add_length(self.sampled, tokens)
        group.rollouts[number] = rollout
        self._move(seat, "scored")

    def grouped(self, group: Group) -> None:
        """All are there."""
        for seat in group.seats:
            self._move(seat, "grouped")
        if self.regrouped[group.name] > 0:  # before a restart
            self.regrouped[group.name] -= 1
        else:
            self.note("grouped", group=group.name)

    def failed(self, group: Group, why: str, whole: bool) -> None:
        """What was being worked on is lost with whoever did it. `whole`: what the others of the group did is, too."""
        group.version = None if whole else group.version
        for number, seat in enumerate(group.seats):
            if seat.state == "running" or (whole and seat.state == "scored"):
                self._move(seat, "failed")
                self.note("failed", slot=seat.folder.name, why=why)
                self._move(seat, "requested")
                if rollout := group.rollouts.pop(number, None):
                    add_length(self.sampled, rollout.usage.sampled_tokens, -1)
                if whole:
                    seat.clear()

    def refill(self, group: Group, place: int, task: Task) -> Group:
        """The group that takes this one's place, in one line: a kill leaves both of them or none. What this one showed
        is in that line, too."""
        about = {"task": task.id, "aside": group.task.id, "reward": group.rollouts[0].reward.total}
        shown = asdict(Record.of(group.in_order()))
        self.note("refilled", group=group.name, batch=group.batch, place=place, **about, shown=shown)
        for seat in group.seats:
            self._move(seat, "aside")
            seat.clear()
        return self.group(group.batch, place, task)

    def given(self, step: int, groups: Sequence[Group]) -> None:
        """To a step: first they are in its file, then their slots go."""
        self.run.write_rollouts(step, [rollout for group in groups for rollout in group.in_order()])
        for group in groups:
            self.note("trained", group=group.name, step=step)
            for seat, rollout in zip(group.seats, group.in_order(), strict=True):
                self._move(seat, "trained")
                add_length(self.trained, rollout.usage.sampled_tokens)
                seat.clear()

    def already(self, rollouts: Iterable[Rollout]) -> None:
        """Of a step from before."""
        for rollout in rollouts:
            self.counts["trained"] += 1
            add_length(self.trained, rollout.usage.sampled_tokens)
            if rollout.id.endswith("/0"):
                self.used[rollout.group] += 1

    def lengths(self) -> dict[str, int]:
        """So far, of all that were sampled and of those that a step was given: where these are shorter, long rollouts
        are passed over. Upper ends of buckets."""
        found = {}
        for what, lengths in (("sampled", self.sampled), ("trained", self.trained)):
            for percent in (50, 90) if lengths else ():
                found[f"lengths/{what}_p{percent}"] = quantile(lengths, percent / 100)
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
    """Beyond the last checkpoint: rollouts of another model, or of other settings, are no part of a run."""
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
    """Whether a sandbox can live there: not on every file system."""
    place = folder / "sandbox"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        async with await open_sandbox(Path(__file__).parent, place=place) as sandbox:
            return not (await sandbox.exec("touch ~/here", 20.0)).exit_code
    except OSError:
        return False


def read_journal(folder: Path) -> Iterator[dict[str, Any]]:
    """Its lines; one that is torn is none."""
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


@dataclass(slots=True)
class Unfinished:
    """What a run that was killed has beyond its last checkpoint."""

    stored: dict[int, list[list[Rollout]]] = field(default_factory=dict)  # what its next steps had been given
    groups: list[Group] = field(default_factory=list)  # requested, and in no step
    next_batch: int = 1
    deaths: Counter[str] = field(default_factory=Counter)  # by who died
    restarts: int = 0  # of the run
    refills: Counter[int] = field(default_factory=Counter)  # by batch
    aside: list[FilteredGroup] = field(
        default_factory=list
    )  # groups that others took the place of, for the next step to learn
    learned: dict[int, list[FilteredGroup]] = field(
        default_factory=dict
    )  # from them, by steps up to the last checkpoint

    def tasks(self) -> set[str]:
        """That are taken."""
        stored = {group[0].task for groups in self.stored.values() for group in groups}
        aside = {one.task for one in chain(self.aside, *self.learned.values())}
        return stored | aside | {group.task.id for group in self.groups}


def recall(slots: RolloutBuffer, done: int, tasks: Mapping[str, Task]) -> Unfinished:
    """Files beat the journal: a line may be missing that they have. It is written then, so that the counts agree; and
    slots that a step has taken over go, if a kill left them."""
    folder, lines = slots.run, list(read_journal(slots.run.path))
    states = Counter(line["state"] for line in lines)
    deaths = Counter(line.get("who", "model") for line in lines if line["state"] == "died")
    found = Unfinished(next_batch=done + 1, deaths=deaths, restarts=states["started"] - 1)
    used = slots.used
    while (step := done + 1 + len(found.stored)) in folder.steps():
        rollouts, _ = folder.rollouts(step)
        found.stored[step] = [rollouts[start : start + slots.size] for start in range(0, len(rollouts), slots.size)]
        used.update(group[0].group for group in found.stored[step])
    refilled = [line for line in lines if line["state"] == "refilled"]
    used.update(line["group"] for line in refilled)
    found.refills, found.learned = Counter(line["batch"] for line in refilled), _learned(lines, done)
    found.aside = found.learned.pop(done + 1, [])
    trained = Counter((line["group"], line["step"]) for line in lines if line["state"] == "trained")
    for step, groups in found.stored.items():
        unsaid = Counter((group[0].group, step) for group in groups) - trained
        for group_name, _ in unsaid.elements():
            slots.note("trained", group=group_name, step=step)
    lengths: dict[str, int] = {}
    began: dict[str, int] = {}
    for line in lines:
        if line["state"] == "scored":
            lengths[line["slot"]] = line["tokens"]
        if line["state"] == "failed":
            lengths.pop(line["slot"], None)
        if line["state"] == "grouped":
            slots.regrouped[line["group"]] += 1
        if line["state"] == "running":
            began[line["group"]] = line["began"]
        if line["state"] not in ("requested", "refilled"):
            continue
        found.next_batch = max(found.next_batch, line["batch"] + 1)
        for place, id in enumerate(line["tasks"]) if "tasks" in line else [(line["place"], line["task"])]:
            name = f"step{line['batch']}/{id}"
            if used[name]:
                used[name] -= 1
                slots.regrouped[name] -= 1
                for left in slots.folder.glob(f"{line['batch']}.{place}.*"):
                    remove_tree(str(left))
            elif id in tasks:
                found.groups.append(slots.group(line["batch"], place, tasks[id]))
    for tokens in lengths.values():
        add_length(slots.sampled, tokens)
    found.groups.sort(key=lambda group: group.batch)
    for group in found.groups:
        group.version = began.get(group.name)
        for number, seat in enumerate(group.seats):
            if rollout := seat.scored():
                slots.scored(group, number, rollout, known=seat.folder.name in lengths)
    return found


def _learned(lines: Iterable[dict[str, Any]], done: int) -> dict[int, list[FilteredGroup]]:
    """By the step that learned from a group that was set aside, which is the one that was given its own next. Steps
    beyond the last checkpoint are done again, and their first learns it all."""
    found, given = dict[int, list[FilteredGroup]](), 0
    for line in lines:
        if line["state"] == "trained":
            given = max(given, line["step"])
        elif line["state"] == "refilled":
            one = FilteredGroup(line["aside"], Record(**line.get("shown", {})))
            found.setdefault(min(given, done) + 1, []).append(one)
    return found
