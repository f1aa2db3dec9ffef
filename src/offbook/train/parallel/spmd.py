"""SPMD training under a single controller: rank 0 is the run, the other ranks are workers with shards of the model.

Rollouts, rewards, annotation and files belong to rank 0. Collective work is a function of the trainer: rank 0 sends
the function with its arguments over the control group, and every rank calls it. Samples are broadcast whole; every rank
balances them in the same way and takes its own share. Callers of a trainer or of its decoders see none of this.

After each call the ranks exchange whether it succeeded. An error that all ranks raise is rank 0's to handle. Where one
rank failed alone, its shard differs from the others' and the run ends. The others may wait inside a collective and not
answer within the timeout: then the failed rank ends with its error, and with it the connections that others wait on.
NCCL does not notice that: torchrun ends them.

Left out: each rank loads the whole model, on the host, before it is cut.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import cache, partial
from math import gcd
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from offbook.core.config import RanksConfig, TrainConfig
from offbook.core.routers import routers_of
from offbook.core.weights import Weights
from offbook.train.forward import Decoder, Kind
from offbook.train.parallel.sharding import make_expert_mesh, make_mesh, refuse_undealt
from offbook.train.trainer import Ranks, StepResult, Trainer
from offbook.types import OffbookError, Sample

ANSWER_S = 10.0  # timeout of the other ranks for the same call, where one failed
T = TypeVar("T")
GO_ON = "started again, it goes on from its last checkpoint"
log = logging.getLogger(__name__)


@dataclass
class Share:
    """How many ranks share the weights of a model that is trained."""

    shards: int = 1  # of the dense weights
    expert_shards: int = 1  # of the experts
    dealt_to: int = 1  # ranks of those that tokens travel to: none gathers more of a layer's experts than its own


ALONE = Share()


class RanksDiverged(OffbookError):
    """The ranks' states differ. No collective call is possible any more."""


class RankLost(RanksDiverged):
    """A rank failed inside a collective that others wait for."""


