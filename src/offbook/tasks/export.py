"""Tasks in the form that other tools read."""

from __future__ import annotations

import json
from typing import Any

from offbook.tasks.git import gold_patch, only_commit
from offbook.types import Task

CREATED = "2000-01-01T00:00:00Z"  # the date of the only commit


def swebench_instance(task: Task) -> dict[str, Any]:
    """As SWE-bench has them: `patch` is the fix, `test_patch` brings the hidden tests, test lists are JSON texts."""
    commit = only_commit(task.tree)
    name, _, version = task.origin.partition("==")
    return {
        "instance_id": task.id,
        "repo": name,
        "base_commit": commit,
        "version": version,
        "problem_statement": task.instruction,
        "hints_text": "",
        "created_at": CREATED,
        "patch": (task.folder / "solution" / "gold.patch").read_text(),
        "test_patch": _test_patch(task),
        "FAIL_TO_PASS": json.dumps(list(task.fail_to_pass)),
        "PASS_TO_PASS": json.dumps(list(task.pass_to_pass)),
        "environment_setup_commit": commit,
    }


def _test_patch(task: Task) -> str:
    before, after = dict[str, str](), dict[str, str | None]()
    for name in task.test_files:
        hidden, visible = task.hidden_tests / name, task.tree / name
        before[name] = hidden.read_bytes().decode()
        after[name] = visible.read_bytes().decode() if visible.is_file() else None
    return gold_patch(before, after)
