"""Task folders: the Harbor format, plus an [offbook] table in task.toml for what Harbor has no field for.

task.toml
instruction.md
instructions/            the same request in other lengths, where there are any
environment/Dockerfile   the image: the repository in /app, with what its tests need
environment/repo/        what the agent sees
tests/test.sh            restores the hidden tests, runs them, writes the reward
tests/hidden/            the original test files, and what they need
solution/solve.sh        applies gold.patch
solution/gold.patch
solution/removed.json    the deleted code, piece by piece: what must not be found elsewhere
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import tomli_w
from pydantic import BaseModel, ConfigDict, ValidationError

from offbook.tasks.patch import gold_patch
from offbook.tasks.script import foreign_task
from offbook.types import Deleted, Interrupt, OffbookError, Suite, Task

SCHEMA_VERSION = "1.4"
VERIFIER_TIMEOUT_S = 600.0
TREE, HIDDEN_TESTS = "environment/repo", "tests/hidden"

DOCKERFILE = """\
FROM python:3.11-slim
RUN apt-get update && apt-get install -y --no-install-recommends git patch && rm -rf /var/lib/apt/lists/*
COPY requirements.txt /requirements.txt
RUN pip install --no-cache-dir -r /requirements.txt
COPY repo /app
WORKDIR /app
ENV PYTHONPATH={roots}
"""

TEST_SH = """\
#!/bin/sh
# Restores the original tests, runs them, and writes the reward: 1 if every expected test passes, 0 if not.
cp -R "$(dirname "$0")/hidden/." /app/
cd /app || exit 1
{start}mkdir -p /logs/verifier
if {variables}python -m pytest -q -p no:cacheprovider {options} --rootdir /app \\
    {nodes}
then echo 1 > /logs/verifier/reward.txt
else echo 0 > /logs/verifier/reward.txt
fi
"""

SOLVE_SH = """\
#!/bin/sh
patch -p1 -d /app < "$(dirname "$0")/gold.patch"
"""


class DeletedTable(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: str
    level: str
    targets: tuple[str, ...]
    functions: tuple[str, ...]
    lines: int
    files: int
    callers: int
    floor: float


class InterruptTable(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    after_turns: int
    text: str


class OffbookTable(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str
    origin: str
    difficulty: str
    tools: tuple[str, ...]
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    test_files: tuple[str, ...]
    test_command: str = ""
    environment: str = ""  # where python/ and deps/ are, relative to the task's folder; empty: offbook's own
    import_roots: tuple[str, ...] = (".",)
    pytest_options: tuple[str, ...] = ()
    start: str = ""
    sources: tuple[str, ...] = ()
    deleted: DeletedTable | None = None
    leave: bool = False
    interrupt: InterruptTable | None = None


@dataclass(frozen=True, slots=True)
class NewTask:
    """What a task folder is written from. Files are path -> text, paths relative to the repository."""

    instruction: str
    tree: Mapping[str, str | None]  # with the feature deleted; what `base` has besides stays as it is
    gold: Mapping[str, str]  # the source files that lost something, as they were
    hidden_tests: Mapping[str, str | bytes]  # the test files as they were, and what they need
    test_files: tuple[str, ...]
    id: str
    origin: str
    difficulty: str
    tools: tuple[str, ...]
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    base: Path | None = None  # the repository, where it is more than the files of `tree`
    suite: Suite = field(default_factory=Suite)
    sources: tuple[str, ...] = ()
    test_command: str = ""
    requirements: tuple[str, ...] = ("pytest",)
    deleted: Deleted | None = None
    instructions: Mapping[str, str] = field(default_factory=dict)
    removed: Mapping[str, str] = field(default_factory=dict)
    leave: bool = False
    interrupt: Interrupt | None = None


def write_task(folder: Path, task: NewTask) -> None:
    table = OffbookTable(
        id=task.id,
        origin=task.origin,
        difficulty=task.difficulty,
        tools=task.tools,
        fail_to_pass=task.fail_to_pass,
        pass_to_pass=task.pass_to_pass,
        test_files=task.test_files,
        test_command=task.test_command,
        environment=os.path.relpath(task.suite.environment, folder) if task.suite.environment else "",
        import_roots=task.suite.import_roots,
        pytest_options=task.suite.options,
        start=task.suite.start,
        sources=task.sources,
        deleted=DeletedTable(**asdict(task.deleted)) if task.deleted else None,
        leave=task.leave,
        interrupt=InterruptTable(**asdict(task.interrupt)) if task.interrupt else None,
    )
    config = {
        "schema_version": SCHEMA_VERSION,
        "artifacts": ["/app"],  # all that a verifier of its own gets to see of the agent's work
        "metadata": {"category": "feature-deletion", "difficulty": task.difficulty},
        "verifier": {"environment_mode": "separate", "timeout_sec": VERIFIER_TIMEOUT_S},
        # No docker_image: Harbor would pull it, and run without the repository, instead of building the Dockerfile.
        "environment": {"network_mode": "no-network"},
        "offbook": table.model_dump(exclude_none=True),
    }
    if task.base is not None:
        shutil.copytree(task.base, folder / TREE, symlinks=True)
    write_files(folder / TREE, task.tree)
    write_files(folder / HIDDEN_TESTS, task.hidden_tests)
    write_files(
        folder,
        {
            "task.toml": tomli_w.dumps(config),
            "instruction.md": task.instruction.rstrip("\n") + "\n",
            "environment/Dockerfile": DOCKERFILE.format(
                roots=":".join(os.path.normpath(f"/app/{root}") for root in task.suite.import_roots)
            ),
            "environment/requirements.txt": "\n".join(task.requirements) + "\n",
            "tests/test.sh": _test_script(task),
            "solution/solve.sh": SOLVE_SH,
            "solution/gold.patch": gold_patch(task.gold, {path: task.tree[path] for path in task.gold}),
            "solution/removed.json": json.dumps(task.removed, indent=1) + "\n",
            **{f"instructions/{name}.md": text.rstrip("\n") + "\n" for name, text in task.instructions.items()},
        },
    )
    for script in ("tests/test.sh", "solution/solve.sh"):
        (folder / script).chmod(0o755)


def _test_script(task: NewTask) -> str:
    """Without an environment of its own a repository's conftest files and settings do not count, with one they do."""
    nodes = shlex.join([*task.fail_to_pass, *task.pass_to_pass])
    if task.suite.environment is None:
        options, variables = "--noconftest -c /dev/null -o addopts=", "PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 "
    else:
        options, variables = shlex.join(["-o", "addopts=", *task.suite.options]), ""
    start = f"{task.suite.start}\n" if task.suite.start else ""
    return TEST_SH.format(nodes=nodes, options=options, variables=variables, start=start)


def load_task(folder: Path, wording: str = "") -> Task:
    """`wording` is one of the folder's instructions: terse, normal or detailed."""
    for needed in ("task.toml", "instruction.md"):
        if not (folder / needed).exists():
            raise OffbookError(f"{folder} is not a task folder: it has no {needed}")
    table = _read_table(folder / "task.toml")
    if table is None:
        return foreign_task(folder, (folder / "instruction.md").read_text().strip())
    for needed in (TREE, HIDDEN_TESTS):
        if not (folder / needed).exists():
            raise OffbookError(f"{folder} is not a task folder: it has no {needed}")
    environment = (folder / table.environment).resolve() if table.environment else None
    if environment is not None and not (environment / "python").is_dir():
        raise OffbookError(f"{folder} needs the interpreter and the packages in {environment}, which are not there")
    instruction = folder / "instructions" / f"{wording}.md" if wording else folder / "instruction.md"
    if not instruction.is_file():
        raise OffbookError(f"{folder} has no instruction called {wording}")
    return Task(
        id=table.id,
        folder=folder,
        instruction=instruction.read_text().strip(),
        tree=folder / TREE,
        hidden_tests=folder / HIDDEN_TESTS,
        test_files=table.test_files,
        fail_to_pass=table.fail_to_pass,
        pass_to_pass=table.pass_to_pass,
        tools=table.tools,
        origin=table.origin,
        difficulty=table.difficulty,
        test_command=table.test_command,
        suite=Suite(environment, table.import_roots, table.pytest_options, table.start),
        sources=table.sources,
        deleted=Deleted(**table.deleted.model_dump()) if table.deleted else None,
        leave=table.leave,
        interrupt=Interrupt(**table.interrupt.model_dump()) if table.interrupt else None,
    )


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


def _read_table(path: Path) -> OffbookTable | None:
    """None where somebody else made the folder."""
    try:
        config = tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise OffbookError(f"{path} is not TOML: {error}") from error
    if "offbook" not in config:
        return None
    try:
        return OffbookTable.model_validate(config["offbook"])
    except ValidationError as error:
        first = error.errors()[0]
        raise OffbookError(f"[offbook] in {path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
