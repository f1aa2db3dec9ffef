"""The outcome: do the hidden tests pass on a clean copy of the repository with the agent's changes on it?

How it is found out, and what of the agent's changes counts, is in tasks/grade.py.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path
from tempfile import NamedTemporaryFile

from pydantic import TypeAdapter

from offbook.sandbox import SandboxSpec
from offbook.tasks.grade import Grade, counted, grade
from offbook.tasks.perturbed import Perturbed
from offbook.tasks.script import RECORD, reward_by_script
from offbook.tasks.suite import SuiteRun
from offbook.types import MachineFault, Rollout, Task

GRADE = TypeAdapter(Grade)
FAULTS_IN_A_ROW = 16  # of the machine; then it is not the load of the moment


class Grader:
    """Scores rollouts, several at a time. The same changes to the same task are graded once and remembered.

    In the folder `shared`, where one is given, also for other processes: grades of tasks next to it, which are
    generated and never change.
    """

    def __init__(
        self,
        spec: SandboxSpec | None = None,
        timeout_s: float = 60.0,
        partial: bool = False,
        perturbed: Perturbed = "outcome",
        shared: Path | None = None,
    ):
        self.runs = 0
        self._faults = FAULTS_IN_A_ROW  # gradings since the last one that worked; at first one fault is enough
        self._shared = shared
        self._spec = spec or SandboxSpec()
        self._timeout_s = timeout_s
        self._partial = partial
        self._perturbed: Perturbed = perturbed
        self._slots = asyncio.Semaphore(os.cpu_count() or 1)
        self._grades: dict[tuple[str, str], asyncio.Task[Grade]] = {}

    @property
    def is_broken(self) -> bool:
        """No grading works here: none has yet, or none did for a while."""
        return self._faults > FAULTS_IN_A_ROW

    async def outcome(self, task: Task, rollout: Rollout) -> float:
        return (await self.graded(task, rollout))[0]

    async def graded(self, task: Task, rollout: Rollout) -> tuple[float, Grade | None]:
        """1.0 if every expected test passes, else 0.0, and the grade where tests were run. Crashed and overlong
        rollouts are scored like any other.

        With partial credit, less than all of the tests that need the feature earn their share of what a trivial body
        does not pass, as long as no other test fails.
        """
        if task.script == RECORD:
            from offbook.tasks.from_verifiers import reward_by_taskset

            reward = await reward_by_taskset(task, rollout.changed, rollout, self._spec)
            return min(1.0, max(0.0, reward)), None
        if task.script:
            reward, _ = await reward_by_script(task, rollout.changed, self._spec, self._timeout_s)
            return min(1.0, max(0.0, reward)), None
        if task.leave and (_edited(task, rollout) or rollout.stop not in ("finish", "answer")):
            return 0.0, None  # without an answer
        changes = {path: text for path, text in rollout.changed.items() if counted(task, path)}
        if not changes and not task.leave:
            return 0.0, None  # the tests were seen red on this very tree when the task was made
        key = task.id, hashlib.sha256(json.dumps(changes, sort_keys=True).encode()).hexdigest()
        if key not in self._grades:
            self._grades[key] = asyncio.create_task(self._grade(task, changes))
        try:
            result = await self._grades[key]
        except (OSError, MachineFault) as error:  # the next request grades again
            self._grades.pop(key, None)
            self._faults += isinstance(error, MachineFault)
            raise
        self._faults = 0
        if result.solved or not self._partial:
            return float(result.solved), result
        floor = task.deleted.floor if task.deleted else 0.0
        return max(0.0, (result.share(task) - floor) / (1 - floor)) if floor < 1 else 0.0, result

    async def _grade(self, task: Task, changes: dict[str, str | None]) -> Grade:
        async with self._slots:
            self.runs += 1
            if self._shared is None or not task.folder.is_relative_to(self._shared.parent):
                return await grade(task, changes, self._spec, self._timeout_s, self._perturbed)
            asked = [str(task.folder), changes, str(self._spec), self._timeout_s, self._perturbed]
            file = self._shared / hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()
            if file.is_file():
                return GRADE.validate_json(file.read_bytes())
            result = await grade(task, changes, self._spec, self._timeout_s, self._perturbed)
            if not result.run.timed_out:  # which may be the machine's fault
                self._shared.mkdir(parents=True, exist_ok=True)
                with NamedTemporaryFile(dir=self._shared, delete=False) as draft:
                    draft.write(GRADE.dump_json(replace(result, run=SuiteRun(False, "", ""))))
                os.replace(draft.name, file)
            return result


def _edited(task: Task, rollout: Rollout) -> bool:
    """Whether a file of the repository is another one now, or a new one is code. Scratch files are neither."""
    return any((task.tree / path).is_file() or path.endswith(".py") for path in rollout.changed)
