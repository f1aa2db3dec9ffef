"""Task folders: the Harbor format, plus an [offbook] table in task.toml for what Harbor has no field for.

task.toml
instruction.md
instructions/            the same request in other lengths, where there are any
environment/Dockerfile   the image: the repository in /app, with what its tests need
environment/repo/        what the agent sees
tests/test.sh            judges what the agent left, writes the reward (harbor.py)
tests/judge/             what it needs for that
tests/hidden/            the original test files, and what they need
tests/twins.json         edits of them that right code fails (twins.py), where there are any
tests/perturbed.json     calls with other inputs, and what the right code returns (perturbed.py), where there are any
solution/solve.sh        applies gold.patch
solution/gold.patch
solution/removed.json    the deleted code, piece by piece: what must not be found elsewhere
"""

from __future__ import annotations

import json
import os
import shutil
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypedDict

import tomli_w
from pydantic import TypeAdapter, ValidationError

from offbook.tasks.git import gold_patch
from offbook.tasks.harbor import dockerfile, write_judge
from offbook.tasks.perturbed import Case, write_cases
from offbook.tasks.script import foreign_task
from offbook.tasks.twins import Twins, write_twins
from offbook.types import OffbookError, Task

SCHEMA_VERSION = "1.4"
VERIFIER_TIMEOUT_S = 600.0

SOLVE_SH = """\
#!/bin/sh
patch -p1 -d /app < "$(dirname "$0")/gold.patch"
"""


class Places(TypedDict):
    """Where the parts of a task folder lie."""

    folder: Path
    tree: Path
    hidden_tests: Path


def places(folder: Path) -> Places:
    return Places(folder=folder, tree=folder / "environment/repo", hidden_tests=folder / "tests/hidden")


@dataclass(frozen=True, slots=True)
class Contents:
    """What a task folder is filled with, besides the task. Files are path -> text, paths relative to the repository."""

    tree: Mapping[str, str | None]  # with the feature deleted; what `base` has besides stays as it is
    gold: Mapping[str, str]  # the source files that lost something, as they were
    hidden_tests: Mapping[str, str | bytes]  # the test files as they were, and what they need
    base: Path | None = None  # the repository, where it is more than the files of `tree`
    requirements: tuple[str, ...] = ("pytest",)
    instructions: Mapping[str, str] = field(default_factory=dict)  # the same request in other lengths
    removed: Mapping[str, str] = field(default_factory=dict)
    twins: Twins = field(default_factory=Twins)
    cases: Sequence[Case] = ()


# What of a task is not in its [offbook] table: the folder itself says it.
NOT_IN_TABLE = {"folder", "instruction", "tree", "hidden_tests", "script", "suite"}
FIRST = ("id", "origin", "difficulty", "tools", "fail_to_pass", "pass_to_pass", "test_files", "test_command")
SUITE = {"import_roots": "import_roots", "pytest_options": "options", "start": "start"}
_TASK = TypeAdapter(Task)


def write_task(task: Task, contents: Contents) -> None:
    """Into `task.folder`."""
    folder = task.folder
    config = {
        "schema_version": SCHEMA_VERSION,
        "artifacts": ["/app"],  # all that a verifier of its own gets to see of the agent's work
        "metadata": {"category": "release" if _is_release(task) else "feature-deletion", "difficulty": task.difficulty},
        "verifier": {"environment_mode": "separate", "timeout_sec": VERIFIER_TIMEOUT_S},
        # No docker_image: Harbor would pull it, and run without the repository, instead of building the Dockerfile.
        "environment": {"network_mode": "no-network"},
        "offbook": _table_of(task),
    }
    if contents.base is not None:
        shutil.copytree(contents.base, task.tree, symlinks=True)
    write_files(task.tree, contents.tree)
    write_files(task.hidden_tests, contents.hidden_tests)
    write_files(
        folder,
        {
            "task.toml": tomli_w.dumps(config),
            "instruction.md": task.instruction.rstrip("\n") + "\n",
            "environment/Dockerfile": dockerfile(task.suite),
            "environment/requirements.txt": "\n".join(contents.requirements) + "\n",
            "solution/solve.sh": SOLVE_SH,
            "solution/gold.patch": gold_patch(contents.gold, {path: contents.tree.get(path) for path in contents.gold}),
            "solution/removed.json": json.dumps(contents.removed, indent=1) + "\n",
            **{f"instructions/{name}.md": text.rstrip("\n") + "\n" for name, text in contents.instructions.items()},
        },
    )
    write_judge(task)
    write_twins(folder / "tests", contents.twins)
    write_cases(folder, contents.cases)
    for script in ("tests/test.sh", "solution/solve.sh"):
        (folder / script).chmod(0o755)


