"""Whether a file that was read, or an answer, gives deleted code away: the same search as when a task is made."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from offbook.types import Task

if TYPE_CHECKING:
    from offbook.copies import Wanted

FOUND_AT = re.compile(r"(?m)^[\w./~+-]+\.\w{1,5}[:-](?:\d+[:-])?")  # what a search puts before a line
OWN_SHARE = 0.3  # of the deleted code in the agent's own words: then it is being looked at, and not found


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
    removed = _removed(file)
    targets = [what for what in (task.deleted and task.deleted.targets) or removed if what in removed]
    return "" if all(_pieces(file, what) for what in targets) else None


def gives_out(task: Task, answer: str, words: str) -> str:
    """Which deleted code an answer has, although the agent had not written it; `words` are all its own so far."""
    file = task.folder / "solution" / "removed.json"
    removed = _removed(file) if file.is_file() else {}
    if not any(re.split(r"::|\.", what)[-1] in answer for what in removed):
        return ""
    from offbook.copies import found_in, named_shingles, normalise, page_of, tokens_of

    page, own = page_of(FOUND_AT.sub("", answer), is_source=False), {*named_shingles(tokens_of(normalise(words)))}
    for piece in (piece for what in removed for piece in _pieces(file, what) if piece.name in answer):
        written = max(sum(one in own for one in shingles) / max(1, len(shingles)) for shingles in piece.named)
        if written < OWN_SHARE and found_in(page, piece):
            return piece.what
    return ""


@lru_cache(maxsize=64)
def _removed(file: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads(file.read_text())
    return found


@lru_cache(maxsize=256)
def _pieces(file: Path, what: str) -> list[Wanted]:
    from offbook.copies import wanted_pieces  # numpy, and only where something was found

    return wanted_pieces(what, _removed(file)[what], "")


@lru_cache(maxsize=64)  # rollouts of one task ask about the same files
def _leaks(file: Path, root: Path) -> tuple[str, ...]:
    from offbook.taskgen.audit.corpus import Corpus

    found = Corpus({"place": root}).leaks(_removed(file)) if root.is_dir() else []
    return tuple(leak.path.partition("/")[2] for leak in found)
