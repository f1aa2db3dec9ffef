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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from offbook.algo import target_key
from offbook.config import Config, with_new_keys
from offbook.engine import LocalEngine
from offbook.feedback import hints_in
from offbook.judge import Judgement
from offbook.loop.annotate import annotate, teachers_of
from offbook.loop.collect import chat_of, collect, grader_of, harness_of
from offbook.loop.judge import judge_of, judge_row, local_judge
from offbook.loop.judges import judges_of
from offbook.loop.measure import summarize
from offbook.loop.order import Selected, Walk
from offbook.loop.record import record_tasks
from offbook.loop.setup import Progress, load_model, model_folder, quiet, refuse_missing_tasks, task_sets
from offbook.runfolder import RunFolder, latest_checkpoint, write_atomic
from offbook.tokens import Chat
from offbook.train.checkpoint import finished_steps, load_training_state, save_checkpoint
from offbook.train.targets import Measured
from offbook.train.trainer import Trainer
from offbook.types import Feedback, Likely, OffbookError, Rollout, Task

OnStep = Callable[[dict[str, Any]], None]


def train(config: Config, on_step: OnStep = lambda row: None, progress: Progress = quiet) -> RunFolder:
    """Run, or go on with, the training that `config` describes. Returns when its last step is in a checkpoint."""
    torch.set_num_threads(config.threads)
    folder = RunFolder(config.out)
    folder.refuse_file()
    _refuse_another_run(folder, config)
    refuse_missing_tasks(config)
    rewards, monitors = judges_of(config)
    judge = judge_of(config.feedback)
    start = model_folder(config.model, config.seed, progress)
    sets = task_sets(config, progress)
    tasks = sets.train
    by_id = {task.id: task for task in tasks}
    chat = chat_of(start, config)
    done = _claim(folder, config)
    record_tasks(folder, {"train": sets.train, "heldout": sets.heldout})
    trainer = Trainer(
        load_model(start), config.train, teachers_of(config.feedback, reference=config.train.reference_kl > 0)
    )
    if done:
        path = latest_checkpoint(folder)
        trainer.model.load_state_dict(load_model(path).state_dict())
        load_training_state(trainer, path)
    if monitors is not None:
        for step in (step for step in folder.steps() if step <= done):
            monitors.recall(folder.rollouts(step)[0])
    engine = local_engine(start, chat, config)
    judge = judge or local_judge(config, engine, chat, progress)
    grader = grader_of(config)
    order = (Selected if config.tasks.order == "select" else Walk)(tasks, config.seed, folder, done)
    with asyncio.Runner() as runner:
        for step in range(done + 1, config.train.steps + 1):
            started = time.monotonic()
            engine.apply(trainer.publish(version=step - 1))
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
            judgement = Judgement() if judge is None else runner.run(judge.read(_with_tasks(groups, by_id)))
            row = {"step": step, **learn(step, groups, by_id, judgement, config, chat, trainer, folder)}
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
    return LocalEngine(
        load_model(model, settings.precision), chat.stop_ids, settings.temperature, settings.max_rows, config.seed
    )


def _refuse_another_run(folder: RunFolder, config: Config) -> None:
    if not finished_steps(folder.path / "ckpt"):
        return  # nothing to lose
    old, new = with_new_keys(tomllib.loads(folder.config_file.read_text())), config.model_dump()
    for tree in (old, new):
        tree["train"].pop("steps")  # a finished run may be trained further
    if old != new:
        told = "; ".join(f"{key} is {now!r} now and {then!r} there" for key, then, now in _differences(old, new))
        raise OffbookError(f"{folder.path} holds a run with another configuration ({told}); give another --out")


def _differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """The dotted keys that are not the same, with both values; None where there is none."""
    for key in {**old, **new}:
        then, now = old.get(key), new.get(key)
        if isinstance(then, dict) and isinstance(now, dict):
            yield from _differences(then, now, f"{prefix}{key}.")
        elif then != now:
            yield f"{prefix}{key}", then, now


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
    step: int,
    groups: list[list[Rollout]],
    tasks: dict[str, Task],
    judgement: Judgement,
    config: Config,
    chat: Chat,
    trainer: Trainer,
    folder: RunFolder,
) -> dict[str, Any]:
    """One optimizer step on scored rollouts. They and what the hints did to them go to the run folder."""
    counts: Counter[str] = Counter()
    temperature, written = config.engine.temperature, hints_in(judgement)
    samples, feedback = annotate(groups, config.feedback, chat, step, tasks, written, counts, temperature)
    result = trainer.step(samples, lr_scale=min(1.0, step / max(1, config.train.warmup_steps)))
    for item in feedback:
        if measured := result.measured.get(target_key(item.target)):
            record(item, measured, chat)
    folder.write_rollouts(step, [rollout for group in groups for rollout in group])
    folder.write_feedback(step, feedback)
    rules = Counter(item.target.rule for item in feedback)
    counts.update(f"left_out/{item.skipped}" for item in feedback if item.skipped)
    return {
        **summarize(groups),
        **result.metrics,
        "hinted_targets": len(feedback),
        **{f"targets/{rule}": count for rule, count in sorted(rules.items())},
        **dict(sorted(counts.items())),
        **judge_row(judgement),
        "groups_without_signal": sum(len({rollout.reward.total for rollout in group}) == 1 for group in groups),
    }


def _with_tasks(groups: list[list[Rollout]], tasks: dict[str, Task]) -> list[tuple[Rollout, Task | None]]:
    return [(rollout, tasks.get(rollout.task)) for group in groups for rollout in group]


def record(item: Feedback, measured: Measured, chat: Chat) -> None:
    """What the hint did to its message, for people and for `offbook view`."""
    item.student, item.teacher, item.divergence = measured.student, measured.teacher, measured.divergence
    item.skipped = measured.skipped
    item.student_top = [_as_text(likely, chat) for likely in measured.student_top]
    item.teacher_top = [_as_text(likely, chat) for likely in measured.teacher_top]


def _as_text(likely: Likely, chat: Chat) -> list[tuple[str, float]]:
    return [(chat.decode([token]), round(logprob, 3)) for token, logprob in likely]
