"""Training a draft head by self-distillation: at every depth to the distribution of the model's own head. The model is
a constant.

At depth 1 the head reads the model's states. At depth d it reads its own states of depth d - 1, and attends to what it
will attend to when it drafts: keys of the model's states up to where drafting began, and of its own from there.

Left out: EAGLE's regression on hidden states. What counts is the distribution, and that is compared itself. Depths
above 1 are trained on a window of each sample, which bounds their cost however long samples are.

Axes: F tokens of a micro-batch, T tokens of a sample, W of a window, N tokens to predict, D width, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from offbook.core.config import MtpConfig
from offbook.core.draft import DraftHead
from offbook.core.output import output_of
from offbook.train import head as chunked
from offbook.train.attention import attend
from offbook.train.batches import Batch
from offbook.train.head import divergence
from offbook.train.schedule import GRADIENT_CLIP
from offbook.train.trainer import Masters, total_norm

NAME = "offbook_draft"  # of the attention function
WINDOW = 512  # tokens of a sample, at depths above 1


@dataclass
class Depths:
    """Keys and values of the depths so far: of the first for all positions, of the others for those of the window,
    which begins at `start`."""

    start: int = 0
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        self.keys.append(key)
        self.values.append(value)
        if len(self.keys) == 1:
            return attend(query, key, value, None, scaling)
        own, device = query.shape[2], query.device
        masks = [torch.ones(own, self.keys[0].shape[2], dtype=torch.bool, device=device).tril(self.start)]
        masks += [torch.eye(own, keys.shape[2], dtype=torch.bool, device=device) for keys in self.keys[1:]]
        return attend(query, torch.cat(self.keys, 2), torch.cat(self.values, 2), torch.cat(masks, dim=1), scaling)


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, depths: Depths, **_: Any
) -> tuple[Tensor, None]:
    return depths.attend(query, key, value, scaling).transpose(1, 2).contiguous(), None


class DraftTrainer:
    """A head, its optimizer, and what a step adds up."""

    def __init__(self, model: PreTrainedModel, head: DraftHead, settings: MtpConfig):
        self.model = model
        self.head = head.train()
        self.settings = settings
        AttentionInterface.register(NAME, _attention)
        head.config._attn_implementation = NAME
        self.output = _Constant(output_of(model))
        self.masters = Masters(head)
        rates = {"lr": settings.learning_rate, "betas": (0.9, 0.95), "weight_decay": 0.0}
        self.optimizer = torch.optim.AdamW(self.masters.named.values(), **rates, fused=True)
        self.steps = 0
        self.forget()

    def forget(self) -> None:
        """Drop what was learned since the last step."""
        self.optimizer.zero_grad()
        self._tokens = [0] * self.settings.depth
        self._loss_K, self._kept_K = torch.zeros(2, self.settings.depth, device=self.model.device)

    def learn(self, batch: Batch, hidden_1FD: Tensor, differentiate: bool = True) -> None:
        """Add a micro-batch to the step. `hidden_1FD` are the model's last states."""
        with torch.set_grad_enabled(differentiate):
            states: list[list[Tensor]] = [[] for _ in range(self.settings.depth)]
            places: list[list[Tensor]] = [[] for _ in range(self.settings.depth)]
            for sample, begin, length in zip(batch.samples, batch.row.starts, batch.row.lengths, strict=True):
                counted_T = torch.zeros(length, dtype=torch.bool)
                for weights in (sample.rl_weight, sample.ce_weight):
                    counted_T[: len(weights)] |= torch.tensor(weights) != 0
                part = slice(begin, begin + length)
                found = self.states(batch.row.ids_1F[:, part], hidden_1FD[:, part].detach())
                for depth, (first, state_1WD) in enumerate(found):
                    at_N = counted_T[first + 2 : first + 2 + state_1WD.shape[1]].nonzero()[:, 0]
                    states[depth].append(state_1WD[0, at_N])
                    places[depth].append(at_N + first + 2 + begin)
            total = torch.zeros((), device=hidden_1FD.device)
            for depth in range(self.settings.depth):
                if sum(map(len, places[depth])):
                    at_N = torch.cat(places[depth]).to(hidden_1FD.device)
                    total = total + self._loss(batch, hidden_1FD[0].detach(), depth, torch.cat(states[depth]), at_N)
        if total.requires_grad:
            total.backward()

    def states(self, ids_1T: Tensor, hidden_1TD: Tensor) -> list[tuple[int, Tensor]]:
        """Of each depth, as far as the sample is long enough, its first position and its states. At position p the head
        has read the token at p + 1, and predicts the one at p + 2."""
        embedded = self.model.get_input_embeddings()(ids_1T).detach()[:, 1:]
        state = hidden_1TD[:, :-1]
        rng = torch.Generator().manual_seed(self.steps)
        start = int(torch.randint(max(1, state.shape[1] - WINDOW), (1,), generator=rng))
        depths = Depths(start)
        found = []
        for depth in range(self.settings.depth):
            first = start + depth if depth else 0
            if depth == 1:
                state, embedded = state[:, start : start + WINDOW], embedded[:, start : start + WINDOW]
            if depth:
                state, embedded = state[:, :-1], embedded[:, 1:]
            if not state.shape[1]:
                break
            place_1W = torch.arange(first, first + state.shape[1], device=state.device)[None]
            state = self.head(embedded, state, place_1W, depths=depths)
            found.append((first, state))
        return found

    def _loss(self, batch: Batch, hidden_FD: Tensor, depth: int, state_ND: Tensor, at_N: Tensor) -> Tensor:
        """The sum over tokens with a weight. The states predict the tokens at `at_N`."""
        temperatures = torch.tensor([sample.temperature for sample in batch.samples])
        temperature_F = temperatures.repeat_interleave(torch.tensor(batch.row.lengths)).to(at_N.device)
        temperature_N = temperature_F[at_N]
        teacher_ND = hidden_FD[at_N - 1]

        def losses_of(logits_NV: Tensor, part: slice) -> dict[str, Tensor]:
            with torch.no_grad():
                teacher_NV = chunked.log_probabilities(self.output(teacher_ND[part]), temperature_N[part])
            student_NV = chunked.log_probabilities(logits_NV, temperature_N[part])
            variation_N = 0.5 * (student_NV.exp() - teacher_NV.exp()).abs().sum(-1)
            nats_N = divergence(student_NV, teacher_NV, "forward")
            self._loss_K[depth] += nats_N.detach().sum()
            self._kept_K[depth] += (1 - variation_N.detach()).sum()
            return {"kl": nats_N.sum()}

        self._tokens[depth] += len(at_N)
        size = max(1, chunked.CHUNK_ENTRIES // 2 // self.model.config.get_text_config().vocab_size)
        chunks = [slice(first, min(first + size, len(at_N))) for first in range(0, len(at_N), size)]
        (loss,) = chunked.in_chunks(state_ND, self.output, losses_of, chunks)
        return loss

    def step(self, lr_scale: float = 1.0) -> dict[str, float]:
        """One step on what was learned since the last one."""
        metrics = self.measured()
        gradients = self.masters.gradients()
        if gradients and self._tokens[0]:
            torch._foreach_div_(gradients, sum(self._tokens))
            norm = total_norm(gradients)
            metrics["mtp/gradient_norm"] = float(norm)
            if math.isfinite(norm):  # else nothing is applied, and the metric says so
                torch._foreach_mul_(gradients, (GRADIENT_CLIP / (norm + 1e-6)).clamp(max=1.0))
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
        return found


class _Constant(nn.Module):
    """The model's head, whose weights are not trained by what goes through it."""

    def __init__(self, output: nn.Module):
        super().__init__()
        self._output = (output,)  # in a tuple, its parameters are not this module's

    def forward(self, hidden: Tensor) -> Tensor:
        (output,) = self._output
        logits: Tensor = output(hidden)
        return logits
