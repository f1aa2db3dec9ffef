"""Hint training without an environment: targets are faults that rules or people found in recorded messages.

There is no outcome and so no RL: each rollout is its own group with advantage 0. What remains is distillation: the
model with the hint teaches the model without it, on the recorded tokens.

The tokens are on-policy only where the model sampled them, as `offbook serve` records them. Messages of other agents
are rendered in its chat template, so it might never write them. The mismatch is measured before the first step.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from offbook.core.config import Config
from offbook.core.runfolder import RunFolder, latest_checkpoint, only_writer, write_atomic
from offbook.rl.models import Progress, chat_folder, load_weights, model_folder, model_to_train, quiet
from offbook.rl.plan import make_plan, refuse_too_large, this_device
from offbook.rl.resume import begin_run, resumed
from offbook.rl.train_step import TrainContext, teachers_of, train_step
from offbook.signals.feedback import SAID, Rule, read_all, rules_of
from offbook.signals.judge import Critique, Judgement
from offbook.stages.conversations import Renderer
from offbook.stages.run import Tell, refuse_other_data
from offbook.stages.sources import read_sources, refuse_missing_data
from offbook.train.checkpoint import Checkpoints, load_training_state
from offbook.train.forward import Decoder, token_logprobs
from offbook.train.trainer import Trainer
from offbook.types import OffbookError, Rollout


@dataclass
class Mismatch:
    """How off-policy the tokens are."""

    segments: int = 0
    written_again: int = 0  # of these: rendered from text
    tokens: int = 0  # of the agent
    nats: float = 0.0  # a token
    recorded: int = 0  # tokens whose log-probability was recorded at sampling
    difference: float = 0.0  # |log pi - log mu|, a mean over the recorded

    def __str__(self) -> str:
        text = f"{self.segments} segments, {self.written_again} of them written again; {self.tokens} tokens at "
        recorded = f"; of {self.recorded} recorded ones |log pi - log mu| is {self.difference:.3f} on average"
        return f"{text}{self.nats:.2f} nats each for this model{recorded if self.recorded else ''}"


def distill(
    config: Config,
    epochs: int = 1,
    on_step: Callable[[dict[str, Any]], None] = lambda row: None,
    progress: Progress = quiet,
    tell: Tell = lambda line: None,
) -> RunFolder:
    """Run or resume hint training on `config.sft.data`."""
    folder = RunFolder(config.out)
    folder.refuse_file()
    with only_writer(folder.path):
        config = resumed(folder, config, imitates=True)
        torch.set_num_threads(config.threads)
        refuse_missing_data(config)
        plan = make_plan(config, this_device(), samples=False)
        refuse_too_large(config, plan)
        config = config.model_copy(update={"train": config.train.settled(*astuple(plan.way))})
        rules = rules_of(config.feedback.files)
        start = model_folder(config.model, config.seed, progress)
        renderer = Renderer.of(start, config, rules)
        rollouts = _with_faults(_read(config, renderer, start, progress, tell), config, rules, tell)
        steps = _steps(rollouts, config.train.groups * config.train.group_size, epochs, config.seed)
        config = config.model_copy(update={"train": config.train.model_copy(update={"steps": len(steps)})})
        trained = model_to_train(config, start)
        mismatch = measure(rollouts, Decoder(trained), config.engine.temperature, progress)
        tell(str(mismatch))
        ids = [segment.ids for rollout in rollouts for segment in rollout.segments]
        content = hashlib.sha256(repr(ids).encode()).hexdigest()
        refuse_other_data(folder, content)
        done = begin_run(folder, config)
        write_atomic(folder.path / "mismatch.json", json.dumps(asdict(mismatch), indent=1) + "\n")
        about = {"verb": "distill", "sources": config.sft.data, "content": content}
        write_atomic(folder.data_file, json.dumps(about, indent=1) + "\n")
        trainer = Trainer(trained, config.train, teachers_of(config.feedback))
        if done:
            path = latest_checkpoint(folder)
            load_weights(trainer.model, path)
            load_training_state(trainer, path)
        context = TrainContext(config, folder, {}, rules, renderer.chat, trainer)
        teach(context, steps, chat_folder(start), done, on_step)
    return folder


def teach(
    context: TrainContext,
    steps: Sequence[list[Rollout]],
    tokenizer_from: Path,
    done: int = 0,
    on_step: Callable[[dict[str, Any]], None] = lambda row: None,
) -> None:
    """Train on recorded rollouts, each its own group, and on people's feedback about them."""
    folder, config = context.folder, context.config
    kept = folder.path / "ckpt", tokenizer_from, config.checkpoint, config.loop.deadline_s
    with Checkpoints(context.trainer, *kept) as checkpoints:
        for step in range(done + 1, len(steps) + 1):
            chosen = steps[step - 1]
            folder.write_rollouts(step, chosen)
            row = {"step": step, **train_step(step, [[rollout] for rollout in chosen], critiques_in(chosen), context)}
            folder.append_metrics(row)
            if checkpoints.is_due(step) or step == len(steps):
                checkpoints.save(step)
            on_step({**row, "steps": len(steps)})


