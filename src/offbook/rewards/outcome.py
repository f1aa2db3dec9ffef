"""The outcome: do the hidden tests pass on a clean copy of the repository with the agent's changes on it?

Only the source files the agent changed are taken over. Test files, conftest and configuration come from the task, so
that nothing the agent did to them counts.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from pathlib import PurePosixPath

from offbook.sandbox import BoxSpec, open_box
from offbook.tasks.testrun import run_tests_in
from offbook.types import Rollout, Task, is_test_file

STARTUP_FILES = ("sitecustomize.py", "usercustomize.py")  # run before any test does


class Grader:
    """Scores rollouts, several at a time. The same changes to the same task are graded once and remembered."""

    def __init__(self, spec: BoxSpec | None = None, timeout_s: float = 60.0):
        self.runs = 0
        self.spec = spec or BoxSpec()
        self._timeout_s = timeout_s
        self._slots = asyncio.Semaphore(os.cpu_count() or 1)
        self._grades: dict[tuple[str, str], asyncio.Task[bool]] = {}

    async def outcome(self, task: Task, rollout: Rollout) -> float:
        """1.0 if every expected test passes, else 0.0. Crashed and overlong rollouts are scored like any other."""
        changes = submitted(rollout.changed)
        if not changes:
            return 0.0  # the tests were seen red on this very tree when the task was made
        key = task.id, hashlib.sha256(json.dumps(changes, sort_keys=True).encode()).hexdigest()
        if key not in self._grades:
            self._grades[key] = asyncio.create_task(self._passes(task, changes))
        return float(await self._grades[key])

    async def _passes(self, task: Task, changes: dict[str, str | None]) -> bool:
        async with self._slots:
            self.runs += 1
            async with await open_box(task.tree, self.spec) as box:
                for path, text in changes.items():
                    if text is None:
                        await box.remove(path)
                    else:
                        await box.write(path, text)
                for name in task.test_files:
                    await box.write(name, (task.hidden_tests / name).read_text())
                run = await run_tests_in(box, task.test_files, self._timeout_s)
        return run.passed >= {*task.fail_to_pass, *task.pass_to_pass}


def submitted(changed: dict[str, str | None]) -> dict[str, str | None]:
    """The part of the agent's changes that is graded: Python sources."""
    return {
        path: text
        for path, text in changed.items()
        if path.endswith(".py") and not is_test_file(path) and PurePosixPath(path).name not in STARTUP_FILES
    }
