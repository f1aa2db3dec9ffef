"""What proof.py measures of an arm beside its held-out rollouts."""

from __future__ import annotations

import asyncio
import hashlib
import math
import random
from collections import Counter
from pathlib import Path

import torch
from transformers import PreTrainedModel

from offbook.core.config import Config
from offbook.core.runfolder import RunFolder
from offbook.pocket.demonstrations import episodes, harness_of
from offbook.pocket.script import LONG_HABITS, Habits
from offbook.pocket.tasks import draft_tasks, level_named
from offbook.rl.hint_probe import effects_of, measure
from offbook.rl.models import chat_of
from offbook.signals.feedback import read_all, write_hint
from offbook.train.forward import Decoder
from offbook.types import Feedback, Rollout, Task

READ = 16  # scripted episodes whose faults are read with and without hints
TEXT_CHARS, TEXT_WINDOW = 40_000, 1024  # of text that has nothing to do with any of it, and tokens of a window


def taught(folder: RunFolder, last: int) -> list[dict[str, float]]:
    """By step: tokens that hints taught, and how likely their messages were without and with the hint, in nats."""
    found = []
    for step in (step for step in folder.steps() if step <= last):
        items = [item for item in folder.feedback(step)[0] if item.student and item.teacher]
        kept = [item for item in items if not item.skipped]
        number = max(1, len(items))
        found.append(
            {
                "step": step,
                "tokens": sum(len(item.student) for item in kept),
                "fault": sum(sum(item.student) for item in items) / number,
                "hinted_fault": sum(sum(item.teacher) for item in items) / number,
            }
        )
    return found


def rule_counts(rollouts: list[Rollout], tasks: dict[str, Task]) -> dict[str, int]:
    """Findings by rule; a message may break several."""
    return dict(Counter(target.rule for one in rollouts for target in read_all(one, tasks[one.task])))


def functions_missing(task: Task) -> int:
    """That the agent has to write."""
    return sum(path.read_text().count("raise NotImplementedError") for path in task.tree.rglob("*.py"))


def readings(model: PreTrainedModel, config: Config, source: str) -> dict[str, dict[str, float | None]]:
    """Faults of the scripted agent on held-out drafts, the same for every arm: how much likelier a hint makes them, in
    nats, and how much the hint of another rule does. Below 0 is good."""
    chat, level = chat_of(Path(config.model), config), level_named(source)
    assert level is not None
    drafts = list(draft_tasks(config.seed, READ, "heldout", level))

    async def scripted() -> list[Rollout]:
        habits = LONG_HABITS if level.is_long else Habits()
        played = episodes(chat, drafts, random.Random("readings"), habits, harness_of(level))
        return [one async for one in played]

    pairs = [
        (rollout, Feedback(target, write_hint(target.rule, rollout.tools)))
        for rollout in asyncio.run(scripted())
        for target in read_all(rollout, None, config.feedback.rules)
    ]
    decoder = Decoder(model)
    measure(pairs, decoder, chat, config.engine.temperature)
    found = effects_of(item for _, item in pairs)
    said = {effect.rule: [sum(one.student) for _, one in pairs if one.target.rule == effect.rule] for effect in found}
    return {
        effect.rule: {
            "targets": effect.targets,
            "fault": sum(said[effect.rule]) / len(said[effect.rule]),
            "hint": effect.log_odds,
        }
        for effect in found
    }


def unrelated_text() -> tuple[str, str]:
    """Python's manual, as pydoc has it, and what stands for it: versions of Python differ."""
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name] for name in sorted(topics))[:TEXT_CHARS]
    return text, hashlib.sha256(text.encode()).hexdigest()[:12]


@torch.no_grad()
def perplexity(model: PreTrainedModel, config: Config) -> float:
    ids = chat_of(Path(config.model), config).encode(unrelated_text()[0])
    total, count = 0.0, 0
    for start in range(0, len(ids) - 1, TEXT_WINDOW):
        window = torch.tensor([ids[start : start + TEXT_WINDOW + 1]], device=model.device)
        logits = model(input_ids=window[:, :-1], use_cache=False).logits[0].float()
        total += float(torch.nn.functional.cross_entropy(logits, window[0, 1:], reduction="sum"))
        count += window.shape[1] - 1
    return math.exp(total / count)
