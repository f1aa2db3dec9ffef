"""Rollouts without training: any model, local or behind a URL, on any tasks."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from offbook.client import Client
from offbook.config import Config
from offbook.engine import Engine, RemoteEngine
from offbook.harness import Harness
from offbook.loop.circle import local_engine
from offbook.loop.claim import claim_of, differing
from offbook.loop.collect import Watch, chat_of, collect, grader_of, harness_of
from offbook.loop.measure import summarize
from offbook.loop.models import model_folder
from offbook.loop.record import record_tasks
from offbook.loop.setup import Progress, quiet, task_sets
from offbook.monitors import monitors_of
from offbook.rewards import Rewards, compose
from offbook.runfolder import RunFolder, write_atomic
from offbook.tasks import load_task, load_tasks
from offbook.tokens import Chat, byte_chat, render_call
from offbook.types import OffbookError, Rollout, Task

RECORD = 0  # these rollouts belong to no training step
NAME = "rollout"  # begins their ids, and so decides their dice


def tasks_at(source: str, config: Config, progress: Progress = quiet) -> list[Task]:
    """`pocket` for the held-out pocket tasks, a task folder, or a folder of task folders."""
    if source == "pocket":
        return task_sets(config, progress).heldout
    folder = Path(source)
    if not folder.is_dir():
        raise OffbookError(f"there is no task folder {source}; give one, or `pocket`")
    wording = config.tasks.wording
    return [load_task(folder, wording)] if (folder / "task.toml").is_file() else load_tasks(folder, wording)


def is_url(model: str) -> bool:
    return model.startswith(("http://", "https://"))


def refuse_password(url: str) -> None:
    """A run folder keeps its configuration, and that is no place for a secret."""
    if "@" in url.partition("://")[2].partition("/")[0]:
        raise OffbookError("the URL has a password in it; give the key in the variable OPENAI_API_KEY instead")


def roll_out(
    config: Config,
    tasks: list[Task],
    samples: int,
    watch: Watch,
    remote_name: str = "",
    progress: Progress = quiet,
) -> dict[str, Any]:
    """Scored rollouts in the run folder `config.out`, each written when it is over. Returns their numbers.

    Those that are there from before, of the same model, tasks and settings, are told to `watch` and not run again.
    """
    folder = RunFolder(config.out)
    folder.refuse_file()
    rewards = compose(config.rewards, config.harness)
    model = None if is_url(config.model) else model_folder(config.model, config.seed, progress)
    kept, unreadable = _begin(folder, {"samples": samples, **claim_of(config, model, remote_name, tasks)})
    write_atomic(folder.config_file, config.to_toml())
    record_tasks(folder, {"": tasks})
    started = time.monotonic()
    for rollout in kept:
        watch(rollout, True)

    def keep(rollout: Rollout, over: bool) -> None:
        if over:
            folder.append_rollout(RECORD, rollout)
        watch(rollout, over)

    new = asyncio.run(_collect(config, model, tasks, samples, keep, remote_name, rewards, kept))
    by_id = {rollout.id: rollout for rollout in [*kept, *new]}
    groups = [[by_id[f"{NAME}/{task.id}/{number}"] for number in range(samples)] for task in tasks]
    # Again and in order: what a task's other rollouts showed of it counts for all of them.
    folder.write_rollouts(RECORD, [rollout for group in groups for rollout in group])
    counted = {"tasks": len(tasks), "resumed": len(kept), "unreadable": unreadable}
    result = {**summarize(groups), **counted, "seconds": time.monotonic() - started}
    folder.truncate_metrics(RECORD - 1)
    folder.append_metrics({"step": RECORD, **result})
    return result


def _begin(folder: RunFolder, claim: dict[str, Any]) -> tuple[list[Rollout], int]:
    """The rollouts that are there from before, and how many lines of the file could not be read."""
    file = folder.path / "claim.json"
    before = json.loads(file.read_text()) if file.is_file() else {}
    differs = differing(before, claim)
    if folder.steps() and differs:
        another = f"another {', '.join(differs)}" if before else "of what, it does not say"
        raise OffbookError(f"{folder.path} holds other rollouts ({another}); give another --out")
    write_atomic(file, json.dumps(claim, indent=1) + "\n")
    kept, unreadable = folder.rollouts(RECORD)
    if kept or unreadable:
        folder.write_rollouts(RECORD, kept)  # the next line must not come behind half of one
    return kept, unreadable


async def _collect(
    config: Config,
    model: Path | None,
    tasks: list[Task],
    samples: int,
    watch: Watch,
    remote_name: str,
    rewards: Rewards,
    kept: list[Rollout],
) -> list[Rollout]:
    """Those that are missing."""
    grader, monitors = grader_of(config), monitors_of(config.monitors)
    done = {rollout.id for rollout in kept}
    if monitors is not None:
        monitors.recall(kept)
    if len(done) == len(tasks) * samples:
        return []  # no model is loaded for nothing
    async with open_engine(config, model, remote_name) as (engine, chat, harness):
        groups = await collect(tasks, samples, engine, chat, grader, harness, NAME, watch, rewards, monitors, done)
    if monitors is not None:
        monitors.settle([old for old in kept if not any(event.kind == "quarantined" for event in old.events)])
    return [rollout for group in groups for rollout in group]


@asynccontextmanager
async def open_engine(
    config: Config, model: Path | None, remote_name: str = ""
) -> AsyncIterator[tuple[Engine, Chat, Harness]]:
    """The model in its folder or, without one, behind the URL `config.model`; its chat format; the harness for it."""
    harness = harness_of(config)
    if model is not None:
        torch.set_num_threads(config.threads)
        chat = chat_of(model, config)
        yield local_engine(model, chat, config), chat, harness
        return
    dialect = "bash" if harness.profile == "bash" else "hermes"
    # The model's own ids stay behind the URL: the record is for reading, not for training.
    recorder = byte_chat(dialect)
    remote = RemoteEngine(
        Client(config.model, remote_name, timeout_s=300.0, max_retries=5),
        temperature=config.engine.temperature,
        encode=recorder.encode,
        end_id=recorder.end_id,
        render_call=render_call,
    )
    try:
        yield remote, recorder, replace(harness, told=True)
    finally:
        await remote.aclose()
