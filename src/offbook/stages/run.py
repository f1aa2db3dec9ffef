"""Learning from data as a run: batches in an order that is settled beforehand, checkpoints that any other run may start
from. Imitation and pretraining are this with other lessons.

All that is drawn is a function of the seed, the epoch and the data, so a run that was killed goes on from its last
checkpoint and, on a CPU, ends at the same weights. Which ranks there are decides who computes what and not what is
learned, so it goes on at another number of them.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from offbook.core.config import CheckpointConfig, Config, PretrainConfig, StageConfig, TeachersConfig, TrainConfig
from offbook.core.runfolder import RunFolder, latest_checkpoint, only_writer, write_atomic
from offbook.rl.models import Progress, chat_folder, model_folder, model_to_train
from offbook.rl.plan import Device, Plan, make_plan, refuse_too_large, this_device
from offbook.rl.ranks import HOST, follow, follows, go_on, joined, make_trainer, refuse_ranks, share_in
from offbook.rl.resume import begin_run, computed_as_before, refuse_another_run
from offbook.train.checkpoint_writer import SMALL, Checkpoints, checkpoint_size
from offbook.train.memory import ALONE, Share
from offbook.train.schedule import learning_rate_share
from offbook.train.trainer import NotFinite, StepResult, Trainer, WeightsLost
from offbook.types import OffbookError, Sample

OnStep = Callable[[dict[str, Any]], None]
Tell = Callable[[str], None]  # a line for people
WARMUP_SHARE = 0.03  # of the steps, in which the learning rate rises
FINAL_SHARE = 0.1  # of the learning rate, one step after the schedule has ended
VALIDATION_EVERY = 50  # steps; one more validation is at the end
MINUTES = 2.0  # between checkpoints that are small; steps are too short to keep every one
log = logging.getLogger(__name__)


class Lessons(Protocol):
    """What is learned, step by step."""

    @property
    def read(self) -> dict[str, Any]:
        """How much there was, and what was left out of it by its reason: for data.json."""
        ...

    @property
    def num_steps(self) -> int: ...

    def samples(self, step: int, counts: Counter[str]) -> list[Sample]: ...

    def told(self, step: int) -> dict[str, Any]:
        """Of a step, for its row of metrics."""
        ...

    def validated(self, trainer: Trainer) -> dict[str, float]:
        """Losses on what nothing is learned from."""
        ...

    def fingerprint(self) -> str:
        """Of all that is learned from, by content."""
        ...


@dataclass(frozen=True, slots=True)
class Stage:
    """A way to learn from data. `lessons` are made for the model in a folder, which `begin` may have changed first."""

    verb: str
    section: str  # of the configuration
    settings: StageConfig
    refuse: Callable[[Config], None]  # what can be told before a model is loaded
    lessons: Callable[[Config, Path], Lessons]
    begin: Callable[[Config, Path], Path] = lambda config, start: start
    context: int = 0  # tokens of a row, at most; 0 is what a rollout may have


def run_stage(stage: Stage, config: Config, on_step: OnStep, progress: Progress, tell: Tell) -> RunFolder:
    """Run, or go on with, a stage. Returns when its last step is in a checkpoint.

    `on_step` gets each step's metrics, and how many `steps` there are.
    """
    folder = RunFolder(config.out)
    folder.refuse_file()
    with joined() as orders:
        if follows(orders):
            follow(orders)
            return folder
        refuse_ranks(config.train, orders)
        with only_writer(folder.path):
            refuse_another_run(folder, config, imitates=True)
            _run_steps(_prepared(stage, config, folder, progress, tell, orders), on_step, progress)
    return folder


def _run_steps(run: _Run, on_step: OnStep, progress: Progress) -> None:
    last = run.lessons.num_steps
    with run.checkpoints:
        for step in range(run.done + 1, last + 1):
            row = _kept_step(run, step)
            is_due = run.checkpoints.is_due(step) or step == last
            if is_due and (waited := run.checkpoints.wait()):
                row["checkpoint_wait_s"] = waited
            run.folder.append_metrics(row)
            if is_due:
                run.checkpoints.save(step)
            progress(f"{run.stage.verb} {run.config.out}", step / last)
            on_step({**row, "steps": last})


def _kept_step(run: _Run, step: int) -> dict[str, Any]:
    """What ends a step before it has changed anything, Ctrl-C too, loses none of those before it."""
    updates = run.trainer.steps
    try:
        return _step(run, step)
    except BaseException:
        if run.trainer.steps == updates and step - 1 > max(run.done, run.checkpoints.last):
            log.warning("the checkpoint of step %d is written before the run ends", step - 1)
            run.checkpoints.save(step - 1)
        raise


@dataclass(frozen=True, slots=True)
class _Run:
    stage: Stage
    config: Config
    folder: RunFolder
    lessons: Lessons
    trainer: Trainer
    checkpoints: Checkpoints
    done: int  # steps, before this process began


def _prepared(stage: Stage, config: Config, folder: RunFolder, progress: Progress, tell: Tell, orders: Any) -> _Run:
    """What can be refused is refused first, from the cheapest on; models are loaded last. `orders` are for other ranks,
    if there are any."""
    torch.set_num_threads(config.threads)
    stage.refuse(config)
    config = computed_as_before(folder, config)
    plan = plan_stage(config, this_device(), stage.context, share_in(config.train, orders))
    refuse_too_large(alone(config), plan)
    config = config.model_copy(update={"train": config.train.settled(*astuple(plan.way))})
    start = model_folder(config.model, config.seed, progress)
    tell(f"model {config.model}, loaded from {start}")
    start = stage.begin(config, start)
    lessons, settings = stage.lessons(config, start), stage.settings
    told = f"{settings.epochs} epochs of about {settings.batch_tokens} tokens per step, kept in {config.out}"
    tell(f"{lessons.num_steps} steps: {told}")
    tell(str(plan))
    trained = model_to_train(config, start, "" if orders is None else HOST)
    content = lessons.fingerprint()
    if folder.checkpoints() and json.loads(folder.data_file.read_text())["content"] != content:
        raise OffbookError(
            f"{folder.path} holds a run on other data: what was read is not what it began with; give another --out"
        )
    done = begin_run(folder, config)
    told_of = {"verb": stage.section, "steps": lessons.num_steps, "sources": settings.data, "content": content}
    write_atomic(folder.data_file, json.dumps({**told_of, **lessons.read}, indent=1) + "\n")
    if 0 < done < lessons.num_steps:
        tell(f"resuming at step {done + 1}")
    train = _settings(config.train, settings, lessons.num_steps)
    trainer = make_trainer(alone(config).model_copy(update={"train": train}), trained, start, progress, orders)
    if done:
        trainer.together(go_on, latest_checkpoint(folder))
    kept, deadline_s = _kept(config.checkpoint, trainer), config.loop.deadline_s
    checkpoints = Checkpoints(trainer, folder.path / "ckpt", chat_folder(start), kept, deadline_s)
    tell(str(checkpoints))
    return _Run(stage, config, folder, lessons, trainer, checkpoints, done)


def plan_stage(config: Config, device: Device, context: int = 0, share: Share = ALONE) -> Plan:
    """`context`: tokens of a row, at most; 0 is what a rollout may have."""
    return make_plan(alone(config), device, samples=False, context=context, share=share)


def alone(config: Config) -> Config:
    """Without teachers and draft heads, which these stages have none of. Nor have they an engine."""
    return config.model_copy(
        update={
            "feedback": config.feedback.model_copy(update={"weight": 0.0}),
            "teachers": TeachersConfig(),
            "mtp": config.mtp.model_copy(update={"along": False}),
            "train": config.train.model_copy(update={"reference_kl": 0.0}),
        }
    )


def _settings(train: TrainConfig, stage: StageConfig, steps: int) -> TrainConfig:
    update = {
        "steps": steps,
        "learning_rate": stage.learning_rate,
        "schedule": "wsd" if isinstance(stage, PretrainConfig) else "cosine",
        "warmup_steps": math.ceil(WARMUP_SHARE * steps),
        "final_share": FINAL_SHARE,
        "reference_kl": 0.0,
    }
    return train.model_copy(update=update)


def _kept(settings: CheckpointConfig, trainer: Trainer) -> CheckpointConfig:
    if settings.every or settings.minutes or checkpoint_size(trainer) >= SMALL:
        return settings
    return settings.model_copy(update={"minutes": MINUTES})


def _step(run: _Run, step: int) -> dict[str, Any]:
    lessons, trainer, settings = run.lessons, run.trainer, run.stage.settings
    started, counts = time.monotonic(), Counter[str]()
    share = learning_rate_share(trainer.settings, step)
    samples = lessons.samples(step, counts)
    try:
        run.checkpoints.check()
        result = trainer.step(samples, lr_scale=share)
    except NotFinite as problem:
        aside = f"{problem}; nothing was applied, and its samples are in {run.folder.write_samples(step, samples)}"
        if run.config.train.on_nonfinite == "stop":
            raise OffbookError(f"step {step}: {aside}; --train.on_nonfinite skip goes on without it") from None
        log.warning("step %d is skipped: %s", step, aside)
        result = StepResult({}, skipped=aside)
    except WeightsLost as problem:
        raise OffbookError(f"step {step}: {problem}; try a lower {run.stage.section}.learning_rate") from None
    row = {"step": step, **lessons.told(step), **result.metrics, **counts}
    row |= {"learning_rate": settings.learning_rate * share, "skipped_steps": step - trainer.steps}
    row["train_s"] = time.monotonic() - started
    if step % VALIDATION_EVERY == 0 or step == lessons.num_steps:
        row |= lessons.validated(trainer)
    return row
