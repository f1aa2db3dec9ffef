"""The circle on one machine: rollouts, rewards, feedback, samples, one optimizer step, new weights to the engine.

Synchronous: every rollout of a step is sampled by the weights that the step before left. All randomness comes from
(seed, step, task, number, turn), never from a generator that lives on, so a run that was killed goes on exactly where
its last checkpoint is and ends at the same weights.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from offbook.acts import with_siblings
from offbook.config import Config
from offbook.engine import LocalEngine, RemoteEngine, Trainable, VllmEngine
from offbook.feedback import read_all, rules_of
from offbook.feedback.coach import Found
from offbook.judge import Judge, Judgement
from offbook.lock import only_writer
from offbook.loop.annotate import teachers_of
from offbook.loop.collector import AnyEngine, Collector, judges_of, refuse_missing_engine
from offbook.loop.judge import judge_of, local_judge
from offbook.loop.learn import Lessons, learn, recall_look
from offbook.loop.look import Look, NoHintHelps
from offbook.loop.look import table as look_table
from offbook.loop.models import (
    Progress,
    chat_folder,
    load_weights,
    model_folder,
    model_to_sample,
    model_to_train,
    quiet,
)
from offbook.loop.plan import as_planned, make_plan, refuse_too_large, this_device
from offbook.loop.resume import claim_run, computed_as_before, refuse_another_run
from offbook.loop.tasks import Selected, Shuffled, record_tasks, refuse_missing_tasks, task_order, task_sets
from offbook.runfolder import RunFolder, latest_checkpoint
from offbook.tasks.select import TasksUsedUp
from offbook.train.checkpoint import load_training_state
from offbook.train.trainer import NotFinite, Trainer, WeightsLost, weights_of
from offbook.train.writing import Checkpoints
from offbook.types import Feedback, OffbookError, Rollout, Task

OnStep = Callable[[dict[str, Any]], None]
Tell = Callable[[str], None]  # a line for people
log = logging.getLogger(__name__)


@dataclass(slots=True)
class Held:
    """The model and the engine that runs of one process have in common, one after the other: to load and compile the
    one and to start the other takes longer than many steps. Runs put their own weights in. Their starts have the same
    shape, precision and adapter. Whoever holds them closes the engine."""

    trained: PreTrainedModel | None = None
    engine: AnyEngine | None = None

    def load(self, config: Config, weights: Path, progress: Progress = quiet) -> PreTrainedModel:
        """The model with these weights in it."""
        if self.trained is not None:
            load_weights(self.trained, weights)
            return self.trained
        self.trained = model_to_train(config, weights)
        sampled = model_to_sample(config, weights, self.trained)
        self.engine = Collector(config, weights, progress=progress, loaded=sampled).engine
        return self.trained

    def publish(self, version: int) -> AnyEngine:
        """The engine with the weights that are in the model."""
        assert self.trained is not None
        assert isinstance(self.engine, LocalEngine | VllmEngine)
        self.engine.apply(weights_of(self.trained, version))
        return self.engine


def train(
    config: Config,
    on_step: OnStep = lambda row: None,
    progress: Progress = quiet,
    tell: Tell = lambda line: None,
    held: Held | None = None,
) -> RunFolder:
    """Run, or go on with, the training that `config` describes. Returns when its last step is in a checkpoint."""
    folder = RunFolder(config.out)
    folder.refuse_file()
    with only_writer(folder.path):
        refuse_another_run(folder, config)
        _train(config, folder, on_step, progress, tell, held)
    return folder


@dataclass(frozen=True, slots=True)
class _Run:
    """All that takes part in a run."""

    lessons: Lessons
    collector: Collector
    engine: Trainable
    judge: Judge | None
    order: Shuffled | Selected
    checkpoints: Checkpoints
    tell: Tell
    done: int  # steps, before this process began


def _train(
    config: Config, folder: RunFolder, on_step: OnStep, progress: Progress, tell: Tell, held: Held | None
) -> None:
    run = _prepared(config, folder, progress, tell, held)
    last = run.lessons.config.train.steps
    with run.checkpoints, asyncio.Runner() as runner, _closed(run.collector, runner):
        for step in range(run.done + 1, last + 1):
            try:
                tasks = run.order.tasks_of(step, config.train.groups)
            except TasksUsedUp as reason:
                if step == 1:
                    raise
                _keep_all_steps(run, step - 1)
                log.warning("the run ends after step %d of %d: %s", step - 1, last, reason)
                return
            row = _step(run, step, tasks, runner)
            is_due = run.checkpoints.is_due(step) or step == last
            if is_due and (waited := run.checkpoints.wait()):
                row["checkpoint_wait_s"] = waited
            folder.append_metrics(row)
            if is_due:
                run.checkpoints.save(step)
            on_step(row)


def _prepared(config: Config, folder: RunFolder, progress: Progress, tell: Tell, held: Held | None) -> _Run:
    """What can be refused is refused first, from the cheapest on; models are loaded last."""
    torch.set_num_threads(config.threads)
    refuse_missing_tasks(config, "train")
    judges, judge = judges_of(config), judge_of(config.feedback)
    rules = rules_of(config.feedback.files)
    refuse_missing_engine(config)
    config = computed_as_before(folder, config)
    plan = make_plan(config, this_device())
    refuse_too_large(config, plan)
    config = as_planned(config, plan)
    start = model_folder(config.model, config.seed, progress)
    sets = task_sets(config, progress)
    tell(f"model {config.model}, loaded from {start}")
    tell(f"tasks {config.tasks.source}: {len(sets.train)} to train on, {len(sets.heldout)} held out")
    rollouts = f"{config.train.groups} tasks x {config.train.group_size} rollouts"
    tell(f"{config.train.steps} steps of {rollouts}, kept in {config.out}")
    tell(str(plan))
    if held is None:
        trained = model_to_train(config, start)
        sampled = model_to_sample(config, start, trained)
        collector = Collector(config, start, judges=judges, progress=progress, loaded=sampled)
    else:
        trained = held.load(config, start, progress)
        collector = Collector(config, start, judges=judges, progress=progress, lent=held.engine)
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
    checkpoints = Checkpoints(trainer, folder.path / "ckpt", chat_folder(start), config.checkpoint)
    tell(str(checkpoints))
    lessons = Lessons(config, folder, {task.id: task for task in sets.train}, rules, chat, trainer)
    recall_look(lessons, folder.looks(done))
    return _Run(lessons, collector, engine, judge, order, checkpoints, tell, done)


def _step(run: _Run, step: int, tasks: list[Task], runner: asyncio.Runner) -> dict[str, Any]:
    """Once around the circle. What fails outside of the optimizer's step loses none of those before it."""
    lessons, collector, order = run.lessons, run.collector, run.order
    settings, started = lessons.config.train, time.monotonic()
    try:
        run.engine.apply(lessons.trainer.publish(version=step - 1))
        groups = runner.run(collector.groups(tasks, settings.group_size, f"step{step}"))
        run.checkpoints.check()
        collected = time.monotonic()
        order.learn(groups)
        read = [(rollout, lessons.tasks.get(rollout.task)) for group in groups for rollout in group]
        judgement = Judgement() if run.judge is None else runner.run(run.judge.read(read))
        began = time.monotonic()
        if is_look := lessons.config.feedback.is_look_due(step):
            _look(run, step, groups, runner)
        looked_s = time.monotonic() - began
        collector.rest()
    except BaseException:  # also Ctrl-C
        _keep_all_steps(run, step - 1)
        raise
    try:
        row = {"step": step, **learn(step, groups, judgement, lessons)}
    except NotFinite as problem:
        _keep_all_steps(run, step - 1)
        raise _stopped(run, step, problem, "--train.on_nonfinite skip goes on without such a step") from None
    except WeightsLost as problem:  # they are not those of any step that can be kept
        raise _stopped(run, step, problem, "try a lower train.learning_rate") from None
    row |= {"epoch": order.epoch(step, settings.groups), "skipped_steps": step - lessons.trainer.steps}
    row |= collector.metrics() | _slowest(groups)
    took = {"rollout_s": collected - started, "train_s": time.monotonic() - collected - looked_s}
    return row | took | ({"look_s": looked_s} if is_look else {})


