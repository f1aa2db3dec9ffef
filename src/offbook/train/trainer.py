"""One optimizer step over samples: a sum of components (rl, ce, hint_kl), each divided by its own global token count.

Left out on purpose: critics, trust-region clipping, entropy bonuses, several epochs over the same rollouts.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from offbook.config import FeedbackConfig, TrainConfig
from offbook.train import attention, losses
from offbook.train.attention import Trunk
from offbook.train.batches import Batch, BranchBatch, micro_batches
from offbook.train.muon import Muon
from offbook.types import Branch, Sample


@dataclass(slots=True)
class Measured:
    """What a hint did to the tokens of its target: log-probabilities of the sampled tokens and divergence, each."""

    student: list[float]
    teacher: list[float]
    divergence: list[float]


@dataclass(slots=True)
class StepResult:
    metrics: dict[str, float]
    measured: dict[str, Measured] = field(default_factory=dict)  # by Branch.key


@dataclass(slots=True)
class _Sums:
    """Running sums over the micro-batches of one step."""

    values: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, value: Tensor | float) -> None:
        self.values[name] = self.values.get(name, 0.0) + float(value)


class Trainer:
    def __init__(self, model: PreTrainedModel, train: TrainConfig, feedback: FeedbackConfig, temperature: float = 1.0):
        attention.install(model)
        self.model = model
        self.settings = train
        self.feedback = feedback
        self.temperature = temperature
        self.optimizer = _optimizer(model, train)
        self.teacher = model if feedback.teacher == "live" else copy.deepcopy(model).requires_grad_(False)

    def step(self, samples: list[Sample], lr_scale: float = 1.0) -> StepResult:
        counts = _global_counts(samples)
        sums = _Sums()
        result = StepResult(metrics={})
        batches = micro_batches(samples, self.settings.micro_tokens)
        for micro in batches:
            self._loss(Batch.collate(micro, self.model.device), counts, sums, result.measured).backward()
        gradient_norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.gradient_clip)
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.learning_rate * lr_scale
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._update_teacher()
        padded = sum(len(micro) * len(micro[0].ids) for micro in batches)
        used = sum(len(sample.ids) for sample in samples)
        result.metrics = {
            **_means(sums.values, counts),
            "gradient_norm": float(gradient_norm),
            "train_tokens": used,
            "padding_share": 1 - used / padded,
        }
        return result

    def _loss(self, batch: Batch, counts: dict[str, int], sums: _Sums, measured: dict[str, Measured]) -> Tensor:
        trunk = Trunk() if batch.branches else None
        keeps = trunk if self.teacher is self.model else None
        hidden_BTD = self.model.base_model(input_ids=batch.ids_BT, use_cache=False, trunk=keeps).last_hidden_state
        mask_BT = batch.predicted()
        row_N, token_N = mask_BT.nonzero(as_tuple=True)
        logp_NV = self._log_softmax(self.model, hidden_BTD[row_N, token_N - 1])
        logp_N = logp_NV.gather(1, batch.ids_BT[mask_BT][:, None])[:, 0]

        loss = torch.zeros((), device=logp_N.device)
        if counts["rl"]:
            behaviour_N, weight_N = batch.logprobs_BT[mask_BT], batch.rl_weight_BT[mask_BT]
            rl_N = losses.policy_gradient(logp_N, behaviour_N, batch.advantage_BT[mask_BT], self.settings.ratio_cap)
            loss = loss + (weight_N * rl_N).sum() / counts["rl"]
            sampled_N = weight_N != 0
            sums.add("rl/loss", (weight_N * rl_N).detach().sum())
            sums.add("rl/mismatch", (logp_N.detach() - behaviour_N)[sampled_N].abs().sum())
            sums.add("rl/entropy", -(logp_NV.exp() * logp_NV).detach().sum(-1)[sampled_N].sum())
        if counts["ce"]:
            ce_N = -batch.ce_weight_BT[mask_BT] * logp_N
            loss = loss + ce_N.sum() / counts["ce"]
            sums.add("ce/loss", ce_N.detach().sum())
        if trunk is not None:
            index_BT = torch.full_like(batch.ids_BT, -1)
            index_BT[mask_BT] = torch.arange(len(row_N), device=index_BT.device)
            target_M = torch.cat([index_BT[row, b.target_start : b.target_end] for row, b in batch.branches])
            teacher_MV = self._teacher_logp(batch, trunk)
            loss = loss + self._hint_loss(
                logp_NV[target_M], teacher_MV, logp_N[target_M], batch, counts, sums, measured
            )
        return loss

    def _log_softmax(self, model: PreTrainedModel, hidden_ND: Tensor) -> Tensor:
        logits_NV = model.get_output_embeddings()(hidden_ND).float() / self.temperature
        return torch.log_softmax(logits_NV, dim=-1)

    @torch.no_grad()
    def _teacher_logp(self, batch: Batch, trunk: Trunk) -> Tensor:
        """The teacher's distribution at every target token, one pass for all branches of the batch."""
        if self.teacher is not self.model:  # a teacher of its own weights needs a trunk of its own
            self.teacher.base_model(input_ids=batch.ids_BT, use_cache=False, trunk=trunk)
        flat = BranchBatch.collate(batch)
        hidden_1LD = self.teacher.base_model(
            input_ids=flat.ids_1L, position_ids=flat.positions_1L, use_cache=False, trunk=trunk, branches=flat.rows
        ).last_hidden_state
        return self._log_softmax(self.teacher, hidden_1LD[0, flat.predictors])

    def _hint_loss(
        self,
        student_MV: Tensor,
        teacher_MV: Tensor,
        student_logp_M: Tensor,
        batch: Batch,
        counts: dict[str, int],
        sums: _Sums,
        measured: dict[str, Measured],
    ) -> Tensor:
        divergence_M = losses.divergence(student_MV, teacher_MV, self.feedback.direction)
        weight_M = torch.cat([torch.full((_num_targets(b),), b.weight) for _, b in batch.branches]).to(divergence_M)
        ids_M = torch.cat([batch.ids_BT[row, b.target_start : b.target_end] for row, b in batch.branches])
        teacher_logp_M = teacher_MV.gather(1, ids_M[:, None])[:, 0]
        sums.add("hint/kl", divergence_M.detach().sum())
        sums.add("hint/capped", (divergence_M > self.feedback.token_cap).sum())
        start = 0
        for _, branch in batch.branches:
            span = slice(start, start + _num_targets(branch))
            measured[branch.key] = Measured(
                student_logp_M[span].tolist(), teacher_logp_M[span].tolist(), divergence_M[span].tolist()
            )
            start = span.stop
        capped_M = losses.cap_tokens(divergence_M, self.feedback.token_cap)
        return (weight_M * capped_M).sum() / counts["hint"]

    @torch.no_grad()
    def _update_teacher(self) -> None:
        if self.feedback.teacher == "ema":
            for slow, fast in zip(self.teacher.parameters(), self.model.parameters(), strict=True):
                slow.lerp_(fast, 1 - self.feedback.ema_decay)


def _optimizer(model: PreTrainedModel, settings: TrainConfig) -> torch.optim.Optimizer:
    shared = {"lr": settings.learning_rate, "betas": (0.9, 0.95), "weight_decay": settings.weight_decay}
    if settings.optimizer == "muon":
        return Muon(model.named_parameters(), **shared)
    return torch.optim.AdamW(model.parameters(), **shared, fused=True)


def _num_targets(branch: Branch) -> int:
    return branch.target_end - branch.target_start


def _global_counts(samples: list[Sample]) -> dict[str, int]:
    """How many tokens each component is a mean over, in the whole step and not in one micro-batch."""
    return {
        "rl": sum(weight != 0 for sample in samples for weight in sample.rl_weight),
        "ce": sum(weight != 0 for sample in samples for weight in sample.ce_weight),
        "hint": sum(_num_targets(branch) for sample in samples for branch in sample.branches),
    }


def _means(sums: dict[str, float], counts: dict[str, int]) -> dict[str, float]:
    """`rl/loss` is a mean over the tokens that rl counts, `hint/kl` over those that hint counts, and so on."""
    return {name: total / counts[name.split("/")[0]] for name, total in sums.items()}
