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
class _Ledger:
    """What one step adds up over its micro-batches. `counts` are the tokens each component is a mean over, in all."""

    counts: dict[str, int]
    sums: dict[str, float] = field(default_factory=dict)
    measured: dict[str, Measured] = field(default_factory=dict)

    @classmethod
    def open(cls, samples: list[Sample]) -> _Ledger:
        return cls(
            {
                "rl": sum(weight != 0 for sample in samples for weight in sample.rl_weight),
                "ce": sum(weight != 0 for sample in samples for weight in sample.ce_weight),
                "hint": sum(_num_targets(branch) for sample in samples for branch in sample.branches),
            }
        )

    def add(self, name: str, values: Tensor) -> None:
        self.sums[name] = self.sums.get(name, 0.0) + float(values.detach().sum())

    def means(self) -> dict[str, float]:
        """`rl/loss` is a mean over the tokens that rl counts, `hint/kl` over those that hint counts, and so on."""
        return {name: total / self.counts[name.split("/")[0]] for name, total in self.sums.items()}


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
        ledger = _Ledger.open(samples)
        batches = micro_batches(samples, self.settings.micro_tokens)
        for micro in batches:
            self._loss(Batch.collate(micro, self.model.device), ledger).backward()
        gradient_norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.gradient_clip)
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.learning_rate * lr_scale
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._update_teacher()
        padded = sum(len(micro) * len(micro[0].ids) for micro in batches)
        used = sum(len(sample.ids) for sample in samples)
        metrics = {"gradient_norm": float(gradient_norm), "train_tokens": used, "padding_share": 1 - used / padded}
        return StepResult({**ledger.means(), **metrics}, ledger.measured)

    def _loss(self, batch: Batch, ledger: _Ledger) -> Tensor:
        trunk = Trunk() if batch.branches else None
        keeps = trunk if self.teacher is self.model else None
        hidden_BTD = self.model.base_model(input_ids=batch.ids_BT, use_cache=False, trunk=keeps).last_hidden_state
        mask_BT = batch.predicted()
        row_N, token_N = mask_BT.nonzero(as_tuple=True)
        logp_NV = self._log_softmax(self.model, hidden_BTD[row_N, token_N - 1])
        logp_N = logp_NV.gather(1, batch.ids_BT[mask_BT][:, None])[:, 0]

        loss = torch.zeros((), device=logp_N.device)
        if ledger.counts["rl"]:
            behaviour_N, weight_N = batch.logprobs_BT[mask_BT], batch.rl_weight_BT[mask_BT]
            rl_N = weight_N * losses.policy_gradient(
                logp_N, behaviour_N, batch.advantage_BT[mask_BT], self.settings.ratio_cap
            )
            loss = loss + rl_N.sum() / ledger.counts["rl"]
            sampled_N = weight_N != 0
            ledger.add("rl/loss", rl_N)
            ledger.add("rl/mismatch", (logp_N - behaviour_N)[sampled_N].abs())
            ledger.add("rl/entropy", -(logp_NV.exp() * logp_NV).sum(-1)[sampled_N])
        if ledger.counts["ce"]:
            ce_N = -batch.ce_weight_BT[mask_BT] * logp_N
            loss = loss + ce_N.sum() / ledger.counts["ce"]
            ledger.add("ce/loss", ce_N)
        if trunk is not None:
            index_BT = torch.full_like(batch.ids_BT, -1)
            index_BT[mask_BT] = torch.arange(len(row_N), device=index_BT.device)
            target_M = torch.cat([index_BT[row, b.target_start : b.target_end] for row, b in batch.branches])
            ids_M = batch.ids_BT[mask_BT][target_M]
            hint_M = self._hint_loss(batch.branches, ids_M, logp_NV[target_M], self._teacher_logp(batch, trunk), ledger)
            loss = loss + hint_M.sum() / ledger.counts["hint"]
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
        branches: list[tuple[int, Branch]],
        ids_M: Tensor,
        student_logp_MV: Tensor,
        teacher_logp_MV: Tensor,
        ledger: _Ledger,
    ) -> Tensor:
        """The weighted, capped divergence at each target token, branch after branch."""
        divergence_M = losses.divergence(student_logp_MV, teacher_logp_MV, self.feedback.direction)
        ledger.add("hint/kl", divergence_M)
        ledger.add("hint/capped", divergence_M > self.feedback.token_cap)
        sizes = [_num_targets(branch) for _, branch in branches]
        rows = (student_logp_MV, teacher_logp_MV)
        student_M, teacher_M = (logp_MV.detach().gather(1, ids_M[:, None])[:, 0] for logp_MV in rows)
        parts = zip(student_M.split(sizes), teacher_M.split(sizes), divergence_M.detach().split(sizes), strict=True)
        for (_, branch), (student, teacher, divergence) in zip(branches, parts, strict=True):
            ledger.measured[branch.key] = Measured(student.tolist(), teacher.tolist(), divergence.tolist())
        weight_M = torch.tensor([branch.weight for _, branch in branches], device=ids_M.device)
        weight_M = weight_M.repeat_interleave(torch.tensor(sizes, device=ids_M.device))
        return weight_M * losses.cap_tokens(divergence_M, self.feedback.token_cap)

    @torch.no_grad()
    def _update_teacher(self) -> None:
        if self.feedback.teacher == "ema":
            for slow, fast in zip(self.teacher.parameters(), self.model.parameters(), strict=True):
                slow.lerp_(fast, 1 - self.feedback.ema_decay)


def _optimizer(model: PreTrainedModel, settings: TrainConfig) -> torch.optim.Optimizer:
    lr, decay, betas = settings.learning_rate, settings.weight_decay, (0.9, 0.95)
    if settings.optimizer == "muon":
        return Muon(model.named_parameters(), lr=lr, betas=betas, weight_decay=decay)
    return torch.optim.AdamW(model.parameters(), lr=lr, betas=betas, weight_decay=decay, fused=True)


def _num_targets(branch: Branch) -> int:
    return branch.target_end - branch.target_start
