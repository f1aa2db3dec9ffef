"""Imitation as a run: conversations, cross-entropy on what agents wrote, checkpoints that any other run may start from.

All that is drawn is a function of the seed, the epoch and the conversation, so a run that was killed goes on from its
last checkpoint and, on a CPU, ends at the same weights.

Left out: packing several conversations into one row. Each has a row of its own, those of like length share a batch, and
so none can see another.
"""

from __future__ import annotations

import json
import logging
import math
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch

from offbook.algo import dft_sample
from offbook.config import CheckpointConfig, Config, TrainConfig
from offbook.feedback import rules_of
from offbook.lock import only_writer
from offbook.loop.collector import chat_of
from offbook.loop.models import (
    Progress,
    chat_folder,
    described,
    load_weights,
    model_folder,
    model_to_train,
    positions,
    quiet,
)
from offbook.loop.plan import make_plan, refuse_too_large, this_device
from offbook.loop.resume import claim_run, computed_as_before, refuse_another_run
from offbook.runfolder import RunFolder, latest_checkpoint, write_atomic
from offbook.stages.conversations import Writing, batches_of, find_pairs, fingerprint, split
from offbook.stages.reminders import Conversation, Reminders
from offbook.stages.sources import read_sources, refuse_missing_data
from offbook.train.checkpoint import load_training_state
from offbook.train.schedule import learning_rate_share
from offbook.train.trainer import NotFinite, StepResult, Trainer, WeightsLost
from offbook.train.validation import imitation_loss
from offbook.train.writing import SMALL, Checkpoints, checkpoint_size
from offbook.types import OffbookError, Sample

OnStep = Callable[[dict[str, Any]], None]
Tell = Callable[[str], None]  # a line for people
MINUTES = 2.0  # between checkpoints that are small; steps are too short to keep every one
log = logging.getLogger(__name__)


def sft(
    config: Config,
    on_step: OnStep = lambda row: None,
    progress: Progress = quiet,
    tell: Tell = lambda line: None,
) -> RunFolder:
    """Run, or go on with, the imitation that `config` describes. Returns when its last step is in a checkpoint.

    `on_step` gets each step's metrics, and how many `steps` there are.
    """
    folder = RunFolder(config.out)
    folder.refuse_file()
    with only_writer(folder.path):
        refuse_another_run(folder, config, imitates=True)
        run = _prepared(config, folder, progress, tell)
        with run.checkpoints:
            for step in range(run.done + 1, run.num_steps + 1):
                row = _kept_step(run, step)
                is_due = run.checkpoints.is_due(step) or step == run.num_steps
                if is_due and (waited := run.checkpoints.wait()):
                    row["checkpoint_wait_s"] = waited
                folder.append_metrics(row)
                if is_due:
                    run.checkpoints.save(step)
                progress(f"imitate {config.out}", step / run.num_steps)
                on_step({**row, "steps": run.num_steps})
    return folder


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
class Lessons:
    """What is learned, step by step."""

    learned: list[Conversation]
    apart: list[Conversation]  # for validation
    reminders: Reminders
    batches: list[tuple[int, list[int]]]  # the epoch, and numbers of conversations

    def samples(self, step: int, counts: Counter[str]) -> list[Sample]:
        epoch, numbers = self.batches[step - 1]
        samples = [one for number in numbers for one in self.reminders.samples(self.learned[number], epoch, counts)]
        return [dft_sample(one) for one in samples] if self.reminders.settings.loss == "dft" else samples

    def validation(self) -> list[Sample]:
        """With reminders too, the same ones every time: a loss that can be compared with the one in training."""
        return [one for conversation in self.apart for one in self.reminders.samples(conversation, 0, Counter())]


@dataclass(frozen=True, slots=True)
class _Run:
    config: Config
    folder: RunFolder
    lessons: Lessons
    trainer: Trainer
    checkpoints: Checkpoints
    done: int  # steps, before this process began

    @property
    def num_steps(self) -> int:
        return len(self.lessons.batches)


def _prepared(config: Config, folder: RunFolder, progress: Progress, tell: Tell) -> _Run:
    """What can be refused is refused first, from the cheapest on; models are loaded last."""
    torch.set_num_threads(config.threads)
    refuse_missing_data(config)
    _refuse_unknown_rules(config)
    config = computed_as_before(folder, config)
    plan = make_plan(_alone(config), this_device(), engine_apart=True)
    refuse_too_large(_alone(config), plan)
    config = config.model_copy(update={"train": config.train.settled(*astuple(plan.way))})
    start = model_folder(config.model, config.seed, progress)
    tell(f"model {config.model}, loaded from {start}")
    lessons = make_lessons(config, start, progress, tell)
    told = f"{config.sft.epochs} epochs of about {config.sft.batch_tokens} tokens a step, kept in {config.out}"
    tell(f"{len(lessons.batches)} steps: {told}")
    tell(str(plan))
    trained = model_to_train(config, start)
    content = fingerprint([*lessons.learned, *lessons.apart])
    _refuse_other_data(folder, content)
    done = claim_run(folder, config)
    write_atomic(folder.data_file, json.dumps({"sources": config.sft.data, "content": content}, indent=1) + "\n")
    if 0 < done < len(lessons.batches):
        tell(f"resuming at step {done + 1}")
    trainer = Trainer(trained, _settings(config, len(lessons.batches)))
    if done:
        path = latest_checkpoint(folder)
        load_weights(trainer.model, path)
        load_training_state(trainer, path)
    checkpoints = Checkpoints(trainer, folder.path / "ckpt", chat_folder(start), _kept(config.checkpoint, trainer))
    tell(str(checkpoints))
    return _Run(config, folder, lessons, trainer, checkpoints, done)


