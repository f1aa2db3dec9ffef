"""Checkpoints of a run: when they are due, and writing them beside training.

A snapshot is copied to the host, and a thread writes it while the next steps run. One is written at a time; when the
next is due before the last is on disk, training waits for it. What fails in the thread is raised where training next
looks. A process that is killed leaves the last one that was finished.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

from torch import Tensor

from offbook.config import CheckpointConfig
from offbook.train.checkpoint import Contents, checkpoint_path, remove_old
from offbook.train.memory import free_host_memory
from offbook.train.trainer import Trainer

SMALL = 1e9  # bytes of a checkpoint that is written after every step
SPARSE_MINUTES = 30.0  # between larger ones
HOST_SHARE = 0.8  # of the free memory, that a snapshot may take

DEFAULTS = CheckpointConfig()


class Checkpoints:
    def __init__(self, trainer: Trainer, root: Path, tokenizer_from: Path, settings: CheckpointConfig = DEFAULTS):
        self.trainer, self.root, self.tokenizer_from = trainer, root, tokenizer_from
        self.keep, self.every, self.minutes = settings.keep, settings.every, settings.minutes
        self.size = checkpoint_size(trainer)
        if not (self.every or self.minutes):
            self.every, self.minutes = (1, 0.0) if self.size < SMALL else (0, SPARSE_MINUTES)
        self.last = 0  # step that was saved here
        self._since = time.monotonic()
        self._buffers: dict[str, Tensor] = {}
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[None] | None = None

    def __str__(self) -> str:
        ways = [f"every {self.every} steps" if self.every > 1 else "every step"] if self.every else []
        ways += [f"every {self.minutes:g} minutes"] if self.minutes else []
        size = f"{self.size / 1e9:.1f} GB" if self.size >= SMALL else f"{self.size / 1e6:.0f} MB"
        return f"checkpoints of {size}: {', '.join(ways)}, and at the end"

    def is_due(self, step: int) -> bool:
        minutes = (time.monotonic() - self._since) / 60
        return bool(self.every and step % self.every == 0) or bool(self.minutes and minutes >= self.minutes)

    def save(self, step: int) -> None:
        """What the trainer holds now, after `step`. It may go on at once, unless the host has no room for a copy."""
        self.wait()
        contents = self.trainer.together(Contents.of, step, self.tokenizer_from)
        new = sum(tensor.nbytes for name, tensor in contents.all_tensors() if name not in self._buffers)
        fits = new <= HOST_SHARE * free_host_memory()
        self._writing = self._thread.submit(self._write, contents.on_host(self._buffers) if fits else contents, step)
        self.last, self._since = step, time.monotonic()
        if not fits:
            self.wait()

    def _write(self, contents: Contents, step: int) -> None:
        contents.write(checkpoint_path(self.root, step))
        remove_old(self.root, self.keep)

    def check(self) -> None:
        """Raises what ended the thread's last write, if it has ended with an error."""
        if self._writing is not None and self._writing.done():
            self.wait()

    def wait(self) -> float:
        """For the write that is under way, with its error. Says how many seconds that took."""
        writing, self._writing = self._writing, None
        if writing is None or (writing.done() and not writing.exception()):
            return 0.0
        started = time.monotonic()
        writing.result()
        return time.monotonic() - started

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """What is being written is finished, also when training has failed; then that is the error that is told."""
        try:
            self.wait()
        except Exception:
            if error is None:
                raise
        finally:
            self._thread.shutdown()


def checkpoint_size(trainer: Trainer) -> int:
    """Bytes, about: what is trained, its optimizer state (8 bytes; 4 more for a float32 copy of bfloat16 weights) and
    the teachers that move."""
    trained = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
    weights = sum(parameter.nbytes for parameter in trained)
    state = sum(parameter.numel() * (12 if parameter.element_size() == 2 else 8) for parameter in trained)
    moving = sum(own.kind.moves for own in trainer.own_weights().values())
    return weights * (1 + moving) + state
