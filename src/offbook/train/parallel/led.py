"""A run on many ranks: rank 0 is the run, and the others hold their parts of the weights and do what it tells them.

Rollouts, rewards, annotation and files are rank 0's. What all ranks have to take part in is a function of the trainer:
rank 0 tells it to the others, with its arguments, and all of them call it. Samples are told whole; every rank deals
them alike and takes its own. Whoever calls a trainer, or reads with one of its decoders, does not see that it is led.

Left out: each rank loads the whole model, on the host, before it is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from offbook.config import RanksConfig, TrainConfig
from offbook.train.forward import Decoder
from offbook.train.parallel.context import Context
from offbook.train.parallel.dense import make_mesh
from offbook.train.parallel.experts import make_expert_mesh
from offbook.train.parallel.ranks import Ranks
from offbook.train.teachers import Kind
from offbook.train.trainer import StepResult, Trainer
from offbook.types import OffbookError, Sample
from offbook.weights import Weights

T = TypeVar("T")


def ranks_of(settings: RanksConfig) -> Ranks:
    """Of the process group that there is."""
    world, device = dist.get_world_size(), "cuda" if torch.cuda.is_available() else "cpu"
    for name, size in settings.model_dump().items():
        if world % size:
            raise OffbookError(f"train.ranks.{name} is {size}, which {world} ranks cannot be divided by")
    mesh = make_mesh(settings.replicate, world // settings.replicate, device)
    experts = make_expert_mesh(1, world // settings.experts, settings.experts, device) if settings.experts > 1 else None
    return Ranks(mesh, experts, Context(settings.context, device) if settings.context > 1 else None)


class LedTrainer(Trainer):
    """The same on every rank. Rank 0 calls what a Trainer has; the others `follow`."""

    def __init__(self, model: PreTrainedModel, settings: TrainConfig, teachers: Mapping[str, Kind], orders: Any):
        """`orders` is the group that rank 0 tells others by."""
        self.orders = orders
        super().__init__(model, settings, teachers, ranks_of(settings.ranks))
        for name, decoder in self.decoders().items():
            if dist.get_rank() == 0:
                decoder.together = partial(self.together, read, name)

    def decoders(self) -> dict[str, Decoder]:
        """The student, without a name, and the teachers that have weights of their own."""
        return {"": self.student, **{name: own.decoder for name, own in self.own_weights().items()}}

    def together(self, work: Callable[..., T], *arguments: Any) -> T:
        dist.broadcast_object_list([(work, arguments)], 0, self.orders)
        return work(self, *arguments)

    def step(self, samples: list[Sample], lr_scale: float = 1.0) -> StepResult:
        return self.together(step_of_all, samples, lr_scale)

    def publish(self, version: int) -> Weights:
        return self.together(Trainer.publish, version)

    def follow(self) -> None:
        """Until rank 0 dismisses this one. What it raises there is raised here, too, and rank 0 knows what to do."""
        order: list[Any] = [None]
        while True:
            dist.broadcast_object_list(order, 0, self.orders)
            if order[0] is None:
                return
            work, arguments = order[0]
            try:
                work(self, *arguments)
            except (OffbookError, ValueError):
                continue


def read(trainer: LedTrainer, name: str, work: Callable[..., T], *arguments: Any) -> T:
    return trainer.decoders()[name].read(work, *arguments)


def step_of_all(trainer: Trainer, samples: list[Sample], lr_scale: float) -> StepResult:
    own = trainer.ranks.share_of(samples, trainer.model.config.get_text_config().hidden_size)
    result = Trainer.step(trainer, own, lr_scale)
    measured = {key: value for each in trainer.ranks.gathered(result.measured) for key, value in each.items()}
    return replace(result, measured=measured)
