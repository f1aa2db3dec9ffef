"""Measure a policy on tasks it was not trained on."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import torch

from offbook.config import Config
from offbook.loop.circle import local_engine
from offbook.loop.collect import box_spec_of, chat_of, collect, harness_of
from offbook.loop.measure import bootstrap, invalid_per_100, solved_share, summarize
from offbook.rewards import Grader
from offbook.types import Rollout, Task


def evaluate(model: Path, tasks: list[Task], config: Config) -> tuple[dict[str, Any], list[Rollout]]:
    """The numbers, with 95% intervals over tasks, and the rollouts behind them."""
    torch.set_num_threads(config.threads)
    started = time.monotonic()
    chat = chat_of(model, config)
    engine = local_engine(model, chat, config)
    grader = Grader(box_spec_of(config))
    groups = asyncio.run(collect(tasks, config.eval.samples, engine, chat, grader, harness_of(config), "eval"))
    result = {
        **summarize(groups),
        "tasks": len(tasks),
        "solved_ci": bootstrap(groups, solved_share),
        "invalid_per_100_ci": bootstrap(groups, invalid_per_100),
        "seconds": time.monotonic() - started,
    }
    return result, [rollout for group in groups for rollout in group]
