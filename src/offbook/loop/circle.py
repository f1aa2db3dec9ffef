"""The circle on one machine: rollouts, rewards, feedback, samples, one optimizer step, new weights to the engine.

Synchronous: every rollout of a step is sampled by the weights that the step before left. All randomness comes from
(seed, step, task, number, turn), never from a generator that lives on, so a run that was killed goes on exactly where
its last checkpoint is and ends at the same weights.
"""

from __future__ import annotations

import asyncio
import shutil
import time
import tomllib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from offbook.algo import add_branch, hint_weight, rl_samples, target_key
from offbook.config import Config
from offbook.engine import LocalEngine
from offbook.feedback import read_rollout, write_hint
from offbook.loop.collect import chat_of, collect, grader_of, harness_of
from offbook.loop.measure import summarize
from offbook.loop.order import Selected, Walk
from offbook.loop.setup import Progress, load_model, model_folder, quiet, refuse_missing_tasks, task_sets
from offbook.monitors import monitors_of
from offbook.rewards import compose
from offbook.runfolder import RunFolder, write_atomic
from offbook.tokens import Chat
from offbook.train.checkpoint import checkpoint_path, finished_steps, load_training_state, save_checkpoint
from offbook.train.trainer import Trainer
from offbook.types import Feedback, OffbookError, Rollout, Sample

OnStep = Callable[[dict[str, Any]], None]


def train(config: Config, on_step: OnStep = lambda row: None, progress: Progress = quiet) -> RunFolder:
    """Run, or go on with, the training that `config` describes. Returns when its last step is in a checkpoint."""
    torch.set_num_threads(config.threads)
    folder = RunFolder(config.out)
    _refuse_another_run(folder, config)
    refuse_missing_tasks(config)
    rewards = compose(config.rewards, config.harness)
    monitors = monitors_of(config.monitors)
    start = model_folder(config.model, config.seed, progress)
    tasks = task_sets(config, progress).train
    chat = chat_of(start, config)
    done = _claim(folder, config)
    trainer = Trainer(load_model(start), config.train, config.feedback, config.engine.temperature)
    if done:
        path = checkpoint_path(folder.path / "ckpt", done)
        trainer.model.load_state_dict(load_model(path).state_dict())
        load_training_state(trainer, path)
    if monitors is not None:
        for step in (step for step in folder.steps() if step <= done):
            monitors.recall(folder.rollouts(step)[0])
    engine = local_engine(start, chat, config)
    grader = grader_of(config)
    order = (Selected if config.tasks.order == "select" else Walk)(tasks, config.seed, folder, done)
    with asyncio.Runner() as runner:
        for step in range(done + 1, config.train.steps + 1):
            started = time.monotonic()
            engine.load_weights(trainer.model.state_dict(), version=step - 1)
            batch = order.tasks_of(step, config.train.groups)
            size = config.train.group_size
            rollouts = collect(
                batch,
                size,
                engine,
                chat,
                grader,
                harness_of(config),
                f"step{step}",
                rewards=rewards,
                monitors=monitors,
            )
            groups = runner.run(rollouts)
            collected = time.monotonic()
            order.learn(groups)
            row = {"step": step, **learn(step, groups, config, chat, trainer, folder)}
            if monitors is not None:
                row["quarantined"] = len(monitors.quarantined)
            row |= {"rollout_s": collected - started, "train_s": time.monotonic() - collected, "grades": grader.runs}
            folder.append_metrics(row)
            if step % config.checkpoint.every == 0 or step == config.train.steps:
                save_checkpoint(trainer, folder.path / "ckpt", step, start, config.checkpoint.keep)
            on_step(row)
    return folder


def local_engine(model: Path, chat: Chat, config: Config) -> LocalEngine:
    settings = config.engine
    return LocalEngine(load_model(model), chat.stop_ids, settings.temperature, settings.max_rows, config.seed)


def latest_checkpoint(folder: RunFolder) -> Path:
    steps = finished_steps(folder.path / "ckpt")
    if not steps:
        raise OffbookError(f"{folder.path} has no finished checkpoint yet")
    return checkpoint_path(folder.path / "ckpt", steps[-1])


def _refuse_another_run(folder: RunFolder, config: Config) -> None:
    if not finished_steps(folder.path / "ckpt"):
        return  # nothing to lose
    old, new = tomllib.loads(folder.config_file.read_text()), config.model_dump()
    for tree in (old, new):
        tree["train"].pop("steps")  # a finished run may be trained further
    if old != new:
        raise OffbookError(f"{folder.path} holds a run with another configuration; give another --out")


def _claim(folder: RunFolder, config: Config) -> int:
    """Write the configuration, clear what an unfinished step left, and say which step was the last finished one."""
    write_atomic(folder.config_file, config.to_toml())
    done = max(finished_steps(folder.path / "ckpt"), default=0)
    folder.truncate_metrics(done)
    for path in (folder.path / "ckpt").glob("step_*"):
        if not (path / "DONE").exists():
            shutil.rmtree(path)
    return done


def learn(
    step: int, groups: list[list[Rollout]], config: Config, chat: Chat, trainer: Trainer, folder: RunFolder
) -> dict[str, Any]:
    """One optimizer step on scored rollouts. They and what the hints did to them go to the run folder."""
    samples, feedback = annotate(groups, config, chat, step)
    result = trainer.step(samples, lr_scale=min(1.0, step / max(1, config.train.warmup_steps)))
    for item in feedback:
        measured = result.measured[target_key(item.target)]
        item.student, item.teacher, item.divergence = measured.student, measured.teacher, measured.divergence
    folder.write_rollouts(step, [rollout for group in groups for rollout in group])
    folder.write_feedback(step, feedback)
    rules = Counter(item.target.rule for item in feedback)
    return {
        **summarize(groups),
        **result.metrics,
        "hinted_targets": len(feedback),
        **{f"targets/{rule}": count for rule, count in sorted(rules.items())},
        "groups_without_signal": sum(len({rollout.reward.total for rollout in group}) == 1 for group in groups),
    }


def annotate(groups: list[list[Rollout]], config: Config, chat: Chat, step: int) -> tuple[list[Sample], list[Feedback]]:
    """Rollouts to samples: the group's advantage on all sampled tokens, a hint branch on each target."""
    samples, feedback = [], []
    settings = config.feedback
    for group in groups:
        for rollout, of_segments in zip(group, rl_samples(group), strict=True):
            samples += of_segments
            if not settings.weight:
                continue
            for target in read_rollout(rollout, settings.max_targets):
                segment = rollout.segments[target.segment]
                hint = write_hint(target.rule, rollout.tools)
                of_rule = settings.rule_weights.get(target.rule, 1.0)
                weight = hint_weight(settings.weight, step, settings.anneal_steps, settings.anneal_to, of_rule)
                branch = add_branch(of_segments[target.segment], segment, target, hint, chat, weight)
                pieces = chat.pieces(segment.ids[branch.target_start : branch.target_end])
                feedback.append(Feedback(target, hint, pieces))
    return samples, feedback
