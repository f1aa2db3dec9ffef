"""Imitation: conversations, and cross-entropy on the agent's tokens."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from offbook.core.config import Config
from offbook.core.runfolder import RunFolder
from offbook.rl.models import Progress, quiet
from offbook.signals.feedback import rules_of
from offbook.stages.conversations import Renderer, batches_of_epochs, fingerprint, split
from offbook.stages.reminders import Conversation, Reminders
from offbook.stages.run import Lessons, OnStep, Stage, Tell, run_stage
from offbook.stages.sources import read_sources, refuse_missing_data
from offbook.types import OffbookError, Sample


def sft(
    config: Config,
    on_step: OnStep = lambda row: None,
    progress: Progress = quiet,
    tell: Tell = lambda line: None,
) -> RunFolder:
    """Run or resume the imitation that `config` describes. Returns when its last step is in a checkpoint.

    `on_step` gets each step's metrics and the number of `steps`.
    """

    def prepare(config: Config, start: Path) -> tuple[Path, Lessons]:
        return start, make_lessons(config, start, progress, tell)

    refuse_missing_data(config)
    return run_stage(Stage("imitate", "sft", "conversations", config.sft, prepare), config, on_step, progress, tell)


def make_lessons(config: Config, start: Path, progress: Progress, tell: Tell) -> Lessons:
    """Read `config.sft.data` for the model in a folder."""
    settings = config.sft
    names = config.feedback.rules
    rules = {name: rule for name, rule in rules_of(config.feedback.files, names).items() if name in names or not names}
    renderer = Renderer.of(start, config, rules)
    sources = []
    for source in read_sources(config, start, progress):
        tell(str(source))
        sources.append(source)
    counts: Counter[str] = Counter()
    conversations = renderer.conversations(sources, counts, progress)
    if not conversations:
        left = ", ".join(f"{count} {what}" for what, count in counts.items())
        raise OffbookError(f"no conversation is left to learn from ({left}); harness.context is {renderer.context}")
    learned, held_out = split(conversations, lambda one: one.task, settings.validation_share, config.seed)
    lengths = [len(conversation.segment.ids) for conversation in learned]
    left = "".join(f"; {count} {what}" for what, count in counts.items())
    tell(f"{len(learned)} conversations of {sum(lengths)} tokens to learn from, {len(held_out)} for validation{left}")
    tell(f"reminders before {settings.reminders:.0%} of {sum(len(one.kept) for one in learned)} messages")
    left_out = Counter({"could not be read": sum(len(source.problems) for source in sources)})
    for source in sources:
        left_out.update(source.left_out)
    reminders = Reminders(renderer.chat, settings, config.seed, renderer.context)

    def samples(epoch: int, batch: list[Conversation], counts: Counter[str]) -> list[Sample]:
        return [reminders.sample(conversation, epoch, counts) for conversation in batch]

    return Lessons(
        learned=learned,
        held_out=held_out,
        batches=batches_of_epochs(lengths, settings, config.seed),
        samples=samples,
        validation=[reminders.sample(one, 0, Counter()) for one in held_out],
        read={"conversations": len(conversations), **counts, "left_out": dict(+left_out)},
        fingerprint=fingerprint([*learned, *held_out]),
    )
