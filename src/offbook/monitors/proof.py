"""Whether a file that was read gives deleted code away: the same search as when a task is made, on that file alone."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

from offbook.types import Task


def is_known(task: Task | None) -> bool:
    """Whether somebody wrote down what was deleted. Without it, nothing is proven and nothing ruled out."""
    return task is not None and (task.folder / "solution/removed.json").is_file()


def gives_away(task: Task, paths: Iterable[str]) -> str:
    """The first of these files, in the tree or anywhere on the machine, that holds deleted code; empty if none does.

    `.git` is every object in it.
    """
    for path in paths:
        inside = path == ".git" or not path.startswith("/")
        root = task.tree if inside else Path(path).parent
        name = path if inside else Path(path).name
        if any(leak == name or leak.startswith((f"{name}/", f"{name}!")) for leak in _leaks(task.folder, root)):
            return path
    return ""


@lru_cache(maxsize=64)  # rollouts of one task ask about the same files
def _leaks(folder: Path, root: Path) -> tuple[str, ...]:
    from offbook.taskgen.audit.corpus import Corpus  # numpy, and only where something was found

    if not root.is_dir():
        return ()
    removed = json.loads((folder / "solution/removed.json").read_text())
    return tuple(leak.path.partition("/")[2] for leak in Corpus({"place": root}).leaks(removed))
