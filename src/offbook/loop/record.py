"""What the tasks of a run are, kept in its folder: whoever looks at a run later may not have them."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from offbook.runfolder import RunFolder, write_atomic
from offbook.types import Task

MAX_PATCH = 60_000  # characters
MAX_TESTS = 300  # names of each kind


def record_tasks(folder: RunFolder, tasks: dict[str, list[Task]]) -> None:
    """Write tasks.jsonl, one line a task. `tasks` has them by what they are for: train, heldout."""
    lines = [json.dumps(task_record(task, split)) + "\n" for split, of in tasks.items() for task in of]
    write_atomic(folder.path / "tasks.jsonl", "".join(lines))


def task_record(task: Task, split: str) -> dict[str, Any]:
    patch = _gold_patch(task.folder)
    return {
        "id": task.id,
        "split": split,
        "origin": task.origin,
        "difficulty": task.difficulty,
        "instruction": task.instruction,
        "deleted": asdict(task.deleted) if task.deleted else None,
        "patch": patch[:MAX_PATCH],
        "patch_left_out": max(0, len(patch) - MAX_PATCH),
        "fail_to_pass": task.fail_to_pass[:MAX_TESTS],
        "pass_to_pass": task.pass_to_pass[:MAX_TESTS],
        "num_fail_to_pass": len(task.fail_to_pass),
        "num_pass_to_pass": len(task.pass_to_pass),
    }


def _gold_patch(folder: Path) -> str:
    """What brings the deleted code back. Tasks that others made may have none."""
    path = folder / "solution" / "gold.patch"
    return path.read_text(errors="replace") if path.is_file() else ""
