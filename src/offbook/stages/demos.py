"""Demonstrations on factory tasks: episodes of the scripted expert that the grader pays and no monitor flags.

They teach the format and the way of working. The code of an edit is learned with the rest: a model that learns the old
text and not the new one learns to write the old text twice (docs/results/repositories.md). What the expert got wrong on
purpose is not learned. Held-out repositories give no demonstrations.

Rejection sampling takes a model's own solved rollouts on training tasks for the next round of imitation. What a model
solved itself is closer to what it writes than a script or another model, so all of it is learned, code included (STaR,
2203.14465; RFT, 2308.01825). Of a task's rollouts the few with the fewest invalid calls and tokens are kept: tasks that
are solved often would fill the data otherwise.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from offbook.core.config import Config, ConfigError, MonitorsConfig, RewardsConfig
from offbook.core.runfolder import RunFolder, dump_lines, read_lines, write_atomic
from offbook.pocket.tasks import level_named
from offbook.rl.checks import refuse_missing_tasks
from offbook.rl.collector import Collector, Job
from offbook.rl.evaluate import roll_out
from offbook.rl.models import Progress, chat_of, pocket_cache, positions
from offbook.rl.tasks import task_sets, with_source
from offbook.signals.monitors.policy import action_of
from offbook.signals.trajectory.formats import UNLEARNED
from offbook.stages import expert
from offbook.stages.expert import Experts
from offbook.train.checkpoint import TOKENIZER_FILES
from offbook.types import Event, Rollout, Task

NAME = re.compile(r"demos(?::(?P<source>(?!\d+$).+?))?(?::(?P<count>\d+))?")
PER_TASK = 4
KEPT = "kept.jsonl"  # of rejection sampling, in the stage's folder
KEPT_PER_TASK = 2


@dataclass
class Demos:
    """`demos`, `demos:DIR`, `demos:DIR:N`."""

    source: str
    count: int  # per task

    @classmethod
    def named(cls, name: str, config: Config) -> Demos | None:
        found = NAME.fullmatch(name)
        if found is None or Path(name).exists():
            return None
        return cls(found["source"] or config.tasks.source, int(found["count"] or PER_TASK))

    def refuse(self, config: Config) -> None:
        if level_named(self.source):
            raise ConfigError(f"demos are of a folder of tasks and not of {self.source}; give demos:DIR")
        if not self.count:
            raise ConfigError("demos:DIR:0 demonstrates nothing; give a count")
        has_tasks = any(Path(self.source).glob("*/task.toml"))
        refuse_missing_tasks(with_source(config, self.source), "" if has_tasks else "train")


def demonstrated(demos: Demos, config: Config, model: Path, progress: Progress) -> tuple[list[Rollout], Counter[str]]:
    """The episodes to learn from, and how many were left out by the reason. Made on first use, then cached."""
    sets = task_sets(with_source(config, demos.source))
    left_out = Counter({"held-out tasks": len(sets.heldout)})
    tasks = []
    for task in sets.train:
        if task.leave or task.script or not (task.folder / "solution" / "gold.patch").is_file():
            left_out["tasks without a gold patch"] += 1
        else:
            tasks.append(task)
    config = _settings(config, model)
    path = _cached(tasks, demos.count, config, model)
    if not path.is_file():
        write_atomic(path, dump_lines(asyncio.run(_make(tasks, demos.count, config, model, progress))))
    rollouts, _ = read_lines(path, Rollout)
    reasons = list(map(why_left_out, rollouts))
    left_out.update(filter(None, reasons))
    kept = [rollout for rollout, why in zip(rollouts, reasons, strict=True) if not why]
    without = {rollout.task for rollout in rollouts} - {rollout.task for rollout in kept}
    left_out["tasks without any demonstration"] = len(without)
    return kept, +left_out


def _settings(config: Config, model: Path) -> Config:
    """A rollout of the run's harness, with the plain rewards, and in one context window."""
    harness = config.harness
    context = min(harness.context, positions(model), harness.summarize_at or harness.context)
    alone: dict[str, object] = {"context": context, "summarize_at": 0, "command": "", "mounts": {}}
    update = {"harness": harness.model_copy(update=alone), "rewards": RewardsConfig(), "monitors": MonitorsConfig()}
    return config.model_copy(update=update)


