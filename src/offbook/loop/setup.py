"""From names in a configuration to things. Models by name are in models.py."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from offbook.config import Config
from offbook.loop.models import Progress, load_model, model_folder, pocket_cache, quiet
from offbook.tasks import load_tasks, make_pocket_tasks
from offbook.types import OffbookError, Task

__all__ = ["Progress", "TaskSets", "load_model", "model_folder", "quiet", "refuse_missing_tasks", "task_sets"]


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
    wording = config.tasks.wording
    return TaskSets(load_tasks(root / "train", wording), load_tasks(root / "heldout", wording))
