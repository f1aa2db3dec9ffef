"""Hints without an environment: what agents wrote, with the faults that rules or people found in it, as the targets.

There is no outcome here, so there is no RL: each rollout is a group of its own and its advantage is 0. What is left is
the hint: the model that is told of the fault teaches the one that is not, on the words that were written.

The words are the model's own only where it sampled them, as an endpoint of `offbook serve` records them. Those of other
agents are written again in its chat: then no one sampled these tokens, and what the hint teaches is about messages that
the model might never write. How far the model is from what it learns on is measured before the first step.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from offbook.core.config import Config
from offbook.core.runfolder import RunFolder, latest_checkpoint, only_writer, write_atomic
from offbook.rl.models import Progress, chat_folder, load_weights, model_folder, model_to_train, quiet
from offbook.rl.plan import make_plan, refuse_too_large, this_device
from offbook.rl.resume import begin_run, computed_as_before, refuse_another_run
from offbook.rl.train_step import TrainContext, teachers_of, train_step
from offbook.signals.feedback import read_all, rules_of
from offbook.signals.judge import Critique, Judgement
from offbook.stages.conversations import Writing
from offbook.stages.run import Tell, refuse_other_data
from offbook.stages.sources import read_sources, refuse_missing_data
from offbook.train.checkpoint import Checkpoints, load_training_state
from offbook.train.forward import Decoder, token_logprobs
from offbook.train.trainer import Trainer
from offbook.types import OffbookError, Rollout, Segment

FAR = -10.0  # nats: tokens that the model would hardly have written
RATIOS = 0.5, 2.0  # of pi / mu, outside of which a token is no longer the model's own
SAID = "said"  # the rule of what people said about a message


@dataclass(slots=True)
class Mismatch:
    """How far the model is from the tokens that it learns on. Ratios are of those recorded when they were sampled."""

    segments: int = 0
    written_again: int = 0  # of these: no one sampled their tokens
    tokens: int = 0  # of the agent
    nats: float = 0.0  # a token
    far: float = 0.0  # share of the tokens
    recorded: int = 0  # tokens
    ratio_outside: float = 0.0  # share of the recorded
    difference: float = 0.0  # |log pi - log mu|, a mean over the recorded

    def __str__(self) -> str:
        told = f"{self.segments} segments, {self.written_again} of them written again; {self.tokens} tokens at "
        told += f"{self.nats:.2f} nats each for this model, {self.far:.1%} below {FAR:g}"
        if self.recorded:
            told += f"; of {self.recorded} recorded ones |log pi - log mu| is {self.difference:.3f} on average, for "
            told += f"{self.ratio_outside:.1%} pi / mu is not within {RATIOS[0]:g} to {RATIOS[1]:g}"
        return told


def distill(
    config: Config,
    epochs: int = 1,
    on_step: Callable[[dict[str, Any]], None] = lambda row: None,
    progress: Progress = quiet,
    tell: Tell = lambda line: None,
) -> RunFolder:
    """Run, or go on with, hint training on the data of `config.sft.data`."""
    folder = RunFolder(config.out)
    folder.refuse_file()
    with only_writer(folder.path):
        refuse_another_run(folder, config, imitates=True)
        torch.set_num_threads(config.threads)
        refuse_missing_data(config)
        config = computed_as_before(folder, config)
        plan = make_plan(config, this_device(), samples=False)
        refuse_too_large(config, plan)
        config = config.model_copy(update={"train": config.train.settled(*astuple(plan.way))})
        _run(config, folder, epochs, on_step, progress, tell)
    return folder


def _run(
    config: Config,
    folder: RunFolder,
    epochs: int,
    on_step: Callable[[dict[str, Any]], None],
    progress: Progress,
    tell: Tell,
) -> None:
    rules, start = rules_of(config.feedback.files), model_folder(config.model, config.seed, progress)
    writing = Writing.of(start, config, rules)
    rollouts = _targeted(_read(config, writing, progress, tell), config, tell)
    steps = _steps(rollouts, config.train.groups * config.train.group_size, epochs, config.seed)
    config = config.model_copy(update={"train": config.train.model_copy(update={"steps": len(steps)})})
    trained = model_to_train(config, start)
    mismatch = measure(rollouts, Decoder(trained), config.engine.temperature, progress)
    tell(str(mismatch))
    content = hashlib.sha256(repr([segment.ids for one in rollouts for segment in one.segments]).encode()).hexdigest()
    refuse_other_data(folder, content)
    done = begin_run(folder, config)
    write_atomic(folder.path / "mismatch.json", json.dumps(asdict(mismatch), indent=1) + "\n")
    told_of = {"verb": "distill", "sources": config.sft.data, "content": content}
    write_atomic(folder.data_file, json.dumps(told_of, indent=1) + "\n")
    trainer = Trainer(trained, config.train, teachers_of(config.feedback, config.train.reference_kl > 0))
    if done:
        load_weights(trainer.model, path := latest_checkpoint(folder))
        load_training_state(trainer, path)
    teach(TrainContext(config, folder, {}, rules, writing.chat, trainer), steps, chat_folder(start), done, on_step)


def teach(
    context: TrainContext,
    steps: Sequence[list[Rollout]],
    tokenizer_from: Path,
    done: int = 0,
    on_step: Callable[[dict[str, Any]], None] = lambda row: None,
) -> None:
    """Steps on rollouts that are there already, each a group of its own, and what people said about them."""
    folder, config = context.folder, context.config
    kept = folder.path / "ckpt", tokenizer_from, config.checkpoint, config.loop.deadline_s
    with Checkpoints(context.trainer, *kept) as checkpoints:
        for step in range(done + 1, len(steps) + 1):
            chosen = steps[step - 1]
            folder.write_rollouts(step, chosen)
            row = {"step": step, **train_step(step, [[rollout] for rollout in chosen], said_in(chosen), context)}
            folder.append_metrics(row)
            if checkpoints.is_due(step) or step == len(steps):
                checkpoints.save(step)
            on_step({**row, "steps": len(steps)})


def _read(config: Config, writing: Writing, progress: Progress, tell: Tell) -> list[Rollout]:
    """In the model's ids, each under a name of its own, no longer than its context."""
    found: list[Rollout] = []
    counts, names = Counter[str](), Counter[str]()
    for source in read_sources(config, model_folder(config.model, config.seed), progress):
        tell(str(source))
        for rollout, tools in zip(source.rollouts, source.tools, strict=True):
            names[rollout.id] += 1
            id = rollout.id if names[rollout.id] == 1 else f"{rollout.id}#{names[rollout.id]}"
            segments = [_cut(one, writing.context) for one in writing.segments(rollout, tools, counts)]
            pairs = zip(segments, rollout.segments, strict=True)
            counts["cut"] += sum(len(new.messages) < len(old.messages) for new, old in pairs)
            found.append(replace(rollout, id=id, segments=segments))
    tell("; ".join([f"{len(found)} rollouts", *(f"{count} segments {what}" for what, count in counts.items())]))
    return found


