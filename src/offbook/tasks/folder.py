"""Task folders: the Harbor format, plus an [offbook] table in task.toml for what Harbor has no field for.

task.toml
instruction.md
instructions/            the same request in other lengths, where there are any
environment/Dockerfile   the image: the repository in /app, with what its tests need
environment/requirements.txt
environment/repo/        what the agent sees
tests/test.sh            judges what the agent left, writes the reward (harbor.py)
tests/judge/             what it needs for that
tests/hidden/            the original test files, and what they need
tests/mutants.json         edits of them that right code fails (mutants.py), where there are any
tests/perturbed.json     calls and what the right code returns, tests that run without pytest (perturbed.py), if any
solution/solve.sh        applies gold.patch
solution/gold.patch
solution/removed.json    the deleted code, piece by piece: what must not be found elsewhere

Tasks next to the repository they were made from store only their difference, instead of environment/, tests/hidden/
and the judge (shared.py); `write_whole` makes a whole folder of one.
"""

from __future__ import annotations

import json
import os
import shutil
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypedDict

import tomli_w
from pydantic import TypeAdapter, ValidationError

from offbook.tasks.git import gold_patch
from offbook.tasks.harbor import dockerfile, modules_of, write_judge
from offbook.tasks.mutants import Mutants, write_mutants
from offbook.tasks.perturbed import Apart, write_apart
from offbook.tasks.script import foreign_task
from offbook.tasks.shared import CHANGES, SharedTask, make_lazy, write_files
from offbook.types import OffbookError, Task

SCHEMA_VERSION = "1.4"
VERIFIER_TIMEOUT_S = 600.0

SOLVE_SH = """\
#!/bin/sh
patch -p1 -d /app < "$(dirname "$0")/gold.patch"
"""


class Places(TypedDict):
    """The paths of a task folder's parts."""

    folder: Path
    tree: Path
    hidden_tests: Path


def places(folder: Path) -> Places:
    return Places(folder=folder, tree=folder / "environment/repo", hidden_tests=folder / "tests/hidden")


@dataclass(frozen=True)
class Contents:
    """What a task folder is filled with, besides the task. Files are path -> text, paths relative to the repository."""

    tree: Mapping[str, str | None]  # with the feature deleted; what `base` has besides stays as it is
    gold: Mapping[str, str]  # the source files that lost something, as they were
    hidden_tests: Mapping[str, str | bytes]  # the test files as they were, and what they need
    base: Path | None = None  # the repository, where it is more than the files of `tree`
    requirements: tuple[str, ...] = ("pytest",)
    instructions: Mapping[str, str] = field(default_factory=dict)  # the same request in other lengths
    removed: Mapping[str, str] = field(default_factory=dict)
    mutants: Mutants = field(default_factory=Mutants)
    apart: Apart = field(default_factory=Apart)


# What of a task is not in its [offbook] table: the folder itself says it.
NOT_IN_TABLE = {"folder", "instruction", "tree", "hidden_tests", "script"}
_TASK = TypeAdapter(Task)
_SHARED_TASK = TypeAdapter(SharedTask)


def write_task(task: Task, contents: Contents, harbor: bool = True) -> None:
    """Into `task.folder`. `harbor`: with what Harbor needs to judge it by itself."""
    folder = task.folder
    task = replace(task, num_mutants=len(contents.mutants))
    if contents.base is not None:
        shutil.copytree(contents.base, task.tree, symlinks=True)
    write_files(task.tree, contents.tree)
    write_files(task.hidden_tests, contents.hidden_tests)
    write_files(
        folder,
        {
            "task.toml": _settings_of(task),
            "instruction.md": task.instruction.rstrip("\n") + "\n",
            "solution/gold.patch": gold_patch(contents.gold, {path: contents.tree.get(path) for path in contents.gold}),
            "solution/removed.json": json.dumps(contents.removed, indent=1) + "\n",
            "environment/requirements.txt": "\n".join(contents.requirements) + "\n",
            **{f"instructions/{name}.md": text.rstrip("\n") + "\n" for name, text in contents.instructions.items()},
        },
    )
    write_mutants(folder / "tests", contents.mutants)
    write_apart(folder, contents.apart)
    if harbor:
        _write_for_harbor(task)


def write_whole(task: Task, folder: Path) -> None:
    """The task as a folder that Harbor takes, whatever form its own folder has. The environment stays where it is."""
    whole = replace(task, **places(folder))
    shutil.copytree(task.folder, folder, symlinks=True)
    rewrite_settings(whole)
    if (folder / CHANGES).is_file():
        (folder / CHANGES).unlink()
        shutil.copytree(task.tree, whole.tree, symlinks=True)
        shutil.copytree(task.hidden_tests, whole.hidden_tests, symlinks=True)
        _write_for_harbor(whole)


def rewrite_settings(task: Task) -> None:
    """Write task.toml again, after the task changed."""
    write_files(task.folder, {"task.toml": _settings_of(task)})


def rewrite_mutants(task: Task, mutants: Mutants) -> None:
    """Replace the folder's mutants."""
    write_mutants(task.folder / "tests", mutants)
    rewrite_settings(replace(task, num_mutants=len(mutants)))


