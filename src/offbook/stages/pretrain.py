"""Continued pretraining on code, in windows that hold files of one repository.

A window is one row: files after their paths, imported files first, so attention crosses files and never repositories.
A file that does not fit continues in the next window after its path. Some files are written for fill-in-the-middle
(2207.14255): prefix, suffix, middle in one window, where they fit into one.

Left out: an end-of-text token between repositories, which ends messages in chat models; corpora that do not fit into
memory as token ids.
"""

from __future__ import annotations

import hashlib
import math
import random
from array import array
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from offbook.core.config import Config, PretrainConfig
from offbook.core.runfolder import RunFolder
from offbook.rl.models import Progress, chat_folder, quiet
from offbook.rl.tasks import tasks_at
from offbook.stages import run
from offbook.stages.conversations import batches_of_epochs, split
from offbook.stages.corpus import Corpus, Repository, refuse_missing_sources
from offbook.stages.extend import extended
from offbook.stages.run import OnStep, Stage, Tell, run_stage
from offbook.tasks.contamination import Sought
from offbook.train.forward import imitation_loss
from offbook.train.trainer import Trainer
from offbook.types import OffbookError, Sample

FIM_MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
)  # of tokenizers that have them; the first are spelled out in those that have none
WORDS = ("docs", "settings")  # domains of which nothing is filled in
FIM_SHARE = 0.3  # share of code files that are written to fill in the middle


def pretrain(
    config: Config,
    on_step: OnStep = lambda row: None,
    progress: Progress = quiet,
    tell: Tell = lambda line: None,
) -> RunFolder:
    """Run or resume the pretraining that `config` describes. Returns when its last step is in a checkpoint."""
    settings = config.pretrain

    def prepare(config: Config, start: Path) -> tuple[Path, Lessons]:
        start = extended(start, Path(config.out) / "start", settings.context, settings.rope, tell)
        lessons = make_lessons(config, start, progress, tell)
        tell(f"the longest window has {max(map(length_of, lessons.learned))} of {settings.context} tokens")
        return start, lessons

    def refuse(config: Config) -> None:
        refuse_missing_sources(settings)

    stage = Stage("pretrain", "pretrain", "windows", settings, refuse, prepare, settings.context)
    return run_stage(stage, config, on_step, progress, tell)


@dataclass(frozen=True, slots=True)
class Part:
    """A file in a window, or as much of it as fits."""

    domain: str
    ids: list[int]


Window = list[Part]


def length_of(window: Window) -> int:
    return sum(len(part.ids) for part in window)


@dataclass(frozen=True)
class Lessons(run.Lessons):
    """Windows of code."""

    num_bytes: dict[str, int]  # predicted bytes of the validation windows, by domain

    def samples(self, step: int, counts: Counter[str]) -> list[Sample]:
        for part in (part for window in self.batch(step) for part in window):
            counts[f"tokens/{part.domain}"] += len(part.ids)
        return [sample_of(window) for window in self.batch(step)]

    def validated(self, trainer: Trainer) -> dict[str, float]:
        """The loss of each domain, in nats per token and in bits per byte, which compares tokenizers."""
        row, nats, tokens = {}, 0.0, 0
        for domain, size in self.num_bytes.items():
            samples = [sample_of(window, domain) for window in self.held_out]
            samples = [one for one in samples if any(one.ce_weight)]
            count = sum(sum(map(bool, one.ce_weight)) for one in samples)
            if not count:
                continue
            loss = imitation_loss(trainer.student, samples, trainer.settings.micro_tokens)
            row[f"validation/loss/{domain}"] = loss
            row[f"validation/bits_per_byte/{domain}"] = loss * count / math.log(2) / size
            nats, tokens = nats + loss * count, tokens + count
        return {"validation/loss": nats / tokens, **row} if tokens else {}

    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for window in (*self.learned, *self.held_out):
            for part in window:
                digest.update(part.domain.encode() + array("q", part.ids).tobytes())
        return digest.hexdigest()


def sample_of(window: Window, domain: str = "") -> Sample:
    """Cross-entropy on all of it, or on one domain; but on the first token, which nothing predicts."""
    ids = [token for part in window for token in part.ids]
    weights = [float(part.domain == domain or not domain) for part in window for _ in part.ids]
    return Sample(ids, ce_weight=[0.0, *weights[1:]])


