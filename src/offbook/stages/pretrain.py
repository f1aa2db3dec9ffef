"""Continued pretraining on code, in windows that hold files of one repository.

A window is one row: files after their paths, imported files first, so attention crosses files and never repositories.
A file that does not fit continues in the next window after its path. Some files are written for fill-in-the-middle
(2207.14255): prefix, suffix, middle in one window; longer ones in pieces.

Left out: an end-of-text token between repositories, which ends messages in chat models; corpora that do not fit into
memory as token ids.
"""

from __future__ import annotations

import hashlib
import logging
import math
import random
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from offbook.core.config import Config, PretrainConfig
from offbook.core.runfolder import RunFolder
from offbook.rl.models import Progress, chat_folder, positions, quiet
from offbook.rl.tasks import tasks_at
from offbook.stages.conversations import batches_of_epochs, split
from offbook.stages.corpus import Corpus, Repository, refuse_missing_sources
from offbook.stages.extend import extended
from offbook.stages.run import OnStep, Stage, Tell, run_stage
from offbook.tasks.contamination import Sought
from offbook.train.trainer import Trainer
from offbook.train.validation import imitation_loss
from offbook.types import OffbookError, Sample

FIM_MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
)  # of tokenizers that have them; the first are spelled out in those that have none
WORDS = ("docs", "settings")  # domains of which nothing is filled in
FIM_SHARE = 0.3  # share of code files that are written to fill in the middle
SHORTEST_PIECE = 200  # characters, of which something is filled in; the end of a file may have fewer
MOST_CHARACTERS = 8  # a token, where a piece is looked for that fits
NOTHING_LONGER = (
    "no window teaches longer contexts: pretrain.context is {context} and the longest window, which has files of one "
    "repository, has {longest} tokens, of {known} that the model reads already; give larger repositories, or a smaller "
    "pretrain.context"
)
log = logging.getLogger(__name__)


def pretrain(
    config: Config,
    on_step: OnStep = lambda row: None,
    progress: Progress = quiet,
    tell: Tell = lambda line: None,
) -> RunFolder:
    """Run or resume the pretraining that `config` describes. Returns when its last step is in a checkpoint."""
    settings = config.pretrain

    def prepare(config: Config, start: Path) -> tuple[Path, Lessons]:
        known = positions(chat_folder(start))
        start = extended(start, Path(config.out) / "start", settings.context, settings.rope, tell)
        lessons = make_lessons(config, start, progress, tell)
        longest = max(map(length_of, lessons.learned))
        if longest <= known < settings.context:
            line = NOTHING_LONGER.format(context=settings.context, longest=longest, known=known)
            tell(line)
            log.warning("%s", line)
        return start, lessons

    stage = Stage(
        "pretrain", "pretrain", settings, lambda config: refuse_missing_sources(settings), prepare, settings.context
    )
    return run_stage(stage, config, on_step, progress, tell)


@dataclass(frozen=True, slots=True)
class Part:
    """A file in a window, or as much of it as fits."""

    domain: str
    ids: list[int]


Window = list[Part]


def length_of(window: Window) -> int:
    return sum(len(part.ids) for part in window)


@dataclass(frozen=True, slots=True)
class Lessons:
    learned: list[Window]
    held_out: list[Window]  # validation
    batches: list[tuple[int, list[int]]]  # the epoch, and numbers of windows
    num_bytes: dict[str, int]  # predicted bytes of the validation windows, by domain
    read: dict[str, Any]

    @property
    def num_steps(self) -> int:
        return len(self.batches)

    def samples(self, step: int, counts: Counter[str]) -> list[Sample]:
        _, numbers = self.batches[step - 1]
        windows = [self.learned[number] for number in numbers]
        for part in (part for window in windows for part in window):
            counts[f"tokens/{part.domain}"] += len(part.ids)
        return [sample_of(window) for window in windows]

    def metrics(self, step: int) -> dict[str, Any]:
        epoch, numbers = self.batches[step - 1]
        return {"epoch": epoch, "windows": len(numbers)}

    def validated(self, trainer: Trainer) -> dict[str, float]:
        """The loss of each domain, in nats per token and in bits per byte, which compares tokenizers."""
        row, nats, tokens = {}, 0.0, 0
        for domain, size in self.num_bytes.items():
            samples = [sample_of(window, domain) for window in self.held_out]
            samples = [one for one in samples if any(one.ce_weight)]
            count = sum(sum(map(bool, one.ce_weight)) for one in samples)
            if not count:
                continue
            loss = imitation_loss(trainer, samples)
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
    tell(f"{len(repositories)} repositories, {sum(len(one.files) for one in repositories)} files{left}")
    by_domain = Counter[str]()
    for part in (part for window in learned for part in window):
        by_domain[part.domain] += len(part.ids)
    told = ", ".join(f"{domain} {count}" for domain, count in by_domain.most_common())
    tell(f"{len(learned)} windows of {sum(lengths)} tokens ({told}), {len(held_out)} windows for validation")
    num_bytes = Counter[str]()
    for window in held_out:
        for number, part in enumerate(window):
            predicted = part.ids if number else part.ids[1:]  # nothing predicts the first token of a window
            num_bytes[part.domain] += len(writer.tokenizer.decode(predicted).encode())
    return Lessons(learned, held_out, batches, dict(sorted(num_bytes.items())), _read(repositories, corpus))


def _read(repositories: Sequence[Repository], corpus: Corpus) -> dict[str, Any]:
    return {
        "repositories": len(repositories),
        "files": sum(len(one.files) for one in repositories),
        "licences": dict(Counter(one.licence or "no licence" for one in repositories)),
        "held_out": corpus.held_out,
        "left_out": dict(sorted(corpus.left_out.items())),
    }


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
            left, header = file.text.rstrip(), self._encoded(f"# {file.path}\n")
            if file.domain not in WORDS and rng.random() < self.fim_share:
                left = self._write_rotated(windows, file.domain, header, left, rng)
            if left:
                self._write(windows, file.domain, header, left)
        return [window for window in windows if window]

    def _write(self, windows: list[Window], domain: str, header: list[int], text: str) -> None:
        left = self._encoded(text + "\n\n")
        while left:
            if self._room(windows) <= len(header):  # not even a token of the file would fit
                windows.append([])
            taken = [*header, *left][: self._room(windows)]
            left = left[len(taken) - len(header) :]
            windows[-1].append(Part(domain, taken))
            if len(header) >= self.settings.context:
                break

    def _write_rotated(
        self, windows: list[Window], domain: str, header: list[int], left: str, rng: random.Random
    ) -> str:
        """Write fill-in-the-middle pieces, each in one window. Returns the rest, for which no window has room."""
        while left:
            ids, size = self._piece(left, self._room(windows) - len(header), rng)
            if size >= min(len(left), SHORTEST_PIECE):
                windows[-1].append(Part(domain, [*header, *ids]))
                left = left[size:]
            elif windows[-1]:
                windows.append([])
            else:
                return left
        return ""

    def _piece(self, text: str, room: int, rng: random.Random) -> tuple[list[int], int]:
        """Token ids of the longest prefix-suffix-middle piece that fits, and its characters."""
        size = min(len(text), MOST_CHARACTERS * room)
        while size > 0:
            first, second = sorted(rng.randrange(size + 1) for _ in range(2))
            parts = text[:first], text[second:size], text[first:second]
            marked = zip(self._marks, (*parts[:2], parts[2] + "\n\n"), strict=True)
            ids = [token for mark, part in marked for token in (*mark, *self._encoded(part))]
            if len(ids) <= room:
                return ids, size
            size = size * room // len(ids) - 1
        return [], 0

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
