"""Task folders: the Harbor format, plus an [offbook] table in task.toml for what Harbor has no field for.

task.toml
instruction.md
environment/Dockerfile   the image: the repository in /app, pytest installed
environment/repo/        what the agent sees
tests/test.sh            restores the hidden tests, runs them, writes the reward
tests/hidden/            the original test files
solution/solve.sh        applies gold.patch
solution/gold.patch
"""

from __future__ import annotations

import difflib
import shlex
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import tomli_w
from pydantic import BaseModel, ConfigDict, ValidationError

from offbook.types import OffbookError, Task

SCHEMA_VERSION = "1.4"
VERIFIER_TIMEOUT_S = 600.0
TREE, HIDDEN_TESTS = "environment/repo", "tests/hidden"

DOCKERFILE = """\
FROM python:3.11-slim
RUN apt-get update && apt-get install -y --no-install-recommends patch && rm -rf /var/lib/apt/lists/*
RUN pip install --no-cache-dir pytest
COPY repo /app
WORKDIR /app
"""

TEST_SH = """\
#!/bin/sh
# Restores the original tests, runs them, and writes the reward: 1 if every expected test passes, 0 if not.
cp -R "$(dirname "$0")/hidden/." /app/
cd /app || exit 1
mkdir -p /logs/verifier
if PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 python -m pytest -q -p no:cacheprovider --noconftest -c /dev/null -o addopts= \\
    --rootdir /app {nodes}
then echo 1 > /logs/verifier/reward.txt
else echo 0 > /logs/verifier/reward.txt
fi
"""

SOLVE_SH = """\
#!/bin/sh
patch -p1 -d /app < "$(dirname "$0")/gold.patch"
"""


class OffbookTable(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str
    origin: str
    difficulty: str
    tools: tuple[str, ...]
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    test_files: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class NewTask:
    """What a task folder is written from. Files are path -> text, paths relative to the repository."""

    instruction: str
    tree: Mapping[str, str]  # with the feature deleted
    gold: Mapping[str, str]  # the source files that lost something, as they were
    hidden_tests: Mapping[str, str]  # the test files as they were
    id: str
    origin: str
    difficulty: str
    tools: tuple[str, ...]
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]


def write_task(folder: Path, task: NewTask) -> None:
    table = OffbookTable(
        id=task.id,
        origin=task.origin,
        difficulty=task.difficulty,
        tools=task.tools,
        fail_to_pass=task.fail_to_pass,
        pass_to_pass=task.pass_to_pass,
        test_files=tuple(sorted(task.hidden_tests)),
    )
    config = {
        "schema_version": SCHEMA_VERSION,
        "artifacts": ["/app"],  # all that a verifier of its own gets to see of the agent's work
        "metadata": {"category": "feature-deletion", "difficulty": task.difficulty},
        "verifier": {"environment_mode": "separate", "timeout_sec": VERIFIER_TIMEOUT_S},
        # No docker_image: Harbor would pull it, and run without the repository, instead of building the Dockerfile.
        "environment": {"network_mode": "no-network"},
        "offbook": table.model_dump(),
    }
    nodes = shlex.join([*task.fail_to_pass, *task.pass_to_pass])
    write_files(folder / TREE, task.tree)
    write_files(folder / HIDDEN_TESTS, task.hidden_tests)
    write_files(
        folder,
        {
            "task.toml": tomli_w.dumps(config),
            "instruction.md": task.instruction + "\n",
            "environment/Dockerfile": DOCKERFILE,
            "tests/test.sh": TEST_SH.format(nodes=nodes),
            "solution/solve.sh": SOLVE_SH,
            "solution/gold.patch": _patch(task.tree, task.gold),
        },
    )
    for script in ("tests/test.sh", "solution/solve.sh"):
        (folder / script).chmod(0o755)


def load_task(folder: Path) -> Task:
    for needed in ("task.toml", "instruction.md", TREE, HIDDEN_TESTS):
        if not (folder / needed).exists():
            raise OffbookError(f"{folder} is not a task folder: it has no {needed}")
    table = _read_table(folder / "task.toml")
    return Task(
        id=table.id,
        folder=folder,
        instruction=(folder / "instruction.md").read_text().strip(),
        tree=folder / TREE,
        hidden_tests=folder / HIDDEN_TESTS,
        test_files=table.test_files,
        fail_to_pass=table.fail_to_pass,
        pass_to_pass=table.pass_to_pass,
        tools=table.tools,
        origin=table.origin,
        difficulty=table.difficulty,
    )


def load_tasks(root: Path) -> list[Task]:
    """The tasks in the folders directly under `root`, sorted by id."""
    folders = [path for path in root.iterdir() if path.is_dir()] if root.is_dir() else []
    if not folders:
        raise OffbookError(f"{root} holds no task folders")
    return sorted((load_task(folder) for folder in folders), key=lambda task: task.id)


def write_files(root: Path, files: Mapping[str, str]) -> None:
    for path, text in files.items():
        target = root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(text.encode())


def _read_table(path: Path) -> OffbookTable:
    try:
        config = tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise OffbookError(f"{path} is not TOML: {error}") from error
    if "offbook" not in config:
        raise OffbookError(f"{path} has no [offbook] table, so offbook cannot run this task")
    try:
        return OffbookTable.model_validate(config["offbook"])
    except ValidationError as error:
        first = error.errors()[0]
        raise OffbookError(f"[offbook] in {path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error


def _patch(tree: Mapping[str, str], gold: Mapping[str, str]) -> str:
    """A unified diff from the tree to the gold files, for `patch -p1`."""
    lines: list[str] = []
    for path, text in gold.items():
        before, after = tree[path].splitlines(keepends=True), text.splitlines(keepends=True)
        for line in difflib.unified_diff(before, after, f"a/{path}", f"b/{path}"):
            lines.append(line if line.endswith("\n") else line + "\n\\ No newline at end of file\n")
    return "".join(lines)
