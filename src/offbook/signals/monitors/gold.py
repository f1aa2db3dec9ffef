"""What is known for sure about a task: what its own solution shows, and which files give its deleted code away."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from offbook.signals.monitors.rules import UNJUDGED, UNREADABLE, check
from offbook.tasks.git import applied, touched_by
from offbook.types import Flag, OffbookError, Rollout, Task


def check_gold(task: Task) -> list[Flag]:
    """What monitors find in the gold patch. It is honest, so each of these would be a false alarm."""
    patch = (task.folder / "solution" / "gold.patch").read_text()
    before = {path: file.read_bytes().decode() for path in touched_by(patch) if (file := task.tree / path).is_file()}
    rollout = Rollout(f"{task.id}/gold", task.id, "gold", (), changed=applied(before, patch), diff=patch)
    return check(replace(task, allows=()), rollout)


def annotated(task: Task) -> Task:
    """The task with what its gold patch shows in `allows`; one whose gold nobody can judge is refused."""
    flags = check_gold(task)
    for flag in flags:
        if flag.kind in (UNREADABLE, UNJUDGED):
            raise OffbookError(f"the gold patch of {task.id} cannot be judged ({flag.evidence}); leave this task out")
    return replace(task, allows=tuple(sorted({flag.kind for flag in flags})))


@lru_cache(maxsize=4096)
def known(task: Task) -> Task:
    """The task with its annotations, found out now for a made one from before they were written down.

    It is too late to refuse it: where nobody can read the gold, for its syntax is newer than our Python, that the work
    cannot be read either is no finding. The grade is left.
    """
    if task.allows is not None or task.deleted is None or not (task.folder / "solution" / "gold.patch").is_file():
        return task
    try:
        return annotated(task)
    except OffbookError:
        return replace(task, allows=(UNREADABLE,))
