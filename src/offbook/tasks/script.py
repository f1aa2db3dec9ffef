"""Harbor folders that others made: no [offbook] table, a script that judges, a script that solves.

What their Dockerfile installs is not there: a sandbox has this machine's tools and offbook's Python. Its COPY lines say
which files the agent starts with. The judge runs as Harbor runs it: the agent's files in /app, the task's tests in
/tests, the reward in /logs/verifier.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

from offbook.sandbox import Sandbox, SandboxSpec, open_sandbox
from offbook.tasks.grade import put
from offbook.types import OffbookError, Task

RECORD = "verifiers.json"  # in folders that from_verifiers.py made: which task of which taskset judges
TESTS = "tests"
SOLUTION = "solution"
READ_REWARD = "cat /logs/verifier/reward.json 2>/dev/null || cat /logs/verifier/reward.txt"
MARK = "--- the reward ---"


def foreign_task(folder: Path, instruction: str) -> Task:
    script = RECORD if (folder / RECORD).is_file() else f"{TESTS}/test.sh"
    for needed in ("environment", script):
        if not (folder / needed).exists():
            raise OffbookError(f"{folder} is not a task folder: it has no {needed}")
    return Task(
        id=folder.name,
        folder=folder,
        instruction=instruction,
        tree=_tree(folder / "environment"),
        hidden_tests=folder / TESTS,
        test_files=(),
        fail_to_pass=(),
        pass_to_pass=(),
        tools=("read_file", "edit_file", "list_dir", "search_codebase", "run_command", "finish"),
        origin=folder.name,
        script=script,
    )


def _tree(environment: Path) -> Path:
    """What the Dockerfile copies to where the agent works: one folder of the environment, or all of it."""
    dockerfile = environment / "Dockerfile"
    text = dockerfile.read_text(errors="replace") if dockerfile.is_file() else ""
    copied = re.findall(r"^(?:COPY|ADD)\s+(?:--\S+\s+)*(\S+)\s+\S+\s*$", text, re.M | re.I)
    folders = [environment / source for source in copied if (environment / source).is_dir()]
    return folders[0] if len(folders) == 1 else environment


async def reward_by_script(
    task: Task, changes: Mapping[str, str | None], spec: SandboxSpec, timeout_s: float
) -> tuple[float, str]:
    """What the task's own script says of a clean tree with these changes, and the end of what it printed."""
    async with await _open(task, spec) as sandbox:
        await put(sandbox, changes)
        result = await sandbox.exec(f"bash /tests/test.sh; echo '{MARK}'; {READ_REWARD}", timeout_s)
    printed, _, reward = result.output.rpartition(MARK)
    words = (printed.strip().splitlines() or ["it printed nothing"])[-1]
    return _number(reward.strip()), words


async def solved_by_script(task: Task, spec: SandboxSpec, timeout_s: float) -> dict[str, str | None]:
    """What the task's solution changes in the tree."""
    if not (task.folder / SOLUTION / "solve.sh").is_file():
        raise OffbookError(f"{task.folder} has no solution/solve.sh to check it with")
    async with await _open(task, spec) as sandbox:
        await sandbox.exec("bash /solution/solve.sh", timeout_s)
        return await sandbox.changes()


async def _open(task: Task, spec: SandboxSpec) -> Sandbox:
    if spec.backend != "bwrap":
        raise OffbookError(f"{task.folder} brings its own judge, which runs in bwrap sandboxes only")
    mounts = {"/tests": task.folder / TESTS, "/solution": task.folder / SOLUTION}
    return await open_sandbox(task.tree, spec, mounts={at: path for at, path in mounts.items() if path.is_dir()})


def _number(reward: str) -> float:
    """Of a reward.txt its number, of a reward.json the one called reward, or its only one."""
    try:
        value = json.loads(reward)
    except ValueError:
        return 0.0
    if isinstance(value, dict):
        value = value.get("reward", next(iter(value.values()), 0.0) if len(value) == 1 else 0.0)
    return float(value) if isinstance(value, int | float) else 0.0
