"""Which rollouts run when, and their state and files until a step has trained on them.

Those of later batches are sampled while the trainer works, and none is dropped for its age. Batch b may begin when the
weights of step b - 1 - max_staleness are in the engine; 0 is a synchronous run. A group is due at the step whose
weights are max_staleness newer than those that it began with. A step waits for the groups that are due, and takes them
and the oldest finished groups within a window. So a few young rollouts overtake a long one, and none is trained too
old.

In lockstep the rollouts of a batch are sampled together, by one version, one batch after the other, so with a staleness
of at most 1 everything follows from the seed. In continuous mode and with vLLM, new weights go in while rollouts run,
and each token has its version.

A rollout is requested -> running -> scored -> trained. `failed`: the model was lost; the rollout is requested again.
`filtered`: all rewards of its group were equal, and another task takes the group's place (loop.refill).

OUT/slots/journal.jsonl         append-only, a line per change
OUT/slots/3.1.0/rollout.json    batch 3, second task, first rollout: scored, and in no step yet
OUT/slots/now.json              numbers for the viewer

A step's rollouts are in rollouts/step_00003.jsonl before it is trained, and then leave slots/. After a restart the step
gets the same rollouts again, so its weights are the same.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import random
import shutil
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from offbook.core import processes
from offbook.core.config import Config
from offbook.core.processes import Watchdog, wait_with_heartbeat
from offbook.core.runfolder import RunFolder, dump_lines, load_lines
from offbook.core.weights import Weights
from offbook.rl.collector import FREE, Collector, Job
from offbook.rl.train_step import has_gradient
from offbook.tasks.select import History, Record, Sampler
from offbook.types import ModelLost, Rollout, ServerLost, Task

WINDOW = 0.3  # of the groups that may be ahead of a step: how far behind the oldest one a step may choose
DEATHS = 3  # of the model, between two steps, end the run
SHOW_S = 1.0  # between two updates for the viewer
PER_CORE = 8  # rollouts that run at once; engines have queues of their own
log = logging.getLogger(__name__)


@dataclass(eq=False)
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
    def rollouts(self) -> list[Rollout]:
        """Those that are scored."""
        return [job.rollout for job in self.jobs if job.rollout]


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
        self.lines = list(read_journal(run.path))  # of the processes before this one
        starts = [line["fingerprint"] for line in self.lines if line["state"] == "started"]
        if starts[-1:] != [fingerprint]:
            self.lines = []
            shutil.rmtree(self.folder, ignore_errors=True)
            shutil.rmtree(run.path / "harder", ignore_errors=True)
            for step in run.steps():
                if step > done:
                    run.step_file("rollouts", step).unlink()
        self.made = [id for line in self.lines if line["state"] == "harder" for id in line["made"]]  # harder tasks
        self.folder.mkdir(parents=True, exist_ok=True)
        self.waiting: list[Group] = []  # in no step yet, the oldest first
        self.stored: dict[int, list[list[Rollout]]] = {}  # steps that got their rollouts before a restart
        self.next_batch = done + 1
        self.filtered: list[tuple[str, Record]] = []  # since the last step: tasks, and what their groups showed
        self.learned: list[tuple[str, Record]] = []  # the same, before a restart
        self.refills: Counter[int] = Counter()  # groups replaced, by batch
        self.ended: Counter[str] = Counter()  # rollouts, by state
        self.deaths = sum(line["state"] == "died" for line in self.lines)  # of the model
        self.restarts = sum(line["state"] == "started" for line in self.lines)
        journal = self.folder / "journal.jsonl"
        if journal.is_file() and not journal.read_bytes().endswith(b"\n"):
            with open(journal, "ab") as file:
                file.write(b"\n")  # ends the line that a kill cut off
        self.note("started", fingerprint=fingerprint)

    def note(self, state: str, **about: Any) -> None:
        """Append a line to the journal in one write: a kill leaves the line, none of it, or a torn one at the end."""
        line = {"at": round(time.time(), 3), "state": state, **about}
        with open(self.folder / "journal.jsonl", "ab", buffering=0) as file:
            file.write(json.dumps(line).encode() + b"\n")

    @property
    def counts(self) -> Counter[str]:
        """Rollouts by state."""
        found = Counter(self.ended)
        for group in self.waiting:
            for job in group.jobs:
                found["scored" if job.rollout else "running" if group.is_begun else "requested"] += 1
        return found

    @property
    def taken(self) -> list[str]:
        """The task of each group that was drawn for steps after the last checkpoint, or filtered."""
        stored = [group[0].task for groups in self.stored.values() for group in groups]
        return [*stored, *(task for task, _ in self.learned), *(group.task.id for group in self.waiting)]

    def request(self, batch: int, tasks: Sequence[Task]) -> list[Group]:
        self.note("requested", batch=batch, tasks=[task.id for task in tasks])
        groups = [self._group(batch, place, task) for place, task in enumerate(tasks)]
        self.waiting += groups
        self.next_batch = batch + 1
        return groups

    def _group(self, batch: int, place: int, task: Task) -> Group:
        group = Group(batch, place, task, [])
        for number in range(self.size):
            group.jobs.append(Job(task, f"{group.name}/{number}", group.name, folder=f"{batch}.{place}.{number}"))
        return group

    def running(self, group: Group, version: int) -> None:
        """A resumed group keeps its older version."""
        group.is_begun = True
        group.version = version if group.version is None else min(group.version, version)
        self.note("running", group=group.name, version=version, began=group.version)

    def scored(self, job: Job, rollout: Rollout) -> None:
        folder = self.folder / job.folder
        folder.mkdir(exist_ok=True)
        part = folder / "rollout.part"
        part.write_bytes(dump_lines([rollout]))
        os.replace(part, folder / "rollout.json")
        usage = rollout.usage
        self.note("scored", slot=job.folder, tokens=usage.sampled_tokens, turns=usage.turns)
        job.rollout = rollout

    def failed(self, group: Group, why: str, whole: bool) -> None:
        """Request running rollouts again; if `whole`, the group's scored ones too."""
        if whole:
            group.version = None
        for job in group.jobs:
            if job.rollout is None and group.is_begun:
                self.note("failed", slot=job.folder, why=why)
            elif job.rollout and whole:
                self.note("failed", slot=job.folder, why=why)
                self._clear(job)
                job.rollout = None

    def refill(self, group: Group, task: Task) -> Group:
        """Replace a filtered group, in one line of the journal: a kill leaves both changes or none."""
        record = Record.of(group.rollouts)
        place = group.place + 1 + max(one.place for one in self.waiting if one.batch == group.batch)
        about = {"group": group.name, "batch": group.batch, "place": place, "task": task.id}
        self.note("refilled", **about, filtered=group.task.id, shown=asdict(record))
        self._end(group, "filtered")
        self.refills[group.batch] += 1
        self.filtered.append((group.task.id, record))
        new = self._group(group.batch, place, task)
        self.waiting[self.waiting.index(group)] = new
        return new

    def given(self, step: int, groups: Sequence[Group]) -> None:
        """Hand groups to a step: they are in the step's file before their slots are removed."""
        self.run.write_rollouts(step, [rollout for group in groups for rollout in group.rollouts])
        for group in groups:
            self.note("trained", group=group.name, step=step)
            self._end(group, "trained")
        self.waiting = [group for group in self.waiting if group not in groups]

    def _end(self, group: Group, state: str) -> None:
        self.ended[state] += self.size
        for job in group.jobs:
            self._clear(job)

    def _clear(self, job: Job) -> None:
        shutil.rmtree(self.folder / job.folder, ignore_errors=True)

    def restore(
        self, tasks: Mapping[str, Task], recall: Callable[[list[Rollout]], None] = lambda rollouts: None
    ) -> None:
        """Take over what a killed run has beyond its last checkpoint. Files beat the journal. `recall` gets the
        rollouts of the steps before."""
        used = Counter[str]()  # groups that a step has, or that were replaced
        for step in self.run.steps():
            rollouts, _ = self.run.rollouts(step)
            groups = [rollouts[start : start + self.size] for start in range(0, len(rollouts), self.size)]
            used.update(group[0].group for group in groups)
            self.ended["trained"] += len(rollouts)
            if step > self.done:
                self.stored[step] = groups
            else:
                recall(rollouts)
        began: dict[str, int] = {}
        requested: list[tuple[int, int, str]] = []
        known = set()
        for line in self.lines:
            match line["state"]:
                case "requested":
                    requested += [(line["batch"], place, id) for place, id in enumerate(line["tasks"])]
                case "refilled":
                    used[line["group"]] += 1
                    self.refills[line["batch"]] += 1
                    self.ended["filtered"] += self.size
                    self.learned.append((line["filtered"], Record(**line["shown"])))
                    requested.append((line["batch"], line["place"], line["task"]))
                case "running":
                    began[line["group"]] = line["began"]
                case "scored":
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
                if folder := left.pop(job.folder, None):
                    found, _ = load_lines(folder / "rollout.json", Rollout)
                    if found and job.folder not in known:
                        self.scored(job, found[0])
                    elif found:
                        job.rollout = found[0]
        for path in left.values():
            shutil.rmtree(path)


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


