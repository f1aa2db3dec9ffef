"""The outcome: do the hidden tests pass on a clean copy of the repository with the agent's changes on it?

How it is found out, and what of the agent's changes counts, is in tasks/grade.py.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os

from offbook.sandbox import BoxSpec
from offbook.tasks.grade import Grade, counted, grade
from offbook.tasks.perturbed import Perturbed
from offbook.tasks.script import reward_by_script
from offbook.types import Rollout, Task


class Grader:
    """Scores rollouts, several at a time. The same changes to the same task are graded once and remembered."""

    def __init__(
        self,
        spec: BoxSpec | None = None,
        timeout_s: float = 60.0,
        partial: bool = False,
        perturbed: Perturbed = "finding",
    ):
        self.runs = 0
        self._spec = spec or BoxSpec()
        self._timeout_s = timeout_s
        self._partial = partial
        self._perturbed: Perturbed = perturbed
        self._slots = asyncio.Semaphore(os.cpu_count() or 1)
        self._grades: dict[tuple[str, str], asyncio.Task[Grade]] = {}

    async def outcome(self, task: Task, rollout: Rollout) -> float:
        return (await self.graded(task, rollout))[0]

    async def graded(self, task: Task, rollout: Rollout) -> tuple[float, Grade | None]:
        """1.0 if every expected test passes, else 0.0, and the grade where tests were run. Crashed and overlong
        rollouts are scored like any other.

        With partial credit, less than all of the tests that need the feature earn their share of what a trivial body
        does not pass, as long as no other test fails.
        """
        if task.script:
            reward, _ = await reward_by_script(task, rollout.changed, self._spec, self._timeout_s)
            return min(1.0, max(0.0, reward)), None
        if task.leave and (_edited(task, rollout) or rollout.stop not in ("finish", "answer")):
            return 0.0, None  # whoever breaks off has not answered either
        changes = {path: text for path, text in rollout.changed.items() if counted(task, path)}
        if not changes and not task.leave:
            return 0.0, None  # the tests were seen red on this very tree when the task was made
        key = task.id, hashlib.sha256(json.dumps(changes, sort_keys=True).encode()).hexdigest()
        if key not in self._grades:
            self._grades[key] = asyncio.create_task(self._grade(task, changes))
        try:
            result = await self._grades[key]
        except OSError:  # of the machine: whoever asks again gets another grading
            self._grades.pop(key, None)
            raise
        if result.solved or not self._partial:
            return float(result.solved), result
        floor = task.deleted.floor if task.deleted else 0.0
        return max(0.0, (result.share(task) - floor) / (1 - floor)) if floor < 1 else 0.0, result

    async def _grade(self, task: Task, changes: dict[str, str | None]) -> Grade:
        async with self._slots:
            self.runs += 1
            return await grade(task, changes, self._spec, self._timeout_s, self._perturbed)


def _edited(task: Task, rollout: Rollout) -> bool:
    """Whether a file of the repository is another one now, or a new one is code. Scratch files are neither."""
    return any((task.tree / path).is_file() or path.endswith(".py") for path in rollout.changed)
