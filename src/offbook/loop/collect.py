"""Rollouts for tasks: boxes, agents and grading side by side, results in a fixed order."""

from __future__ import annotations

import asyncio

from offbook.engine import LocalEngine, Session
from offbook.harness import run_agent
from offbook.rewards import Grader
from offbook.sandbox import ProcessBox
from offbook.tokens import ChatFormat
from offbook.types import Limits, Rollout, Task


async def collect(
    tasks: list[Task], samples: int, engine: LocalEngine, chat: ChatFormat, grader: Grader, limits: Limits, name: str
) -> list[list[Rollout]]:
    """For each task, one group of `samples` scored rollouts. `name` makes their ids, and so their dice, unique."""

    async def one(task: Task, session: Session) -> Rollout:
        try:
            with ProcessBox(task.tree) as box:
                rollout = await run_agent(task, box, session, chat, limits, session.key, f"{name}/{task.id}")
        finally:
            session.close()
        rollout.reward.parts["outcome"] = await grader.outcome(task, rollout)
        return rollout

    pairs = [(task, engine.open(f"{name}/{task.id}/{number}")) for task in tasks for number in range(samples)]
    async with asyncio.TaskGroup() as jobs:
        running = [jobs.create_task(one(task, session)) for task, session in pairs]
    rollouts = [job.result() for job in running]
    return [rollouts[start : start + samples] for start in range(0, len(rollouts), samples)]