def _is_release(task: Task) -> bool:
    return task.deleted is not None and task.deleted.kind == "release"


def _table_of(task: Task) -> dict[str, Any]:
    """The task's own fields. Those of its suite stand among them, its environment as a path from the folder."""
    fields = _TASK.dump_python(task, exclude=NOT_IN_TABLE, exclude_none=True)
    environment = task.suite.environment
    suite: dict[str, Any] = {"environment": os.path.relpath(environment, task.folder) if environment else ""}
    suite |= {key: asdict(task.suite)[name] for key, name in SUITE.items()}
    return {**{key: fields[key] for key in FIRST}, **suite, **fields}


def load_task(folder: Path, wording: str = "") -> Task:
    """`wording` is one of the folder's instructions: terse, normal or detailed."""
    for needed in ("task.toml", "instruction.md"):
        _need(folder, folder / needed)
    table = _read_table(folder / "task.toml")
    if table is None:
        return foreign_task(folder, (folder / "instruction.md").read_text().strip())
    where = places(folder)
    for path in (where["tree"], where["hidden_tests"]):
        _need(folder, path)
    instruction = folder / "instructions" / f"{wording}.md" if wording else folder / "instruction.md"
    if not instruction.is_file():
        raise OffbookError(f"{folder} has no instruction called {wording}")
    inside = table.pop("environment", "")
    suite: dict[str, Any] = {name: table.pop(key) for key, name in SUITE.items() if key in table}
    suite["environment"] = environment = (folder / inside).resolve() if inside else None
    if environment is not None and not (environment / "python").is_dir():
        raise OffbookError(f"{folder} needs the interpreter and the packages in {environment}, which are not there")
    try:
        return _TASK.validate_python({**table, **where, "instruction": instruction.read_text().strip(), "suite": suite})
    except ValidationError as error:
        first = error.errors()[0]
        named = f"[offbook] in {folder / 'task.toml'}: {'.'.join(map(str, first['loc']))}"
        raise OffbookError(f"{named}: {first['msg']}") from error


def _need(folder: Path, path: Path) -> None:
    if not path.exists():
        raise OffbookError(f"{folder} is not a task folder: it has no {path.relative_to(folder).as_posix()}")


def load_tasks(root: Path, wording: str = "") -> list[Task]:
    """The tasks in the folders directly under `root`, sorted by id. Hidden folders are none."""
    folders = [path for path in root.iterdir() if path.is_dir() and path.name[0] != "."] if root.is_dir() else []
    if not folders:
        raise OffbookError(f"{root} holds no task folders")
    return sorted((load_task(folder, wording) for folder in folders), key=lambda task: task.id)


def write_files(root: Path, files: Mapping[str, str | None] | Mapping[str, str | bytes] | Mapping[str, str]) -> None:
    """None takes a file away, and the folders that are then empty."""
    for path, content in files.items():
        target = root / path
        if content is None:
            target.unlink()
            for parent in target.parents:
                if parent == root or any(parent.iterdir()):
                    break
                parent.rmdir()
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content.encode() if isinstance(content, str) else content)


def _read_table(path: Path) -> dict[str, Any] | None:
    """None where somebody else made the folder."""
    try:
        table = tomllib.loads(path.read_text()).get("offbook")
    except tomllib.TOMLDecodeError as error:
        raise OffbookError(f"{path} is not TOML: {error}") from error
    if table is not None and (known := NOT_IN_TABLE & table.keys()):
        raise OffbookError(f"[offbook] in {path}: {min(known)}: the folder itself says that")
    return table
