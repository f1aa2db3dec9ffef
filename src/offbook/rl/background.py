"""Background work of a run: evaluations of checkpoints, and harder tasks from those that became easy.

Neither holds the run up, both are noted in its journal, and one that a kill -9 ended is taken up again.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import sys
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain, groupby
from pathlib import Path

from offbook.core.config import Config
from offbook.core.runfolder import RunFolder, write_atomic
from offbook.rl.rollout_buffer import FilteredGroup, RolloutBuffer, read_journal
from offbook.sandbox import SandboxSpec
from offbook.tasks import load_task
from offbook.tasks.factory.harden import THERE, harden, workshop_of
from offbook.tasks.select import Record
from offbook.train.checkpoint import checkpoint_path
from offbook.types import OffbookError, Rollout, Task

ATTEMPTS = 3
LOOK_S = 0.2
LAST_LINES = 3  # of a log, that are shown
RECENT, FEWEST = 8, 3  # steps and groups of the recent solve rate
# It ends with this process, however that ends: two must not write one evaluation.
EVALUATE = "from offbook.core.processes import end_with; end_with({}); from offbook.cli import main; main()"
log = logging.getLogger(__name__)


class Evaluations:
    """Of checkpoints, one after the other, each in a process of its own with weights of its own.

    OUT/eval/step_00010/    until it is over: the model, and what `offbook eval --out` writes
    OUT/eval/step_00010.json, .rollouts.jsonl, .log    then
    """

    def __init__(self, config: Config, folder: RunFolder, buffer: RolloutBuffer, tell: Callable[[str], None]):
        self.config, self.folder, self.buffer, self.tell = config, folder, buffer, tell
        self._due: asyncio.Queue[int] = asyncio.Queue()
        self._left = 0
        for model in sorted(folder.path.glob("eval/step_*/model")):
            self._add(int(model.parent.name.removeprefix("step_")))

    def is_due(self, step: int) -> bool:
        return bool(self.config.loop.eval_every) and step % self.config.loop.eval_every == 0

    def saved(self, step: int) -> None:
        """A checkpoint is being written that is to be measured."""
        if self.is_due(step):
            self._add(step)

    def _add(self, step: int) -> None:
        self._left += 1
        self._due.put_nowait(step)

    async def run(self) -> None:
        while True:
            step = await self._due.get()
            place = self.folder.path / "eval" / f"step_{step:05d}"
            await self._link_checkpoint(step, place / "model")
            for attempt in range(1, ATTEMPTS + 1):
                if not (code := await self._evaluated(place)):
                    break
                words = place.with_suffix(".log").read_text().strip().splitlines()[-LAST_LINES:]
                said = f"the evaluation of step {step} ended with code {code}: {' | '.join(words)}"
                if attempt == ATTEMPTS:
                    raise OffbookError(f"{said}; without evaluations: --loop.eval_every 0")
                log.warning("%s; it is started again", said)
            self._keep(step, place)
            self._left -= 1

    @property
    def are_over(self) -> bool:
        return not self._left

    async def _link_checkpoint(self, step: int, model: Path) -> None:
        """By links: removing old checkpoints does not remove this one."""
        checkpoint = checkpoint_path(self.folder.path / "ckpt", step)
        while not model.is_dir():
            if (checkpoint / "DONE").exists():
                part = model.with_name("model.part")
                shutil.rmtree(part, ignore_errors=True)
                shutil.copytree(checkpoint, part, copy_function=os.link)
                part.rename(model)
            await asyncio.sleep(LOOK_S)

    async def _evaluated(self, place: Path) -> int:
        config = str(self.folder.config_file)
        kind = self.config.engine.kind
        own_engine = kind if kind != "vllm" else "lockstep"  # vLLM's GPUs are the run's
        command = ["eval", str(place / "model"), "--suite", self.config.tasks.source, "--out", str(place)]
        command += ["--plain", "--json", "@", config, "--engine.kind", own_engine, "--loop.max_staleness", "0"]
        with open(place.with_suffix(".log"), "ab") as output:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", EVALUATE.format(os.getpid()), *command, stdout=output, stderr=output
            )
            try:
                return await process.wait()
            except asyncio.CancelledError:
                process.kill()
                await process.wait()
                raise

    def _keep(self, step: int, place: Path) -> None:
        """Where measurements of a run are, the rollouts first; then what only the evaluation needed goes."""
        found = json.loads((place / "results.json").read_text())
        os.replace(place / "rollouts" / "step_00000.jsonl", place.with_suffix(".rollouts.jsonl"))
        write_atomic(place.with_suffix(".json"), json.dumps({"step": step, **found}, indent=2) + "\n")
        self.buffer.note("evaluated", step=step, solved=found["solved"])
        self.tell(f"held out, after step {step}: {found['solved']:.0%} solved")
        shutil.rmtree(place)


@dataclass(frozen=True, slots=True)
class _Shown:
    """What a group showed of its task."""

    task: str
    origin: str
    solved: float  # the share of its rollouts


class Harder:
    """Tasks that nearly all rollouts solve, in a repository whose tasks have been solved as often lately, are made
    harder through the factory, verified there, and drawn later. Lately is within RECENT steps, by FEWEST groups of the
    repository or, where there are fewer, of all.

    OUT/harder/ID/    those that were made
    """

    def __init__(
        self,
        config: Config,
        buffer: RolloutBuffer,
        tasks: dict[str, Task],
        added: Callable[[list[Task]], None],
        done: int = 0,
    ):
        self.share, self.buffer, self.tasks, self.added = config.tasks.harden, buffer, tasks, added
        self._recent: deque[list[_Shown]] = deque(maxlen=RECENT)  # by step
        for step in [step for step in buffer.run.steps() if step <= done][-RECENT:]:
            rollouts, _ = buffer.run.rollouts(step)
            groups = [list(group) for _, group in groupby(rollouts, lambda one: one.group)]
            self._recent.append(self._shown(groups, buffer.learned.get(step, ())))
        self.spec = SandboxSpec(**config.sandbox.model_dump())
        self.folder = buffer.run.path / "harder"
        self._easy: asyncio.Queue[Task] = asyncio.Queue()
        lines = [line for line in read_journal(buffer.run.path) if line["state"] in ("easy", "harder")]
        over = {line["task"] for line in lines if line["state"] == "harder"}
        self._seen = {line["task"] for line in lines}
        for line in lines:
            if line["state"] == "easy" and line["task"] not in over and line["task"] in tasks:
                self._easy.put_nowait(tasks[line["task"]])

    def look_at(self, groups: Iterable[list[Rollout]], filtered: Iterable[FilteredGroup] = ()) -> None:
        """Those of the next step."""
        self._recent.append(self._shown(groups, filtered))
        for one in chain(*self._recent):
            task, rate = self.tasks[one.task], self._rate(one.origin)
            if task.deleted and min(one.solved, rate) >= self.share and task.id not in self._seen:
                self._seen.add(task.id)
                self.buffer.note("easy", task=task.id, solved=one.solved, recent=rate)
                self._easy.put_nowait(task)

    def _shown(self, groups: Iterable[list[Rollout]], filtered: Iterable[FilteredGroup]) -> list[_Shown]:
        found = []
        for id, shown in chain(((group[0].task, Record.of(group)) for group in groups), filtered):
            if shown.rollouts and (task := self.tasks.get(id)):
                found.append(_Shown(id, task.origin, shown.solved / shown.rollouts))
        return found

    def _rate(self, origin: str) -> float:
        """The recent solve rate of a repository's tasks; 0 where too little is known."""
        every = [*chain(*self._recent)]
        own = [one for one in every if one.origin == origin]
        shown = [one.solved for one in (own if len(own) >= FEWEST else every)]
        return sum(shown) / len(shown) if len(shown) >= FEWEST else 0.0

    async def run(self) -> None:
        while True:
            task = await self._easy.get()
            why, folders = "", list[Path]()
            try:
                workshop = await asyncio.to_thread(workshop_of, task)
                outcomes = await harden(task, self.folder, self.spec, workshop=workshop)
                folders = [self.folder / one.id for one in outcomes if not one.refused]
                folders += [Path(one.evidence) for one in outcomes if one.refused == THERE]
            except OffbookError as reason:  # its repository is not here any more
                why = str(reason)
            new = [one for one in map(load_task, dict.fromkeys(folders)) if one.id not in self.tasks]
            self.buffer.note("harder", task=task.id, made=[one.id for one in new], why=why)
            self.tasks |= {one.id: one for one in new}
            self.added(new)


def harder_tasks(run: Path) -> list[Task]:
    """Those that a run made before it was ended."""
    made = {id for line in read_journal(run) if line["state"] == "harder" for id in line["made"]}
    return [load_task(run / "harder" / id) for id in sorted(made)]
