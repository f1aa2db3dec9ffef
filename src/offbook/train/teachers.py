"""Who the hinted teacher is. Every kind is the same branch pass; they differ in the weights that run it.

live          the student as it is now: its branches go along with the RL forward and cost only their own tokens
frozen        the model the run started from, or was `refresh_steps` ago, on a trunk of its own without gradients
ema           a slow average of the student, likewise
trust_region  between the two, in logits: frozen ** (1 - trust_mix) * live ** trust_mix (SDPO, section 3)
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from offbook.config import FeedbackConfig
from offbook.train.batches import Batch, BranchBatch
from offbook.train.forward import Decoder


class Teacher:
    def __init__(self, student: Decoder, feedback: FeedbackConfig):
        self.kind = feedback.teacher
        self.ema_decay = feedback.ema_decay
        self.refresh_steps = feedback.refresh_steps if self.kind == "frozen" else 0
        self.moves = self.kind == "ema" or self.refresh_steps > 0
        self.steps = 0
        self.rides = self.kind in ("live", "trust_region")  # reads the student's own forward
        self.own = _copied(student) if self.kind != "live" or feedback.anchor_share else None
        self.model = student.model if self.own is None else self.own.model
        mix = feedback.trust_mix
        self.shares = (1 - mix, mix) if self.kind == "trust_region" else (1.0,)

    def readings(self, batch: Batch, branches: BranchBatch) -> list[tuple[nn.Module, Tensor]]:
        """The head and the hinted hidden states of its own weights; before the student's forward fills the memory."""
        if self.own is None or (self.kind == "live" and not batch.anchors):
            return []
        return [(self.own.head, self.own.targets(batch, branches))]

    @torch.no_grad()
    def follow(self, student: PreTrainedModel) -> None:
        """After each step."""
        self.steps += 1
        if not self.moves or (self.refresh_steps and self.steps % self.refresh_steps):
            return
        share = 1.0 if self.refresh_steps else 1 - self.ema_decay
        pairs = zip(self.model.parameters(), student.parameters(), strict=True)
        slow, fast = zip(*((mine, its) for mine, its in pairs if mine is not its), strict=True)
        if share < 1 and slow[0].dtype == torch.bfloat16:
            _lerp_by_chance(slow, fast, share, self.steps)
        else:
            torch._foreach_lerp_(slow, fast, share)


def _lerp_by_chance(slow: Sequence[Tensor], fast: Sequence[Tensor], share: float, seed: int) -> None:
    """For bfloat16, whose steps are larger than a hundredth of most differences: rounding to the nearest would never
    move. Up or down by chance is right on the average, and needs no copy in float32."""
    dice = torch.Generator(slow[0].device).manual_seed(seed)
    for mine, its in zip(slow, fast, strict=True):
        bits = torch.lerp(mine.float(), its.float(), share).view(torch.int32)
        bits += torch.randint(1 << 16, bits.shape, generator=dice, dtype=torch.int32, device=bits.device)
        mine.copy_((bits & -(1 << 16)).view(torch.float32))


def _copied(student: Decoder) -> Decoder:
    """Shares what is not trained: beside a low-rank adapter the second model is as small as the adapter."""
    untrained = {id(parameter): parameter for parameter in student.model.parameters() if not parameter.requires_grad}
    model = copy.deepcopy(student.model, untrained).requires_grad_(False)
    return Decoder(model, compiled=student.compiled, plain=student.plain)
