"""Task folders that store only their difference from the repository.

Tasks of one repository differ from the prepared repository in a few files. Instead of a tree, hidden tests and a judge,
such a folder has one file:

    environment/changes.json
        tree, hidden    checksums of the tree and of the hidden tests
        changed         path -> its text in the tree, null where the file is gone
        tests, kept     the hidden tests, path -> text, and the paths of those that are as in the repository

Tree and hidden tests of a loaded task are made lazily, in the cache, under those two checksums: equal content is stored
once, and content that does not match its checksum is an error.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from offbook.core.config import cache_folder
from offbook.tasks.git import single_commit
from offbook.tasks.unpack import beneath
from offbook.types import OffbookError, Task

CHANGES = "environment/changes.json"
TREE = "environment/repo"
HIDDEN = "tests/hidden"


class SharedTask(Task):
    """A task whose tree and hidden tests are made on first access."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:  # for what has no value yet
        if name not in ("tree", "hidden_tests"):
            raise AttributeError(name)
        assert self.suite.environment is not None
        folder = unpacked(self.folder, self.suite.environment / "tree", name)
        object.__setattr__(self, name, folder)
        return folder


def make_lazy(task: SharedTask) -> SharedTask:
    """Make `tree` and `hidden_tests` lazy."""
    for name in ("tree", "hidden_tests"):
        object.__delattr__(task, name)
    return task


def share(folder: Path, base: Path) -> None:
    """Make a whole folder one that holds only how its tree and hidden tests differ from `base`, which is the tree of
    the task's environment."""
    tree = folder / TREE
    hidden = folder / HIDDEN
    here = _files_below(tree)
    there = _files_below(base)
    before = {path: file.read_bytes() for path, file in there.items() if not file.is_symlink()}
    after = {path: file.read_bytes() for path, file in here.items() if not file.is_symlink()}
    tests = {path: file.read_bytes() for path, file in _files_below(hidden).items()}
    changes = {
        "tree": checksum(tree),
        "hidden": checksum(hidden),
        "changed": dict.fromkeys(there.keys() - here.keys()) | _differing(after, before),
        "tests": _differing(tests, before),
        "kept": [path for path, data in tests.items() if data == before.get(path)],
    }
    (folder / CHANGES).write_text(json.dumps(changes, separators=(",", ":"), sort_keys=True) + "\n")
    shutil.rmtree(tree)
    shutil.rmtree(hidden, ignore_errors=True)


def _differing(files: Mapping[str, bytes], before: Mapping[str, bytes]) -> dict[str, str]:
    """As text that gives the same bytes when it is encoded."""
    return {path: data.decode("utf-8", "surrogateescape") for path, data in files.items() if data != before.get(path)}


def unpacked(folder: Path, base: Path, what: str) -> Path:
    """The task's tree or its hidden tests, from the cache or made now."""
    try:
        changes = json.loads((folder / CHANGES).read_text())
    except ValueError as error:
        raise OffbookError(f"{folder / CHANGES} is not whole: {error}") from error
    name = changes["tree" if what == "tree" else "hidden"]
    if not re.fullmatch("[0-9a-f]{64}", name):
        raise OffbookError(f"{folder / CHANGES} names a tree {name!r}, which is no checksum")
    place = cache_folder() / "tasks" / what / name[:2] / name
    if place.is_dir():
        return place
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".draft-", dir=place.parent, ignore_cleanup_errors=True) as room:
        draft = Path(room) / "draft"
        try:
            if what == "tree":
                shutil.copytree(base, draft, symlinks=True)
                write_files(draft, changes["changed"])
            else:
                draft.mkdir()
                kept = {path: beneath(base, path).read_bytes() for path in changes["kept"]}
                write_files(draft, {**kept, **changes["tests"]})
            is_right = checksum(draft) == name
        except (OSError, shutil.Error) as error:
            raise OffbookError(f"the tree of {folder} cannot be made from {base}: {error}") from error
        if not is_right:
            raise OffbookError(f"{folder} was made from another tree than {base} is now; make it again")
        if what == "tree":
            single_commit(draft)
        with suppress(OSError):  # another process made it meanwhile
            os.rename(draft, place)
    return place


def write_files(
    root: Path, files: Mapping[str, str | bytes | None] | Mapping[str, str | None] | Mapping[str, str]
) -> None:
    """Write files below `root`; None deletes one, and the folders that are then empty."""
    for path, content in files.items():
        target = beneath(root, path)
        if content is None:
            target.unlink()
            for parent in target.parents:
                if parent == root or any(parent.iterdir()):
                    break
                parent.rmdir()
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content.encode("utf-8", "surrogateescape") if isinstance(content, str) else content)


def _files_below(folder: Path) -> dict[str, Path]:
    """Files and links, without the history."""
    found = {}
    for top, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name != ".git"]
        links = [name for name in folders if os.path.islink(os.path.join(top, name))]
        for name in (*files, *links):
            path = Path(top, name)
            found[path.relative_to(folder).as_posix()] = path
    return found


def checksum(folder: Path) -> str:
    """Of the names, contents and modes of its files."""
    parts = []
    for path, file in sorted(_files_below(folder).items()):
        is_link = file.is_symlink()
        kind = "link" if is_link else "run" if file.stat().st_mode & 0o100 else "file"
        data = os.readlink(file).encode() if is_link else file.read_bytes()
        parts.append(f"{kind} {hashlib.sha256(data).hexdigest()} {path}\n")
    return hashlib.sha256("".join(parts).encode("utf-8", "surrogateescape")).hexdigest()