def _cut(segment: Segment, context: int) -> Segment:
    fitting = sum(message.end <= context for message in segment.messages)
    return segment if fitting == len(segment.messages) else segment.up_to(fitting)


def _targeted(rollouts: list[Rollout], config: Config, tell: Tell) -> list[Rollout]:
    """Those with something to teach."""
    rules = rules_of(config.feedback.files)
    said = {critique.rollout.id for critique in said_in(rollouts).found}
    found = [one for one in rollouts if one.id in said or read_all(one, None, config.feedback.rules, rules)]
    if not found:
        raise OffbookError("no rule finds a fault in these trajectories, and nobody said one: nothing can be taught")
    tell(f"{len(found)} rollouts with a fault that a hint can be given for, {len(said)} of them by what people said")
    return found


def said_in(rollouts: Sequence[Rollout]) -> Judgement:
    """What people said about messages, which an endpoint keeps as events."""
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
    """Tokens that nobody sampled get the model's own log-probability as the one they were written with: then a weight
    by pi / mu says how far training has moved, and no more."""
    found, nats, far, outside, difference = Mismatch(), 0.0, 0, 0, 0.0
    for number, rollout in enumerate(rollouts):
        for segment in rollout.segments:
            logprobs = token_logprobs(decoder, segment.ids, temperature)
            own = [place for place, is_own in enumerate(segment.sampled) if is_own]
            recorded = [place for place in own if segment.versions[place] >= 0]
            gaps = [logprobs[place] - segment.logprobs[place] for place in recorded]
            found.segments += 1
            found.written_again += not recorded
            found.tokens += len(own)
            found.recorded += len(recorded)
            nats -= sum(logprobs[place] for place in own)
            far += sum(logprobs[place] < FAR for place in own)
            outside += sum(not math.log(RATIOS[0]) <= gap <= math.log(RATIOS[1]) for gap in gaps)
            difference += sum(map(abs, gaps))
            for place in {*own} - {*recorded}:
                segment.logprobs[place] = logprobs[place]
        progress("how far the model is", (number + 1) / len(rollouts))
    found.nats, found.far = nats / max(1, found.tokens), far / max(1, found.tokens)
    found.ratio_outside = outside / max(1, found.recorded)
    found.difference = difference / max(1, found.recorded)
    return found
