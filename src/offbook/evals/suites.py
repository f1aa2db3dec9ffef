"""Evaluation suites by name: `pocket`, generated side suites, or a folder of task folders."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass, field
from pathlib import Path

import offbook
from offbook.core.config import Config, cache_folder
from offbook.evals.sides import NUM_TASKS, SIDES, make_side
from offbook.pocket.tasks import level_named
from offbook.rl.models import Progress, quiet
from offbook.rl.tasks import held_out, refuse_no_heldout, task_sets, tasks_at, with_source
from offbook.tasks import load_tasks
from offbook.types import OffbookError, Task

ALL_SIDES = "sides"


@dataclass(frozen=True)
class Suites:
    """The tasks of one or more suites, and which suite each is of."""

    names: list[str]
    by_id: dict[str, Task] = field(default_factory=dict)
    suite_of: dict[str, str] = field(default_factory=dict)

    @property
    def tasks(self) -> list[Task]:
        return list(self.by_id.values())


def load_suites(names: list[str], config: Config, limit: int = 0, progress: Progress = quiet) -> Suites:
    """`limit` is for each suite; 0 is no limit."""
    suites = Suites([each for name in names for each in (SIDES if name == ALL_SIDES else [name])])
    for name in suites.names:
        tasks = tasks_of(name, config, progress, limit)
        for task in tasks[: limit or None]:
            if task.id in suites.suite_of:
                raise OffbookError(f"{name} has a task {task.id}, and {suites.suite_of[task.id]} has one of that name")
            suites.suite_of[task.id] = name
            suites.by_id[task.id] = task
    return suites


def tasks_of(name: str, config: Config, progress: Progress = quiet, limit: int = 0) -> list[Task]:
    """Of a folder with train/ and heldout/, the held-out tasks. `limit` avoids generating more than needed."""
    if name in SIDES:
        return load_tasks(side_folder(name, config.seed, progress, limit))
    is_folder = Path(name).is_dir()
    if not level_named(name) and any((Path(name) / split).is_dir() for split in ("train", "heldout")):
        if tasks := held_out(Path(name)):
            return tasks
        if name == config.tasks.source and config.tasks.heldout_share:
            return task_sets(config).heldout
        refuse_no_heldout(name)
    if not level_named(name) and not is_folder:
        made = f"`pocket`, `pocket-long`, {', '.join(SIDES)} or `sides`"
        raise OffbookError(f"there is no suite {name}; give a folder of tasks, {made}")
    return tasks_at(name, config, progress)


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
    package = Path(offbook.__file__).parent
    digest = hashlib.sha256()
    for path in [*sorted((package / "evals" / "sides").glob("*.*")), *sorted((package / "tasks").glob("*.py"))]:
        digest.update(path.read_bytes() if path.is_file() else b"")
    wanted = min(limit or NUM_TASKS, NUM_TASKS)
    root = cache_folder() / "sides" / digest.hexdigest()[:12] / f"{name}-{seed}-{wanted}"
    if not root.is_dir():
        asyncio.run(make_side(name, root, seed, lambda share: progress(f"making {name}", share), wanted))
    return root
