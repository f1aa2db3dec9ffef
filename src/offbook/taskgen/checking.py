"""All tasks of a set looked at again, as a stranger would who was handed the folders."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from offbook.sandbox import BoxSpec
from offbook.taskgen.audit import Corpus, Leak
from offbook.taskgen.workshop import given_away, standard_library
from offbook.tasks.check import check
from offbook.types import OffbookError, Task

Share = Callable[[float], None]


async def check_all(
    tasks: Sequence[Task], progress: Share = lambda share: None, spec: BoxSpec | None = None
) -> list[str]:
    """For each task why it does not hold, or nothing."""
    slots = asyncio.Semaphore((os.cpu_count() or 1) + 1)
    done = 0

    async def one(task: Task) -> str:
        nonlocal done
        async with slots:
            try:
                why = await check(task, spec)
            except OffbookError as error:
                why = str(error)
        done += 1
        progress(done / len(tasks))
        return why

    async with asyncio.TaskGroup() as jobs:
        running = [jobs.create_task(one(task)) for task in tasks]
    return [job.result() for job in running]


def audit_all(tasks: Sequence[Task], progress: Share = lambda share: None) -> list[list[Leak]]:
    """For each task where its deleted code can be read. What tasks have in common is read once."""
    shared: dict[Path, Corpus] = {}
    result = []
    for number, task in enumerate(tasks, 1):
        removed = removed_from(task)
        places = [Corpus({"tree": task.tree})]
        environment = task.suite.environment
        if environment is not None:
            if environment not in shared:
                shared[environment] = Corpus({"deps": environment / "deps"})
            places += [shared[environment], standard_library(environment)]
        unread = [Leak(name, "", "unread", why) for corpus in places for name, why in corpus.unread.items()]
        leaks = [leak for corpus in places for leak in corpus.leaks(removed)]
        targets = task.deleted.targets if task.deleted else tuple(removed)
        result.append(given_away(leaks, removed, targets, task.sources) + unread)
        progress(number / len(tasks))
    return result


def removed_from(task: Task) -> dict[str, str]:
    """The deleted code, piece by piece, as its maker wrote it down."""
    file = task.folder / "solution" / "removed.json"
    if not file.is_file():
        raise OffbookError(
            f"{task.folder} does not say what was deleted (solution/removed.json), so nothing can be searched for"
        )
    removed = json.loads(file.read_text())
    return {str(what): str(source) for what, source in removed.items()}
