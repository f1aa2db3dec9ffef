"""Whether a file that was read, or an answer, gives deleted code away: the same search as when a task is made."""

from __future__ import annotations

import codecs
import json
import os
import re
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

from offbook.sandbox.access import BYTECODE
from offbook.tasks.factory.types import is_inside
from offbook.types import Task

FOUND_AT = re.compile(r"(?m)^[\w./~+-]+\.\w{1,5}[:-](?:\d+[:-])?")  # what a search puts before a line


def gives_away(task: Task | None, paths: Iterable[str]) -> str | None:
    """The first of these files, in the tree or anywhere on the machine, that holds deleted code; empty if none does.

    None where that is unknown: what was deleted was not written down, or is too short to be searched for, or a file is
    bytecode. `.git` is every object in it; where that is one commit, which is the tree's own, there is nothing else to
    be found.
    """
    if task is None:
        return None
    paths = [path for path in paths if path != ".git" or not _is_one_commit(task.tree / ".git")]
    if not paths:
        return ""
    for path in holding(task, paths):
        return path
    removed = _removed(task.folder)
    targets = removed.keys() & (task.deleted.targets if task.deleted else ()) or removed
    is_readable = removed and not any(BYTECODE.search("/" + path) for path in paths)  # the search reads no bytecode
    return "" if is_readable and all(_is_long(task.folder, what) for what in targets) else None


def holding(task: Task | None, paths: Iterable[str]) -> list[str]:
    """Those of these files, in the tree or anywhere on the machine, that hold deleted code."""
    if task is None:
        return []
    places = {path: Path(os.path.normpath(task.tree / path)) for path in paths}
    inside = {path: place for path, place in places.items() if path[:1] == "/" or place.is_relative_to(task.tree)}
    found = {place for place, _ in _leaks(task.folder, tuple(inside.values()))}
    return [path for path, place in inside.items() if place in found]


def held_by(task: Task | None, places: Iterable[str]) -> str:
    """The first file of the task that holds deleted code and is no source of the product: in its tree, or in these
    places outside of it. Empty where none does, and then what an agent shows is its own."""
    if task is None:
        return ""
    hidden = [path for _, path in _leaks(task.folder, (task.tree,)) if not is_inside(path, task.sources)]
    return next(iter([*hidden, *holding(task, places)]), "")


def gives_out(task: Task | None, answer: str, words: str) -> str:
    """Why an answer gives deleted code away, plain or encoded, that the agent had not written; `words` are all its
    own so far."""
    removed = _removed(task.folder) if task is not None else {}
    names = {re.split(r"::|\.", what)[-1] for what in removed}
    texts = [FOUND_AT.sub("", text) for text in plain_texts(answer, names) if any(name in text for name in names)]
    if not texts:
        return ""
    from offbook.core.copies import shared_code

    said = "\n".join(plain_texts(words, names))
    for what, source in removed.items():
        found = next(filter(None, (shared_code(text, {what: source}) for text in texts)), "")
        if found and not shared_code(said, {what: source}):
            return found
    return ""


def plain_texts(text: str, names: Iterable[str]) -> list[str]:
    """A text and what is encoded in it; turned by 13 letters or backwards where one of the names shows that it is."""
    from offbook.tasks.factory.audit.reading import decoded

    turned = [codecs.encode(text, "rot13"), text[::-1]]
    return [text, *decoded(text), *(one for one in turned if any(name in one for name in names))]


@lru_cache(maxsize=256)
def _is_one_commit(folder: Path) -> bool:
    from offbook.tasks.factory.audit.reading import leaves

    found = leaves(folder, ".git", {}) if (folder / "objects").is_dir() else ()
    return sum(leaf.name.startswith(".git!commit ") for leaf in found) == 1


@lru_cache(maxsize=64)
def _removed(folder: Path) -> dict[str, str]:
    """What was deleted, where a task has it written down."""
    file = folder / "solution" / "removed.json"
    found: dict[str, str] = json.loads(file.read_text()) if file.is_file() else {}
    return found


@lru_cache(maxsize=256)
def _is_long(folder: Path, what: str) -> bool:
    """Whether deleted code has enough to be searched for."""
    from offbook.core.copies import wanted_pieces  # numpy, and only where something was found

    return bool(wanted_pieces(what, _removed(folder)[what]))


@lru_cache(maxsize=1024)  # rollouts of one task ask about the same files
def _leaks(folder: Path, places: tuple[Path, ...]) -> tuple[tuple[Path, str], ...]:
    """The places that hold deleted code, with the file inside of a folder."""
    from offbook.tasks.factory.audit.corpus import Corpus

    there = {str(number): place for number, place in enumerate(places) if place.exists()}
    removed = _removed(folder)
    found = [leak.path.partition("/") for leak in (Corpus(there).leaks(removed) if there and removed else ())]
    return tuple((there[number], path.partition("!")[0]) for number, _, path in found)
