"""A run on many ranks: rank 0 is the run, and the others hold their parts of the weights and do what it tells them.

Rollouts, rewards, annotation and files are rank 0's. What all ranks have to take part in is a function of the trainer:
rank 0 tells it to the others, with its arguments, and all of them call it. Samples are told whole; every rank deals
them alike and takes its own. Whoever calls a trainer, or reads with one of its decoders, does not see that it is led.

After each order ranks tell one another whether it went well. What all of them raise is rank 0's to deal with; where one
failed alone, its part of the state is not that of the others any more, and the run ends. Others may wait for it in the
middle of a collective and not answer: then it leaves word in the store that the group was made by, and ends; with it
end the connections that they wait at, and they say which rank it was. NCCL does not see that: torchrun ends them.

Left out: each rank loads the whole model, on the host, before it is cut.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from functools import cache, partial
from itertools import count
from math import gcd
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from offbook.core.config import RanksConfig, TrainConfig
from offbook.core.routers import routers_of
from offbook.core.weights import Weights
from offbook.train.forward import Decoder
from offbook.train.memory import Share
from offbook.train.parallel.context import Context
from offbook.train.parallel.dense import make_mesh
from offbook.train.parallel.experts import make_expert_mesh, refuse_undealt
from offbook.train.parallel.ranks import Ranks
from offbook.train.teachers import Kind
from offbook.train.trainer import StepResult, Trainer
from offbook.types import OffbookError, Sample

ANSWER_S = 10.0  # that other ranks have, where one failed, to be done with the same order
T = TypeVar("T")
GO_ON = "started again, it goes on from its last checkpoint"
_numbers = count()  # of orders, alike on all ranks
log = logging.getLogger(__name__)


class Parted(OffbookError):
    """Ranks that did not do the same. Nothing can be done together any more."""


class Gone(Parted):
    """A rank failed where others waited for it: none of them can be led any more."""


def ranks_of(settings: RanksConfig) -> Ranks:
    """Of the process group that there is."""
    world, device = dist.get_world_size(), "cuda" if torch.cuda.is_available() else "cpu"
    refuse_uneven(settings, world)
    mesh = make_mesh(settings.replicate, world // settings.replicate, device)
    experts = make_expert_mesh(*expert_shape(world, settings), device) if settings.experts > 1 else None
    return Ranks(mesh, experts, Context(settings.context, device) if settings.context > 1 else None)


def refuse_uneven(settings: RanksConfig, world: int) -> None:
    for name, size in settings.model_dump().items():
        if world % size:
            raise OffbookError(f"train.ranks.{name} is {size}, which {world} ranks cannot be divided by")
    expert_shape(world, settings)


def expert_shape(world: int, settings: RanksConfig) -> tuple[int, int, int]:
    """Replicas, shards and ranks that experts are dealt out to. There are as many replicas as of the dense weights, as
    `offbook plan` draws them (loop/layout.py), or fewer where experts are dealt out over several of those."""
    groups = world // settings.experts
    replicate = gcd(settings.replicate, groups)
    return replicate, groups // replicate, settings.experts


def share_of(settings: RanksConfig, world: int) -> Share:
    """That each rank has of what is trained."""
    shards = world // settings.replicate
    _, expert_shards, dealt_to = expert_shape(world, settings) if settings.experts > 1 else (1, shards, 1)
    return Share(shards, expert_shards * dealt_to, dealt_to, settings.context)


class LedTrainer(Trainer):
    """The same on every rank. Rank 0 calls what a Trainer has; the others `follow`."""

    def __init__(self, model: PreTrainedModel, settings: TrainConfig, teachers: Mapping[str, Kind], orders: Any):
        """`orders` is the group that rank 0 tells others by."""
        self.orders = orders
        self.parted: Parted | None = None
        if settings.ranks.experts > 1 and not routers_of(model):
            refuse_undealt(0, settings.ranks.experts)
        super().__init__(model, settings, teachers, ranks_of(settings.ranks))
        for name, decoder in self.decoders().items():
            if dist.get_rank() == 0:
                decoder.together = partial(self.together, read, name)

    def decoders(self) -> dict[str, Decoder]:
        """The student, without a name, and the teachers that have weights of their own."""
        return {"": self.student, **{name: own.decoder for name, own in self.own_weights().items()}}

    def together(self, work: Callable[..., T], *arguments: Any) -> T:
        if self.parted is not None:
            raise self.parted
        dist.broadcast_object_list([(work, arguments)], 0, self.orders)
        try:
            return done_by_all(partial(work, self, *arguments), ANSWER_S)
        except Parted as problem:
            self.parted = problem
            raise

    def step(self, samples: list[Sample], lr_scale: float = 1.0) -> StepResult:
        return self.together(step_of_all, samples, lr_scale)

    def publish(self, version: int) -> Weights:
        return self.together(Trainer.publish, version)

    def follow(self) -> None:
        """Until rank 0 dismisses this one, also after a fault: rank 0 knows of it and what to do."""
        while (order := told_by(self.orders)) is not None:
            work, arguments = order
            try:
                done_by_all(partial(work, self, *arguments), ANSWER_S)
            except Gone:
                raise
            except (OffbookError, ValueError):
                continue


def told_by(orders: Any) -> Any:
    """What rank 0 tells others. It may be gone, which is no fault of theirs."""
    told: list[Any] = [None]
    try:
        dist.broadcast_object_list(told, 0, orders)
    except RuntimeError as error:
        raise Gone(f"rank 0, which is the run, has ended; {GO_ON}") from error
    return told[0]


def done_by_all(work: Callable[[], T], answer_s: float | None = None) -> T:
    """All ranks have to call it. What all of them raise is raised; where some do it is `Parted`, on each of them. What
    is neither OffbookError nor ValueError ends the rank at once, and so the run; so does a fault that others do not
    answer to within `answer_s`."""
    problem: Exception | None = None
    word = f"offbook/failed/{next(_numbers)}"
    group, failed = _answers(), torch.tensor([0])  # made before anything can fail: all ranks have to
    try:
        try:
            done = work()
        except (OffbookError, ValueError) as error:
            problem, failed = error, torch.tensor([1])
            log.warning("rank %d failed and asks the others: %s", dist.get_rank(), error)
        answers = dist.all_reduce(failed, group=group, async_op=True)
        answers.wait(*([timedelta(seconds=answer_s)] if problem is not None and answer_s else []))
    except Exception as error:
        if (gone := _gone(word, problem or error)) is error:
            raise
        raise gone from error
    if not failed:
        return done
    told: list[tuple[str, str]] = [("", "")] * dist.get_world_size()
    dist.all_gather_object(told, (type(problem).__name__, str(problem)) if problem else ("", ""), group)
    if problem is not None and len({kind for kind, _ in told}) == 1:
        raise problem
    rank, (kind, text) = next((rank, one) for rank, one in enumerate(told) if one[0])
    raise Parted(
        f"rank {rank} failed alone ({kind}: {text}), so ranks no longer hold the same and the run ends; {GO_ON}"
    )


def _gone(word: str, problem: Exception) -> Exception:
    """What to end with. Whoever fails leaves word; who has lost it meanwhile has nothing to say but what that is."""
    is_expected = isinstance(problem, OffbookError | ValueError)
    has_lost_others = not is_expected and (isinstance(problem, dist.DistError) or "gloo" in str(problem))
    store, first = dist.distributed_c10d._get_default_store(), "a rank has ended without a word"
    try:
        if store.check([word]):
            first = store.get(word).decode()
        elif not has_lost_others:
            first = f"rank {dist.get_rank()} failed ({type(problem).__name__}: {problem})"
            store.set(word, first)
            if not is_expected:
                return problem
    except RuntimeError:  # the store was rank 0's
        first = "rank 0, which is the run, has ended"
    return Gone(f"{first} while others waited for it, so the run ends; {GO_ON}")


@cache
def _answers() -> Any:
    """Of its own: rank 0 may dismiss others that still wait for its answer. They do so for the library's half hour."""
    return dist.new_group(backend="gloo")


def read(trainer: LedTrainer, name: str, work: Callable[..., T], *arguments: Any) -> T:
    return trainer.decoders()[name].read(work, *arguments)


def step_of_all(trainer: Trainer, samples: list[Sample], lr_scale: float) -> StepResult:
    own = trainer.ranks.share_of(samples, trainer.model.config.get_text_config().hidden_size)
    result = Trainer.step(trainer, own, lr_scale)
    measured = {key: value for each in trainer.ranks.gathered(result.measured) for key, value in each.items()}
    return replace(result, measured=measured)
