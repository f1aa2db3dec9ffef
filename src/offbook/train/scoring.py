"""From the hidden states of a micro-batch to its loss, and what a step adds up on the way."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from offbook.train import head
from offbook.train.batches import Batch, Tokens
from offbook.train.gate import VERDICTS, Shift, shift_of, verdicts, within_limits
from offbook.train.head import Lessons, Objective, Reading, Rows, Terms
from offbook.train.targets import Measured, Reader, Record, likeliest, read_targets
from offbook.types import Branch, Sample


@dataclass(slots=True)
class Ledger:
    """What one step adds up over its micro-batches. `counts` are the tokens each component is a mean over, in all.

    Values are not read until the step is over: reading one would wait for all the work before it.
    """

    counts: dict[str, int]
    sums: dict[str, list[Tensor]] = field(default_factory=dict)
    records: list[Record] = field(default_factory=list)

    @classmethod
    def open(cls, samples: list[Sample]) -> Ledger:
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
        """By the branch's key. After the means, which wait for the device."""
        return {key: value for record in self.records for key, value in record.by_key().items()}


@dataclass(slots=True)
class Scoring:
    """The tokens of one micro-batch, scored chunk by chunk."""

    batch: Batch
    tokens: Tokens
    student: Reader  # at the targets
    teachers: list[Reader]
    objective: Objective
    ledger: Ledger
    compiled: bool = False
    judged_B: Tensor | None = None  # verdicts, where they cannot be left to the chunks
    readings: list[Reading] = field(default_factory=list)

    def judge(self, chunk_rows: int) -> None:
        """Read all targets before anything is differentiated. Where branches compete for their sample's places, or a
        target is cut in two, no chunk can tell by itself which of them may teach."""
        ids_M = self.tokens.rows.ids_N[: len(self.tokens.weight_M)]
        reading = read_targets(self.student, self.teachers, ids_M, self.objective, chunk_rows, self.compiled)
        self.judged_B = self._verdicts(self._shift(reading))
        self.objective = replace(self.objective, gate=0.0)

    def loss(self, logits_NV: Tensor, part: slice) -> Tensor:
        rows = Rows(*(stream_N[part] for stream_N in self.tokens.rows))
        targets = self.tokens.targets_in(part)
        teachers = self.teachers if targets.stop > targets.start else []
        with torch.no_grad():
            teacher_logits = [output(hidden_MD[targets]) for output, hidden_MD in teachers]
        score = head.compiled_chunk_terms if self.compiled else head.chunk_terms
        terms = score(logits_NV, teacher_logits, rows, self._lessons(targets), self.objective)
        self._record(terms, rows)
        return self._sum(terms)

    def _lessons(self, targets: slice) -> Lessons:
        tokens = self.tokens
        taught_B = torch.ones(len(tokens.sizes), device=tokens.weight_M.device)
        if self.judged_B is not None:
            taught_B = torch.eq(self.judged_B, 0).float()
        return Lessons(tokens.weight_M[targets], tokens.branch_M[targets], taught_B)

    def _sum(self, terms: Terms) -> Tensor:
        loss = torch.zeros((), device=terms.rl.device)
        targets = "anchor" if self.batch.anchors else "hint"
        for name, total in (("rl", terms.rl), ("ce", terms.ce), (targets, terms.hint)):
            if self.ledger.counts[name]:
                loss = loss + total / self.ledger.counts[name]
        return loss

    def _record(self, terms: Terms, rows: Rows) -> None:
        add = self.ledger.add
        if terms.reading is not None:
            self.readings.append(terms.reading)
        if self.ledger.counts["rl"]:
            sampled_N = (rows.rl_weight_N != 0).float()
            add("rl/loss", terms.rl)
            add("rl/mismatch", (terms.logp_N - rows.behaviour_N).abs() * sampled_N)
            add("rl/entropy", terms.entropy_N * sampled_N)
        if self.ledger.counts["ce"]:
            add("ce/loss", terms.ce)

    @torch.no_grad()
    def record_targets(self, top: int, chunk_rows: int) -> None:
        """After all chunks: what the hints did, and which of them taught."""
        add, reading = self.ledger.add, Reading(*(torch.cat(column) for column in zip(*self.readings, strict=True)))
        if self.batch.anchors:
            add("anchor/kl", reading.divergence_M)
            return
        shift = self._shift(reading)
        verdict_B = self._verdicts(shift) if self.judged_B is None else self.judged_B
        told = likeliest(self.student, self.teachers, reading.divergence_M, self.objective, top, chunk_rows)
        branches = [branch for _, branch in self.batch.branches]
        self.ledger.records.append(Record(branches, reading, told, verdict_B).on_host())
        add("hint/kl", reading.divergence_M)
        add("hint/capped", reading.divergence_M > self.objective.token_cap)
        add("target/shift", shift.nats_B)
        add("target/gain", shift.gain_B)
        for number, reason in enumerate(VERDICTS):
            add(f"target/{reason or 'taught'}", verdict_B == number)

    def _shift(self, reading: Reading) -> Shift:
        return shift_of(*reading, self.tokens.branch_M, len(self.tokens.sizes))

    def _verdicts(self, shift: Shift) -> Tensor:
        return within_limits(verdicts(shift, self.objective.gate), shift, *self.batch.owners())


def _num_targets(branch: Branch) -> int:
    return branch.target_end - branch.target_start
