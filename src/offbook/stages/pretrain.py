"""Continued pretraining on code, in windows that hold files of one repository.

A window is one row: files after their paths, so attention crosses files and never repositories.
A file that does not fit continues in the next window after its path.

A longer context than the model's is YaRN (2309.00071), written into its config.json, as transformers and vLLM load it:
slow rotations are interpolated, fast ones are left alone, logits are scaled.

Left out: an end-of-text token between repositories, which ends messages in chat models; fill-in-the-middle; corpora
that do not fit into memory as token ids.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from array import array
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig

from offbook.core.config import Config
from offbook.core.runfolder import RunFolder, is_adapter, whole_folder
from offbook.rl.models import Progress, chat_folder, quiet
from offbook.rl.tasks import tasks_at
from offbook.stages.conversations import batches_of_epochs, split
from offbook.stages.corpus import Corpus, Repository, refuse_missing_sources
from offbook.stages.run import Lessons, OnStep, Stage, Tell, run_stage
from offbook.tasks.contamination import Sought
from offbook.types import OffbookError, Sample

PLAIN = "default"  # transformers' name for unscaled RoPE
Window = list[int]
Encode = Callable[[str], list[int]]


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
        return start, make_lessons(config, start, progress, tell)

    refuse_missing_sources(settings)
    stage = Stage("pretrain", "pretrain", "windows", settings, prepare, settings.context)
    return run_stage(stage, config, on_step, progress, tell)


def sample_of(window: Window) -> Sample:
    """Cross-entropy on all of it but the first token, which nothing predicts."""
    return Sample(window, ce_weight=[0.0, *[1.0] * (len(window) - 1)])


def make_lessons(config: Config, start: Path, progress: Progress, tell: Tell) -> Lessons:
    settings = config.pretrain
    tasks = [task for suite in settings.guard for task in tasks_at(suite, config, progress)]
    corpus = Corpus(settings, Sought(tasks) if tasks else None, frozenset(task.origin for task in tasks))
    repositories = list(corpus.repositories(config.seed, progress))
    for line in corpus.about_held_out():
        tell(line)
    left = "".join(f"; {count} {what} left out" for what, count in sorted(corpus.left_out.items()))
    if not repositories:
        raise OffbookError(f"nothing is left to pretrain on{left}")
    encode = encoder(AutoTokenizer.from_pretrained(chat_folder(start), trust_remote_code=False))
    sides = split(repositories, lambda one: one.name, settings.validation_share, config.seed)
    learned, held_out = (
        [window for one in side for window in windows_of(one, encode, settings.context)] for side in sides
    )
    lengths = list(map(len, learned))
    files = sum(len(one.files) for one in repositories)
    tell(f"{len(repositories)} repositories, {files} files{left}")
    tell(f"{len(learned)} windows of {sum(lengths)} tokens, {len(held_out)} windows for validation")
    tell(f"the longest window has {max(lengths)} of {settings.context} tokens")
    digest = hashlib.sha256()
    for window in (*learned, *held_out):
        digest.update(array("q", window).tobytes() + b"/")
    return Lessons(
        learned=learned,
        held_out=held_out,
        batches=batches_of_epochs(lengths, settings, config.seed),
        samples=lambda epoch, windows, counts: list(map(sample_of, windows)),
        validation=list(map(sample_of, held_out)),
        read={
            "repositories": len(repositories),
            "files": files,
            "licences": dict(Counter(one.licence or "no licence" for one in repositories)),
            "held_out": corpus.held_out,
            "left_out": dict(sorted(corpus.left_out.items())),
        },
        fingerprint=digest.hexdigest(),
    )


def encoder(tokenizer: Any) -> Encode:
    """Tokenize; control tokens in the text become ordinary characters."""
    return lambda text: tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]


def windows_of(repository: Repository, encode: Encode, context: int) -> list[Window]:
    windows: list[Window] = [[]]
    for file in repository.files:
        header = encode(f"# {file.path}\n")
        left = encode(file.text.rstrip() + "\n\n")
        while left and len(header) < context:
            if len(windows[-1]) + len(header) >= context:  # not even a token of the file would fit
                windows.append([])
            room = context - len(windows[-1]) - len(header)
            windows[-1] += header + left[:room]
            left = left[room:]
    return [window for window in windows if window]


def extended(start: Path, folder: Path, context: int, rope: str, tell: Tell) -> Path:
    """The model's folder, or a new one with the same weights and a context of `context` tokens."""
    config = AutoConfig.from_pretrained(chat_folder(start), trust_remote_code=False)
    known = config.get_text_config().max_position_embeddings
    if context <= known:
        return start
    if not rope:
        raise OffbookError(
            f"pretrain.context is {context} and the model reads {known} tokens; give a shorter one, or --pretrain.rope "
            "yarn"
        )
    if is_adapter(start):
        raise OffbookError(f"{start} is an adapter, and positions are its base's; first: offbook export --merged")
    if not folder.is_dir():
        stretch(config.get_text_config(), context)
        with whole_folder(folder) as part:
            for file in start.iterdir():
                if file.suffix == ".safetensors":
                    os.symlink(file.resolve(), part / file.name)
                elif file.is_file() and file.name != "DONE":
                    shutil.copyfile(file, part / file.name)
            config.save_pretrained(part)
    tell(f"positions are stretched by {rope} from {known} to {context}")
    return folder


def stretch(config: PreTrainedConfig, context: int) -> None:
    known = config.max_position_embeddings
    old = dict(config.rope_parameters or {})
    if old.get("rope_type", PLAIN) != PLAIN:
        raise OffbookError(f"its positions are stretched already ({old['rope_type']}); start from what it was before")
    scaling = {"rope_type": "yarn", "factor": context / known, "original_max_position_embeddings": known}
    config.rope_parameters = {**old, **scaling}
    config.max_position_embeddings = context
