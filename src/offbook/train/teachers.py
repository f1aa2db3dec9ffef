"""Who scores branches as their teacher. Every kind is the same branch pass; they differ in the weights that run it.

Live     the student as it is now: its branches go along with the training forward and cost only their own tokens
Frozen   the model the run started from, on a base of its own without gradients
Ema      a slow average of the student, likewise
Other    another model with the same vocabulary, which stays as it is
Mix      between one of those and the live one, in logits: own ** (1 - share) * live ** share (SDPO, section 3)

A trainer is given them by name. Those with equal weights share one copy.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from offbook.train.batches import Batch, BranchAt, BranchBatch
from offbook.train.forward import Decoder
from offbook.train.head import Scorers
from offbook.train.lora import switch_off_idle
from offbook.train.optim.units import local
from offbook.types import OffbookError


@dataclass(frozen=True, slots=True)
class Live:
    pass


@dataclass(frozen=True, slots=True)
class Frozen:
    moves = False

    def share(self, step: int) -> float:
        return 0.0


@dataclass(frozen=True, slots=True)
class Ema:
    decay: float = 0.99
    moves = True

    def share(self, step: int) -> float:
        return 1 - self.decay


@dataclass(frozen=True, slots=True)
class Other:
    model: PreTrainedModel
    moves = False

    def share(self, step: int) -> float:
        return 0.0


@dataclass(frozen=True, slots=True)
class Mix:
    own: Frozen | Ema
    live_share: float


Kind = Live | Frozen | Ema | Other | Mix


class OwnWeights:
    """A copy of the student that goes its own way, or another model."""

    def __init__(self, student: Decoder, kind: Frozen | Ema | Other):
        self.kind = kind
        self.decoder = _other(student, kind.model) if isinstance(kind, Other) else _copied(student)
        if not kind.moves:
            switch_off_idle(self.decoder.model)
        self.steps = 0

    @torch.no_grad()
    def follow(self, student: PreTrainedModel) -> None:
        """After each step: towards the student by the share that the kind says."""
        self.steps += 1
        share = self.kind.share(self.steps)
        if not share:
            return
        both = zip(self.decoder.model.parameters(), student.parameters(), strict=True)
        apart = [(mine, its) for mine, its in both if mine is not its]
        for rounds in (True, False):
            pairs = [pair for pair in apart if (pair[0].dtype == torch.bfloat16) == rounds]
            slow, fast = ([local(pair[place]) for pair in pairs] for place in (0, 1))
            if rounds and share < 1:
                _lerp_by_chance(slow, fast, share, self.steps)
            elif pairs:
                torch._foreach_lerp_(slow, fast, share)


@dataclass(frozen=True, slots=True)
class Teacher:
    own: OwnWeights | None  # None is the student alone
    live_share: float

    @property
    def rides(self) -> bool:
        """Whether its branches go along with the student's forward."""
        return self.live_share > 0

    @property
    def shares(self) -> tuple[float, ...]:
        """Of its own weights and of the student's, as far as it has them."""
        return (1.0,) if self.own is None or not self.rides else (1 - self.live_share, self.live_share)

    def own_scorers(self, batch: Batch, branches: list[BranchAt], plain: bool) -> Scorers:
        """By weights of its own, none where it has none; with `plain` also of the targets without what is inserted,
        as branches that insert nothing: the same base, and the targets' own tokens once more."""
        if self.own is None:
            return Scorers([], self.shares)
        decoder, bare = self.own.decoder, [(number, replace(branch, inserted=[])) for number, branch in branches]
        read = BranchBatch.collate(batch, [*branches, *(bare if plain else [])])
        hidden_MD = decoder.inside(lambda: decoder.targets(batch, read))
        size = sum(branch.num_targets for _, branch in branches)
        hinted = decoder.head, hidden_MD[:size]
        return Scorers([hinted], self.shares, [(decoder.head, hidden_MD[size:])] if plain else ())


def make_teachers(student: Decoder, kinds: Mapping[str, Kind]) -> dict[str, Teacher]:
    copies: dict[Frozen | Ema | Other, OwnWeights] = {}
    teachers = {}
    for name, kind in kinds.items():
        weights = kind.own if isinstance(kind, Mix) else kind
        if isinstance(weights, Live):
            teachers[name] = Teacher(None, 1.0)
            continue
        if weights not in copies:
            copies[weights] = OwnWeights(student, weights)
        teachers[name] = Teacher(copies[weights], kind.live_share if isinstance(kind, Mix) else 0.0)
    return teachers


def _lerp_by_chance(slow: Sequence[Tensor], fast: Sequence[Tensor], share: float, seed: int) -> None:
    """For bfloat16, whose steps are larger than a hundredth of most differences: rounding to the nearest would never
    move. Up or down by chance is right on the average, and needs no copy in float32."""
    rng = torch.Generator(slow[0].device).manual_seed(seed) if slow else None
    for mine, its in zip(slow, fast, strict=True):
        bits = torch.lerp(mine.float(), its.float(), share).view(torch.int32)
        bits += torch.randint(1 << 16, bits.shape, generator=rng, dtype=torch.int32, device=bits.device)
        mine.copy_((bits & -(1 << 16)).view(torch.float32))


def _other(student: Decoder, model: PreTrainedModel) -> Decoder:
    sizes = [one.config.get_text_config().vocab_size for one in (student.model, model)]
    if sizes[0] != sizes[1]:
        told = f"the student's vocabulary has {sizes[0]} entries and its teacher's {sizes[1]}"
        raise OffbookError(f"{told}: they are compared entry by entry, so take a teacher of the same family")
    return Decoder(model.requires_grad_(False), compiled=student.compiled)


def _copied(student: Decoder) -> Decoder:
    return Decoder(sharing_copy(student.model), compiled=student.compiled, plain=student.plain)


def sharing_copy(model: PreTrainedModel) -> PreTrainedModel:
    """Shares what is not trained: beside a low-rank adapter the second model is as small as the adapter."""
    untrained = {id(parameter): parameter for parameter in model.parameters() if not parameter.requires_grad}
    return copy.deepcopy(model, untrained).requires_grad_(False)