class Shuffled:
    """Epochs in a new order each: no task comes twice before all have come once."""

    def __init__(self, tasks: list[Task], seed: int):
        self._tasks = tasks
        self._seed = seed

    def tasks_of(self, step: int, groups: int) -> list[Task]:
        chosen = []
        for place in range((step - 1) * groups, step * groups):
            epoch, index = divmod(place, len(self._tasks))
            order = random.Random(f"{self._seed}/{epoch}").sample(range(len(self._tasks)), len(self._tasks))
            chosen.append(self._tasks[order[index]])
            if epoch == 1 and not index:
                log.warning("all %d tasks have been trained on once; they come again", len(self._tasks))
        return chosen

    def epoch(self, step: int, groups: int) -> int:
        """Which pass over the tasks a step ends in, from 1."""
        return (step * groups - 1) // len(self._tasks) + 1


class Selected:
    """By what this run's rollouts have shown so far of tasks of the same kind (tasks/select.py). The same run picks the
    same ones, also when it was killed in between: those that were `drawn` for later steps are on record."""

    def __init__(self, tasks: list[Task], seed: int, folder: RunFolder, done: int, drawn: Iterable[str] = ()):
        self._history = History.of_runs([folder.path], before_step=done + 1)
        self._sampler = Sampler(tasks, seed, [*self._history.groups.elements(), *drawn])

    def tasks_of(self, step: int, groups: int) -> list[Task]:
        return self._sampler.draw(groups, self._history)

    def epoch(self, step: int, groups: int) -> int:
        return self._sampler.passes + 1

    def learn(self, groups: Iterable[Iterable[Rollout]], filtered: Iterable[tuple[str, Record]] = ()) -> None:
        for group in groups:
            self._history.add(group)
        for one in filtered:
            self._history.shown(*one)

    def add(self, task: Task) -> None:
        self._sampler.add(task)


