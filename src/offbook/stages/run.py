"""Training on data as a run: the order of batches is fixed beforehand, and other runs may start from its checkpoints.

Imitation and pretraining are this with different lessons. All random draws are a function of the seed, the epoch and
the data, so a killed run resumes from its last checkpoint and, on a CPU, ends with the same weights. The number of
ranks decides who computes what and not what is learned, so a run may resume on another number of them.
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
from typing import Any

import torch

from offbook.core.config import Config, PretrainConfig, StageConfig, TeachersConfig
from offbook.core.runfolder import RunFolder, latest_checkpoint, only_writer, write_atomic
from offbook.rl.models import Progress, chat_folder, model_folder, model_to_train
from offbook.rl.plan import Device, MemoryPlan, make_plan, refuse_too_large, this_device
from offbook.rl.ranks import HOST, follow, follows, go_on, joined, make_trainer, share_in
from offbook.rl.resume import begin_run, resumed
from offbook.train.checkpoint import Checkpoints
from offbook.train.forward import imitation_loss
from offbook.train.parallel.spmd import ALONE, Share
from offbook.train.schedule import learning_rate_share
from offbook.train.trainer import NotFinite, StepResult, Trainer, WeightsLost
from offbook.types import OffbookError, Sample

OnStep = Callable[[dict[str, Any]], None]
Tell = Callable[[str], None]  # a line of output
WARMUP_SHARE = 0.03  # of the steps
VALIDATION_EVERY = 50  # steps, and at the end
MINUTES = 2.0  # between small checkpoints; steps are too short to keep each
log = logging.getLogger(__name__)


@dataclass
class Lessons:
    """What a stage learns from."""

    learned: list[Any]
    held_out: list[Any]  # for validation
    batches: list[tuple[int, list[int]]]  # of each step: the epoch, and numbers of what is learned
    samples: Callable[[int, list[Any], Counter[str]], list[Sample]]  # of an epoch's batch; counts go into the metrics
    validation: list[Sample]
    read: dict[str, Any]  # for data.json: how much was read, and what was left out by reason
    fingerprint: str  # hash of all training data


@dataclass
class Stage:
    """A way to train on data. `prepare` gets the model's folder and returns the one to start from, with the lessons."""

    verb: str
    section: str  # of the configuration
    unit: str  # what a batch has so many of
    settings: StageConfig
    prepare: Callable[[Config, Path], tuple[Path, Lessons]]
    context: int = 0  # longest row in tokens; 0 is that of a rollout


def run_stage(stage: Stage, config: Config, on_step: OnStep, progress: Progress, tell: Tell) -> RunFolder:
    """Run or resume a stage. Returns when its last step is in a checkpoint.

    `on_step` gets each step's metrics and the number of `steps`. Checks come first, from the cheapest on; models are
    loaded last.
    """
    folder = RunFolder(config.out)
    folder.refuse_file()
    with joined() as orders:  # `orders` are for the other ranks, if there are any
        if orders is not None and follows(orders):
            follow(orders)
            return folder
        with only_writer(folder.path):
            config = resumed(folder, config, imitates=True)
            torch.set_num_threads(config.threads)
            plan = plan_stage(config, this_device(), stage.context, ALONE if orders is None else share_in(config.train))
            refuse_too_large(without_teachers(config), plan)
            config = config.model_copy(update={"train": config.train.settled(*astuple(plan.way))})
            start = model_folder(config.model, config.seed, progress)
            tell(f"model {config.model}, loaded from {start}")
            start, lessons = stage.prepare(config, start)
            settings = stage.settings
            steps = len(lessons.batches)
            size = f"{settings.epochs} epochs of about {settings.batch_tokens} tokens per step"
            tell(f"{steps} steps: {size}, kept in {config.out}")
            tell(str(plan))
            trained = model_to_train(config, start, "" if orders is None else HOST)
            refuse_other_data(folder, lessons.fingerprint)
            done = begin_run(folder, config)
            about = {"verb": stage.section, "steps": steps, "sources": settings.data, "content": lessons.fingerprint}
            write_atomic(folder.data_file, json.dumps({**about, **lessons.read}, indent=1) + "\n")
            schedule = {
                "steps": steps,
                "learning_rate": settings.learning_rate,
                "schedule": "wsd" if isinstance(settings, PretrainConfig) else "cosine",
                "warmup_steps": math.ceil(WARMUP_SHARE * steps),
            }
            scheduled = without_teachers(config.model_copy(update={"train": config.train.model_copy(update=schedule)}))
            trainer = make_trainer(scheduled, trained, start, progress, orders)
            if done:
                trainer.together(go_on, latest_checkpoint(folder))
            kept, deadline_s = config.checkpoint, config.loop.deadline_s
            checkpoints = Checkpoints(trainer, folder.path / "ckpt", chat_folder(start), kept, deadline_s, MINUTES)
            tell(str(checkpoints))
            with checkpoints:
                for step in range(done + 1, steps + 1):
                    row = _step(step, stage, config, folder, lessons, trainer, checkpoints)
                    progress(f"{stage.verb} {config.out}", step / steps)
                    on_step({**row, "steps": steps})
    return folder


