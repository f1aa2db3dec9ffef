"""Whether a file that was read, or an answer, gives deleted code away: the same search as when a task is made."""

from __future__ import annotations

import codecs
import json
import os
import re
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from offbook.sandbox.access import BYTECODE
from offbook.tasks.factory.types import is_inside
from offbook.types import Task

if TYPE_CHECKING:
    from offbook.core.copies import Wanted

FOUND_AT = re.compile(r"(?m)^[\w./~+-]+\.\w{1,5}[:-](?:\d+[:-])?")  # what a search puts before a line
OWN_SHARE = 0.3  # of the deleted code in the agent's own words: then it is being looked at, and not found


def gives_away(task: Task | None, paths: Iterable[str]) -> str | None:
    """The first of these files, in the tree or anywhere on the machine, that holds deleted code; empty if none does.

    None where that is unknown: what was deleted was not written down, or is too short to be searched for, or a file is
    bytecode. `.git` is every object in it; where that is one commit, which is the tree's own, there is nothing else to
    be found.
    """
    if task is None:
        return None
    paths = [path for path in paths if path != ".git" or not _is_one_commit(task.tree / ".git")]
    file = _file(task)
    if not paths or file is None:
        return None if paths else ""
    if found := holding(task, paths):
        return found[0]
    removed = _removed(file)
    targets = [what for what in (task.deleted and task.deleted.targets) or removed if what in removed]
    is_readable = not any(BYTECODE.search("/" + path) for path in paths)  # the search reads no bytecode
    return "" if is_readable and all(_pieces(file, what) for what in targets) else None


def holding(task: Task | None, paths: Iterable[str]) -> list[str]:
    """Those of these files, in the tree or anywhere on the machine, that hold deleted code."""
    file = _file(task)
    if task is None or file is None:
        return []
    places = {path: Path(os.path.normpath(task.tree / path)) for path in paths}
    inside = {path: place for path, place in places.items() if path[:1] == "/" or place.is_relative_to(task.tree)}
    found = {place for place, _ in _leaks(file, tuple(inside.values()))}
    return [path for path, place in inside.items() if place in found]


def held_by(task: Task | None, places: Iterable[str]) -> str:
    """The first file of the task that holds deleted code and is no source of the product: in its tree, or in these
    places outside of it. Empty where none does, and then what an agent shows is its own."""
    file = _file(task)
    if task is None or file is None:
        return ""
    hidden = [path for _, path in _leaks(file, (task.tree,)) if not is_inside(path, task.sources)]
    return next(iter([*hidden, *holding(task, places)]), "")


def gives_out(task: Task | None, answer: str, words: str) -> str:
    """Which deleted code an answer has, plain or encoded, although the agent had not written it; `words` are all its
    own so far."""
    file = _file(task)
    if file is None:
        return ""
    removed = _removed(file)
    names = {re.split(r"::|\.", what)[-1] for what in removed}
    texts = [text for text in plain_texts(answer, names) if any(name in text for name in names)]
    if not texts:
        return ""
    from offbook.core.copies import found_in, named_shingles, normalise, page_of, tokens_of

    pages = [page_of(FOUND_AT.sub("", text), is_source=False) for text in texts]
    said = "\n".join(plain_texts(words, names))
    own = {*named_shingles(tokens_of(normalise(said)))}
    for piece in (piece for what in removed for piece in _pieces(file, what)):
        written = max(sum(one in own for one in shingles) / max(1, len(shingles)) for shingles in piece.named)
        if written < OWN_SHARE and any(found_in(page, piece) for page in pages):
            return piece.what
    return ""


def plain_texts(text: str, names: Iterable[str]) -> list[str]:
    """A text and what is encoded in it; turned by 13 letters or backwards where one of the names shows that it is."""
    from offbook.tasks.factory.audit.reading import decoded

    turned = [codecs.encode(text, "rot13"), text[::-1]]
    return [text, *decoded(text), *(one for one in turned if any(name in one for name in names))]


def _file(task: Task | None) -> Path | None:
    """Where what was deleted is written down."""
    file = task.folder / "solution" / "removed.json" if task is not None else None
    return file if file is not None and file.is_file() else None


@lru_cache(maxsize=256)
def _is_one_commit(folder: Path) -> bool:
    from offbook.tasks.factory.audit.reading import leaves

    found = leaves(folder, ".git", lambda *_: None) if (folder / "objects").is_dir() else ()
    return sum(leaf.name.startswith(".git!commit ") for leaf in found) == 1


@lru_cache(maxsize=64)
def _removed(file: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads(file.read_text())
    return found


@lru_cache(maxsize=256)
def _pieces(file: Path, what: str) -> list[Wanted]:
    from offbook.core.copies import wanted_pieces  # numpy, and only where something was found

    return wanted_pieces(what, _removed(file)[what], "")


@lru_cache(maxsize=1024)  # rollouts of one task ask about the same files
def _leaks(file: Path, places: tuple[Path, ...]) -> tuple[tuple[Path, str], ...]:
    """The places that hold deleted code, with the file inside of a folder."""
    from offbook.tasks.factory.audit.corpus import Corpus

    there = {str(number): place for number, place in enumerate(places) if place.exists()}
    found = [leak.path.partition("/") for leak in (Corpus(there).leaks(_removed(file)) if there else ())]
    return tuple((there[number], path.partition("!")[0]) for number, _, path in found)
