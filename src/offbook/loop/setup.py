"""From names in a configuration to things. Models by name are in models.py."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from pathlib import Path

from offbook.config import Config
from offbook.loop.models import Progress, load_model, model_folder, pocket_cache, quiet
from offbook.taskgen.pocket import make_pocket_tasks
from offbook.tasks import load_tasks
from offbook.types import OffbookError, Task

__all__ = [
    "Progress",
    "TaskSets",
    "held_out",
    "load_model",
    "model_folder",
    "quiet",
    "refuse_missing_tasks",
    "task_sets",
]
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TaskSets:
    train: list[Task]
    heldout: list[Task]


def refuse_missing_tasks(config: Config) -> None:
    """Before minutes go into a model: is the task folder there?"""
    if config.tasks.source != "pocket" and not Path(config.tasks.source).is_dir():
        raise OffbookError(f"there is no task folder {config.tasks.source}")


def task_sets(config: Config, progress: Progress = quiet) -> TaskSets:
    """The train and held-out tasks of a configuration; pocket tasks are made and verified if they are not there yet."""
    root = Path(config.tasks.source)
    if config.tasks.source == "pocket":
        wanted = config.tasks.num_train, config.tasks.num_heldout
        root = pocket_cache() / f"tasks-{config.seed}-{wanted[0]}-{wanted[1]}"
        if not root.is_dir():
            asyncio.run(make_pocket_tasks(root, config.seed, *wanted, lambda share: progress("making tasks", share)))
    sets = TaskSets(load_tasks(root / "train", config.tasks.wording), held_out(root, config.tasks.wording))
    if both := {task.id for task in sets.train} & {task.id for task in sets.heldout}:
        raise OffbookError(
            f"the task {min(both)} is in {root / 'train'} and in {root / 'heldout'}; remove one of the two"
        )
    if not sets.heldout:
        log.warning("%s has no held-out tasks: all of them are trained on, and there are none to measure with", root)
    return sets


def held_out(root: Path, wording: str = "") -> list[Task]:
    """The held-out tasks of a folder; there are none where all of its tasks are of one repository."""
    folder = root / "heldout"
    return load_tasks(folder, wording) if any(folder.glob("[!.]*")) else []