def _look(run: _Run, step: int, groups: list[list[Rollout]], runner: asyncio.Runner) -> None:
    """Whether hints help on the faults of this step, before any of them teaches."""
    lessons, settings = run.lessons, run.lessons.config.feedback
    rollouts = [rollout for group in groups for rollout in group if not rollout.fault]
    found = [
        Found(rollout, Feedback(target, lessons.rules[target.rule].hint(rollout.tools)), "", siblings)
        for rollout, siblings in with_siblings(rollouts)
        for target in read_all(rollout, lessons.tasks.get(rollout.task), settings.rules, lessons.rules, siblings)
        if settings.rule_weights.get(target.rule, 1.0)
    ]
    look = Look(run.collector, lessons.tasks, lessons.rules, settings.look_samples)
    sampled = runner.run(look.sampled(found, f"look{step}"))
    run.collector.rest()  # the trainer reads next
    own = lessons.trainer.teachers[settings.teacher].own
    looked = look.measured(sampled, found, own.decoder if own else lessons.trainer.student)
    rows = [one.row() for one in looked]
    lessons.folder.write_look(step, rows)
    for line in look_table(looked) if looked else ["no rule was broken, so there was no hint to look at"]:
        run.tell(line)
    recall_look(lessons, rows)
    if step == 1 and looked and all(one.why_not for one in looked):
        lessons.folder.write_rollouts(step, rollouts)  # for `offbook coach`
        raise NoHintHelps(", ".join(one.rule for one in looked))


def _slowest(groups: list[list[Rollout]]) -> dict[str, float]:
    """What the rollout that the step waited for spent its seconds on."""
    usage = max((one.usage for group in groups for one in group), key=lambda each: each.seconds + each.scoring_seconds)
    tools_s = usage.seconds - usage.model_seconds
    return {
        "slowest/model_s": usage.model_seconds,
        "slowest/tools_s": tools_s,
        "slowest/scoring_s": usage.scoring_seconds,
    }


@contextmanager
def _closed(collector: Collector, runner: asyncio.Runner) -> Iterator[None]:
    """A server that was started for the run goes with it, whatever ends it."""
    try:
        yield
    finally:
        runner.run(collector.aclose())


def _keep_all_steps(run: _Run, last: int) -> None:
    """Those since the last checkpoint too. Only between steps, where the weights are whole."""
    if last > max(run.done, run.checkpoints.last):
        log.warning("the checkpoint of step %d is written before the run ends", last)
        run.checkpoints.save(last)


def _stopped(run: _Run, step: int, problem: OffbookError, way_out: str) -> OffbookError:
    run.checkpoints.wait()
    last = max(run.lessons.folder.checkpoints(), default=0)
    kept = f"the last checkpoint is of step {last}" if last else "there is no checkpoint yet"
    return OffbookError(f"step {step}: {problem}; {kept}; {way_out}")
