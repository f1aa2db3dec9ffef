"""Whether a file that was read gives deleted code away: the same search as when a task is made, on that file alone."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

from offbook.types import Task


def gives_away(task: Task, paths: Iterable[str]) -> str | None:
    """The first of these files, in the tree or anywhere on the machine, that holds deleted code; empty if none does.

    None where nobody can tell: what was deleted was not written down, or is too short to be searched for. `.git` is
    every object in it.
    """
    file = task.folder / "solution" / "removed.json"
    if not file.is_file():
        return None
    for path in paths:
        root, name = (Path(path).parent, Path(path).name) if path.startswith("/") else (task.tree, path)
        if any(leak == name or leak.startswith((f"{name}/", f"{name}!")) for leak in _leaks(file, root)):
            return path
    return "" if _is_searchable(file, task.deleted.targets if task.deleted else ()) else None


@lru_cache(maxsize=64)
def _is_searchable(file: Path, targets: tuple[str, ...]) -> bool:
    from offbook.copies import wanted_pieces  # numpy, and only where something was found

    removed = json.loads(file.read_text())
    return all(wanted_pieces(what, removed[what], "") for what in targets or removed if what in removed)


@lru_cache(maxsize=64)  # rollouts of one task ask about the same files
def _leaks(file: Path, root: Path) -> tuple[str, ...]:
    from offbook.taskgen.audit.corpus import Corpus

    found = Corpus({"place": root}).leaks(json.loads(file.read_text())) if root.is_dir() else []
    return tuple(leak.path.partition("/")[2] for leak in found)
