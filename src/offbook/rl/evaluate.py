"""Rollouts without training, and numbers about rollouts: what a training step, `rollout` and an evaluation say.

What more an evaluation counts is in offbook.evals.
"""

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
from offbook.rl.report import shares_without
from offbook.rl.resume import RolloutFiles
from offbook.rl.tasks import record_tasks
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
    refuse_all_crashed(groups)
    return groups, {"resumed": len(kept), "unreadable": unreadable}


def crashes(groups: list[list[Rollout]]) -> dict[str, int]:
    """How many rollouts crashed, by cause, the commonest first."""
    rollouts = (rollout for group in groups for rollout in group)
    return dict(Counter(each.cause for each in rollouts if each.stop == "crash" or each.fault).most_common())


def refuse_all_crashed(groups: list[list[Rollout]]) -> None:
    """Refuse to measure an agent that never came to work."""
    causes = crashes(groups)
    rollouts = sum(map(len, groups))
    if rollouts and sum(causes.values()) == rollouts:
        cause, number = next(iter(causes.items()))
        raise OffbookError(
            f"every rollout crashed, so nothing was measured: {cause} ({number} of {rollouts}); repair the model's "
            "server or the machine, then give the same command again"
        )


def summarize(groups: list[list[Rollout]]) -> dict[str, float]:
    """Means over all rollouts, but invalid calls per 100 calls, and drift and events as they are: each one counts."""
    rollouts = [rollout for group in groups for rollout in group]
    count = len(rollouts)
    stops = Counter(rollout.stop for rollout in rollouts)
    events = Counter(event.kind for rollout in rollouts for event in rollout.events)
    flags = Counter(flag.kind for rollout in rollouts for flag in rollout.flags)
    return {
        "rollouts": count,
        "solved": sum(rollout.solved for rollout in rollouts) / count,
        "reward": sum(rollout.reward.total for rollout in rollouts) / count,
        **reward_parts(rollouts),
        "invalid_per_100": invalid_per_100(rollouts),
        **shares_without(rollouts),
        "turns": sum(rollout.usage.turns for rollout in rollouts) / count,
        "tokens": sum(rollout.usage.sampled_tokens for rollout in rollouts) / count,
        "summaries": sum(rollout.usage.summaries for rollout in rollouts) / count,
        "drift": sum(rollout.usage.drift for rollout in rollouts),
        "machine_faults": sum(rollout.struck for rollout in rollouts) / count,
        "groups_lost": sum(all(rollout.fault for rollout in group) for group in groups),
        **{f"stop/{reason}": number / count for reason, number in sorted(stops.items())},
        **{f"events/{kind}": number for kind, number in sorted(events.items())},
        "flagged": sum(bool(rollout.flags) for rollout in rollouts) / count,
        **{f"flags/{kind}": number for kind, number in sorted(flags.items())},
    }


def reward_parts(rollouts: list[Rollout]) -> dict[str, float]:
    """The mean of each part, before its weight. A rollout without it counts as 0."""
    names = dict.fromkeys(name for rollout in rollouts for name in rollout.reward.parts)
    sums = {name: sum(rollout.reward.parts.get(name, 0.0) for rollout in rollouts) for name in names}
    return {f"reward/{name}": total / len(rollouts) for name, total in sums.items()}


def invalid_per_100(rollouts: list[Rollout]) -> float:
    calls = sum(rollout.usage.calls for rollout in rollouts)
    return 100 * sum(rollout.usage.invalid_calls for rollout in rollouts) / calls if calls else 0.0
