"""Who scores branches as their teacher. Every kind is the same branch pass; they differ in the weights that run it.

Live     the student as it is now: its branches go along with the training forward and cost only their own tokens
Frozen   the model the run started from, on a base of its own without gradients
Ema      a slow average of the student, likewise
Other    another model with the same vocabulary, which stays as it is

A trainer is given them by name. Those with equal weights share one copy.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from offbook.train.batches import Batch, BranchAt, BranchBatch, BranchGroup
from offbook.train.forward import Decoder
from offbook.train.head import Teacher
from offbook.train.optim.units import local
from offbook.types import Branch, OffbookError, Sample

FILLER = Sample(ids=[0, 0])
IDLE = Branch(1, [0], ((1, 2),))  # of any sample; its result is not used


@dataclass(frozen=True, slots=True)
class Live:
    pass


@dataclass(frozen=True, slots=True)
class Frozen:
    share = 0.0  # of the student, by which the weights move to it after each step


@dataclass(frozen=True, slots=True)
class Ema:
    decay: float = 0.99

    @property
    def share(self) -> float:
        return 1 - self.decay


@dataclass(frozen=True, slots=True)
class Other:
    model: PreTrainedModel
    share = 0.0


Kind = Live | Frozen | Ema | Other


class OwnWeights:
    """A copy of the student that goes its own way, or another model. `name`: of the first teacher that has them."""

    def __init__(self, student: Decoder, kind: Frozen | Ema | Other, name: str):
        self.name = name
        self.share = kind.share
        if isinstance(kind, Other):
            self.decoder = Decoder(kind.model.requires_grad_(False), compiled=student.compiled)
            if self.decoder.vocabulary != student.vocabulary:
                raise OffbookError(
                    f"the student's vocabulary has {student.vocabulary} entries and its teacher's "
                    f"{self.decoder.vocabulary}: they are compared entry by entry, so take a teacher of the same family"
                )
        else:
            self.decoder = Decoder(sharing_copy(student.model), compiled=student.compiled, plain=student.plain)
        self.steps = 0

    @torch.no_grad()
    def follow(self, student: PreTrainedModel) -> None:
        """After each step: move towards the student by the share that the kind says."""
        self.steps += 1
        if not self.share:
            return
        both = zip(self.decoder.model.parameters(), student.parameters(), strict=True)
        pairs = [(local(mine), local(its)) for mine, its in both if mine is not its]
        rounded = [pair for pair in pairs if pair[0].dtype == torch.bfloat16]
        exact = [pair for pair in pairs if pair[0].dtype != torch.bfloat16]
        if rounded:
            _lerp_by_chance(rounded, self.share, self.steps)
        if exact:
            slow, fast = zip(*exact, strict=True)
            torch._foreach_lerp_(slow, fast, self.share)

    def read(self, batch: Batch, groups: Sequence[BranchGroup]) -> list[Teacher]:
        """The targets of each group. Without what is inserted they are branches that insert nothing, on the same base.
        Without groups the pass is a filler, in which this rank only gives its shards."""
        asked: list[list[BranchAt]] = []
        for group in groups:
            asked.append(group.branches)
            is_gated = group.distill.gate or group.distill.token_gate
            bare = [(number, replace(branch, inserted=[])) for number, branch in group.branches]
            asked.append(bare if is_gated else [])
        branches = [one for each in asked for one in each]
        if not branches:
            batch, branches = Batch.collate([FILLER], self.decoder.model.device), [(0, IDLE)]
        hidden_MD = self.decoder.inside(lambda: self.decoder.targets(batch, BranchBatch.collate(batch, branches)))
        if not groups:
            return []
        parts = hidden_MD.split([sum(branch.num_targets for _, branch in each) for each in asked])
        hidden = parts[::2], parts[1::2]
        return [
            [(self.decoder.head, part_MD) for part_MD in both if len(part_MD)] for both in zip(*hidden, strict=True)
        ]


def make_teachers(student: Decoder, kinds: Mapping[str, Kind]) -> dict[str, OwnWeights | None]:
    """By name; None is the student itself."""
    copies: dict[Kind, OwnWeights] = {}
    teachers: dict[str, OwnWeights | None] = {}
    for name, kind in kinds.items():
        if not isinstance(kind, Live) and kind not in copies:
            copies[kind] = OwnWeights(student, kind, name)
        teachers[name] = copies.get(kind)
    return teachers


def _lerp_by_chance(pairs: Sequence[tuple[Tensor, Tensor]], share: float, seed: int) -> None:
    """For bfloat16, whose steps are larger than a hundredth of most differences: rounding to the nearest would never
    move. Stochastic rounding is right on average and needs no copy in float32."""
    rng = torch.Generator(pairs[0][0].device).manual_seed(seed)
    for slow, fast in pairs:
        bits = torch.lerp(slow.float(), fast.float(), share).view(torch.int32)
        bits += torch.randint(1 << 16, bits.shape, generator=rng, dtype=torch.int32, device=bits.device)
        slow.copy_((bits & -(1 << 16)).view(torch.float32))


def sharing_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A copy that shares what is not trained: with a low-rank adapter it is as small as the adapter."""
    untrained = {id(parameter): parameter for parameter in model.parameters() if not parameter.requires_grad}
    return copy.deepcopy(model, untrained).requires_grad_(False)
