"""Imitation: conversations, and cross-entropy on the agent's tokens."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offbook.core.config import Config
from offbook.core.runfolder import RunFolder
from offbook.rl.models import Progress, quiet
from offbook.signals.feedback import rules_of
from offbook.stages.conversations import Renderer, batches_of_epochs, find_pairs, fingerprint, split
from offbook.stages.hint_sensitivity import hint_sensitivity
from offbook.stages.reminders import Conversation, Reminders
from offbook.stages.run import OnStep, Stage, Tell, run_stage
from offbook.stages.sources import read_sources, refuse_missing_data
from offbook.train.algorithms import dft_sample
from offbook.train.forward import imitation_loss
from offbook.train.trainer import Trainer
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

    return run_stage(Stage("imitate", "sft", config.sft, _refuse, prepare), config, on_step, progress, tell)


def _refuse(config: Config) -> None:
    refuse_missing_data(config)
    known = rules_of(config.feedback.files, config.feedback.rules)
    for name in config.sft.hold_out_rules:
        if name not in known:
            raise OffbookError(f"sft.hold_out_rules: there is no rule {name}; the rules are {', '.join(known)}")


@dataclass(frozen=True, slots=True)
class Lessons:
    """Training and validation conversations, and the batches of all steps."""

    learned: list[Conversation]
    held_out: list[Conversation]  # for validation
    reminders: Reminders
    batches: list[tuple[int, list[int]]]  # the epoch, and numbers of conversations
    read: dict[str, Any]

    @property
    def num_steps(self) -> int:
        return len(self.batches)

    def samples(self, step: int, counts: Counter[str]) -> list[Sample]:
        counts.update(shown=0, reminded=0, pairs=0, without_room=0)
        epoch, numbers = self.batches[step - 1]
        samples = [one for number in numbers for one in self.reminders.samples(self.learned[number], epoch, counts)]
        return [dft_sample(one) for one in samples] if self.reminders.settings.loss == "dft" else samples

    def metrics(self, step: int) -> dict[str, Any]:
        epoch, numbers = self.batches[step - 1]
        return {"epoch": epoch, "conversations": len(numbers)}

    def validation(self) -> list[Sample]:
        """With fixed reminders, so that the loss is comparable with training."""
        return [one for conversation in self.held_out for one in self.reminders.samples(conversation, 0, Counter())]

    def validated(self, trainer: Trainer) -> dict[str, float]:
        if not self.held_out:
            return {}
        asked = self.reminders.chat, self.reminders.context, trainer.settings.micro_tokens
        sensitivity = hint_sensitivity(trainer.student, self.held_out, *asked)
        loss = imitation_loss(trainer.student, self.validation(), trainer.settings.micro_tokens)
        return {"validation/loss": loss, **sensitivity}

    def fingerprint(self) -> str:
        return fingerprint([*self.learned, *self.held_out])


def make_lessons(config: Config, start: Path, progress: Progress, tell: Tell) -> Lessons:
    """Read `config.sft.data` for the model in a folder."""
    settings, rules = config.sft, rules_of(config.feedback.files, config.feedback.rules)
    chosen = {name: rule for name, rule in rules.items() if not config.feedback.rules or name in config.feedback.rules}
    renderer = Renderer.of(start, config, chosen)
    sources = []
    for source in read_sources(config, start, progress):
        tell(str(source))
        sources.append(source)
    counts: Counter[str] = Counter()
    conversations = renderer.conversations(sources, config, counts, progress)
    if not conversations:
        left = ", ".join(f"{count} {what}" for what, count in counts.items())
        raise OffbookError(f"no conversation is left to learn from ({left}); harness.context is {renderer.context}")
    learned, held_out = split(conversations, lambda one: one.task, settings.validation_share, config.seed)
    for side in (learned, held_out):
        find_pairs(side)
    lengths = [len(conversation.segment.ids) for conversation in learned]
    left = "".join(f"; {count} {what}" for what, count in counts.items())
    tell(f"{len(learned)} conversations of {sum(lengths)} tokens to learn from, {len(held_out)} for validation{left}")
    kept, pairs = sum(len(one.kept) for one in learned), sum(len(one.pairs) for one in learned)
    tell(f"reminders before {settings.reminders:.0%} of {kept} messages, and in {settings.pairs:.0%} of {pairs} pairs")
    left_out = Counter({"could not be read": sum(len(source.problems) for source in sources)})
    for source in sources:
        left_out.update(source.left_out)
    read = {"conversations": len(conversations), **counts, "left_out": dict(+left_out)}
    reminders = Reminders(renderer.chat, settings, config.seed, renderer.context)
    return Lessons(learned, held_out, reminders, batches_of_epochs(lengths, settings, config.seed), read)