def ranks_of(settings: RanksConfig) -> Ranks:
    """Of the process group that there is."""
    world, device = dist.get_world_size(), "cuda" if torch.cuda.is_available() else "cpu"
    refuse_uneven(settings, world)
    mesh = make_mesh(settings.replicate, world // settings.replicate, device)
    return Ranks(mesh, make_expert_mesh(*expert_shape(world, settings), device) if settings.experts > 1 else None)


def refuse_uneven(settings: RanksConfig, world: int) -> None:
    for name, size in asdict(settings).items():
        if world % size:
            raise OffbookError(f"train.ranks.{name} is {size}, which {world} ranks cannot be divided by")


def expert_shape(world: int, settings: RanksConfig) -> tuple[int, int, int]:
    """Replicas, shards and ranks that experts are distributed over. There are as many replicas as of the dense weights,
    or fewer where experts are distributed over several of those."""
    groups = world // settings.experts
    replicate = gcd(settings.replicate, groups)
    return replicate, groups // replicate, settings.experts


def share_of(settings: RanksConfig, world: int) -> Share:
    shards = world // settings.replicate
    if settings.experts == 1:
        return Share(shards, shards)
    _, expert_shards, dealt_to = expert_shape(world, settings)
    return Share(shards, expert_shards * dealt_to, dealt_to)


class SpmdTrainer(Trainer):
    """A Trainer that exists on every rank. Rank 0 calls its methods; the other ranks run `follow`, the worker loop."""

    def __init__(self, model: PreTrainedModel, settings: TrainConfig, teachers: Mapping[str, Kind], orders: Any):
        """`orders` is the control group, over which rank 0 broadcasts calls."""
        self.orders = orders
        self.diverged: RanksDiverged | None = None
        if settings.mesh.experts > 1 and not routers_of(model):
            refuse_undealt(0, settings.mesh.experts)
        super().__init__(model, settings, teachers, ranks_of(settings.mesh))
        for name, decoder in self.decoders().items():
            if dist.get_rank() == 0:
                decoder.together = partial(self.together, read, name)

    def decoders(self) -> dict[str, Decoder]:
        """The student, without a name, and the teachers that have weights of their own."""
        return {"": self.student, **{own.name: own.decoder for own in self.own_weights}}

    def together(self, work: Callable[..., T], *arguments: Any) -> T:
        if self.diverged is not None:
            raise self.diverged
        dist.broadcast_object_list([(work, arguments)], 0, self.orders)
        try:
            return run_on_all(partial(work, self, *arguments), ANSWER_S)
        except RanksDiverged as problem:
            self.diverged = problem
            raise

    def step(self, samples: list[Sample], lr_scale: float = 1.0) -> StepResult:
        return self.together(step_on_all, samples, lr_scale)

    def publish(self, version: int) -> Weights:
        return self.together(Trainer.publish, version)

    def follow(self) -> None:
        """Run rank 0's calls until it sends None. Errors that all ranks raise are handled by rank 0."""
        while (call := receive_call(self.orders)) is not None:
            work, arguments = call
            try:
                run_on_all(partial(work, self, *arguments), ANSWER_S)
            except RankLost:
                raise
            except (OffbookError, ValueError):
                continue


def receive_call(orders: Any) -> Any:
    """The next broadcast of rank 0."""
    received: list[Any] = [None]
    try:
        dist.broadcast_object_list(received, 0, orders)
    except RuntimeError as error:
        raise RankLost(f"rank 0, which is the run, has ended; {GO_ON}") from error
    return received[0]


def run_on_all(work: Callable[[], T], answer_s: float | None = None) -> T:
    """Run `work` on every rank: all ranks have to call this. An error that all raise is raised; one of some ranks
    becomes `RanksDiverged` on all. Anything but OffbookError and ValueError ends the rank and so the run, as does an
    error that the others do not answer within `answer_s`."""
    problem: Exception | None = None
    group = _answers()  # made before anything can fail: all ranks have to
    rank = dist.get_rank()
    try:
        try:
            done = work()
        except (OffbookError, ValueError) as error:
            problem = error
            log.warning("rank %d failed and asks the others: %s", rank, error)
        failed = torch.tensor([int(problem is not None)])
        answers = dist.all_reduce(failed, group=group, async_op=True)
        answers.wait(*([timedelta(seconds=answer_s)] if problem is not None and answer_s else []))
    except RuntimeError as error:
        if problem is not None:
            said = f"rank {rank} failed ({type(problem).__name__}: {problem}) while others waited for it"
        elif isinstance(error, dist.DistError) or "gloo" in str(error):
            said = "another rank has ended, and its own output says why"
        else:
            raise
        raise RankLost(f"{said}, so the run ends; {GO_ON}") from error
    if not failed:
        return done
    raised = [""] * dist.get_world_size()
    dist.all_gather_object(raised, f"{type(problem).__name__}: {problem}" if problem else "", group)
    if problem is not None and all(raised):
        raise problem
    first = next(number for number, said in enumerate(raised) if said)
    raise RanksDiverged(
        f"rank {first} failed alone ({raised[first]}), so ranks no longer hold the same and the run ends; {GO_ON}"
    )


@cache
def _answers() -> Any:
    """A separate gloo group, so that shutdown cannot collide with pending answers. Its timeout is 30 minutes."""
    return dist.new_group(backend="gloo")


def read(trainer: SpmdTrainer, name: str, work: Callable[..., T], *arguments: Any) -> T:
    return trainer.decoders()[name].read(work, *arguments)


def step_on_all(trainer: Trainer, samples: list[Sample], lr_scale: float) -> StepResult:
    trainer.refuse(samples)  # all of them, so that no rank refuses alone
    own = trainer.ranks.share_of(samples, trainer.model.config.get_text_config().hidden_size)
    result = Trainer.step(trainer, own, lr_scale)
    measured = {key: value for each in trainer.ranks.gathered(result.measured) for key, value in each.items()}
    return replace(result, measured=measured)
