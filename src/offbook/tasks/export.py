"""Tasks in the form that other tools read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from offbook.tasks.patch import gold_patch
from offbook.types import Task

CREATED = "2000-01-01T00:00:00Z"  # the date of the only commit


def swebench_instance(task: Task) -> dict[str, Any]:
    """As SWE-bench has them: `patch` is the fix, `test_patch` brings the hidden tests, test lists are JSON texts."""
    name, _, version = task.origin.partition("==")
    return {
        "instance_id": task.id,
        "repo": name,
        "base_commit": _commit(task.tree),
        "version": version,
        "problem_statement": task.instruction,
        "hints_text": "",
        "created_at": CREATED,
        "patch": (task.folder / "solution" / "gold.patch").read_text(),
        "test_patch": _test_patch(task),
        "FAIL_TO_PASS": json.dumps(list(task.fail_to_pass)),
        "PASS_TO_PASS": json.dumps(list(task.pass_to_pass)),
        "environment_setup_commit": _commit(task.tree),
    }


def _commit(tree: Path) -> str:
    head = tree / ".git" / "refs" / "heads" / "main"
    packed = tree / ".git" / "packed-refs"
    if head.is_file():
        return head.read_text().strip()
    lines = packed.read_text().splitlines() if packed.is_file() else []
    return next((line.split()[0] for line in lines if line.endswith("refs/heads/main")), "")


def _test_patch(task: Task) -> str:
    before, after = dict[str, str](), dict[str, str | None]()
    for name in task.test_files:
        hidden, visible = task.hidden_tests / name, task.tree / name
        before[name] = hidden.read_bytes().decode()
        after[name] = visible.read_bytes().decode() if visible.is_file() else None
    return gold_patch(before, after)
