"""Weights sharded over ranks by FSDP2, on a mesh of replicas and shards (HSDP).

A layer's weights are gathered when its base rows come, kept for the branch rows that follow, and given up right after;
so a rank without branches starts as many collectives as one with them. What is left of the model (embeddings, the last
norm, the head) is the root's: it is gathered for the whole of a micro-batch, since scoring goes through the head again
and again. Losses are divided by global counts already, so gradients are summed over ranks and not averaged.
"""

from __future__ import annotations

from itertools import chain, pairwise
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel

from offbook.train.forward import Decoder
from offbook.train.parallel.experts import SUMMED, shard_experts
from offbook.types import OffbookError


def make_mesh(replicate: int, shard: int, device: str) -> DeviceMesh:
    dist.all_reduce(torch.zeros(1, device=device))  # a group's first call needs all ranks, which gather.py's may not
    return init_device_mesh(device, (replicate, shard), mesh_dim_names=("replicate", "shard"))


def shard(decoder: Decoder, mesh: DeviceMesh, experts: DeviceMesh | None = None) -> None:
    """In place; experts on a mesh of their own, if there is one. From now on it runs only `inside`."""
    if not decoder.plain:
        raise OffbookError(
            f"{decoder.model.config.model_type} has layers that are not plain attention, which cannot be sharded here: "
            "train it in one process, or take a model of another family"
        )
    model: Any = decoder.model
    if experts is not None:
        shard_experts(model, experts)
    over = mesh if mesh.size(0) > 1 else mesh["shard"]  # or gradients would be reduced over one replica
    for layer in model.base_model.layers:
        fully_shard(layer, mesh=over, reshard_after_forward=False, mp_policy=SUMMED)
    fully_shard(model, mesh=over, mp_policy=SUMMED)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no other reduction
    # By default the order of forward calls says what to gather ahead, and with branches a layer is called twice.
    layers = [[one for one in layer.modules() if isinstance(one, FSDPModule)] for layer in model.base_model.layers]
    for before, after in pairwise([model, *chain.from_iterable(layers)]):
        before.set_modules_to_forward_prefetch([after])
    for before, after in pairwise([model, *chain.from_iterable(reversed(layers)), model]):
        before.set_modules_to_backward_prefetch([after])
    model.run_inside = MethodType(lambda _, work: work(), model)
    register_fsdp_forward_method(model, "run_inside")
    decoder.inside = model.run_inside


def in_common(model: PreTrainedModel, other: PreTrainedModel) -> list[str]:
    """Names of the parameters that a model shares with another, of which it is a copy."""
    theirs = dict(other.named_parameters(remove_duplicate=False))
    return [name for name, one in model.named_parameters(remove_duplicate=False) if theirs.get(name) is one]


def share_again(model: PreTrainedModel, other: PreTrainedModel, names: list[str]) -> None:
    """What both had in common before each was sharded, the same way. FSDP2 looks for changed parameters before the
    first forward, and gathers from these then."""
    for name in names:
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, other.get_parameter(name))


@torch.no_grad()
def put(place: Tensor, whole: Any) -> None:
    """Values into a tensor, of which this rank may have a part. `whole` is a tensor, or one in a file, of which no more
    than that part is read."""
    if not isinstance(place, DTensor):
        place.copy_(whole[...])
        return
    shape, offset = compute_local_shape_and_global_offset(place.shape, place.device_mesh, place.placements)
    part = tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
    place.to_local().copy_(whole[part])
