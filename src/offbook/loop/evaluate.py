"""Measure a policy on tasks it was not trained on. What the rollouts say is counted in offbook.evals."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from offbook.config import Config
from offbook.loop.collect import Watch, collect, grader_of
from offbook.loop.measure import bootstrap, invalid_per_100, solved_share, summarize
from offbook.loop.rollout import open_engine
from offbook.monitors import Monitors, monitors_of
from offbook.rewards import compose
from offbook.types import Rollout, Task

NAME = "eval"  # begins the ids of the rollouts, and so decides their dice
PARALLEL = 128  # rollouts open at once


def evaluate(model: Path, tasks: list[Task], config: Config) -> tuple[dict[str, Any], list[Rollout]]:
    """The numbers, with 95% intervals over tasks, and the rollouts behind them."""
    started = time.monotonic()
    groups = asyncio.run(gather(tasks, config, model))
    return summary(groups, time.monotonic() - started), [rollout for group in groups for rollout in group]


def summary(groups: list[list[Rollout]], seconds: float) -> dict[str, Any]:
    return {
        **summarize(groups),
        "tasks": len(groups),
        "solved_ci": bootstrap(groups, solved_share),
        "invalid_per_100_ci": bootstrap(groups, invalid_per_100),
        "seconds": seconds,
    }


async def gather(
    tasks: Sequence[Task],
    config: Config,
    model: Path | None,
    remote_name: str = "",
    kept: Sequence[Rollout] = (),
    watch: Watch = lambda rollout, over: None,
    parallel: int = PARALLEL,
) -> list[list[Rollout]]:
    """For each task, `config.eval.samples` scored rollouts. Those in `kept` are from before and not run again.

    A local model decodes in lockstep, so its rollouts come in waves; behind a URL one follows the other.
    """
    samples, done = config.eval.samples, {rollout.id for rollout in kept}
    left = [task for task in tasks if not done.issuperset(rollout_ids(task, samples))]
    monitors = monitors_of(config.monitors)
    if monitors is not None:
        monitors.recall(kept)
    new = await _run(left, config, model, remote_name, done, watch, monitors, parallel) if left else []
    before, after = _by_task(kept), _by_task(new)
    if monitors is not None:
        for group in before.values():  # a rollout is kept when it is over, before the others of its task are
            monitors.settle([rollout for rollout in group if not any(e.kind == "quarantined" for e in rollout.events)])
    return [
        sorted([*before.get(task.id, ()), *after.get(task.id, ())], key=lambda rollout: _number(rollout.id))
        for task in tasks
    ]


async def _run(
    tasks: Sequence[Task],
    config: Config,
    model: Path | None,
    remote_name: str,
    done: Collection[str],
    watch: Watch,
    monitors: Monitors | None,
    parallel: int,
) -> list[Rollout]:
    samples, grader, rewards = config.eval.samples, grader_of(config), compose(config.rewards, config.harness)
    tasks_at_once = max(1, parallel // samples)
    size, waves = (tasks_at_once, 1) if model is not None else (1, tasks_at_once)
    slots = asyncio.Semaphore(waves)
    async with open_engine(config, model, remote_name) as (engine, chat, harness):

        async def wave(batch: list[Task]) -> list[list[Rollout]]:
            async with slots:
                return await collect(
                    batch, samples, engine, chat, grader, harness, NAME, watch, rewards, monitors, done
                )

        batches = [list(tasks[start : start + size]) for start in range(0, len(tasks), size)]
        try:
            async with asyncio.TaskGroup() as jobs:
                running = [jobs.create_task(wave(batch)) for batch in batches]
        except ExceptionGroup as problems:
            raise problems.exceptions[0] from None
    return [rollout for job in running for group in job.result() for rollout in group]


def rollout_ids(task: Task, samples: int) -> list[str]:
    return [f"{NAME}/{task.id}/{number}" for number in range(samples)]


def _number(rollout_id: str) -> int:
    return int(rollout_id.rpartition("/")[2])


def _by_task(rollouts: Iterable[Rollout]) -> dict[str, list[Rollout]]:
    groups: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.task, []).append(rollout)
    return groups
