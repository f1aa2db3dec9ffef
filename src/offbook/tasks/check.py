"""Checks a task folder: its gold patch must be accepted, and doing nothing must not."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from offbook.sandbox import SandboxSpec
from offbook.tasks.git import BadPatch, applied, touched_by
from offbook.tasks.grade import Grade, counted, grade
from offbook.tasks.script import RECORD, reward_by_script, solved_by_script
from offbook.types import OffbookError, Task

TIMEOUT_S = 600.0


def gold_changes(task: Task) -> dict[str, str | None]:
    """The changes that the gold patch makes: path -> text, None for a deleted file."""
    if task.leave:
        return {}
    file = task.folder / "solution" / "gold.patch"
    if not file.is_file():
        raise OffbookError(f"{task.folder} has no solution/gold.patch to check it with")
    try:
        return changes_by(task, file.read_bytes().decode())
    except BadPatch as error:
        raise OffbookError(f"the gold patch of {task.folder} cannot be used: {error}") from error


def changes_by(task: Task, patch: str) -> dict[str, str | None]:
    """The changes that a patch makes to the task's tree."""
    there = [path for path in touched_by(patch) if (task.tree / path).is_file()]
    return applied({path: (task.tree / path).read_bytes().decode() for path in there}, patch)


async def check(task: Task, spec: SandboxSpec | None = None, timeout_s: float = TIMEOUT_S) -> str:
    """Why the folder is not a valid task, in one sentence; empty if it is."""
    spec = spec or SandboxSpec()
    if task.script == RECORD:
        from offbook.tasks.from_verifiers import reward_by_taskset

        is_solved = await reward_by_taskset(task, {}, None, spec) >= 1
    elif task.script:
        gold = await solved_by_script(task, spec, timeout_s)
        reward, words = await reward_by_script(task, gold, spec, timeout_s)
        if reward < 1:
            return f"its solution earns {reward:g}, not 1 ({words}); what its Dockerfile installs may be missing here"
        is_solved = (await reward_by_script(task, {}, spec, timeout_s))[0] >= 1
    else:
        if not task.leave and not task.fail_to_pass:
            return "it names no test that needs the feature"
        if not task.leave and (why := await check_gold(task, spec, timeout_s)):
            return why
        untouched = await grade(task, {}, spec, timeout_s)
        if task.leave and not untouched.solved:
            return f"nothing is to be changed, and it is refused: {why_refused(untouched)}"
        is_solved = untouched.solved and not task.leave
    return "it is solved by doing nothing" if is_solved else ""


async def check_all(tasks: Sequence[Task], progress: Callable[[float], None] = lambda share: None) -> list[str]:
    """The result of `check` for each task."""
    slots = asyncio.Semaphore((os.cpu_count() or 1) + 1)
    done = 0

    async def one(task: Task) -> str:
        nonlocal done
        found: dict[str, str] = {}
        async with slots:
            with readable(task, found):
                found[task.id] = await check(task)
        done += 1
        progress(done / len(tasks))
        return found[task.id]

    async with asyncio.TaskGroup() as jobs:
        running = [jobs.create_task(one(task)) for task in tasks]
    return [job.result() for job in running]


@contextmanager
def readable(task: Task, bad: dict[str, str]) -> Iterator[None]:
    """Record an unreadable folder in `bad` instead of ending the checks of all others."""
    try:
        yield
    except OffbookError as error:
        bad[task.id] = str(error)
    except (OSError, ValueError) as error:
        bad[task.id] = f"something in {task.folder} cannot be read: {error}"


async def check_gold(task: Task, spec: SandboxSpec, timeout_s: float = TIMEOUT_S) -> str:
    """Why the gold patch is not accepted; empty if it is."""
    gold = gold_changes(task)
    for path in gold:
        if path.endswith(".py") and not counted(task, path):
            return f"its gold patch changes {path}, which is not graded"
    accepted = await grade(task, gold, spec, timeout_s)
    return "" if accepted.solved else f"its gold patch is refused: {why_refused(accepted)}"


def why_refused(result: Grade) -> str:
    if result.invalid:
        return result.invalid
    test = min(result.missing)
    if result.run.timed_out:
        return f"stopped in {result.run.running or 'the middle'}"
    broken = next(iter(result.run.broken.items()), None)
    reason = result.run.failed.get(test) or (f"{broken[0]}: {broken[1]}" if broken else "not run")
    return f"{test} does not pass ({reason})"
