"""Imitation: conversations, and cross-entropy on the agent's tokens."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from offbook.core.config import Config
from offbook.core.runfolder import RunFolder
from offbook.rl.models import Progress, quiet
from offbook.signals.feedback import rules_of
from offbook.stages import run
from offbook.stages.conversations import Renderer, batches_of_epochs, fingerprint, split
from offbook.stages.reminders import Reminders
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

    stage = Stage("imitate", "sft", "conversations", config.sft, refuse_missing_data, prepare)
    return run_stage(stage, config, on_step, progress, tell)


@dataclass(frozen=True)
class Lessons(run.Lessons):
    """Conversations with reminders."""

    reminders: Reminders

    def samples(self, step: int, counts: Counter[str]) -> list[Sample]:
        counts.update(reminded=0, without_room=0)
        epoch, _ = self.batches[step - 1]
        samples = [self.reminders.sample(conversation, epoch, counts) for conversation in self.batch(step)]
        return [dft_sample(one) for one in samples] if self.reminders.settings.loss == "dft" else samples

    def validation(self) -> list[Sample]:
        """With fixed reminders, so that the loss is comparable with training."""
        return [self.reminders.sample(conversation, 0, Counter()) for conversation in self.held_out]

    def validated(self, trainer: Trainer) -> dict[str, float]:
        if not self.held_out:
            return {}
        return {"validation/loss": imitation_loss(trainer.student, self.validation(), trainer.settings.micro_tokens)}

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
    read = {"conversations": len(conversations), **counts, "left_out": dict(+left_out)}
    reminders = Reminders(renderer.chat, settings, config.seed, renderer.context)
    return Lessons(learned, held_out, batches_of_epochs(lengths, settings, config.seed), read, reminders)
