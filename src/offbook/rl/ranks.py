"""The ranks of a run that torchrun has started: rank 0 is the run, the others hold parts of its trainer."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tokenizers import Tokenizer

from offbook.core.config import Config, TrainConfig
from offbook.rl.models import Progress, chat_folder, load_model, load_weights, model_folder, model_to_train
from offbook.rl.train_step import teachers_of
from offbook.train.algorithms import OTHER
from offbook.train.checkpoint import load_training_state
from offbook.train.forward import Kind, Other
from offbook.train.parallel.spmd import (
    RankLost,
    Share,
    SpmdTrainer,
    receive_call,
    refuse_uneven,
    run_on_all,
    share_of,
)
from offbook.train.trainer import PATIENCE, Trainer
from offbook.types import OffbookError

HOST = "cpu"  # where a model is loaded that ranks share: each takes its parts of one layer after the other from there


@contextmanager
def grouped() -> Iterator[None]:
    """The processes that torchrun has started, as a group. It can be made once a process: several runs have it around
    all of them."""
    if dist.is_initialized() or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    failed: list[int] = []
    atexit.register(_leave, failed)  # so early that it comes last
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    try:
        yield
    except BaseException:
        failed.append(1)
        raise
    dist.destroy_process_group()


def _leave(failed: list[int]) -> None:
    """The end of a process that failed, once it has said why and closed what it had. Its group would wait for others,
    and they wait for the connections that end with it."""
    if failed:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


@contextmanager
def joined() -> Iterator[Any]:
    """The group that rank 0 tells others by, or None where this process is alone."""
    with grouped():
        if not dist.is_initialized():
            yield None
            return
        orders = dist.new_group(backend="gloo", timeout=PATIENCE)
        try:
            yield orders
        except (OffbookError, ValueError, KeyboardInterrupt) as error:
            if isinstance(error, RankLost):
                raise
            with suppress(RuntimeError):  # a rank that has ended does not hear it, and why is in what was raised
                _dismiss(orders)
            raise
        _dismiss(orders)


def _dismiss(orders: Any) -> None:
    if dist.get_rank() == 0:
        dist.broadcast_object_list([None], 0, orders)


def follows(orders: Any) -> bool:
    """Whether another rank is the run."""
    return dist.get_rank() > 0


def share_in(settings: TrainConfig) -> Share:
    """This rank's share of parameters, experts and rows. Refuses ranks that cannot be divided."""
    refuse_uneven(settings.mesh, dist.get_world_size())
    return share_of(settings.mesh, dist.get_world_size())


def make_trainer(config: Config, trained: Any, start: Path, progress: Progress, orders: Any) -> Trainer:
    """Of rank 0; the others make theirs from what rank 0 broadcasts."""
    other = model_folder(config.teachers.model, config.seed, progress) if config.teachers.opd else None
    if other is not None:
        refuse_other_tokenizer(start, other)
    if orders is None:
        return Trainer(trained, config.train, _teachers(config, other))
    dist.broadcast_object_list([(config, start, other)], 0, orders)
    return run_on_all(lambda: SpmdTrainer(trained, config.train, _teachers(config, other, HOST), orders))


def follow(orders: Any) -> None:
    setup = receive_call(orders)
    if setup is None:  # it was over before it began
        return
    config, start, other = setup
    torch.set_num_threads(config.threads)

    def make() -> SpmdTrainer:
        trained = model_to_train(config, start, HOST)
        return SpmdTrainer(trained, config.train, _teachers(config, other, HOST), orders)

    try:
        trainer = run_on_all(make)
    except (OffbookError, ValueError):  # rank 0 has it, too, and tells of it
        receive_call(orders)
        return
    trainer.follow()


def go_on(trainer: Trainer, checkpoint: Path) -> None:
    """From what a checkpoint holds. All ranks have to call it."""
    load_weights(trainer.model, checkpoint, trainer.base)
    load_training_state(trainer, checkpoint)


def refuse_other_tokenizer(student: Path, teacher: Path) -> None:
    """Each entry of the student's vocabulary has to be the teacher's, too."""
    files = [chat_folder(model) / "tokenizer.json" for model in (student, teacher)]
    missing = [path.parent for path in files if not path.is_file()]
    if missing:
        raise OffbookError(f"{missing[0]} has no tokenizer.json, so student and teacher cannot be compared")
    own, its = (Tokenizer.from_file(str(path)).get_vocab() for path in files)
    if unlike := sum(its.get(entry) != number for entry, number in own.items()):
        problem = f"of the student's {len(own)} tokens {unlike} are others to its teacher {teacher}"
        raise OffbookError(f"{problem}: they are compared entry by entry, so take a teacher of the same family")


def _teachers(config: Config, other: Path | None, device: str = "") -> dict[str, Kind]:
    """`other` is a teacher that is another model."""
    teachers = teachers_of(config.feedback, config.teachers, config.train.reference_kl > 0)
    return {**teachers, OTHER: Other(load_model(other, config.train.precision, device))} if other else teachers