def _refuse_unknown_rules(config: Config) -> None:
    known = rules_of(config.feedback.files, config.feedback.rules)
    for name in config.sft.hold_out_rules:
        if name not in known:
            raise OffbookError(f"sft.hold_out_rules: there is no rule {name}; the rules are {', '.join(known)}")


def _alone(config: Config) -> Config:
    """Without teachers, which imitation has none of. Nor has it an engine."""
    return config.model_copy(
        update={
            "feedback": config.feedback.model_copy(update={"weight": 0.0}),
            "train": config.train.model_copy(update={"reference_kl": 0.0}),
        }
    )


def make_lessons(config: Config, start: Path, progress: Progress, tell: Tell) -> Lessons:
    """What a model in a folder would learn from the data of a configuration."""
    settings, chat = config.sft, chat_of(start, config)
    context = min(config.harness.context, positions(chat_folder(start)))
    rules = rules_of(config.feedback.files, config.feedback.rules)
    chosen = {name: rule for name, rule in rules.items() if not config.feedback.rules or name in config.feedback.rules}
    writing = Writing(chat, described(str(start)).get_text_config().vocab_size, context, chosen)
    sources = []
    for source in read_sources(config, start, progress):
        tell(str(source))
        sources.append(source)
    counts: Counter[str] = Counter()
    conversations = writing.conversations(sources, config, counts, progress)
    if not conversations:
        left = ", ".join(f"{count} {what}" for what, count in counts.items())
        raise OffbookError(f"no conversation is left to learn from ({left}); harness.context is {context}")
    learned, apart = split(conversations, settings.validation_share, config.seed)
    for side in (learned, apart):
        find_pairs(side)
    lengths = [len(conversation.segment.ids) for conversation in learned]
    batches = [
        (epoch, numbers)
        for epoch in range(1, settings.epochs + 1)
        for numbers in batches_of(lengths, settings.batch_tokens, random.Random(f"{config.seed} {epoch}"))
    ]
    told = "".join(f"; {count} {what}" for what, count in counts.items())
    tell(f"{len(learned)} conversations of {sum(lengths)} tokens to learn from, {len(apart)} for validation{told}")
    kept, pairs = sum(len(one.kept) for one in learned), sum(len(one.pairs) for one in learned)
    tell(f"reminders before {settings.reminders:.0%} of {kept} messages, and in {settings.pairs:.0%} of {pairs} pairs")
    return Lessons(learned, apart, Reminders(chat, settings, config.seed, context), batches)


def _refuse_other_data(folder: RunFolder, content: str) -> None:
    if folder.checkpoints() and json.loads(folder.data_file.read_text())["content"] != content:
        raise OffbookError(
            f"{folder.path} holds a run on other data: what was read is not what it began with; give another --out"
        )


def _settings(config: Config, steps: int) -> TrainConfig:
    sft = config.sft
    update = {
        "steps": steps,
        "learning_rate": sft.learning_rate,
        "schedule": sft.schedule,
        "warmup_steps": math.ceil(sft.warmup_share * steps),
        "final_share": sft.final_share,
        "reference_kl": 0.0,
    }
    return config.train.model_copy(update=update)


def _kept(settings: CheckpointConfig, trainer: Trainer) -> CheckpointConfig:
    if settings.every or settings.minutes or checkpoint_size(trainer) >= SMALL:
        return settings
    return settings.model_copy(update={"minutes": MINUTES})


def _step(run: _Run, step: int) -> dict[str, Any]:
    lessons, trainer, settings = run.lessons, run.trainer, run.config.sft
    started, counts = time.monotonic(), Counter[str](reminded=0, pairs=0, without_room=0)
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
        raise OffbookError(f"step {step}: {problem}; try a lower sft.learning_rate") from None
    epoch, _ = lessons.batches[step - 1]
    row = {
        "step": step,
        "epoch": epoch,
        "conversations": len(lessons.batches[step - 1][1]),
        **result.metrics,
        **counts,
    }
    row |= {"learning_rate": settings.learning_rate * share, "skipped_steps": step - trainer.steps}
    row["train_s"] = time.monotonic() - started
    if lessons.apart and (step % settings.validation_every == 0 or step == run.num_steps):
        row["validation/loss"] = imitation_loss(trainer, lessons.validation())
    return row
