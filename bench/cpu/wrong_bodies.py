"""How many wrong bodies the outcome pays, and what mutants cost a grading and a task.

    python bench/cpu/wrong_bodies.py [--tasks FOLDER] [--pocket 3] [--each 4] [--json FILE]

FOLDER holds task folders that `offbook tasks make` wrote. Of each repository in it `--each` tasks are taken, and
pocket tasks besides. Every wrong body of tests/wrong_bodies.py is graded on every one of them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from wrong_bodies import all_bodies, submission

from offbook.pocket.tasks import make_pocket_tasks
from offbook.sandbox import SandboxSpec
from offbook.tasks import load_tasks
from offbook.tasks import mutants as mutants_module
from offbook.tasks.check import gold_changes
from offbook.tasks.grade import Grade, grade
from offbook.types import Task

TIMEOUT_S = 40.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=Path, help="a folder of task folders")
    parser.add_argument("--pocket", type=int, default=3, help="pocket tasks")
    parser.add_argument("--each", type=int, default=2, help="tasks of each repository")
    parser.add_argument("--only", default="", help="bodies whose names hold this")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        tasks = chosen(arguments, Path(place))
        costs = asyncio.run(cost(tasks))
        rows = asyncio.run(attack(tasks, arguments.only, arguments.jobs))
        result = {"costs": costs, **summary(rows, tasks)}
    print(json.dumps({key: value for key, value in result.items() if key != "rows"}, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


def chosen(arguments: argparse.Namespace, place: Path) -> list[Task]:
    found: list[Task] = []
    if arguments.tasks:
        by_origin: dict[str, list[Task]] = defaultdict(list)
        for task in load_tasks(arguments.tasks):
            by_origin[task.origin].append(task)
        found += [task for tasks in by_origin.values() for task in tasks[: arguments.each]]
    if arguments.pocket:
        asyncio.run(make_pocket_tasks(place / "pocket", 0, arguments.pocket, 1, lambda share: None))
        found += load_tasks(place / "pocket" / "train")
    return found


async def attack(tasks: list[Task], only: str, jobs: int) -> list[dict[str, Any]]:
    slots = asyncio.Semaphore(jobs)
    rows: list[dict[str, Any]] = []

    async def one(task: Task, name: str, prelude: str, value: str) -> None:
        async with slots:
            result = await grade(task, submission(task, prelude, value), SandboxSpec(), TIMEOUT_S)
        rows.append(row(task, name, result))
        if result.solved:
            print("PAID", task.id, name, file=sys.stderr, flush=True)
        elif len(rows) % 50 == 0:
            print(len(rows), "graded", file=sys.stderr, flush=True)

    async with asyncio.TaskGroup() as group:
        for task in tasks:
            for name, (prelude, value) in all_bodies().items():
                if only in name:
                    group.create_task(one(task, name, prelude, value))
    return rows


def row(task: Task, name: str, result: Grade) -> dict[str, Any]:
    kinds = sorted({finding.kind for finding in result.findings})
    return {"task": task.id, "body": name, "paid": result.solved, "findings": kinds, "invalid": result.invalid}


def summary(rows: list[dict[str, Any]], tasks: list[Task]) -> dict[str, Any]:
    kinds = sorted({one["body"].partition(":")[0] for one in rows})
    mutants = [mutants_module.read_mutants(task.folder / "tests", task.hidden_tests) for task in tasks]
    return {
        "tasks": len(tasks),
        "tasks without a check": sum(not one for one in mutants),
        "wrong bodies": len(rows),
        "paid": [f"{one['task']}: {one['body']}" for one in rows if one["paid"]],
        "by kind": {
            kind: {
                "graded": len(of_kind),
                "paid": sum(one["paid"] for one in of_kind),
                "forged": sum("forged" in one["findings"] for one in of_kind),
                "seen": dict(Counter(finding for one in of_kind for finding in one["findings"])),
            }
            for kind in kinds
            for of_kind in [[one for one in rows if one["body"].startswith(f"{kind}:")]]
        },
        "rows": rows,
    }


async def cost(tasks: list[Task]) -> dict[str, Any]:
    """CPU seconds of grading the gold patch, with mutants and changed inputs, with mutants alone, and without."""
    found: dict[str, Any] = {}
    nothing = mock.patch("offbook.tasks.grade.mutants_of", return_value=mutants_module.Mutants())
    for name, perturbed, patch in (
        ("with both", "finding", None), ("with mutants", "off", None), ("without", "off", nothing),
    ):  # fmt: skip
        if patch:
            patch.start()
        before, began = cpu(), time.monotonic()
        for task in tasks:
            result = await grade(task, gold_changes(task), SandboxSpec(), TIMEOUT_S, perturbed)
            assert result.solved, (task.id, result.invalid, result.missing)
        found[name] = {
            "cpu_s": round((cpu() - before) / len(tasks), 3),
            "wall_s": round((time.monotonic() - began) / len(tasks), 3),
        }
        if patch:
            patch.stop()
    return found


def cpu() -> float:
    parts = (resource.getrusage(who) for who in (resource.RUSAGE_CHILDREN, resource.RUSAGE_SELF))
    return sum(part.ru_utime + part.ru_stime for part in parts)


if __name__ == "__main__":
    main()