def _read(config: Config, renderer: Renderer, start: Path, progress: Progress, tell: Tell) -> list[Rollout]:
    """Rollouts in the model's ids with unique names, cut to its context."""
    found: list[Rollout] = []
    counts = Counter[str]()
    for place, source in enumerate(read_sources(config, start, progress)):
        tell(str(source))
        for number, (rollout, tools) in enumerate(zip(source.rollouts, source.tools, strict=True)):
            segments = []
            for segment in renderer.segments(rollout, tools, counts):
                fitting = sum(message.end <= renderer.context for message in segment.messages)
                counts["cut"] += fitting < len(segment.messages)
                segments.append(segment.up_to(fitting) if fitting < len(segment.messages) else segment)
            found.append(replace(rollout, id=f"{place}/{number}/{rollout.id}", segments=segments))
    tell("; ".join([f"{len(found)} rollouts", *(f"{count} segments {what}" for what, count in counts.items())]))
    return found


def _with_faults(rollouts: list[Rollout], config: Config, rules: Mapping[str, Rule], tell: Tell) -> list[Rollout]:
    said = {critique.rollout.id for critique in critiques_in(rollouts).found}
    found = [one for one in rollouts if one.id in said or read_all(one, None, config.feedback.rules, rules)]
    if not found:
        raise OffbookError("no rule and no feedback finds a fault in these trajectories: there is nothing to train on")
    tell(f"{len(found)} rollouts with a fault that a hint can be given for, {len(said)} of them by what people said")
    return found


def critiques_in(rollouts: Sequence[Rollout]) -> Judgement:
    """People's feedback about messages, which an endpoint records as events."""
    found = []
    for rollout in rollouts:
        for event in rollout.events:
            if event.kind != "feedback" or event.segment >= len(rollout.segments):
                continue
            segment = rollout.segments[event.segment]
            if 0 <= event.message < len(segment.messages) and segment.is_own(segment.messages[event.message]):
                found.append(Critique(rollout, event.segment, event.message, SAID, event.detail, event.detail))
    return Judgement(found, rollouts=len(rollouts))


def _steps(rollouts: list[Rollout], size: int, epochs: int, seed: int) -> list[list[Rollout]]:
    steps = []
    for epoch in range(epochs):
        order = random.Random(f"{seed} distill {epoch}").sample(rollouts, len(rollouts))
        steps += [order[start : start + size] for start in range(0, len(order), size)]
    return steps


def measure(rollouts: Sequence[Rollout], decoder: Decoder, temperature: float, progress: Progress) -> Mismatch:
    """Also fills in the model's current log-probability for tokens without a recorded one, so that pi / mu measures
    only how far training has moved."""
    found = Mismatch()
    for number, rollout in enumerate(rollouts):
        for segment in rollout.segments:
            found.segments += 1
            before = found.recorded
            for place, logprob in enumerate(token_logprobs(decoder, segment.ids, temperature)):
                if not segment.sampled[place]:
                    continue
                found.tokens += 1
                found.nats -= logprob
                if segment.versions[place] >= 0:
                    found.recorded += 1
                    found.difference += abs(logprob - segment.logprobs[place])
                else:
                    segment.logprobs[place] = logprob
            found.written_again += found.recorded == before
        progress("how far the model is", (number + 1) / len(rollouts))
    found.nats /= max(1, found.tokens)
    found.difference /= max(1, found.recorded)
    return found
