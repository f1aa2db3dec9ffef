"""Rollouts without training. What an evaluation counts of them is in offbook.evals."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

from offbook.core.config import Config
from offbook.core.runfolder import RunFolder, dump_lines, write_atomic
from offbook.rl.collector import Collector, OnRollout, rollout_ids, unwatched
from offbook.rl.models import local_or_remote
from offbook.rl.resume import RolloutFiles
from offbook.rl.tasks import record_tasks
from offbook.rl.train_step import summarize
from offbook.types import OffbookError, Rollout, Task

PARALLEL = 128  # rollouts of an evaluation that are open at once


def roll_out(
    config: Config,
    tasks: list[Task],
    samples: int,
    watch: OnRollout,
    remote_name: str = "",
) -> dict[str, Any]:
    """Scored rollouts in the run folder `config.out`, each written when it is over. Returns their numbers.

    Those that are there from before, of the same model, tasks and settings, go to `watch` and are not run again.
    """
    folder = RunFolder(config.out)
    folder.refuse_file()
    model = local_or_remote(config.model, remote_name, config.seed)
    collector, files = Collector(config, model, remote_name), RolloutFiles.folder(folder.path)
    with files.writing("set of rollouts", collector, tasks, samples=samples):
        record_tasks(folder, {"": tasks})
        started = time.monotonic()
        groups, counted = collect_into(files, collector, tasks, samples, "rollout", watch)
        result = {**summarize(groups), "tasks": len(tasks), **counted, "seconds": time.monotonic() - started}
        folder.truncate_metrics(-1)
        folder.append_metrics({"step": 0, **result})  # they belong to no training step
    return {**result, "crashes": crashes(groups)}


def collect_into(
    files: RolloutFiles,
    collector: Collector,
    tasks: Sequence[Task],
    size: int,
    name: str,
    watch: OnRollout = unwatched,
    parallel: int = 0,
) -> tuple[list[list[Rollout]], dict[str, int]]:
    """Groups of rollouts, each written when it is over, and how many were there from before or could not be read.

    Those from before go to `watch` first. That none of them came about is an error and no measurement.
    """
    kept, unreadable = files.read({id for task in tasks for id in rollout_ids(name, task, size)})
    for rollout in kept:
        watch(rollout, True)

    def keep(rollout: Rollout, over: bool) -> None:
        if over:
            files.append(rollout)
        watch(rollout, over)

    async def collect() -> list[list[Rollout]]:
        async with aclosing(collector):
            return await collector.groups(tasks, size, name, kept, keep, parallel)

    groups = asyncio.run(collect())
    # Again and in order: what a task's other rollouts showed of it counts for all of them.
    write_atomic(files.rollouts, dump_lines(rollout for group in groups for rollout in group))
    causes = crashes(groups)
    rollouts = sum(map(len, groups))
    if rollouts and sum(causes.values()) == rollouts:  # an agent that never came to work is not measured
        cause, number = next(iter(causes.items()))
        raise OffbookError(
            f"every rollout crashed, so nothing was measured: {cause} ({number} of {rollouts}); repair the model's "
            "server or the machine, then give the same command again"
        )
    return groups, {"resumed": len(kept), "unreadable": unreadable}


def crashes(groups: list[list[Rollout]]) -> dict[str, int]:
    """How many rollouts crashed, by cause, the commonest first."""
    rollouts = (rollout for group in groups for rollout in group)
    return dict(Counter(each.cause for each in rollouts if each.stop == "crash" or each.fault).most_common())
