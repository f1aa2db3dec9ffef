"""Rollouts without training: any model, local or behind a URL, on any tasks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from offbook.config import Config
from offbook.engine import RemoteEngine
from offbook.harness import Harness
from offbook.loop.circle import local_engine
from offbook.loop.collect import Engine, Watch, chat_of, collect, grader_of, harness_of
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
    """Scored rollouts in the run folder `config.out`, each written when it is over. Returns their numbers."""
    folder = RunFolder(config.out)
    if folder.steps():
        raise OffbookError(f"{folder.path} holds rollouts already; give another --out")
    rewards = compose(config.rewards, config.harness)
    model = None if is_url(config.model) else model_folder(config.model, config.seed, progress)
    write_atomic(folder.config_file, config.to_toml())
    record_tasks(folder, {"": tasks})
    started = time.monotonic()

    def keep(rollout: Rollout, over: bool) -> None:
        if over:
            folder.append_rollout(RECORD, rollout)
        watch(rollout, over)

    groups = asyncio.run(_collect(config, model, tasks, samples, keep, remote_name, rewards))
    result = {**summarize(groups), "tasks": len(tasks), "seconds": time.monotonic() - started}
    folder.append_metrics({"step": RECORD, **result})
    return result


async def _collect(
    config: Config,
    model: Path | None,
    tasks: list[Task],
    samples: int,
    watch: Watch,
    remote_name: str,
    rewards: Rewards,
) -> list[list[Rollout]]:
    grader, monitors = grader_of(config), monitors_of(config.monitors)
    async with open_engine(config, model, remote_name) as (engine, chat, harness):
        return await collect(tasks, samples, engine, chat, grader, harness, "rollout", watch, rewards, monitors)


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
        config.model,
        remote_name,
        temperature=config.engine.temperature,
        encode=recorder.encode,
        end_id=recorder.end_id,
        render_call=render_call,
    )
    try:
        yield remote, recorder, replace(harness, told=True)
    finally:
        await remote.aclose()
