"""Training a draft head by self-distillation: at every depth to the distribution of the model's own head, whose states
are there already. The model is a constant, so a head can be trained along with it.

At depth 1 the head reads the model's states. At depth d it reads what it made itself at depth d - 1, and attends to
what it will attend to when it drafts: keys of the model's states up to where drafting began, and of its own from there.

Left out: EAGLE's regression on hidden states. What counts is the distribution, and that is compared itself. Depths
above 1 are trained on a window of each sample, which bounds what they cost however long samples are.

Axes: F tokens of a micro-batch, T of a sample, W of a window, N tokens to predict, D width, V vocabulary.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from offbook.config import MtpConfig
from offbook.draft import DraftHead
from offbook.output import output_of
from offbook.train import head as chunked
from offbook.train.attention import attend
from offbook.train.batches import Batch
from offbook.train.losses import divergence
from offbook.train.masters import Masters
from offbook.train.parallel.ranks import total_norm
from offbook.types import Sample

NAME = "offbook_draft"  # of the attention function
WINDOW = 512  # tokens of a sample, at depths above 1
LED = 3.0  # how fast KL gives way to total variation as more is kept: exp(-3) is left where all is (2602.23881)
CLIP = 1.0  # the most that the gradient's norm may be
Draft = tuple[Tensor, Tensor]  # of a sample: states that predict, and the places in the row of what they do


@dataclass(slots=True)
class Depths:
    """Keys and values of the depths so far, of the first for all positions, and of the others from `start` on."""

    start: int = 0
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        depth = len(self.keys)  # from 0
        self.keys.append(key)
        self.values.append(value)
        if not depth:
            return attend(query, key, value, None, scaling)
        place = torch.arange(query.shape[2], device=query.device) + self.start + depth - 1
        masks = [torch.arange(self.keys[0].shape[2], device=query.device) <= place[:, None] - depth]
        for number, keys in enumerate(self.keys[1:], 1):  # one of each: that of the same draft
            there = torch.arange(keys.shape[2], device=query.device) + self.start + number - 1
            masks.append(there == place[:, None] - depth + number)
        mask = torch.cat(masks, dim=1)[None, None]
        return attend(query, torch.cat(self.keys, 2), torch.cat(self.values, 2), mask, scaling)


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, depths: Depths, **_: Any
) -> tuple[Tensor, None]:
    return depths.attend(query, key, value, scaling).transpose(1, 2).contiguous(), None


class DraftTrainer:
    """A head, its optimizer, and what a step adds up."""

    def __init__(self, model: PreTrainedModel, head: DraftHead, settings: MtpConfig):
        self.model, self.head, self.settings = model, head.train(), settings
        AttentionInterface.register(NAME, _attention)
        head.config._attn_implementation = NAME
        self.output = _Constant(output_of(model))
        self.masters = Masters(head)
        rates = {"lr": settings.learning_rate, "betas": (0.9, 0.95), "weight_decay": 0.0}
        self.optimizer = torch.optim.AdamW(self.masters.named.values(), **rates, fused=True)
        self.steps = 0
        self._rng = torch.Generator()
        self.forget()

    def forget(self) -> None:
        """What was learned since the last step."""
        self.optimizer.zero_grad()
        depths, device = self.settings.depth, self.model.device
        self._tokens = [0] * depths
        self._loss_K, self._kept_K = torch.zeros(2, depths, device=device)
        self._spent: list[tuple[Any, Any]] = []  # when work began and ended

    def learn(self, batch: Batch, hidden_1FD: Tensor, differentiate: bool = True) -> None:
        """Adds a micro-batch to the step: its gradients and what it says. `hidden_1FD` are the model's last states."""
        began, hidden_1FD = self._now(), hidden_1FD.detach()
        drafts: list[list[Draft]] = [[] for _ in range(self.settings.depth)]  # of each depth
        with torch.set_grad_enabled(differentiate):
            for begin, sample in zip(batch.row.starts, batch.samples, strict=True):
                own = slice(begin, begin + len(sample.ids))
                states = self.states(batch.row.ids_1F[:, own], hidden_1FD[:, own]) if len(sample.ids) > 2 else []
                for depth, (state_1WD, first) in enumerate(states):
                    place_N = _predicted(sample, first, state_1WD.shape[1])
                    drafts[depth].append((state_1WD[0, place_N - 2 - first], begin + place_N))
            losses = [self._loss(batch, hidden_1FD, each, depth) for depth, each in enumerate(drafts) if each]
        if differentiate and (there := [loss for loss in losses if loss is not None]):
            torch.stack(there).sum().backward()
        self._spent.append((began, self._now()))

    def states(self, ids_1T: Tensor, hidden_1TD: Tensor) -> list[tuple[Tensor, int]]:
        """What the head makes at each depth, and the first position that it makes it of. At position p it has read the
        token at p + 1, and predicts the one at p + 2."""
        embedded_1TD = self.model.get_input_embeddings()(ids_1T).detach()[:, 1:]
        length = embedded_1TD.shape[1]
        self._rng.manual_seed(self.steps)
        start = 1 + int(torch.randint(max(1, length - WINDOW), (1,), generator=self._rng))
        depths, found = Depths(start), list[tuple[Tensor, int]]()
        state_1TD, first, places = hidden_1TD[:, :-1], 0, slice(0, length)
        for depth in range(self.settings.depth):
            if depth:
                before, first = first, start + depth - 1
                places = slice(first, min(length, start + WINDOW))
                if places.stop <= places.start:
                    break
                state_1TD = state_1TD[:, places.start - 1 - before : places.stop - 1 - before]
            position_1T = torch.arange(places.start, places.stop, device=ids_1T.device)[None]
            state_1TD = self.head(embedded_1TD[:, places], state_1TD, position_1T, depths=depths)
            found.append((state_1TD, first))
        return found

    def _loss(self, batch: Batch, hidden_1FD: Tensor, drafts: list[Draft], depth: int) -> Tensor | None:
        """The sum over the tokens that were sampled, or are to be imitated."""
        state_ND, place_N = (torch.cat(each) for each in zip(*drafts, strict=True))
        if not (count := len(place_N)):
            return None
        temperatures = torch.tensor([sample.temperature for sample in batch.samples])
        temperature_F = temperatures.repeat_interleave(torch.tensor(batch.row.lengths))
        place_N, temperature_N = place_N.to(state_ND.device), temperature_F[place_N].to(state_ND.device)
        teacher_ND, ids_N = hidden_1FD[0, place_N - 1], batch.row.ids_1F[0, place_N]

        def losses_of(logits_NV: Tensor, part: slice) -> dict[str, Tensor]:
            with torch.no_grad():
                teacher_NV = chunked.log_probabilities([self.output(teacher_ND[part])], temperature_N[part])
            student_NV = chunked.log_probabilities([logits_NV], temperature_N[part])
            apart_N = 0.5 * (student_NV.exp() - teacher_NV.exp()).abs().sum(-1)  # total variation
            kind = self.settings.loss
            if kind == "ce":
                nats_N = -student_NV.gather(1, ids_N[part][:, None])[:, 0]
            elif kind == "tv":
                nats_N = apart_N
            elif kind == "lk":
                nats_N = -torch.minimum(student_NV, teacher_NV).logsumexp(-1)
            else:
                nats_N = divergence(student_NV, teacher_NV, "forward")
            if kind == "kl-tv":  # total variation has no slope where nothing is in common, so KL leads there
                far_N = torch.exp(-LED * (1 - apart_N.detach()))
                nats_N = far_N * nats_N + (1 - far_N) * apart_N
            self._loss_K[depth] += nats_N.detach().sum()
            self._kept_K[depth] += (1 - apart_N.detach()).sum()
            return {kind: nats_N.sum()}

        self._tokens[depth] += count
        size = max(1, chunked.CHUNK_ENTRIES // 2 // self.model.config.get_text_config().vocab_size)
        chunks = [slice(first, min(first + size, count)) for first in range(0, count, size)]
        (loss,) = chunked.in_chunks(state_ND, self.output, losses_of, chunks)
        return loss

    def step(self, lr_scale: float = 1.0) -> dict[str, float]:
        """One step on what was learned since the last one."""
        metrics = self.measured()
        gradients = [master.grad for master in self.masters.named.values() if master.grad is not None]
        if gradients and self._tokens[0]:
            torch._foreach_div_(gradients, sum(self._tokens))
            norm = total_norm(gradients)
            metrics["mtp/gradient_norm"] = float(norm)
            if math.isfinite(norm):  # else it stays as it is, and the metric says so
                torch._foreach_mul_(gradients, (CLIP / (norm + 1e-6)).clamp(max=1.0))
                for group in self.optimizer.param_groups:
                    group["lr"] = self.settings.learning_rate * lr_scale
                self.optimizer.step()
                self.masters.write_back()
        self.steps += 1
        self.forget()
        return metrics

    def measured(self) -> dict[str, float]:
        """Since the last step: means over tokens, by depth. `kept` is the share of drafts that sampling would keep, the
        sum of min(p, q): 1 less the total variation."""
        found = {}
        for depth, count in enumerate(self._tokens):
            if count:
                found[f"mtp/loss_{depth + 1}"] = float(self._loss_K[depth]) / count
                found[f"mtp/kept_{depth + 1}"] = float(self._kept_K[depth]) / count
        return {**found, "mtp/train_s": self._seconds()}

    def _now(self) -> Any:
        """A GPU is not waited for."""
        if self.model.device.type != "cuda":
            return time.monotonic()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self) -> float:
        if self.model.device.type != "cuda":
            return float(sum(ended - began for began, ended in self._spent))
        torch.cuda.synchronize()
        return sum(began.elapsed_time(ended) for began, ended in self._spent) / 1000


class _Constant(nn.Module):
    """The model's head, whose weights are not trained by what goes through it."""

    def __init__(self, output: nn.Module):
        super().__init__()
        self._output = (output,)  # in a tuple, its parameters are not this module's

    def forward(self, hidden: Tensor) -> Tensor:
        (output,) = self._output
        logits: Tensor = output(hidden)
        return logits


def _predicted(sample: Sample, start: int, count: int) -> Tensor:
    """Places of the tokens with a weight, of those that states at start:start + count predict."""
    weights_2T = torch.zeros(2, len(sample.ids))
    for weight_T, stream in zip(weights_2T, (sample.rl_weight, sample.ce_weight), strict=True):
        weight_T[: len(stream)] = torch.tensor(stream)
    return weights_2T[:, start + 2 : start + 2 + count].any(0).nonzero()[:, 0] + start + 2