def make_lessons(config: Config, start: Path, progress: Progress, tell: Tell) -> Lessons:
    settings = config.pretrain
    tasks = [task for suite in settings.guard for task in tasks_at(suite, config, progress)]
    sought, origins = (Sought(tasks), frozenset(task.origin for task in tasks)) if tasks else (None, frozenset())
    corpus = Corpus(settings, sought, origins)
    repositories = list(corpus.repositories(config.seed, progress))
    for line in corpus.about_held_out():
        tell(line)
    left = "".join(f"; {count} {what} left out" for what, count in sorted(corpus.left_out.items()))
    if not repositories:
        raise OffbookError(f"nothing is left to pretrain on{left}")
    writer = Writer(AutoTokenizer.from_pretrained(chat_folder(start), trust_remote_code=False), settings, config.seed)
    learned, held_out = (
        [window for one in side for window in writer.windows(one)]
        for side in split(repositories, lambda one: one.name, settings.validation_share, config.seed)
    )
    lengths = list(map(length_of, learned))
    batches = batches_of_epochs(lengths, settings, config.seed)
    files = sum(len(one.files) for one in repositories)
    tell(f"{len(repositories)} repositories, {files} files{left}")
    tell(f"{len(learned)} windows of {sum(lengths)} tokens, {len(held_out)} windows for validation")
    num_bytes = Counter[str]()
    for window in held_out:
        for number, part in enumerate(window):
            predicted = part.ids if number else part.ids[1:]  # nothing predicts the first token of a window
            num_bytes[part.domain] += len(writer.tokenizer.decode(predicted).encode())
    read = {
        "repositories": len(repositories),
        "files": files,
        "licences": dict(Counter(one.licence or "no licence" for one in repositories)),
        "held_out": corpus.held_out,
        "left_out": dict(sorted(corpus.left_out.items())),
    }
    return Lessons(learned, held_out, batches, read, dict(sorted(num_bytes.items())))


@dataclass(frozen=True)
class Writer:
    """Splits repositories into windows of token ids; deterministic for a seed."""

    tokenizer: Any
    settings: PretrainConfig
    seed: int
    fim_share: float = FIM_SHARE

    def windows(self, repository: Repository) -> list[Window]:
        windows: list[Window] = [[]]
        for file in repository.files:
            rng = random.Random(f"{self.seed} {repository.name} {file.path}")
            header = self._encoded(f"# {file.path}\n")
            text = file.text.rstrip()
            rotated: list[int] = []
            if file.domain not in WORDS and rng.random() < self.fim_share:
                rotated = [*header, *self._rotated(text, rng)]
            if rotated and len(rotated) <= self.settings.context:  # in one window
                if len(rotated) > self._room(windows):
                    windows.append([])
                windows[-1].append(Part(file.domain, rotated))
            elif text:
                self._write(windows, file.domain, header, text)
        return [window for window in windows if window]

    def _write(self, windows: list[Window], domain: str, header: list[int], text: str) -> None:
        left = self._encoded(text + "\n\n")
        while left and len(header) < self.settings.context:
            if self._room(windows) <= len(header):  # not even a token of the file would fit
                windows.append([])
            taken = [*header, *left][: self._room(windows)]
            left = left[len(taken) - len(header) :]
            windows[-1].append(Part(domain, taken))

    def _rotated(self, text: str, rng: random.Random) -> list[int]:
        """Prefix, suffix, middle."""
        first, second = sorted(rng.randrange(len(text) + 1) for _ in range(2))
        parts = (text[:first], text[second:], text[first:second] + "\n\n")
        return [token for mark, part in zip(self._marks, parts, strict=True) for token in (*mark, *self._encoded(part))]

    def _room(self, windows: list[Window]) -> int:
        return self.settings.context - length_of(windows[-1])

    @cached_property
    def _marks(self) -> list[list[int]]:
        """The tokenizer's own FIM tokens; without any, the first marks spelled out."""
        known = self.tokenizer.get_vocab()
        marks = next((marks for marks in FIM_MARKS if marks[0] in known), FIM_MARKS[0])
        return [[known[mark]] if mark in known else self._encoded(mark) for mark in marks]

    def _encoded(self, text: str) -> list[int]:
        """Tokenize; control tokens in the text become ordinary characters."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        return ids
