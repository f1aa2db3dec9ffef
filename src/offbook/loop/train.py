"""The circle on one machine: rollouts, rewards, feedback, samples, one optimizer step, new weights to the engine.

Synchronous: every rollout of a step is sampled by the weights that the step before left. All randomness comes from
(seed, step, task, number, turn), never from a generator that lives on, so a run that was killed goes on exactly where
its last checkpoint is and ends at the same weights.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import astuple
from typing import Any

import torch

from offbook.algo import target_key
from offbook.config import Config
from offbook.engine import RemoteEngine
from offbook.feedback import Rule, hints_in, rules_of
from offbook.judge import Judgement
from offbook.lock import only_writer
from offbook.loop.annotate import annotate, teachers_of
from offbook.loop.collector import Collector, judges_of
from offbook.loop.evaluate import summarize
from offbook.loop.judge import judge_of, judge_row, local_judge
from offbook.loop.models import (
    Progress,
    chat_folder,
    load_weights,
    model_folder,
    model_to_sample,
    model_to_train,
    quiet,
)
from offbook.loop.plan import make_plan, refuse_too_large, this_device
from offbook.loop.resume import claim_run, computed_as_before, refuse_another_run
from offbook.loop.tasks import record_tasks, refuse_missing_tasks, task_order, task_sets
from offbook.runfolder import RunFolder, latest_checkpoint
from offbook.tasks.select import TasksUsedUp
from offbook.tokens import Chat
from offbook.train.checkpoint import load_training_state
from offbook.train.schedule import learning_rate_share
from offbook.train.targets import Measured
from offbook.train.trainer import NotFinite, StepResult, Trainer, WeightsLost
from offbook.train.writing import Checkpoints
from offbook.types import Feedback, Likely, OffbookError, Rollout, Sample, Task

OnStep = Callable[[dict[str, Any]], None]
Tell = Callable[[str], None]  # a line for people
log = logging.getLogger(__name__)


def train(
    config: Config,
    on_step: OnStep = lambda row: None,
    progress: Progress = quiet,
    tell: Tell = lambda line: None,
) -> RunFolder:
    """Run, or go on with, the training that `config` describes. Returns when its last step is in a checkpoint."""
    folder = RunFolder(config.out)
    folder.refuse_file()
    with only_writer(folder.path):
        refuse_another_run(folder, config)
        _train(config, folder, on_step, progress, tell)
    return folder


def _train(config: Config, folder: RunFolder, on_step: OnStep, progress: Progress, tell: Tell) -> None:
    torch.set_num_threads(config.threads)
    refuse_missing_tasks(config, "train")
    judges, judge = judges_of(config), judge_of(config.feedback)
    rules = rules_of(config.feedback.files)
    config = computed_as_before(folder, config)
    plan = make_plan(config, this_device())
    refuse_too_large(config, plan)
    config = config.model_copy(update={"train": config.train.settled(*astuple(plan.way))})
    start = model_folder(config.model, config.seed, progress)
    sets = task_sets(config, progress)
    by_id = {task.id: task for task in sets.train}
    tell(f"model {config.model}, loaded from {start}")
    tell(f"tasks {config.tasks.source}: {len(sets.train)} to train on, {len(sets.heldout)} held out")
    rollouts = f"{config.train.groups} tasks x {config.train.group_size} rollouts"
    tell(f"{config.train.steps} steps of {rollouts}, kept in {config.out}")
    tell(str(plan))
    trained = model_to_train(config, start)
    sampled = model_to_sample(config, start, trained)
    collector = Collector(config, start, judges=judges, progress=progress, loaded=sampled)
    engine, chat = collector.engine, collector.chat
    assert not isinstance(engine, RemoteEngine)  # a model that is trained is here
    done = claim_run(folder, config)
    if 0 < done < config.train.steps:
        tell(f"resuming at step {done + 1}")
    record_tasks(folder, {"train": sets.train, "heldout": sets.heldout})
    trainer = Trainer(trained, config.train, teachers_of(config.feedback, reference=config.train.reference_kl > 0))
    if done:
        path = latest_checkpoint(folder)
        load_weights(trainer.model, path)
        load_training_state(trainer, path)
    for step in (step for step in folder.steps() if step <= done):
        collector.recall(folder.rollouts(step)[0])
    judge = judge or local_judge(config, engine, chat, progress)
    order = task_order(config, sets.train, folder, done)
    with (
        Checkpoints(trainer, folder.path / "ckpt", chat_folder(start), config.checkpoint) as checkpoints,
        asyncio.Runner() as runner,
        _closed(collector, runner),
    ):
        tell(str(checkpoints))
        for step in range(done + 1, config.train.steps + 1):
            started = time.monotonic()
            try:
                tasks = order.tasks_of(step, config.train.groups)
            except TasksUsedUp as reason:
                if step == 1:
                    raise
                _keep_all_steps(checkpoints, step - 1, done)
                log.warning("the run ends after step %d of %d: %s", step - 1, config.train.steps, reason)
                return
            try:
                engine.apply(trainer.publish(version=step - 1))
                groups = runner.run(collector.groups(tasks, config.train.group_size, f"step{step}"))
                checkpoints.check()
                collected = time.monotonic()
                order.learn(groups)
                judgement = Judgement() if judge is None else runner.run(judge.read(_with_tasks(groups, by_id)))
                collector.rest()
            except BaseException:  # also Ctrl-C
                _keep_all_steps(checkpoints, step - 1, done)
                raise
            try:
                row = {"step": step, **learn(step, groups, by_id, judgement, config, chat, trainer, folder, rules)}
            except NotFinite as problem:
                _keep_all_steps(checkpoints, step - 1, done)
                checkpoints.wait()
                raise _stopped(step, problem, folder, "--train.on_nonfinite skip goes on without such a step") from None
            except WeightsLost as problem:  # they are not those of any step that can be kept
                checkpoints.wait()
                raise _stopped(step, problem, folder, "try a lower train.learning_rate") from None
            row |= {"epoch": order.epoch(step, config.train.groups), "skipped_steps": step - trainer.steps}
            row |= collector.metrics()
            row |= {"rollout_s": collected - started, "train_s": time.monotonic() - collected}
            is_due = checkpoints.is_due(step) or step == config.train.steps
            if is_due and (waited := checkpoints.wait()):
                row["checkpoint_wait_s"] = waited
            folder.append_metrics(row)
            if is_due:
                checkpoints.save(step)
            on_step(row)


@contextmanager
def _closed(collector: Collector, runner: asyncio.Runner) -> Iterator[None]:
    """A server that was started for the run goes with it, whatever ends it."""
    try:
        yield
    finally:
        runner.run(collector.aclose())


def _keep_all_steps(checkpoints: Checkpoints, last: int, done: int) -> None:
    """Those since the last checkpoint too. Only between steps, where the weights are whole."""
    if last > max(done, checkpoints.last):
        log.warning("the checkpoint of step %d is written before the run ends", last)
        checkpoints.save(last)


def _stopped(step: int, problem: OffbookError, folder: RunFolder, way_out: str) -> OffbookError:
    last = max(folder.checkpoints(), default=0)
    kept = f"the last checkpoint is of step {last}" if last else "there is no checkpoint yet"
    return OffbookError(f"step {step}: {problem}; {kept}; {way_out}")


def learn(
    step: int,
    groups: list[list[Rollout]],
    tasks: dict[str, Task],
    judgement: Judgement,
    config: Config,
    chat: Chat,
    trainer: Trainer,
    folder: RunFolder,
    rules: Mapping[str, Rule],
) -> dict[str, Any]:
    """One optimizer step on scored rollouts. They and what the hints did to them go to the run folder."""
    counts: Counter[str] = Counter()
    temperature, written = config.engine.temperature, hints_in(judgement)
    samples, feedback = annotate(groups, config.feedback, chat, step, tasks, written, counts, temperature, rules)
    folder.write_rollouts(step, [rollout for group in groups for rollout in group])
    try:
        result = trainer.step(samples, lr_scale=learning_rate_share(config.train, step))
    except NotFinite as problem:
        folder.write_feedback(step, feedback)
        what = f"{problem}; nothing was applied, and {_set_aside(step, samples, folder)}"
        if config.train.on_nonfinite == "stop":
            raise NotFinite(what) from None
        result = StepResult({}, skipped=what)
    except WeightsLost as problem:
        folder.write_feedback(step, feedback)
        raise WeightsLost(f"{problem}; they are not kept, and {_set_aside(step, samples, folder)}") from None
    if result.skipped:
        log.warning("step %d is skipped: %s", step, result.skipped)
    for item in feedback:
        if measured := result.measured.get(target_key(item.target)):
            record(item, measured, chat)
    folder.write_feedback(step, feedback)
    by_rule = Counter(item.target.rule for item in feedback)
    counts.update(f"left_out/{item.skipped}" for item in feedback if item.skipped)
    return {
        **summarize(groups),
        **result.metrics,
        "hinted_targets": len(feedback),
        **{f"targets/{rule}": count for rule, count in sorted(by_rule.items())},
        **dict(sorted(counts.items())),
        **judge_row(judgement),
        "groups_without_signal": sum(len({rollout.reward.total for rollout in group}) == 1 for group in groups),
    }


def _set_aside(step: int, samples: list[Sample], folder: RunFolder) -> str:
    return f"its samples are in {folder.write_samples(step, samples)}"


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
