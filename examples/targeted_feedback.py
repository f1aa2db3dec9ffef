"""Targeted RL with textual feedback, the whole method in one file, on a CPU in a few minutes.

    python examples/targeted_feedback.py [MODEL [STEPS]]

A small agent works on coding tasks with tools. It often calls tools that do not exist. Plain RL sees one number for a
whole rollout; it cannot say *which* message was wrong. Targeted feedback can:

  1. roll out:   the agent works; its hidden tests give each rollout a reward of 0 or 1
  2. find:       a rule finds the message that went wrong ("called open_file, which is not there")
  3. hint:       a general rule is put right before that message ("Reminder: available tools are ...")
  4. teach:      the *same* tokens are scored again with the hint in context; that hinted distribution is the teacher
  5. step:       loss = RL over the whole rollout + lambda * KL(teacher || student) on the tokens of that one message

Nothing is sampled again in 4, and the student never sees the hint. `offbook train` calls these same functions; left out
here are the run folder, checkpoints and evaluation (see offbook.rl.train).
"""

from __future__ import annotations

import asyncio
import math
import sys
from pathlib import Path

import torch

from offbook.agent.chat import ChatFormat
from offbook.agent.harness import Harness, run_agent
from offbook.core.config import load_config
from offbook.engine import LocalEngine
from offbook.rl.models import load_model, model_folder
from offbook.rl.tasks import task_sets
from offbook.rl.train_step import distill_of, summarize, teachers_of
from offbook.sandbox import open_sandbox
from offbook.signals.feedback import read_rollout, write_hint
from offbook.signals.rewards import Grader
from offbook.train.algorithms import group_advantage, hint_branch
from offbook.train.trainer import Measured, Trainer
from offbook.types import Rollout, Sample, Task

MODEL = sys.argv[1] if len(sys.argv) > 1 else "pocket"
STEPS = int(sys.argv[2]) if len(sys.argv) > 2 else 12
TASKS_A_STEP, GROUP = 4, 8
CONFIG = load_config(["pocket"], {"tasks.num_train": str(STEPS * TASKS_A_STEP), "tasks.num_heldout": "1"})
DISTILL = distill_of(CONFIG.feedback)  # who teaches, in which direction, how much a token may count for
HARNESS = Harness(CONFIG.harness.limits(), profile="pocket")


async def roll_out(
    task: Task, number: int, step: int, engine: LocalEngine, chat: ChatFormat, grader: Grader
) -> Rollout:
    """One attempt: a private copy of the repository, the agent's conversation, the verdict of the hidden tests."""
    session = engine.open(f"step{step}/{task.id}/{number}")
    await asyncio.sleep(0)  # let every rollout of the batch open its session first: they are decoded together
    async with await open_sandbox(task.tree) as sandbox:
        rollout = await run_agent(task, sandbox, session, chat, HARNESS, session.key, task.id)
    session.close()
    rollout.reward.parts["outcome"] = await grader.outcome(task, rollout)
    return rollout


def to_samples(group: list[Rollout], chat: ChatFormat) -> list[Sample]:
    """Reward to advantage to tokens; then a hinted branch on each faulty message."""
    samples = []
    group = [rollout for rollout in group if not rollout.fault]  # what the machine ended teaches nothing
    advantages = group_advantage([rollout.reward.total for rollout in group])  # A = R - mean(R), no std, no length
    for rollout, advantage in zip(group, advantages, strict=True):
        (segment,) = rollout.segments
        sampled = [float(flag) for flag in segment.sampled]
        sample = Sample(
            ids=segment.ids,
            logprobs=segment.logprobs,
            advantage=[advantage * flag for flag in sampled],
            rl_weight=sampled,
        )
        for target in read_rollout(rollout, CONFIG.feedback.max_targets, rules=CONFIG.feedback.rules):
            hint = write_hint(target.rule, rollout.tools)
            sample.branches.append(hint_branch(segment, target, hint, chat, CONFIG.feedback.weight, DISTILL))
        samples.append(sample)
    return samples


def show_a_target(groups: list[list[Rollout]], chat: ChatFormat, measured: dict[str, Measured]) -> None:
    """What one hint did: the probability of each token of the faulty message, without and with the hint."""
    for rollout in (rollout for group in groups for rollout in group):
        for target in read_rollout(rollout, CONFIG.feedback.max_targets, rules=CONFIG.feedback.rules):
            if target.key not in measured:
                continue
            message = rollout.segments[target.segment].messages[target.message]
            result = measured[target.key]
            print(f"\n{target.rule}: {message.text}\nhint: {write_hint(target.rule, rollout.tools).text}\n")
            print(f"{'token':>24}  student  teacher  divergence")
            ids = rollout.segments[target.segment].ids[message.body : message.body + len(result.student)]
            for piece, student, teacher, nats in zip(
                chat.pieces(ids), result.student, result.teacher, result.divergence, strict=True
            ):
                print(f"{piece!r:>24}  {math.exp(student):7.1%}  {math.exp(teacher):7.1%}  {nats:8.3f}")
            return


async def train(folder: Path, tasks: list[Task]) -> None:
    chat = ChatFormat.from_folder(folder)
    trainer = Trainer(load_model(folder, CONFIG.train.precision), CONFIG.train, teachers_of(CONFIG.feedback))
    engine = LocalEngine(load_model(folder), chat.stop_ids)
    grader = Grader()
    for step in range(1, STEPS + 1):
        engine.apply(trainer.publish(version=step - 1))
        batch = tasks[(step - 1) * TASKS_A_STEP : step * TASKS_A_STEP]
        rollouts = await asyncio.gather(
            *(roll_out(task, number, step, engine, chat, grader) for task in batch for number in range(GROUP))
        )
        groups = [list(rollouts[start : start + GROUP]) for start in range(0, len(rollouts), GROUP)]
        samples = [sample for group in groups for sample in to_samples(group, chat)]
        result = trainer.step(samples)  # rl + hint: one differentiated forward, one no-grad pass over the branches
        numbers = summarize(groups)
        print(
            f"step {step:2}  solved {numbers['solved']:4.0%}  invalid calls per 100 {numbers['invalid_per_100']:4.1f}  "
            f"targets {len(result.measured):2}  KL(teacher || student) {result.metrics.get('hint/kl', 0.0):.3f}"
        )
        if step == 1:
            show_a_target(groups, chat, result.measured)
            print()


if __name__ == "__main__":
    torch.set_num_threads(1)  # the other cores run the sandboxes
    print("making or loading the model and its tasks; pocket takes about two minutes the first time", file=sys.stderr)
    asyncio.run(train(model_folder(MODEL, CONFIG.seed), task_sets(CONFIG).train))
