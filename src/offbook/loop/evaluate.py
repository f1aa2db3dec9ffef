"""Measure a policy on tasks it was not trained on."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import torch

from offbook.config import Config
from offbook.loop.circle import local_engine
from offbook.loop.collect import chat_of, collect, grader_of, harness_of
from offbook.loop.measure import bootstrap, invalid_per_100, solved_share, summarize
from offbook.monitors import monitors_of
from offbook.rewards import compose
from offbook.types import Rollout, Task


def evaluate(model: Path, tasks: list[Task], config: Config) -> tuple[dict[str, Any], list[Rollout]]:
    """The numbers, with 95% intervals over tasks, and the rollouts behind them."""
    torch.set_num_threads(config.threads)
    started = time.monotonic()
    chat = chat_of(model, config)
    engine = local_engine(model, chat, config)
    grader = grader_of(config)
    rewards = compose(config.rewards, config.harness)
    monitors = monitors_of(config.monitors)
    harness, samples = harness_of(config), config.eval.samples
    rollouts = collect(tasks, samples, engine, chat, grader, harness, "eval", rewards=rewards, monitors=monitors)
    groups = asyncio.run(rollouts)
    result = {
        **summarize(groups),
        "tasks": len(tasks),
        "solved_ci": bootstrap(groups, solved_share),
        "invalid_per_100_ci": bootstrap(groups, invalid_per_100),
        "seconds": time.monotonic() - started,
    }
    return result, [rollout for group in groups for rollout in group]