def _cached(tasks: Sequence[Task], count: int, config: Config, model: Path) -> Path:
    settings = [config.harness.model_dump(), config.tools.model_dump(), config.sandbox.model_dump()]
    digest = hashlib.sha256(json.dumps([settings, config.seed, count]).encode())
    files = [task.folder / name for task in tasks for name in ("task.toml", "instruction.md", "solution/gold.patch")]
    files += [*(model / name for name in TOKENIZER_FILES), Path(__file__), Path(expert.__file__)]
    for file in files:
        digest.update(file.read_bytes() if file.is_file() else b"")
    return pocket_cache() / f"demos-{digest.hexdigest()[:16]}.jsonl"


async def _make(tasks: Sequence[Task], count: int, config: Config, model: Path, progress: Progress) -> list[Rollout]:
    jobs = [Job(task, f"demos/{task.id}/{number}", f"demos/{task.id}") for task in tasks for number in range(count)]
    experts = Experts({job.id: job.task for job in jobs}, chat_of(model, config))
    collector = Collector(config, model, lent=experts)
    experts.harness = collector.harness
    done: set[str] = set()

    def watch(rollout: Rollout, over: bool) -> None:
        done.update([rollout.id] if over else [])
        progress("demonstrations", len(done) / len(jobs))

    rollouts = await collector.rollouts(jobs, watch, asyncio.Semaphore((os.cpu_count() or 1) + 1))
    for start in range(0, len(rollouts), count):
        if collector.monitors is not None:
            collector.monitors.settle(rollouts[start : start + count])
    for rollout in rollouts:
        for segment in rollout.segments:
            own = [number for number, message in enumerate(segment.messages) if segment.is_own(message)]
            slips = experts.sessions[rollout.id].slips
            rollout.events += [Event(number, UNLEARNED, "") for turn, number in enumerate(own) if turn in slips]
    return rollouts


def why_left_out(rollout: Rollout) -> str:
    """Of imitation; empty if it is not. `answer` is a last message without a call."""
    if rollout.fault:
        return "ended by the machine"
    if rollout.stop not in ("finish", "answer"):
        for event in rollout.events:
            if event.kind == "outgrown":
                return event.detail
        return f"ended by {'harness.' if rollout.stop in ('turns', 'context', 'tokens') else ''}{rollout.stop}"
    if action_of(rollout.flags, {}) not in (None, "count"):  # `attempt`: the repository's own tests may look at .git
        return f"flagged as {rollout.flags[0].kind}"
    return "" if rollout.solved else "not solved"


def sample(config: Config, progress: Progress, tell: Callable[[str], None]) -> RunFolder:
    """Roll out `train.group_size` times per training task, and write what is to be imitated to OUT/kept.jsonl."""
    tasks = task_sets(config, progress).train
    size, done = config.train.group_size, set[str]()

    def watch(rollout: Rollout, over: bool) -> None:
        done.update([rollout.id] if over else [])
        progress(f"samples {config.out}", len(done) / (size * len(tasks)))

    roll_out(config, tasks, size, watch)
    folder = RunFolder(config.out)
    rollouts, _ = folder.rollouts(0)
    kept = chosen(rollouts)
    write_atomic(Path(config.out) / KEPT, dump_lines(kept))
    solved = len({rollout.task for rollout in kept})
    tell(f"{len(kept)} of {len(rollouts)} rollouts are kept, of {solved} of {len(tasks)} tasks")
    return folder


def chosen(rollouts: Iterable[Rollout]) -> list[Rollout]:
    """At most KEPT_PER_TASK of each task, in its order."""
    solved = sorted((one for one in rollouts if not why_left_out(one)), key=lambda one: one.task)
    kept: list[Rollout] = []
    for _, of_task in groupby(solved, key=lambda one: one.task):
        kept += sorted(of_task, key=lambda one: (one.usage.invalid_calls, one.usage.sampled_tokens))[:KEPT_PER_TASK]
    return kept
