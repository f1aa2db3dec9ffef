"""Tasks in the form that other tools read."""

from __future__ import annotations

import base64
import io
import json
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from offbook.tasks.folder import write_whole
from offbook.tasks.git import gold_patch, only_commit
from offbook.types import Task

EVAL_SCRIPT = """\
#!/bin/bash
set -uxo pipefail
mkdir -p /opt/judge
base64 -d <<'JUDGE' | tar xz --no-same-owner -C /opt/judge
{judge}
JUDGE
: '>>>>> Start Test Output'
python3 -I /opt/judge/tests/judge/judge.py /testbed /opt/judge/logs --list
: '>>>>> End Test Output'
"""
CREATED = "2000-01-01T00:00:00Z"  # the date of the only commit


def swebench_instance(task: Task) -> dict[str, Any]:
    """As SWE-bench has them: `patch` is the fix, `test_patch` brings the hidden tests, test lists are JSON texts.

    Its own harness (swebench 5) evaluates them in `image`, which `docker build -t IMAGE environment` makes: the script
    brings the task's judge along and prints what that says. Its parser knows no blanks in node ids, so they are `_`.
    """
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
        "FAIL_TO_PASS": json.dumps(["_".join(node.split()) for node in task.fail_to_pass]),
        "PASS_TO_PASS": json.dumps(["_".join(node.split()) for node in task.pass_to_pass]),
        "environment_setup_commit": commit,
        "image": f"offbook/{task.id.lower()}:latest",
        "log_parser": "parse_log_pytest",
        "eval_type": "pass_and_fail",
        "eval_script": EVAL_SCRIPT.format(judge=_packed_tests(task)),
    }


def _packed_tests(task: Task) -> str:
    packed = io.BytesIO()
    with (
        tempfile.TemporaryDirectory(prefix="offbook-export-") as room,
        tarfile.open(fileobj=packed, mode="w:gz") as archive,
    ):
        write_whole(task, Path(room) / "task")
        archive.add(Path(room) / "task" / "tests", "tests")
    return base64.encodebytes(packed.getvalue()).decode().strip()


def _test_patch(task: Task) -> str:
    before = dict[str, str]()
    after = dict[str, str | None]()
    for name in task.test_files:
        hidden = task.hidden_tests / name
        visible = task.tree / name
        before[name] = hidden.read_bytes().decode()
        after[name] = visible.read_bytes().decode() if visible.is_file() else None
    return gold_patch(before, after)
