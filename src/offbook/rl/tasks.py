"""The tasks of a configuration: where they are, in which order a run trains on them, and what it records of them."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Any, NoReturn

from offbook.core.config import Config, cache_folder
from offbook.core.runfolder import RunFolder, write_atomic
from offbook.pocket.tasks import level_named, make_pocket_tasks
from offbook.rl.checks import TASKSET, Progress, is_undivided, pocket_cache, quiet
from offbook.sandbox import SandboxSpec
from offbook.tasks import load_task, load_tasks
from offbook.types import OffbookError, Task

HELD_OUT = 0.2  # of a source that does not say
# What a number on tasks of a repository that is trained on is worth.
SHARED = "where agents could read the code that these lack: numbers on them are no measure of unseen code"
MAX_PATCH = 60_000  # characters
MAX_TESTS = 300  # names of each kind
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TaskSets:
    train: list[Task]
    heldout: list[Task]


def task_sets(config: Config, progress: Progress = quiet) -> TaskSets:
    """The train and held-out tasks of a configuration; pocket tasks are made and verified if they are not there yet."""
    source = config.tasks.source
    root = Path(source)
    level = level_named(source)
    if level:
        num_train = config.tasks.num_train
        num_heldout = config.tasks.num_heldout
        which = f"long-{level.fewest}-{level.most}" if level.is_long else "tasks"
        root = pocket_cache() / f"{which}-{config.seed}-{num_train}-{num_heldout}"
        if not root.is_dir():
            making = partial(progress, "making tasks")
            asyncio.run(make_pocket_tasks(root, config.seed, num_train, num_heldout, making, level))
    if not level and is_undivided(source):
        sets = _cut(tasks_at(source, config), HELD_OUT)
    else:
        sets = TaskSets(load_tasks(root / "train"), held_out(root))
    if not sets.heldout and config.tasks.heldout_share:
        sets = _cut(sets.train, config.tasks.heldout_share, least=1)
        log.warning("%s: %d tasks are held out of repositories to train on, %s", root, len(sets.heldout), SHARED)
        if not sets.train:
            raise OffbookError(f"{root} has no task left to train on; give a smaller tasks.heldout_share")
    if both := {task.id for task in sets.train} & {task.id for task in sets.heldout}:
        raise OffbookError(f"the task {min(both)} is in train/ and in heldout/ of {root}; remove one of the two")
    if not sets.heldout:
        log.warning("%s has no held-out tasks: all of them are trained on, and there are none to measure with", root)
    return sets


def has_heldout(config: Config) -> bool:
    source = config.tasks.source
    is_cut = bool(config.tasks.heldout_share or level_named(source)) or is_undivided(source)
    return is_cut or any((Path(source) / "heldout").glob("[!.]*"))


def refuse_no_heldout(source: str) -> NoReturn:
    raise OffbookError(
        f"{source} has no held-out tasks to measure on; add another repository (offbook tasks make ANOTHER --out "
        f"{quote(source)}), or train again with --tasks.heldout_share 0.2, which holds some of its tasks out"
    )


def _cut(tasks: list[Task], share: float, least: int = 0) -> TaskSets:
    """Hold about this share out, by the digest of the name: the same tasks whatever else comes or goes."""
    digests = {task.id: hashlib.sha256(task.id.encode()).digest() for task in tasks}
    kept = {name for name, digest in digests.items() if digest[0] < 256 * share}
    kept |= {*sorted(digests, key=digests.__getitem__)[:least]}
    return TaskSets([one for one in tasks if one.id not in kept], [one for one in tasks if one.id in kept])


def _taskset(source: str, spec: SandboxSpec) -> list[Task]:
    try:
        from offbook.tasks.from_verifiers import write_taskset
    except ImportError:
        raise OffbookError(f"{source} needs verifiers: pip install 'offbook[verifiers]'") from None
    id = source.removeprefix(TASKSET)
    root = cache_folder() / "verifiers" / hashlib.sha256(id.encode()).hexdigest()[:16]
    folders, left_out = asyncio.run(write_taskset(id, root, spec))
    if left_out:
        log.warning("%d tasks of %s are left out: %s", len(left_out), source, ", ".join(sorted({*left_out.values()})))
    return sorted(map(load_task, folders), key=lambda task: task.id)


def held_out(root: Path) -> list[Task]:
    """The held-out tasks of a folder; there are none where all of its tasks are of one repository."""
    folder = root / "heldout"
    return load_tasks(folder) if any(folder.glob("[!.]*")) else []


def tasks_at(source: str, config: Config, progress: Progress = quiet) -> list[Task]:
    """`pocket` and `pocket-long` for the held-out ones of these, a task folder, or a folder of task folders."""
    if level_named(source):
        return task_sets(with_source(config, source), progress).heldout
    if source.startswith(TASKSET):
        return _taskset(source, SandboxSpec(**config.sandbox.model_dump()))
    folder = Path(source)
    if not folder.is_dir():
        raise OffbookError(f"there is no task folder {source}; give one, `pocket` or `pocket-long`")
    return [load_task(folder)] if (folder / "task.toml").is_file() else load_tasks(folder)


def with_source(config: Config, source: str) -> Config:
    return config.model_copy(update={"tasks": config.tasks.model_copy(update={"source": source})})


def record_tasks(folder: RunFolder, tasks: dict[str, list[Task]]) -> None:
    """Write tasks.jsonl, one line per task: readers of the run may not have the tasks.

    `tasks` has them by what they are for: train, heldout.
    """
    lines = [json.dumps(_record(task, split)) + "\n" for split, of in tasks.items() for task in of]
    write_atomic(folder.path / "tasks.jsonl", "".join(lines))


def _record(task: Task, split: str) -> dict[str, Any]:
    solution = task.folder / "solution" / "gold.patch"  # tasks that others made may have none
    patch = solution.read_text(errors="replace") if solution.is_file() else ""
    return {
        "id": task.id,
        "split": split,
        "origin": task.origin,
        "difficulty": task.difficulty,
        "instruction": task.instruction,
        "deleted": asdict(task.deleted) if task.deleted else None,
        "patch": patch[:MAX_PATCH],
        "patch_left_out": max(0, len(patch) - MAX_PATCH),
        "fail_to_pass": task.fail_to_pass[:MAX_TESTS],
        "pass_to_pass": task.pass_to_pass[:MAX_TESTS],
        "num_fail_to_pass": len(task.fail_to_pass),
        "num_pass_to_pass": len(task.pass_to_pass),
    }
