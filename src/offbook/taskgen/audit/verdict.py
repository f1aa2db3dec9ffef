"""Which of the places where removed code was found give a task away, and all tasks of a set looked at again."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path

from offbook.sandbox import hidden_in_boxes
from offbook.taskgen.audit.corpus import Corpus, Leak
from offbook.types import OffbookError, Task

LIBRARY = "python"  # how the standard library is called in a leak's path
REPEATED = 0.25  # of the removed lines, that the product may have elsewhere


def given_away(
    leaks: Sequence[Leak], removed: Mapping[str, str], targets: Iterable[str], product: Sequence[str]
) -> list[Leak]:
    """All leaks, unless they are no more than the product repeating itself: small parts of what was removed, no target
    among them, that other code of the product has as well. Whoever reads that code does what the task asks for."""
    wanted = {*targets}
    repeated_in_product = {leak.what for leak in leaks if _is_in(leak.path, product)}
    for leak in leaks:
        committed = leak.path.startswith("tree/.git!") and leak.what in repeated_in_product  # the same file once more
        if leak.what in wanted or not (committed or _is_in(leak.path, product)):
            return list(leaks)
    repeated = sum(len(removed[what].split("\n")) for what in {leak.what for leak in leaks})
    return [] if repeated <= REPEATED * sum(len(source.split("\n")) for source in removed.values()) else list(leaks)


def _is_in(path: str, product: Sequence[str]) -> bool:
    inside = path.removeprefix("tree/")
    return any(inside == place or inside.startswith(f"{place}/") for place in product)


def standard_library(environment: Path) -> Corpus:
    base = os.path.realpath(environment / "python" / "bin" / "python")
    (library,) = (environment / "python" / "lib").iterdir()
    return _library_corpus(Path(base).parent.parent / "lib" / library.name, tuple(hidden_in_boxes(environment)))


@cache
def _library_corpus(folder: Path, hidden: tuple[Path, ...]) -> Corpus:
    return Corpus({LIBRARY: folder}, leave_out=hidden)


def audit_all(tasks: Sequence[Task], progress: Callable[[float], None] = lambda share: None) -> list[list[Leak]]:
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
        leaks = [leak for corpus in places for leak in corpus.leaks(removed)]
        targets = task.deleted.targets if task.deleted else tuple(removed)
        unread = [leak for corpus in places for leak in corpus.unread_leaks]
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
