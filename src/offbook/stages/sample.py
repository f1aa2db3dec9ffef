"""Rejection sampling: a model's own solved rollouts on training tasks, for the next round of imitation.

What a model solved itself is closer to what it writes than a script or another model, so all of it is learned, code
included (STaR, 2203.14465; RFT, 2308.01825). Of a task's rollouts the few with the fewest invalid calls and tokens are
kept: tasks that are solved often would fill the data otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

from offbook.core.config import Config
from offbook.core.runfolder import RunFolder, dump_lines, write_atomic
from offbook.rl.evaluate import roll_out
from offbook.rl.models import Progress
from offbook.rl.tasks import task_sets
from offbook.stages.demos import why_left_out
from offbook.stages.run import Tell
from offbook.types import Rollout

KEPT = "kept.jsonl"  # in the stage's folder
PER_TASK = 2


def sample(config: Config, progress: Progress, tell: Tell) -> RunFolder:
    """Roll out `train.group_size` times per training task, and write what is to be imitated to OUT/kept.jsonl."""
    tasks = task_sets(config, progress).train
    size, done = config.train.group_size, set[str]()

    def watch(rollout: Rollout, over: bool) -> None:
        done.update([rollout.id] if over else [])
        progress(f"samples {config.out}", len(done) / (size * len(tasks)))

    roll_out(config, tasks, size, watch)
    folder = RunFolder(config.out)
    rollouts, _ = folder.rollouts(0)
    kept = chosen(rollouts)
    write_atomic(Path(config.out) / KEPT, dump_lines(kept))
    solved = len({rollout.task for rollout in kept})
    tell(f"{len(kept)} of {len(rollouts)} rollouts are kept, of {solved} of {len(tasks)} tasks")
    return folder


def chosen(rollouts: Iterable[Rollout]) -> list[Rollout]:
    """At most PER_TASK of each task, in its order."""
    solved = sorted((one for one in rollouts if not why_left_out(one)), key=lambda one: one.task)
    kept: list[Rollout] = []
    for _, of_task in groupby(solved, key=lambda one: one.task):
        kept += sorted(of_task, key=lambda one: (one.usage.invalid_calls, one.usage.sampled_tokens))[:PER_TASK]
    return kept