def refuse_other_data(folder: RunFolder, content: str) -> None:
    if folder.checkpoints() and json.loads(folder.data_file.read_text())["content"] != content:
        raise OffbookError(
            f"{folder.path} holds a run on other data: what was read is not what it began with; give another --out"
        )


def plan_stage(config: Config, device: Device, context: int = 0, share: Share = ALONE) -> MemoryPlan:
    """`context` is the longest row in tokens; 0 is that of a rollout."""
    return make_plan(without_teachers(config), device, samples=False, context=context, share=share)


def without_teachers(config: Config) -> Config:
    """Stages use no teachers."""
    return config.model_copy(
        update={
            "feedback": config.feedback.model_copy(update={"weight": 0.0}),
            "teachers": TeachersConfig(),
        }
    )


def _step(
    step: int,
    stage: Stage,
    config: Config,
    folder: RunFolder,
    lessons: Lessons,
    trainer: Trainer,
    checkpoints: Checkpoints,
) -> dict[str, Any]:
    """Train, log, save."""
    started = time.monotonic()
    counts = Counter[str]()
    epoch, numbers = lessons.batches[step - 1]
    share = learning_rate_share(trainer.settings, step)
    samples = lessons.samples(epoch, [lessons.learned[number] for number in numbers], counts)
    try:
        result = trainer.step(samples, lr_scale=share)
    except NotFinite as error:
        reason = f"{error}; nothing was applied, and its samples are in {folder.write_samples(step, samples)}"
        if config.train.on_nonfinite == "stop":
            raise OffbookError(f"step {step}: {reason}; --train.on_nonfinite skip goes on without it") from None
        log.warning("step %d is skipped: %s", step, reason)
        result = StepResult({}, skipped=reason)
    except WeightsLost as error:
        raise OffbookError(f"step {step}: {error}; try a lower {stage.section}.learning_rate") from None
    row = {"step": step, "epoch": epoch, stage.unit: len(numbers), **result.metrics, **counts}
    row |= {"learning_rate": stage.settings.learning_rate * share, "skipped_steps": step - trainer.steps}
    row["train_s"] = time.monotonic() - started
    is_last = step == len(lessons.batches)
    if lessons.validation and (is_last or step % VALIDATION_EVERY == 0):
        row["validation/loss"] = imitation_loss(trainer.student, lessons.validation, trainer.settings.micro_tokens)
    waited = checkpoints.ready(step, is_last)
    if waited:
        row["checkpoint_wait_s"] = waited
    folder.append_metrics(row)
    if waited is not None:
        checkpoints.save(step)
    return row