class Scheduler:
    """Requests groups, has them sampled, and gives them to steps. Their state is in the rollout buffer. Nothing is
    sampled before the first `take`."""

    def __init__(self, config: Config, collector: Collector, buffer: RolloutBuffer, order: Shuffled | Selected):
        self.collector = collector
        self.engine = collector.engine
        self.buffer = buffer
        self.order = order
        self.settings = config.loop
        self.last_batch = config.train.steps
        self.num_groups = config.train.groups
        self.in_lockstep = config.engine.kind == "lockstep"
        machines = max(1, config.loop.ray.samplers)
        self.limit = FREE
        if not self.in_lockstep:
            self.limit = asyncio.Semaphore(PER_CORE * len(os.sched_getaffinity(0)) * machines)
        self._in_a_row = Counter[str]()  # losses since the last step, by server
        self._losses: list[ModelLost] = list(self.engine.losses)  # that were counted
        self._sampling: set[asyncio.Task[None]] = set()
        self._background: list[asyncio.Task[None]] = []
        self._is_started = False
        self._is_paused = True
        self._problem: BaseException | None = None
        self._changed = asyncio.Event()
        self._changed_at = time.monotonic()
        self._shown = 0.0

    def _start(self) -> None:
        self._is_started = True
        if self.in_lockstep:
            for group in self.buffer.waiting:
                if not self.has_batch(group.batch):
                    self.buffer.failed(group, "its batch was not over, and is sampled again", whole=True)
        self._is_paused = False
        self._fill()

    def has_batch(self, batch: int) -> bool:
        """Whether all of it was sampled before this process began."""
        jobs = [job for group in self.buffer.waiting if group.batch == batch for job in group.jobs]
        return batch in self.buffer.stored or (bool(jobs) and all(job.rollout for job in jobs))

    async def aclose(self) -> None:
        """Cancel what is running."""
        jobs = [*self._sampling, *self._background]
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)

    def in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """Run work during the steps; if it fails, the run ends."""
        job = asyncio.get_running_loop().create_task(work)
        self._background.append(job)
        job.add_done_callback(self._on_done)

    def _on_done(self, job: asyncio.Task[None]) -> None:
        if not job.cancelled() and (problem := job.exception()):
            self._problem = self._problem or problem
        self.on_change()

    async def take(self, step: int) -> list[list[Rollout]]:
        """The groups that a step is trained on; after a restart the same as before."""
        if not self._is_started:
            self._start()
        if step in self.buffer.stored:
            return self.buffer.stored.pop(step)
        staleness = self.settings.max_staleness
        window = 0 if self.in_lockstep else int(WINDOW * staleness * self.num_groups)
        chosen: list[Group] = []

        def ready() -> bool:
            chosen[:] = choose(self.buffer.waiting, step, self.num_groups, window, staleness)
            return bool(chosen)

        def waited_for() -> str:
            over = sum(group.is_over for group in self.buffer.waiting)
            state = f"{over} of {len(self.buffer.waiting)} groups are over, a step takes {self.num_groups}"
            return f"the rollouts of step {step} ({state})"

        await self._until(ready, waited_for)
        self.buffer.given(step, chosen)
        self._in_a_row.clear()
        return [group.rollouts for group in chosen]

    async def apply(self, weights: Weights) -> None:
        """New weights to the engine. In lockstep between two batches, else at once, in the middle of rollouts.

        In a thread: an engine may take minutes to start, and Ctrl-C has to work meanwhile."""
        if self.in_lockstep:
            await self._until(lambda: not self._sampling, lambda: "the batch that is being sampled, for new weights")
        if self.settings.max_staleness and self.engine.keeps_weights:  # the trainer changes its own meanwhile
            firsts = weights.firsts()
            copies = {name: weights.tensors[name].detach().clone() for name in set(firsts.values())}
            weights = replace(weights, tensors={name: copies[first] for name, first in firsts.items()})
        what = f"the engine to take the weights of {weights.version}"
        work = asyncio.to_thread(self.engine.apply, weights)
        await wait_with_heartbeat(work, Watchdog(lambda: what, math.inf, lambda: None))
        self._fill()

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """Inside, no rollout of the run is sampled: the caller has the engine for itself."""
        self._is_paused = True
        try:
            await self._until(lambda: not self._sampling, lambda: "what is being sampled, to probe hints")
            yield
        finally:
            self._is_paused = False
            self._fill()

    def _fill(self) -> None:
        """Request what may be requested, begin what may begin."""
        if self._is_paused or self._problem:
            return
        newest = min(self.last_batch, self.engine.version + self.settings.max_staleness + 1)
        while self.buffer.next_batch <= newest:
            batch = self.buffer.next_batch
            self.buffer.request(batch, self.order.tasks_of(batch, self.num_groups))
        new = [group for group in self.buffer.waiting if not group.is_begun and group.batch <= newest]
        if not self.in_lockstep:
            for group in new:
                self._begin([group])
        elif new and not self._sampling:
            self._begin([group for group in new if group.batch == new[0].batch])

    def _begin(self, groups: list[Group]) -> None:
        for group in groups:
            group.is_begun = True
        job = asyncio.get_running_loop().create_task(self._sample(groups))
        self._sampling.add(job)
        job.add_done_callback(self._on_sampled)

    def _on_sampled(self, job: asyncio.Task[None]) -> None:
        self._sampling.discard(job)
        self._on_done(job)
        if not job.cancelled():
            self._fill()

    async def _sample(self, groups: list[Group]) -> None:
        """All missing rollouts of these groups. If the model is lost they are retried: in lockstep all of them, else
        those that were running."""
        is_lost = True
        while is_lost:
            for group in groups:
                self.buffer.running(group, self.engine.version)
            jobs = [job for group in groups for job in group.jobs if job.rollout is None]
            try:
                await self.collector.side_by_side(jobs, self._rollout)
                is_lost = False
            except ModelLost as problem:
                self._on_loss(problem)
                for group in groups:
                    self.buffer.failed(group, str(problem), whole=self.in_lockstep)
        for group in groups:
            if self.collector.monitors is not None:
                self.collector.monitors.settle(group.rollouts)
            group.is_over = True
            replaced = self.buffer.refills[group.batch]
            if replaced < self.settings.refill and not has_gradient(group.rollouts):  # dynamic sampling
                (task,) = self.order.tasks_of(group.batch, 1)
                self.buffer.refill(group, task)

    async def _rollout(self, job: Job) -> None:
        asked = time.monotonic()
        async with self.limit:
            waited = time.monotonic() - asked
            rollout = await self.collector.rollout(job, lambda rollout, over: self.on_change())
        rollout.usage.slot_seconds = waited
        self.buffer.scored(job, rollout)
        for loss in self.engine.losses:  # servers that restarted by themselves
            self._on_loss(loss)
        self.on_change()

    def _on_loss(self, problem: ModelLost) -> None:
        """Count a lost model once, however many rollouts report it; each of several servers has its own count."""
        if any(problem is one for one in self._losses):
            return
        self._losses.append(problem)
        self.buffer.deaths += 1
        server = problem.server if isinstance(problem, ServerLost) else ""
        self._in_a_row[server] += 1
        self.buffer.note("died", why=str(problem))
        if self._in_a_row[server] >= DEATHS:
            which = f"the third time between two steps (of {self.buffer.deaths} in all)"
            ends = "so the run ends; the same command goes on from what is kept"
            raise type(problem)(f"{problem}; that was {which}, {ends}")
        log.warning("%s; what it was writing is asked for again", problem)

    def on_change(self) -> None:
        """Something has happened: waits look again, and now and then the viewer gets numbers."""
        self._changed_at = time.monotonic()
        self._changed.set()
        if self._changed_at - self._shown < SHOW_S:
            return
        self._shown = self._changed_at
        numbers = {f"slots {state}": count for state, count in self.buffer.counts.items()} | {
            "weights of step": self.engine.version,
            "engine full, share": round(self.engine.kv_load, 3),
            "restarts of the model": self.buffer.deaths,
            "restarts of the run": self.buffer.restarts,
        }
        part = self.buffer.folder / "now.part"
        part.write_text(json.dumps(numbers))
        os.replace(part, self.buffer.folder / "now.json")

    async def _until(self, ready: Callable[[], bool], what: Callable[[], str]) -> None:
        """Wait with a printed reason and a timeout: it ends when nothing at all has happened for too long."""
        watchdog = Watchdog(what, self.settings.deadline_s, lambda: self._changed_at)
        while not ready():
            if self._problem:
                raise self._problem
            self._changed.clear()
            try:
                async with asyncio.timeout(processes.TELL_S):
                    await self._changed.wait()
            except TimeoutError:
                watchdog.look()

    def metrics(self, step: int, groups: Iterable[Iterable[Rollout]]) -> dict[str, Any]:
        """The pass over the tasks, how old a step's tokens are, in steps, and what became of rollouts so far."""
        segments = [segment for group in groups for rollout in group for segment in rollout.segments]
        ages = [step - 1 - version for segment in segments for version in segment.versions if version >= 0]
        counts = self.buffer.counts
        return {
            "epoch": self.order.epoch(step, self.num_groups),
            "staleness": sum(ages) / max(1, len(ages)),
            "staleness/max": max(ages, default=0),
            "staleness/too_old": sum(age > self.settings.max_staleness for age in ages),
            **{f"slots/{state}": counts[state] for state in ("requested", "running", "scored")},
            "deaths": self.buffer.deaths,
            "restarts": self.buffer.restarts,
        }


def choose(waiting: Sequence[Group], step: int, count: int, window: int, max_staleness: int) -> list[Group]:
    """The groups that a step is given, the oldest first; none where it has to wait."""
    due = [group for group in waiting if group.version is not None and group.version + 1 + max_staleness <= step]
    if not all(group.is_over for group in due):
        return []
    over = [group for group in waiting[: count + window] if group.is_over]
    chosen = [*due, *(group for group in over if group not in due)][:count]
    return [group for group in waiting if group in chosen] if len(chosen) == count else []
