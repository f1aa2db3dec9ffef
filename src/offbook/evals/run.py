"""An evaluation, its suites and its folder. Each rollout is saved when it ends, so a killed evaluation resumes.

Suites have names: `pocket`, generated side suites, or a folder of task folders.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from offbook.core.config import Config
from offbook.core.runfolder import write_atomic
from offbook.evals.metrics import measure, row_of
from offbook.evals.sides import NUM_TASKS, SIDES, make_side
from offbook.pocket.tasks import level_named
from offbook.rl.checks import pocket_cache
from offbook.rl.collector import Collector, OnRollout, unwatched
from offbook.rl.evaluate import PARALLEL, collect_into, crashes
from offbook.rl.models import Progress, model_folder, quiet
from offbook.rl.resume import RolloutFiles
from offbook.rl.tasks import held_out, refuse_no_heldout, task_sets, tasks_at, with_source
from offbook.rl.train_step import summarize
from offbook.tasks import load_tasks
from offbook.tasks.contamination import contamination
from offbook.types import OffbookError, Task

ALL_SIDES = "sides"


@dataclass(frozen=True)
class Suites:
    """The tasks of one or more suites, and which suite each is of."""

    names: list[str]
    tasks: list[Task] = field(default_factory=list)
    suite_of: dict[str, str] = field(default_factory=dict)  # by task


def load_suites(names: list[str], config: Config, limit: int = 0, progress: Progress = quiet) -> Suites:
    """`limit` is for each suite; 0 is no limit."""
    suites = Suites([each for name in names for each in (SIDES if name == ALL_SIDES else [name])])
    for name in suites.names:
        tasks = tasks_of(name, config, progress, limit)
        for task in tasks[: limit or None]:
            if task.id in suites.suite_of:
                raise OffbookError(f"{name} has a task {task.id}, and {suites.suite_of[task.id]} has one of that name")
            suites.suite_of[task.id] = name
            suites.tasks.append(task)
    return suites


def tasks_of(name: str, config: Config, progress: Progress = quiet, limit: int = 0) -> list[Task]:
    """Of a folder with train/ and heldout/, the held-out tasks. `limit` avoids generating more than needed."""
    folder = Path(name)
    if name in SIDES:
        return load_tasks(side_folder(name, config.seed, progress, limit))
    if not level_named(name) and not folder.is_dir():
        made = f"`pocket`, `pocket-long`, {', '.join(SIDES)} or `sides`"
        raise OffbookError(f"there is no suite {name}; give a folder of tasks, {made}")
    if level_named(name) or not ((folder / "train").is_dir() or (folder / "heldout").is_dir()):
        return tasks_at(name, config, progress)
    if tasks := held_out(folder):
        return tasks
    if name == config.tasks.source and config.tasks.heldout_share:
        return task_sets(config).heldout
    return refuse_no_heldout(name)


def train_tasks(source: str, config: Config) -> list[Task]:
    """The training tasks: a folder's train/ part, or all of it."""
    if level_named(source):
        return task_sets(with_source(config, source)).train
    if source == config.tasks.source and config.tasks.heldout_share:
        return task_sets(config).train
    folder = Path(source) / "train" if (Path(source) / "train").is_dir() else Path(source)
    if not folder.is_dir():
        raise OffbookError(f"there is no folder {source} with training tasks")
    return load_tasks(folder)


def side_folder(name: str, seed: int, progress: Progress = quiet, limit: int = 0) -> Path:
    """Generate and verify on first use. The folder's name depends on the templates and the limit."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("sides.*")):
        digest.update(path.read_bytes())
    wanted = min(limit or NUM_TASKS, NUM_TASKS)
    root = pocket_cache() / f"sides-{digest.hexdigest()[:12]}-{name}-{seed}-{wanted}"
    if not root.is_dir():
        asyncio.run(make_side(name, root, seed, lambda share: progress(f"making {name}", share), wanted))
    return root


@dataclass(frozen=True)
class Subject:
    """The evaluated model: a folder or, without one, the endpoint `config.model`."""

    label: str
    config: Config
    folder: Path | None
    remote_name: str = ""


def measure_heldout(config: Config, progress: Progress = quiet) -> dict[str, Any]:
    """Evaluate `config.model` on the held-out tasks of the configuration, in the folder `config.out`."""
    folder = model_folder(config.model, config.seed, progress)
    source = config.tasks.source
    suites = load_suites([source], config, progress=progress)
    files = RolloutFiles.folder(Path(config.out))
    progress(f"measuring {config.out}", 0.0)
    result = run_eval(Subject(config.model, config, folder), suites, files, train=train_tasks(source, config))
    progress(f"measuring {config.out}", 1.0)
    return result


def run_eval(
    subject: Subject,
    suites: Suites,
    files: RolloutFiles,
    watch: OnRollout = unwatched,
    train: list[Task] | None = None,
    parallel: int = PARALLEL,
) -> dict[str, Any]:
    """The numbers of `results.json`. Saved rollouts are passed to `watch` first.

    `train` are the training tasks, if known, for the contamination check.
    """
    config = subject.config
    tasks = suites.tasks
    collector = Collector(config, subject.folder, subject.remote_name)
    with files.writing("evaluation", collector, tasks):
        overlap = contamination(tasks, train) if train is not None else None
        started = time.monotonic()
        groups, counted = collect_into(files, collector, tasks, config.eval.samples, "eval", watch, parallel)
        of_tasks = zip(tasks, groups, strict=True)
        rows = [row_of(one, task, suites.suite_of[task.id]) for task, group in of_tasks for one in group]
        numbers = measure(rows)
        result = {
            "model": subject.label,
            "suites": suites.names,
            **summarize(groups),
            "tasks": len(tasks),
            "seconds": time.monotonic() - started,
            **numbers,
            **{f"{key}_ci": numbers["intervals"].get(key) for key in ("solved", "invalid_per_100")},
            "samples": config.eval.samples,
            **counted,
            "crashes": crashes(groups),
            "contamination": overlap,
            "rows": [asdict(row) for row in rows],
        }
        write_atomic(files.results, json.dumps(result, indent=1) + "\n")
        return result
