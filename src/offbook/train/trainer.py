"""One optimizer step over samples: a sum of components (rl, ce, hint_kl), each divided by its own global token count.

Left out on purpose: critics, trust-region clipping, entropy bonuses, several epochs over the same rollouts.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from offbook.config import FeedbackConfig, TrainConfig
from offbook.train import head
from offbook.train.batches import Batch, BranchBatch, Tokens, micro_batches, row_length
from offbook.train.forward import Decoder
from offbook.train.head import Objective, Rows, Terms
from offbook.train.muon import Muon
from offbook.train.targets import VERDICTS, Gate, Measured, Readings, by_branch, read_targets, told
from offbook.train.teachers import Teacher
from offbook.types import Branch, Sample


@dataclass(slots=True)
class StepResult:
    metrics: dict[str, float]
    measured: dict[str, Measured] = field(default_factory=dict)  # by Branch.key


@dataclass(slots=True)
class _Ledger:
    """What one step adds up over its micro-batches. `counts` are the tokens each component is a mean over, in all.

    Values are not read until the step is over: reading one would wait for all the work before it.
    """

    counts: dict[str, int]
    sums: dict[str, list[Tensor]] = field(default_factory=dict)
    targets: list[tuple[list[Branch], Readings, Tensor]] = field(default_factory=list)  # and the gate's verdicts

    @classmethod
    def open(cls, samples: list[Sample]) -> _Ledger:
        tokens = [(branch.anchor, _num_targets(branch)) for sample in samples for branch in sample.branches]
        return cls(
            {
                "rl": sum(sum(map(bool, sample.rl_weight)) for sample in samples),
                "ce": sum(sum(map(bool, sample.ce_weight)) for sample in samples),
                "hint": sum(count for anchor, count in tokens if not anchor),
                "anchor": sum(count for anchor, count in tokens if anchor),
                "target": sum(not anchor for anchor, _ in tokens),
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
        """After the means, which wait for the device."""
        return {key: value for part in self.targets for key, value in told(*part).items()}


@dataclass(frozen=True, slots=True)
class _Scoring:
    """The tokens of one micro-batch, scored chunk by chunk."""

    tokens: Tokens
    teachers: list[tuple[nn.Module, Tensor]]  # heads, and hidden states [M, D]
    objective: Objective
    compiled: bool
    component: str  # of the loss, that the targets belong to: hint or anchor
    ledger: _Ledger

    def loss(self, logits_NV: Tensor, part: slice) -> Tensor:
        rows = Rows(*(stream_N[part] for stream_N in self.tokens.rows))
        targets = self.tokens.targets_in(part)
        teachers = self.teachers if targets.stop > targets.start else []
        with torch.no_grad():
            teacher_logits = [output(hidden_MD[targets]) for output, hidden_MD in teachers]
        score = head.compiled_chunk_terms if self.compiled else head.chunk_terms
        terms = score(logits_NV, teacher_logits, rows, self.tokens.weight_M[targets], self.objective)
        self._record(terms, rows)
        return self._sum(terms)

    def _sum(self, terms: Terms) -> Tensor:
        loss = torch.zeros((), device=terms.rl.device)
        for name, total in (("rl", terms.rl), ("ce", terms.ce), (self.component, terms.hint)):
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
        padded = sum(len(micro) * row_length(micro, self.model.device) for micro in batches)
        used = sum(len(sample.ids) for sample in samples)
        metrics = {"gradient_norm": float(gradient_norm), "train_tokens": used, "padding_share": 1 - used / padded}
        return StepResult({**ledger.means(), **metrics}, ledger.measured())

    def _loss(self, batch: Batch, ledger: _Ledger) -> Tensor:
        branches = BranchBatch.collate(batch) if batch.branches else None
        teachers = [] if branches is None else self.teacher.readings(batch, branches)
        rides = self.teacher.rides and not batch.anchors
        hidden_BTD, own_MD = self.student.hidden(batch.ids_BT, branches if rides else None)
        tokens = batch.tokens(self._chunk_rows)  # on the host, while a GPU is busy with the forward
        output = self.model.get_output_embeddings()
        if own_MD is not None:
            teachers.append((output, own_MD))
        hidden_ND = hidden_BTD.flatten(0, 1).index_select(0, tokens.predictor_N)
        objective = self._objective(ledger, len(teachers))
        if teachers:
            tokens = self._gated(batch, tokens, hidden_ND, teachers, objective, ledger)
        component = "anchor" if batch.anchors else "hint"
        scoring = _Scoring(tokens, teachers, objective, self.settings.compile, component, ledger)
        return head.in_chunks(hidden_ND, output, scoring.loss, tokens.chunks)

    @property
    def _chunk_rows(self) -> int:
        entries = head.COMPILED_CHUNK_ENTRIES if self.settings.compile else head.CHUNK_ENTRIES
        return max(1, entries // self.model.config.vocab_size)

    @torch.no_grad()
    def _gated(
        self,
        batch: Batch,
        tokens: Tokens,
        hidden_ND: Tensor,
        teachers: list[tuple[nn.Module, Tensor]],
        objective: Objective,
        ledger: _Ledger,
    ) -> Tokens:
        """The same tokens, where branches that may not teach weigh nothing. What the hints did is recorded."""
        num_targets = len(tokens.weight_M)
        student = (self.model.get_output_embeddings(), hidden_ND.detach()[:num_targets])
        ids_M, compiled = tokens.rows.ids_N[:num_targets], self.settings.compile
        rows = -(-self._chunk_rows // 2)  # a teacher's logits lie beside the student's
        readings = read_targets(student, teachers, ids_M, objective, self.feedback.top, rows, compiled)
        if batch.anchors:
            ledger.add("anchor/kl", readings.divergence_M)
            return tokens
        count = len(batch.branches)
        shift_B = by_branch(readings.divergence_M, tokens.branch_M, count)
        gain_B = by_branch(readings.student_M - readings.teacher_M, tokens.branch_M, count)
        sample_B, limit_B = batch.owners()
        verdict_B = Gate(self.feedback.threshold).verdicts(shift_B, gain_B, sample_B, limit_B)
        told_B = verdict_B.to("cpu", non_blocking=True)
        ledger.targets.append(([branch for _, branch in batch.branches], readings.on_host(), told_B))
        ledger.add("hint/kl", readings.divergence_M)
        ledger.add("hint/capped", readings.divergence_M > objective.token_cap)
        ledger.add("target/shift", shift_B)
        ledger.add("target/gain", gain_B)
        for number, reason in enumerate(VERDICTS):
            ledger.add(f"target/{reason or 'taught'}", verdict_B == number)
        taught_M = (verdict_B == 0)[tokens.branch_M]
        return replace(tokens, weight_M=tokens.weight_M * taught_M)

    def _objective(self, ledger: _Ledger, teachers: int) -> Objective:
        return Objective(
            temperature=self.temperature,
            ratio_cap=self.settings.ratio_cap,
            direction=self.feedback.direction,
            token_cap=self.feedback.token_cap,
            entry_cap=self.feedback.entry_cap,
            importance_cap=self.feedback.importance_cap,
            shares=self.teacher.shares if teachers > 1 else (1.0,),
            policy=bool(ledger.counts["rl"]),
        )


def _optimizer(model: PreTrainedModel, settings: TrainConfig) -> torch.optim.Optimizer:
    lr, decay, betas = settings.learning_rate, settings.weight_decay, (0.9, 0.95)
    if settings.optimizer == "muon":
        return Muon(model.named_parameters(), lr=lr, betas=betas, weight_decay=decay)
    return torch.optim.AdamW(model.parameters(), lr=lr, betas=betas, weight_decay=decay, fused=True)


def _num_targets(branch: Branch) -> int:
    return branch.target_end - branch.target_start
