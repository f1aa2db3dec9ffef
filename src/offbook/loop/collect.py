"""Rollouts for tasks: boxes, agents and grading side by side, results in a fixed order."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

from offbook.config import Config
from offbook.engine import Engine, Session
from offbook.harness import Harness, own_tools, run_agent
from offbook.monitors import WITHHELD, Monitors, withhold
from offbook.rewards import Grader, Rewards
from offbook.sandbox import BoxSpec
from offbook.tasks.suite import suite_box
from offbook.tokens import Chat, chat_for
from offbook.types import Event, OffbookError, Prices, Rollout, Task

Watch = Callable[[Rollout, bool], None]  # a rollout as it stands, and whether it is over


def harness_of(config: Config) -> Harness:
    settings = config.harness
    prices = Prices(settings.price_input, settings.price_output)
    own, added = own_tools(config.tools.files), tuple(config.tools.add)
    return Harness(settings.limits(), settings.profile, settings.variation, prices, own_tools=own, added=added)


def chat_of(model: Path, config: Config) -> Chat:
    """The chat format of a model's folder; the profile `bash` has calls of its own, whatever the model's are."""
    return chat_for(model, "bash" if config.harness.profile == "bash" else "auto")


def box_spec_of(config: Config) -> BoxSpec:
    return BoxSpec(**config.sandbox.model_dump())


def grader_of(config: Config) -> Grader:
    return Grader(box_spec_of(config), config.rewards.grade_s, config.rewards.partial)


async def collect(
    tasks: list[Task],
    samples: int,
    engine: Engine,
    chat: Chat,
    grader: Grader,
    harness: Harness,
    name: str,
    watch: Watch = lambda rollout, over: None,
    rewards: Rewards = Rewards(),  # noqa: B008  (frozen)
    monitors: Monitors | None = None,
    done: Collection[str] = (),
) -> list[list[Rollout]]:
    """For each task, one group of `samples` scored rollouts. `name` makes their ids, and so their dice, unique.

    Those with an id in `done` are left out. A rollout whose box could not be opened or graded is a crashed rollout with
    an event, and the others go on.
    """

    spec = replace(grader.spec, watch=monitors is not None and monitors.watch)

    async def one(task: Task, session: Session, rollout_id: str) -> Rollout:
        group = f"{name}/{task.id}"
        rollout = Rollout(rollout_id, task.id, group, task.tools)
        try:
            try:
                async with await suite_box(task.tree, task.suite, spec) as box:
                    rollout = await run_agent(
                        task, box, session, chat, harness, rollout_id, group, lambda rollout: watch(rollout, False)
                    )
            finally:
                session.close()
            rollout.reward.parts["outcome"] = await grader.outcome(task, rollout)
        except OSError:  # the machine, not the agent: no space, no processes, a box that was killed from outside
            rollout.stop = "crash"
            rollout.events.append(Event(-1, "crash", traceback.format_exc(limit=-4)))
            rollout.reward.parts["outcome"] = 0.0
        if monitors is not None:
            await monitors.judge(task, rollout)
        rewards.score(task, rollout)  # after judging: a hack that lost its outcome is scored as what it is, a failure
        if WITHHELD in rollout.reward.parts:
            withhold(rollout)  # nor does any other part of it earn anything
        watch(rollout, True)
        return rollout

    keys = [[key for number in range(samples) if (key := f"{name}/{task.id}/{number}") not in done] for task in tasks]
    # All are opened before the first asks: they decode together.
    opened = [(task, engine.open(key), key) for task, of_task in zip(tasks, keys, strict=True) for key in of_task]
    try:
        async with asyncio.TaskGroup() as jobs:
            running = [jobs.create_task(one(*each)) for each in opened]
    except ExceptionGroup as problems:
        for problem in problems.exceptions:
            if isinstance(problem, OffbookError):  # a reward that broke, in one sentence
                raise problem from None
        raise
    rollouts = iter([job.result() for job in running])
    groups = [[next(rollouts) for _ in of_task] for of_task in keys]
    if monitors is not None:
        for group in groups:
            monitors.settle(group)
    return groups
