"""Weights sharded over ranks by FSDP2, on a mesh of replicas and shards (HSDP).

A layer's weights are gathered when its base rows come, kept for the branch rows that follow, and given up right after;
so a rank without branches starts as many collectives as one with them. What is left of the model (embeddings, the last
norm, the head) is the root's: it is gathered for the whole of a micro-batch, since scoring goes through the head again
and again. Losses are divided by global counts already, so gradients are summed over ranks and not averaged.

Experts over ranks: each rank of a group holds some experts whole, and tokens travel to them and back.

Experts have a mesh of their own, (replicate, shard, ep), of the same ranks as the dense one and of other degrees. Over
`ep` they are cut by expert; what a rank has of them is sharded once more over `shard` by FSDP2, also by expert, so that
Muon always finds whole matrices and needs no exchange. Every call of a layer's experts is two all-to-alls (counts are
exchanged before), so all ranks have to call it as often: a rank without branches reads one row that is not used.

Left out: overlapping the way of one part of the tokens with the work on another; dropping tokens (nothing is dropped).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain, pairwise
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel

from offbook.train.forward import Decoder
from offbook.train.optim.units import local
from offbook.types import OffbookError

WEIGHTS = ("gate_up_proj", "down_proj")
SUMMED = MixedPrecisionPolicy(reduce_dtype=torch.float32)  # gradients of many ranks vanish in bfloat16


def make_mesh(replicate: int, shard: int, device: str) -> DeviceMesh:
    dist.all_reduce(torch.zeros(1, device=device))  # a group's first call needs all ranks, which `gathered` may not be
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


def make_expert_mesh(replicate: int, shard: int, ep: int, device: str) -> DeviceMesh:
    return init_device_mesh(device, (replicate, shard, ep), mesh_dim_names=("replicate", "shard", "ep"))


def refuse_undealt(experts: int, ranks: int) -> None:
    """What a layer has, and where it is to go."""
    if not experts:
        raise OffbookError(f"train.ranks.experts is {ranks} and the model has no experts; leave it 1")
    if experts % ranks:
        raise OffbookError(f"{experts} experts cannot be divided among {ranks} ranks")


def shard_experts(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """In place, before the layers that they are in."""
    for name, module in model.named_modules():
        if not name.endswith(".experts"):
            continue
        is_known = {key for key, _ in module.named_parameters()} == set(WEIGHTS)
        if not is_known or getattr(module, "is_transposed", False):
            raise OffbookError(f"the experts of {model.config.model_type} have a layout that is not supported")
        group, count = mesh["ep"].get_group(), len(module.gate_up_proj)
        refuse_undealt(count, dist.get_world_size(group))
        for key in WEIGHTS:
            whole = getattr(module, key)
            cut = distribute_tensor(whole.detach(), mesh["ep"], [Shard(0)])
            setattr(module, key, nn.Parameter(cut, requires_grad=whole.requires_grad))
        module.forward = partial(_forward, group, count, module)
        over = mesh["replicate", "shard"] if mesh.size(0) > 1 else mesh["shard"]
        fully_shard(module, mesh=over, reshard_after_forward=False, mp_policy=SUMMED)


class _Travel(torch.autograd.Function):
    """Rows to other ranks; gradients come back the same way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, received: list[int], sent: list[int], group: Any) -> Tensor:
        ctx.back = sent, received, group
        out = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(out, rows.contiguous(), received, sent, group)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        received, sent, group = ctx.back
        out = gradients[0].new_empty(sum(received), gradients[0].shape[1])
        dist.all_to_all_single(out, gradients[0].contiguous(), received, sent, group)
        return out, None, None, None


def _forward(
    group: Any, count: int, module: nn.Module, hidden_ND: Tensor, chosen_NK: Tensor, gates_NK: Tensor
) -> Tensor:
    """Of a module of `count` experts, of which this rank holds some."""
    ranks, top = dist.get_world_size(group), chosen_NK.shape[1]
    here = count // ranks
    expert_M, order_M = chosen_NK.flatten().sort(stable=True)  # M token copies, by expert and so by rank
    to_PE = torch.bincount(expert_M, minlength=count).view(ranks, here)
    from_PE = torch.empty_like(to_PE)
    dist.all_to_all_single(from_PE, to_PE, group=group)
    sent, received = to_PE.sum(1).tolist(), from_PE.sum(1).tolist()
    arrived_RD = _Travel.apply(hidden_ND[order_M // top], received, sent, group)
    # They come by rank and then by expert; rows of one expert have to be neighbours.
    numbers_R = torch.arange(here, device=hidden_ND.device).repeat(ranks)
    by_expert_R = numbers_R.repeat_interleave(from_PE.flatten()).argsort(stable=True)
    done = _run(module, arrived_RD[by_expert_R].split(from_PE.sum(0).tolist()))
    back_RD = torch.empty_like(done).index_copy(0, by_expert_R, done)
    home_MD = _Travel.apply(back_RD, sent, received, group)
    weighted_MD = home_MD * gates_NK.flatten()[order_M, None].to(home_MD.dtype)
    return torch.zeros_like(hidden_ND).index_add(0, order_M // top, weighted_MD.to(hidden_ND.dtype))


def _run(module: nn.Module, rows: Sequence[Tensor]) -> Tensor:
    """All experts of this rank, one after the other, on their rows. One without rows has a gradient of zeros."""
    gate_up_EOI, down_EOI = (local(getattr(module, key)) for key in WEIGHTS)
    outs = []
    for expert, part in enumerate(rows):
        gate, up = nn.functional.linear(part, gate_up_EOI[expert]).chunk(2, dim=-1)
        outs.append(nn.functional.linear(module.act_fn(gate) * up, down_EOI[expert]))
    return torch.cat(outs)
