"""One optimizer step over samples: a sum of components (rl, ce, hint_kl), each divided by its own global token count.

Left out on purpose: critics, trust-region clipping, entropy bonuses, several epochs over the same rollouts.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from offbook.config import FeedbackConfig, TrainConfig
from offbook.train import head
from offbook.train.batches import Batch, BranchBatch, micro_batches, row_length
from offbook.train.forward import Decoder
from offbook.train.head import Objective
from offbook.train.muon import Muon
from offbook.train.scoring import Ledger, Scoring
from offbook.train.targets import Measured
from offbook.train.teachers import Teacher
from offbook.types import Sample


@dataclass(slots=True)
class StepResult:
    metrics: dict[str, float]
    measured: dict[str, Measured] = field(default_factory=dict)  # by Branch.key


class Trainer:
    def __init__(self, model: PreTrainedModel, train: TrainConfig, feedback: FeedbackConfig, temperature: float = 1.0):
        self.model = model
        self.settings = train
        self.feedback = feedback
        self.temperature = temperature
        self.student = Decoder(model, train.recompute, train.compile)
        self.teacher = Teacher(self.student, feedback)
        self.optimizer = _optimizer(model, train)

    def step(self, samples: list[Sample], lr_scale: float = 1.0) -> StepResult:
        ledger = Ledger.open(samples)
        batches = micro_batches(samples, self.settings.micro_tokens)
        for micro in batches:
            self._loss(Batch.collate(micro, self.model.device), ledger).backward()
        gradient_norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.gradient_clip)
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.learning_rate * lr_scale
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.teacher.follow(self.model)
        padded = sum(len(micro) * row_length(micro, self.model.device) for micro in batches)
        used = sum(len(sample.ids) for sample in samples)
        metrics = {"gradient_norm": float(gradient_norm), "train_tokens": used, "padding_share": 1 - used / padded}
        return StepResult({**ledger.means(), **metrics}, ledger.measured())

    def _loss(self, batch: Batch, ledger: Ledger) -> Tensor:
        branches = BranchBatch.collate(batch) if batch.branches else None
        teachers = [] if branches is None else self.teacher.readings(batch, branches)
        rides = self.teacher.rides and not batch.anchors
        hidden_BTD, own_MD = self.student.hidden(batch.ids_BT, branches if rides else None)
        tokens = batch.tokens(self._chunk_rows)  # on the host, while a GPU is busy with the forward
        output = self.student.head
        if own_MD is not None:
            teachers.append((output, own_MD))
        hidden_ND = hidden_BTD.flatten(0, 1).index_select(0, tokens.predictor_N)
        student = (output, hidden_ND.detach()[: len(tokens.weight_M)])
        objective = self._objective(ledger, len(teachers), 0.0 if batch.anchors else self.feedback.threshold)
        scoring = Scoring(batch, tokens, student, teachers, objective, ledger, self.settings.compile)
        target_rows = -(-self._chunk_rows // 2)  # a teacher's logits lie beside the student's
        if teachers and not batch.anchors and (batch.is_contested or tokens.has_cut_target):
            scoring.judge(target_rows)
        loss = head.in_chunks(hidden_ND, output, scoring.loss, tokens.chunks)
        if teachers:
            scoring.record_targets(self.feedback.top, target_rows)
        return loss

    @property
    def _chunk_rows(self) -> int:
        entries = head.COMPILED_CHUNK_ENTRIES if self.settings.compile else head.CHUNK_ENTRIES
        return max(1, entries // self.model.config.vocab_size)

    def _objective(self, ledger: Ledger, teachers: int, gate: float) -> Objective:
        return Objective(
            temperature=self.temperature,
            ratio_cap=self.settings.ratio_cap,
            direction=self.feedback.direction,
            token_cap=self.feedback.token_cap,
            entry_cap=self.feedback.entry_cap,
            importance_cap=self.feedback.importance_cap,
            shares=self.teacher.shares if teachers > 1 else (1.0,),
            gate=gate,
            policy=bool(ledger.counts["rl"]),
        )


def _optimizer(model: PreTrainedModel, settings: TrainConfig) -> torch.optim.Optimizer:
    lr, decay, betas = settings.learning_rate, settings.weight_decay, (0.9, 0.95)
    if settings.optimizer == "muon":
        return Muon(model.named_parameters(), lr=lr, betas=betas, weight_decay=decay)
    return torch.optim.AdamW(model.parameters(), lr=lr, betas=betas, weight_decay=decay, fused=True)
