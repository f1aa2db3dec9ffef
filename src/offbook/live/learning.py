"""Trains on sessions of the deployed version: RL by reactions with a baseline per kind of request, hints by follow-ups.

Every step of a cycle learns from other sessions, all sampled by one version. From the second step on they are slightly
off-policy; the pi / mu weights of train/losses.py correct for it, and their mean is in the metrics.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Collection, Sequence
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import torch

from offbook.core.config import Config
from offbook.core.runfolder import RunFolder, latest_checkpoint, write_atomic
from offbook.live.reactions import with_hints
from offbook.live.sessions import Session
from offbook.live.user_hints import may_teach, said_against
from offbook.rl.collector import chat_of
from offbook.rl.models import chat_folder, model_to_train
from offbook.rl.plan import make_plan, this_device
from offbook.rl.resume import begin_run
from offbook.rl.train_step import TrainContext, teachers_of
from offbook.signals.feedback import rules_of
from offbook.stages.distill import teach
from offbook.train.algorithms import baselines
from offbook.train.checkpoint import load_training_state
from offbook.train.trainer import Trainer


def train_on(
    config: Config,
    sessions: Sequence[Session],
    start: Path,
    folder: RunFolder,
    approved: Collection[str] = (),
) -> tuple[Path, dict[str, Any]]:
    """Train a new version. Returns its weights and the last step's metrics.

    `approved` are the ids of the follow-ups that a maintainer approved as hints. A folder that a killed attempt left is
    deleted and done again."""
    shutil.rmtree(folder.path, ignore_errors=True)
    torch.set_num_threads(config.threads)
    rewards = [one.rollout.reward.total for one in sessions]
    found = baselines(rewards, [one.kind for one in sessions])
    by_group = {one.id: value for one, value in zip(sessions, found, strict=True)}
    reasons = may_teach(said_against(sessions), approved)
    hinted = [with_hints(one, lambda text: not reasons[text]) for one in sessions]
    rollouts = [replace(rollout, group=rollout.id) for rollout in hinted]
    order = random.Random(f"{config.seed} live {folder.path.name}").sample(rollouts, len(rollouts))
    size = config.train.groups * config.train.group_size
    steps = [order[place : place + size] for place in range(0, len(order) - size + 1, size)] or [order]
    train = config.train.settled(*astuple(make_plan(config, this_device()).way))
    train = train.model_copy(update={"steps": len(steps)})
    config = config.model_copy(update={"out": str(folder.path), "model": str(start), "train": train})
    begin_run(folder, config)
    sources = {"verb": "live", "sources": [f"{len(rollouts)} sessions"], "content": [one.id for one in sessions]}
    write_atomic(folder.data_file, json.dumps(sources, indent=1) + "\n")
    trainer = Trainer(model_to_train(config, start), config.train, teachers_of(config.feedback))
    if start.is_relative_to(folder.path.parent.resolve()):  # a cycle is too short for a fresh optimizer
        load_training_state(trainer, start)
    rules, chat = rules_of(config.feedback.files), chat_of(start, config)
    context = TrainContext(config, folder, {}, rules, chat, trainer, baselines=by_group)
    teach(context, steps, chat_folder(start))
    rows, _ = folder.metrics()
    return latest_checkpoint(folder), rows[-1]
