"""Experts over ranks: each rank of a group holds some experts whole, and tokens travel to them and back.

Experts have a mesh of their own, (replicate, shard, ep), of the same ranks as the dense one and of other degrees. Over
`ep` they are cut by expert; what a rank has of them is sharded once more over `shard` by FSDP2, also by expert, so that
Muon always finds whole matrices and needs no exchange. Adapters on them lie as they do. Every call of a layer's experts
is two all-to-alls (counts are told before), so all ranks have to call it as often: a rank without branches reads one
row for nobody.

Left out: overlapping the way of one part of the tokens with the work on another; dropping tokens (nothing is dropped).
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import PreTrainedModel

from offbook.core.adapters import FIRST, NAME, SECOND, adapters_on
from offbook.types import OffbookError

WEIGHTS = ("gate_up_proj", "down_proj")
SUMMED = MixedPrecisionPolicy(reduce_dtype=torch.float32)  # gradients of many ranks vanish in bfloat16


def make_expert_mesh(replicate: int, shard: int, ep: int, device: str) -> DeviceMesh:
    world = dist.get_world_size()
    if replicate * shard * ep != world:
        raise OffbookError(f"{replicate} x {shard} x {ep} ranks of experts are not the {world} ranks that there are")
    return init_device_mesh(device, (replicate, shard, ep), mesh_dim_names=("replicate", "shard", "ep"))


def refuse_undealt(experts: int, ranks: int) -> None:
    """What a layer has, and where it is to go."""
    if not experts:
        raise OffbookError(f"train.ranks.experts is {ranks} and the model has no experts; leave it 1")
    if experts % ranks:
        raise OffbookError(f"{experts} experts cannot be dealt out to {ranks} ranks alike")


def shard_experts(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """In place, before the layers that they are in."""
    for name, module in model.named_modules():
        if not name.endswith(".experts"):
            continue
        experts, _ = adapters_on(module)
        is_known = {key for key, _ in experts.named_parameters()} == set(WEIGHTS)
        if not is_known or getattr(experts, "is_transposed", False):
            raise OffbookError(f"the experts of {model.config.model_type} are laid out in a way that is not known here")
        group = mesh["ep"].get_group()
        count = len(experts.gate_up_proj)
        refuse_undealt(count, dist.get_world_size(group))
        for part in module.modules():  # adapters too
            for key, whole in [*part.named_parameters(recurse=False)]:
                cut = distribute_tensor(whole.detach(), mesh["ep"], [Shard(0)])
                setattr(part, key, nn.Parameter(cut, requires_grad=whole.requires_grad))
        module.forward = MethodType(_Experts(group, count), module)
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


class _Experts:
    """The forward of a module of experts of which this rank holds some."""

    def __init__(self, group: Any, count: int):
        self.group = group
        self.ranks = dist.get_world_size(group)
        self.here = count // self.ranks

    def __call__(self, module: nn.Module, hidden_ND: Tensor, chosen_NK: Tensor, gates_NK: Tensor) -> Tensor:
        top = chosen_NK.shape[1]
        expert_M, order_M = chosen_NK.flatten().sort(stable=True)  # M token copies, by expert and so by rank
        to_PE = torch.bincount(expert_M, minlength=self.ranks * self.here).view(self.ranks, self.here)
        from_PE = torch.empty_like(to_PE)
        dist.all_to_all_single(from_PE, to_PE, group=self.group)
        sent, received = to_PE.sum(1).tolist(), from_PE.sum(1).tolist()
        arrived_RD = _Travel.apply(hidden_ND[order_M // top], received, sent, self.group)
        # They lie by rank and then by expert; side by side are wanted those of one expert.
        numbers_R = torch.arange(self.here, device=hidden_ND.device).repeat(self.ranks)
        by_expert_R = numbers_R.repeat_interleave(from_PE.flatten()).argsort(stable=True)
        done = self._run(module, arrived_RD[by_expert_R], from_PE.sum(0).tolist())
        back_RD = torch.empty_like(done).index_copy(0, by_expert_R, done)
        home_MD = _Travel.apply(back_RD, sent, received, self.group)
        weighted_MD = home_MD * gates_NK.flatten()[order_M, None].to(home_MD.dtype)
        return torch.zeros_like(hidden_ND).index_add(0, order_M // top, weighted_MD.to(hidden_ND.dtype))

    def _run(self, module: nn.Module, rows: Tensor, sizes: list[int]) -> Tensor:
        """All experts of this rank, one after the other, on their rows. One without rows has a gradient of zeros."""
        experts, adapters = adapters_on(module)
        gate_up, down = (_product(getattr(experts, key), adapters.get(key)) for key in WEIGHTS)
        outs = []
        for expert, part in enumerate(rows.split(sizes)):
            gate, up = gate_up(part, expert).chunk(2, dim=-1)
            outs.append(down(experts.act_fn(gate) * up, expert))
        return torch.cat(outs)


def _product(weight: Tensor, adapter: Any) -> Callable[[Tensor, int], Tensor]:
    """Of rows with an expert's matrix and with the two of its adapter, if it has one that is switched on."""
    weight_EOI = _own(weight)
    if adapter is None or adapter.disable_adapters:
        return lambda rows, expert: nn.functional.linear(rows, weight_EOI[expert])
    first_ERI, second_EOR = (_own(getattr(adapter, key)[NAME].weight) for key in (FIRST, SECOND))
    scale = adapter.scaling[NAME]

    def product(rows: Tensor, expert: int) -> Tensor:
        inner = nn.functional.linear(rows, first_ERI[expert]) * scale
        return nn.functional.linear(rows, weight_EOI[expert]) + nn.functional.linear(inner, second_EOR[expert])

    return product


def _own(weight: Tensor) -> Tensor:
    return weight.to_local() if isinstance(weight, DTensor) else weight