def _settings_of(task: Task) -> str:
    fields: dict[str, Any] = _TASK.dump_python(task, exclude=NOT_IN_TABLE, exclude_none=True)
    if task.suite.environment:  # as a path from the folder
        fields["suite"]["environment"] = os.path.relpath(task.suite.environment, task.folder)
    is_release = task.deleted is not None and task.deleted.kind == "release"
    config = {
        "schema_version": SCHEMA_VERSION,
        "artifacts": ["/app"],  # all that a verifier of its own gets to see of the agent's work
        "metadata": {"category": "release" if is_release else "feature-deletion", "difficulty": task.difficulty},
        "verifier": {"environment_mode": "separate", "timeout_sec": VERIFIER_TIMEOUT_S},
        # No docker_image: Harbor would pull it, and run without the repository, instead of building the Dockerfile.
        "environment": {"network_mode": "no-network"},
        "offbook": fields,
    }
    return tomli_w.dumps(config)


def _write_for_harbor(task: Task) -> None:
    if modules := modules_of(task.suite):
        shutil.copytree(modules, task.folder / "environment/modules")
    write_files(
        task.folder,
        {
            "environment/Dockerfile": dockerfile(task.suite),
            "solution/solve.sh": SOLVE_SH,
            **({"environment/start.sh": task.suite.start + "\n"} if task.suite.start else {}),
        },
    )
    write_judge(task)
    for script in ("tests/test.sh", "solution/solve.sh"):
        (task.folder / script).chmod(0o755)


def load_task(folder: Path, wording: str = "") -> Task:
    """`wording` is one of the folder's instructions: terse, normal or detailed."""
    _need(folder, "task.toml", "instruction.md")
    try:
        table = tomllib.loads((folder / "task.toml").read_text()).get("offbook")
        instruction = (folder / "instruction.md").read_text()
    except tomllib.TOMLDecodeError as error:
        raise OffbookError(f"{folder / 'task.toml'} is not TOML: {error}") from error
    except UnicodeDecodeError as error:
        raise OffbookError(f"{folder} is not a task folder: what should be text in it is none ({error})") from None
    if table is None:  # another tool made it
        return foreign_task(folder, instruction.strip())
    is_shared = (folder / CHANGES).is_file()
    if not is_shared:
        _need(folder, "environment/repo", "tests/hidden")
    if wording:
        instruction = instructions_of(folder).get(wording, "")
        if not instruction:
            raise OffbookError(f"{folder} has no instruction called {wording}")
    inside = table.get("suite", {}).get("environment", "")
    environment = (folder / inside).resolve() if inside else None
    if (environment or is_shared) and not (environment and (environment / "python").is_dir()):
        raise OffbookError(f"{folder} needs the interpreter and the packages in {environment}, which are not there")
    suite = {**table.get("suite", {}), "environment": environment}
    fields = {**table, **places(folder), "instruction": instruction.strip(), "suite": suite, "script": ""}
    try:
        return make_lazy(_SHARED_TASK.validate_python(fields)) if is_shared else _TASK.validate_python(fields)
    except ValidationError as error:
        first = error.errors()[0]
        named = f"[offbook] in {folder / 'task.toml'}: {'.'.join(map(str, first['loc']))}"
        raise OffbookError(f"{named}: {first['msg']}") from error


def instructions_of(folder: Path) -> dict[str, str]:
    """The request in other lengths, by their names."""
    return {file.stem: file.read_text() for file in sorted((folder / "instructions").glob("*.md"))}


def _need(folder: Path, *paths: str) -> None:
    for path in paths:
        if not (folder / path).exists():
            raise OffbookError(f"{folder} is not a task folder: it has no {path}")


def load_tasks(root: Path, wording: str = "") -> list[Task]:
    return sorted((load_task(folder, wording) for folder in task_folders(root)), key=lambda task: task.id)


def task_folders(root: Path) -> list[Path]:
    """The folders directly under `root`, by name. Hidden ones are none."""
    folders = [path for path in root.iterdir() if path.is_dir() and path.name[0] != "."] if root.is_dir() else []
    if not folders:
        raise OffbookError(f"{root} holds no task folders")
    return sorted(folders)


def tasks_at(places: Iterable[Path], broken: dict[str, str] | None = None) -> list[Task]:
    """Of task folders, folders of them and what `tasks make` has made. Where `broken` is given, folders that are no
    tasks are put there with the reason."""
    found: list[Task] = []
    for folder in [folder for place in places for folder in _folders_at(place)]:
        try:
            found.append(load_task(folder))
        except OffbookError as error:
            if broken is None:
                raise
            broken[folder.name] = str(error)
    return found


def _folders_at(place: Path) -> list[Path]:
    if (place / "task.toml").is_file():
        return [place]
    # A side whose repositories gave no tasks is empty.
    splits = [place / name for name in ("train", "heldout") if any((place / name).glob("[!.]*"))]
    return [folder for split in splits or [place] for folder in task_folders(split)]
