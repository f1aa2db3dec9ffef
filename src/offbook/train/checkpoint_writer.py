"""Checkpoints of a run: when they are due, and writing them beside training.

A snapshot is copied to the host, and a thread writes it while the next steps run; of a model that lies over ranks each
copies and writes its share. One is written at a time; when the next is due before the last is on disk, training waits
for it. What fails in a thread is raised where training next looks. A process that is killed leaves the last one that
was finished.
"""

from __future__ import annotations

import functools
import math
import os
import shutil
import time
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch.distributed as dist

from offbook.core import processes
from offbook.core.config import CheckpointConfig
from offbook.train.checkpoint import Contents, checkpoint_path, is_there, remove_old
from offbook.train.memory import free_host_memory
from offbook.train.parallel.ranks import PATIENCE
from offbook.train.trainer import Trainer
from offbook.types import OffbookError

SMALL = 1e9  # bytes of a checkpoint that is written after every step
SPARSE_MINUTES = 30.0  # between larger ones
HOST_SHARE = 0.8  # of the free memory, that a snapshot may take
SEEN_S = 90.0  # until what another host wrote is seen here: NFS looks again after 60 s

DEFAULTS = CheckpointConfig()


class Checkpoints:
    """A write of which no byte comes for `deadline_s` is waited for no longer."""

    def __init__(
        self,
        trainer: Trainer,
        root: Path,
        tokenizer_from: Path,
        settings: CheckpointConfig = DEFAULTS,
        deadline_s: float = math.inf,
    ):
        self.trainer, self.root, self.tokenizer_from = trainer, root, tokenizer_from
        self.keep, self.every, self.minutes = settings.keep, settings.every, settings.minutes
        self.size, self.deadline_s = checkpoint_size(trainer), deadline_s
        if not (self.every or self.minutes):
            self.every, self.minutes = (1, 0.0) if self.size < SMALL else (0, SPARSE_MINUTES)
        self.last = 0  # step that was saved here
        self._since = time.monotonic()
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
        path = checkpoint_path(self.root, step)
        shutil.rmtree(path, ignore_errors=True)  # before any rank writes
        self._writing = self.trainer.together(begin, path, step, self.tokenizer_from, self.keep)
        self.last, self._since = step, time.monotonic()
        self.check()

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
        what = f"the checkpoint of step {self.last} to be written"
        watchdog = processes.Watchdog(lambda: what, self.deadline_s, self.written, "checkpoint")
        while futures.wait([writing], processes.TELL_S).not_done:
            watchdog.look()
        writing.result()
        return time.monotonic() - started

    def written(self) -> int:
        """Bytes that are in files now: a sign of life."""
        size = 0
        for folder, _, names in os.walk(self.root):
            for name in names:
                with suppress(OSError):  # old ones go
                    size += os.stat(os.path.join(folder, name)).st_size
        return size

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """What is being written is finished, also when training has failed; then that is the error that is told."""
        try:
            self.wait()
        except Exception:
            if error is None:
                raise


def begin(trainer: Trainer, path: Path, step: int, tokenizer_from: Path, keep: int) -> Future[None]:
    """Writes a rank's share beside what follows. Rank 0's is done when all are and the checkpoint is finished."""
    contents = Contents.of(trainer, step, tokenizer_from)
    buffers, is_alone = trainer.snapshot, trainer.ranks.mesh is None
    new = sum(tensor.nbytes for name, tensor in contents.all_tensors() if name not in buffers) if is_alone else 0
    fits = new <= HOST_SHARE * free_host_memory()
    if fits:
        contents = contents.on_host(buffers) if is_alone else contents.gathered_share(buffers)
    thread = ThreadPoolExecutor(1, "checkpoint")
    writing = thread.submit(_write, contents, path, keep, None if is_alone else _group())
    thread.shutdown(wait=not fits)
    return writing


def _write(contents: Contents, path: Path, keep: int, group: Any) -> None:
    if group is None:
        contents.write(path)
    elif not _written_by_all(contents, path, group):
        return
    contents.finish(path)
    remove_old(path.parent, keep)


def _written_by_all(contents: Contents, path: Path, group: Any) -> bool:
    """Whether this is the rank that finishes it. A fault of any rank is raised there."""
    problem, rank = "", dist.get_rank()
    written: dict[str, set[str]] = {}
    try:
        written = contents.write(path)
    except Exception as error:  # whatever it is, the others have to know
        problem = str(error) if isinstance(error, OffbookError) else f"{type(error).__name__}: {error}"
    told: list[tuple[str, dict[str, set[str]]]] = [(problem, written)] * dist.get_world_size()
    dist.gather_object((problem, written), told if rank == 0 else None, group=group)
    if rank:
        return False
    for problem, _ in told:
        if problem:
            raise OffbookError(problem)
    _refuse_unseen(path, [files for _, files in told])
    return True


def _refuse_unseen(path: Path, told: list[dict[str, set[str]]]) -> None:
    """A rank that has a folder of its own by this name wrote there, and what is here is not all."""
    end = time.monotonic() + SEEN_S
    for rank, files in enumerate(told):
        for file, names in files.items():
            while not is_there(path / file, names):
                if time.monotonic() >= end:
                    raise OffbookError(
                        f"rank {rank} wrote {file} of the checkpoint {path}, which rank 0 does not see there: put the "
                        "run's folder where all ranks see it; checkpoints from before are kept"
                    )
                time.sleep(1.0)


@functools.cache
def _group() -> Any:
    """Of its own: what is said while a checkpoint is written must not meet what training says."""
    return dist.new_group(backend="gloo", timeout=PATIENCE)


def checkpoint_size(trainer: Trainer) -> int:
    """Bytes, about: what is trained, its optimizer state (8 bytes; 4 more for a float32 copy of bfloat16 weights) and
    the teachers that move."""
    trained = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
    weights = sum(parameter.nbytes for parameter in trained)
    state = sum(parameter.numel() * (12 if parameter.element_size() == 2 else 8) for parameter in trained)
    moving = sum(own.kind.moves for own in trainer.own_weights().values())
    return weights * (1 + moving) + state
