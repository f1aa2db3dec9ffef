"""Training a draft head by self-distillation: at every depth to the distribution of the model's own head, whose states
are there already. The model is a constant, so a head can be trained along with it.

At depth 1 the head reads the model's states. At depth d it reads what it made itself at depth d - 1, and attends to
what it will attend to when it drafts: keys of the model's states up to where drafting began, and of its own from there.

Left out: EAGLE's regression on hidden states. What counts is the distribution, and that is compared itself. Depths
above 1 are trained on a window of each sample, which bounds what they cost however long samples are.

Samples of about one length are rows side by side, with filler behind the shorter ones.

Axes: F tokens of a micro-batch, B rows, T tokens of each, W of a window, N tokens to predict, D width, V vocabulary.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface, PreTrainedModel

from offbook.core.config import MtpConfig
from offbook.core.draft import DraftHead
from offbook.core.output import output_of
from offbook.train import head as chunked
from offbook.train.attention import attend
from offbook.train.batches import Batch
from offbook.train.losses import divergence
from offbook.train.parallel.ranks import total_norm
from offbook.train.trainer import Masters
from offbook.types import Sample

NAME = "offbook_draft"  # of the attention function
WINDOW = 512  # tokens of a sample, at depths above 1
WARM_UP = 10  # steps of a head that goes on beside RL, whose optimizer begins anew
CLIP = 1.0  # the most that the gradient's norm may be
Draft = tuple[Tensor, Tensor]  # states that predict, and the places in the row of what they do


@dataclass(slots=True)
class Depths:
    """Keys and values of the depths so far: of the first for all positions, of the others for those of the window."""

    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    place_BW: Tensor | None = None  # positions of the window, at depths above 1

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        depth = len(self.keys)  # from 0
        self.keys.append(key)
        self.values.append(value)
        if self.place_BW is None:
            return attend(query, key, value, None, scaling)
        first = torch.arange(self.keys[0].shape[2], device=query.device)
        masks = [first <= self.place_BW[:, :, None] - depth]
        for keys in self.keys[1:]:  # one of each: that of the same draft
            same = torch.eye(query.shape[2], keys.shape[2], dtype=torch.bool, device=query.device)
            masks.append(same.expand(len(query), -1, -1))
        mask = torch.cat(masks, dim=2)[:, None]
        return attend(query, torch.cat(self.keys, 2), torch.cat(self.values, 2), mask, scaling)


@dataclass(frozen=True, slots=True)
class States:
    """What the head makes at one depth. At position p it has read the token at p + 1, and predicts the one at p + 2."""

    state_BWD: Tensor
    first: list[int]  # of each row, the position of its first state
    count: list[int]  # and how many are its own; behind them is filler


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
        rows = [row for row in zip(batch.samples, batch.row.starts, strict=True) if len(row[0].ids) > 2]
        rows.sort(key=lambda row: len(row[0].ids))
        with torch.set_grad_enabled(differentiate):
            for _, alike in itertools.groupby(rows, key=lambda row: len(row[0].ids).bit_length()):
                for depth, draft in enumerate(self._drafts(batch, hidden_1FD[0], [*alike])):
                    drafts[depth].append(draft)
            losses = [self._loss(batch, hidden_1FD, each, depth) for depth, each in enumerate(drafts) if each]
        if differentiate and (there := [loss for loss in losses if loss is not None]):
            torch.stack(there).sum().backward()
        self._spent.append((began, self._now()))

    def _drafts(self, batch: Batch, hidden_FD: Tensor, rows: list[tuple[Sample, int]]) -> Iterator[Draft]:
        """Of samples and where they begin in the row, at each depth."""
        lengths, counted = [len(sample.ids) for sample, _ in rows], [_counted(sample) for sample, _ in rows]
        parts = [slice(begin, begin + length) for (_, begin), length in zip(rows, lengths, strict=True)]
        ids_BT = pad_sequence([batch.row.ids_1F[0, part] for part in parts], batch_first=True)
        hidden_BTD = pad_sequence([hidden_FD[part] for part in parts], batch_first=True)
        for states in self.states(ids_BT, hidden_BTD, lengths):
            where, places = [], []
            for number, (first, count) in enumerate(zip(states.first, states.count, strict=True)):
                place_N = counted[number]
                place_N = place_N[(place_N >= first + 2) & (place_N < first + 2 + count)]
                where.append(number * states.state_BWD.shape[1] + place_N - 2 - first)
                places.append(parts[number].start + place_N)
            where_N = torch.cat(where).to(hidden_FD.device)
            yield states.state_BWD.flatten(0, 1)[where_N], torch.cat(places)

    def states(self, ids_BT: Tensor, hidden_BTD: Tensor, lengths: list[int]) -> Iterator[States]:
        """Of each depth, as far as samples are long enough. None has fewer than three tokens."""
        embedded_BTD = self.model.get_input_embeddings()(ids_BT).detach()[:, 1:]
        usable = [length - 1 for length in lengths]
        starts = [self._start(length) for length in usable]
        rows_B1 = torch.arange(len(lengths), device=ids_BT.device)[:, None]
        place_1T = torch.arange(embedded_BTD.shape[1], device=ids_BT.device)[None]
        depths = Depths()
        state_BWD = self.head(embedded_BTD, hidden_BTD[:, :-1], place_1T, depths=depths)
        yield States(state_BWD, [0] * len(lengths), usable)
        for depth in range(1, self.settings.depth):
            first = [start + depth - 1 for start in starts]
            ends = [min(length, start + WINDOW) for length, start in zip(usable, starts, strict=True)]
            count = [max(0, end - begin) for end, begin in zip(ends, first, strict=True)]
            if not (width := max(count)):
                return
            first_B1 = torch.tensor(first, device=ids_BT.device)[:, None]
            place_BW = (first_B1 + place_1T[:, :width]).clamp(max=embedded_BTD.shape[1] - 1)
            # What was made at the position before. From the second depth on that is the one in the same place.
            state_BWD = state_BWD[rows_B1, place_BW - 1] if depth == 1 else state_BWD[:, :width]
            depths.place_BW = place_BW
            state_BWD = self.head(embedded_BTD[rows_B1, place_BW], state_BWD, place_BW, depths=depths)
            yield States(state_BWD, first, count)

    def _start(self, length: int) -> int:
        """Of the window, in so many positions."""
        self._rng.manual_seed(self.steps)
        return 1 + int(torch.randint(max(1, length - WINDOW), (1,), generator=self._rng))

    def _loss(self, batch: Batch, hidden_1FD: Tensor, drafts: list[Draft], depth: int) -> Tensor | None:
        """The sum over the tokens that were sampled, or are to be imitated."""
        state_ND, place_N = (torch.cat(each) for each in zip(*drafts, strict=True))
        if not (count := len(place_N)):
            return None
        temperatures = torch.tensor([sample.temperature for sample in batch.samples])
        temperature_F = temperatures.repeat_interleave(torch.tensor(batch.row.lengths))
        place_N, temperature_N = place_N.to(state_ND.device), temperature_F[place_N].to(state_ND.device)
        teacher_ND = hidden_1FD[0, place_N - 1]

        def losses_of(logits_NV: Tensor, part: slice) -> dict[str, Tensor]:
            with torch.no_grad():
                teacher_NV = chunked.log_probabilities([self.output(teacher_ND[part])], temperature_N[part])
            student_NV = chunked.log_probabilities([logits_NV], temperature_N[part])
            apart_N = 0.5 * (student_NV.exp() - teacher_NV.exp()).abs().sum(-1)  # total variation
            nats_N = divergence(student_NV, teacher_NV, "forward")
            self._loss_K[depth] += nats_N.detach().sum()
            self._kept_K[depth] += (1 - apart_N.detach()).sum()
            return {"kl": nats_N.sum()}

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


def _counted(sample: Sample) -> Tensor:
    """Places of the tokens with a weight."""
    weights_2T = torch.zeros(2, len(sample.ids))
    for weight_T, stream in zip(weights_2T, (sample.rl_weight, sample.ce_weight), strict=True):
        weight_T[: len(stream)] = torch.tensor(stream)
    return weights_2T.any(0).nonzero()[:, 0]
