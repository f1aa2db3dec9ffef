"""One optimizer step over samples: a sum of components (rl, ce, hint_kl), each divided by its own global token count.

Left out on purpose: critics, trust-region clipping, entropy bonuses, several epochs over the same rollouts.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from offbook.config import FeedbackConfig, TrainConfig
from offbook.train import head
from offbook.train.batches import Batch, BranchBatch, Tokens, micro_batches
from offbook.train.forward import Decoder
from offbook.train.head import Objective, Rows, Targets, Terms
from offbook.train.muon import Muon
from offbook.train.teachers import Teacher
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
    """What one step adds up over its micro-batches. `counts` are the tokens each component is a mean over, in all.

    Values stay on the device until the step is over: reading one would wait for all the work before it.
    """

    counts: dict[str, int]
    sums: dict[str, list[Tensor]] = field(default_factory=dict)
    targets: list[tuple[list[Branch], Tensor]] = field(default_factory=list)  # [student, teacher, divergence] by token

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
        self.sums.setdefault(name, []).append(values.detach().sum())

    def means(self) -> dict[str, float]:
        """`rl/loss` is a mean over the tokens that rl counts, `hint/kl` over those that hint counts, and so on."""
        return {
            name: sum(torch.stack(values).tolist()) / self.counts[name.split("/")[0]]
            for name, values in self.sums.items()
        }

    def measured(self) -> dict[str, Measured]:
        found: dict[str, Measured] = {}
        for branches, values_3M in self.targets:
            parts = values_3M.cpu().split([_num_targets(branch) for branch in branches], dim=1)
            found |= {branch.key: Measured(*part.tolist()) for branch, part in zip(branches, parts, strict=True)}
        return found


@dataclass(frozen=True, slots=True)
class _Scoring:
    """The tokens of one micro-batch, scored chunk by chunk."""

    tokens: Tokens
    teachers: list[tuple[nn.Module, Tensor]]  # heads, and hidden states [M, D]
    objective: Objective
    compiled: bool
    values_3M: Tensor  # student, teacher, divergence at each target token
    ledger: _Ledger

    def loss(self, logits_NV: Tensor, part: slice) -> Tensor:
        rows = Rows(*(stream_N[part] for stream_N in self.tokens.rows))
        inside, aligned = self.tokens.targets_in(part)
        chosen = torch.tensor(inside, dtype=torch.long, device=logits_NV.device)
        row_M, weight_M = (values_M[chosen] for values_M in self.tokens.targets)
        with torch.no_grad():
            teacher_logits = [output(hidden_MD[chosen]) for output, hidden_MD in self.teachers] if inside else []
        score = head.compiled_chunk_terms if self.compiled else head.chunk_terms
        targets = Targets(row_M - part.start, weight_M)
        terms = score(logits_NV, teacher_logits, rows, targets, self.objective, aligned)
        if inside:
            self.values_3M[:, chosen] = torch.stack([terms.student_M, terms.teacher_M, terms.divergence_M])
        self._record(terms, rows)
        return self._sum(terms)

    def _sum(self, terms: Terms) -> Tensor:
        loss = torch.zeros((), device=terms.rl.device)
        for name, total in (("rl", terms.rl), ("ce", terms.ce), ("hint", terms.hint)):
            if self.ledger.counts[name]:
                loss = loss + total / self.ledger.counts[name]
        return loss

    def _record(self, terms: Terms, rows: Rows) -> None:
        add = self.ledger.add
        if self.ledger.counts["rl"]:
            sampled_N = (rows.rl_weight_N != 0).float()
            add("rl/loss", terms.rl)
            add("rl/mismatch", (terms.logp_N - rows.behaviour_N).abs() * sampled_N)
            add("rl/entropy", terms.entropy_N * sampled_N)
        if self.ledger.counts["ce"]:
            add("ce/loss", terms.ce)
        if self.ledger.counts["hint"]:
            add("hint/kl", terms.divergence_M)
            add("hint/capped", terms.divergence_M > self.objective.token_cap)


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
        ledger = _Ledger.open(samples)
        batches = micro_batches(samples, self.settings.micro_tokens)
        for micro in batches:
            self._loss(Batch.collate(micro, self.model.device), ledger).backward()
        gradient_norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.gradient_clip)
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.learning_rate * lr_scale
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.teacher.follow(self.model)
        padded = sum(len(micro) * len(micro[0].ids) for micro in batches)
        used = sum(len(sample.ids) for sample in samples)
        metrics = {"gradient_norm": float(gradient_norm), "train_tokens": used, "padding_share": 1 - used / padded}
        return StepResult({**ledger.means(), **metrics}, ledger.measured())

    def _loss(self, batch: Batch, ledger: _Ledger) -> Tensor:
        compiled = self.settings.compile
        entries = head.COMPILED_CHUNK_ENTRIES if compiled else head.CHUNK_ENTRIES
        tokens = batch.tokens(chunk_rows=max(1, entries // self.model.config.vocab_size))
        branches = BranchBatch.collate(batch) if batch.branches else None
        teachers = [] if branches is None else self.teacher.readings(batch, branches)
        hidden_BTD, own_MD = self.student.hidden(batch.ids_BT, branches if self.teacher.rides else None)
        output = self.model.get_output_embeddings()
        if own_MD is not None:
            teachers.append((output, own_MD))
        values_3M = torch.empty(3, len(tokens.places), device=batch.ids_BT.device)
        ledger.targets.append(([branch for _, branch in batch.branches], values_3M))
        scoring = _Scoring(tokens, teachers, self._objective(ledger), compiled, values_3M, ledger)
        return head.in_chunks(hidden_BTD[tokens.predictors], output, scoring.loss, tokens.chunks)

    def _objective(self, ledger: _Ledger) -> Objective:
        return Objective(
            temperature=self.temperature,
            ratio_cap=self.settings.ratio_cap,
            direction=self.feedback.direction,
            token_cap=self.feedback.token_cap,
            entry_cap=self.feedback.entry_cap,
            importance_cap=self.feedback.importance_cap,
            shares=self.teacher.shares,
            policy=bool(ledger.counts["rl"]),
        )


def _optimizer(model: PreTrainedModel, settings: TrainConfig) -> torch.optim.Optimizer:
    lr, decay, betas = settings.learning_rate, settings.weight_decay, (0.9, 0.95)
    if settings.optimizer == "muon":
        return Muon(model.named_parameters(), lr=lr, betas=betas, weight_decay=decay)
    return torch.optim.AdamW(model.parameters(), lr=lr, betas=betas, weight_decay=decay, fused=True)


def _num_targets(branch: Branch) -> int:
    return branch.target_end - branch.target_start
