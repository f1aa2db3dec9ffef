"""From the hidden states of a micro-batch to its loss, and what a step adds up on the way."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from offbook.train.batches import IMITATION, POLICY, Batch, BranchGroup, Tokens
from offbook.train.gate import VERDICTS, Shift, TargetScores, decided, shift_of
from offbook.train.head import Losses, Objective, Rows, Targets, TeacherLogits, Terms, chunk_terms
from offbook.train.host import compile_once, sent
from offbook.train.losses import k1
from offbook.train.targets import BranchReport, Compared, Measured, Scorer, Scorers
from offbook.types import Sample


@dataclass(frozen=True, slots=True)
class Counts:
    """What the means of a step are over, by part of the loss: tokens, branches, and tokens that share a loss.

    The only place where they are counted. Data-parallel ranks add theirs up before anyone takes a mean.
    """

    tokens: Counter[str]
    branches: Counter[str]
    shared: Counter[str]  # of more branches than places, as many tokens as so many of them have on average

    @classmethod
    def of(cls, samples: list[Sample]) -> Counts:
        tokens: Counter[str] = Counter()
        branches: Counter[str] = Counter()
        contests: dict[tuple[str, str, int], list[int]] = {}
        for sample in samples:
            tokens[POLICY] += sum(map(bool, sample.rl_weight))
            tokens[IMITATION] += sum(map(bool, sample.ce_weight))
            for branch in sample.branches:
                tokens[branch.distill.part] += branch.num_targets
                branches[branch.distill.part] += 1
                if branch.contest and branch.distill.places:
                    contest = branch.distill.part, branch.contest, branch.distill.places
                    contests.setdefault(contest, []).append(branch.num_targets)
        shared = Counter(tokens)
        for (part, _, places), sizes in contests.items():
            shared[part] -= round(sum(sizes) * (1 - min(1.0, places / len(sizes))))
        return cls(tokens, branches, shared)

    def __add__(self, other: Counts) -> Counts:
        return Counts(self.tokens + other.tokens, self.branches + other.branches, self.shared + other.shared)


@dataclass(slots=True)
class Ledger:
    """What one step adds up over its micro-batches.

    Values are not read until the step is over: reading one would wait for all the work before it.
    """

    counts: Counts
    sums: dict[str, list[Tensor]] = field(default_factory=dict)
    over: dict[str, int] = field(default_factory=dict)  # what each sum is divided by
    apart: list[Tensor] = field(default_factory=list)  # log(pi / mu) of each sampled token; else NaN
    reports: list[BranchReport] = field(default_factory=list)
    verdicts: dict[int, int] = field(default_factory=dict)  # by id(branch), of contests across micro-batches

    def add(self, name: str, values: Tensor, count: int) -> None:
        self.sums.setdefault(name, []).append(values.detach().sum())
        self.over[name] = count

    def means(self) -> dict[str, float]:
        """`rl/loss` is a mean over the tokens of that part, `PART/kl` over those of a part that branches name."""
        return {name: sum(torch.stack(values).tolist()) / self.over[name] for name, values in self.sums.items()}

    def log_ratios(self) -> Tensor:
        """log(pi / mu) of each sampled token, on the host."""
        return torch.cat([torch.empty(0), *(values[~values.isnan()].cpu() for values in self.apart)])

    def measured(self) -> dict[str, Measured]:
        """By the branch's key. After the means, which wait for the device."""
        return {key: value for report in self.reports for key, value in report.by_key().items()}


@dataclass(slots=True)
class Scoring:
    """The tokens of one micro-batch, scored chunk by chunk."""

    batch: Batch
    tokens: Tokens
    student: Scorer  # at the targets
    teachers: list[Scorers]  # of each group of branches
    ratio_cap: float
    ledger: Ledger
    compile: bool = False
    reference_kl: float = 0.0
    judged_B: Tensor | None = None  # verdicts, where they cannot be left to the chunks
    scores: list[TargetScores] = field(default_factory=list)

    @property
    def is_contested(self) -> bool:
        """Whether there are more branches than places, here or in the whole step."""
        branches = [branch for _, branch in self.batch.branches if branch.contest and branch.distill.places]
        sizes = Counter(branch.contest for branch in branches)
        known = self.ledger.verdicts
        return any(branch.distill.places < sizes[branch.contest] or id(branch) in known for branch in branches)

    def judge(self, chunk_rows: int) -> None:
        """Where branches compete, or a target is cut in two, no chunk can tell by itself which of them may teach."""
        self.judged_B = self._verdicts(self.shift(chunk_rows))

    def shift(self, chunk_rows: int) -> Shift:
        """Score all targets before anything is differentiated."""
        parts = [
            self._compared(number, group).scores(chunk_rows, self.compile)
            for number, group in enumerate(self.batch.groups)
        ]
        return self._shift(_joined(parts))

    def losses(self, logits_NV: Tensor, part: slice) -> Losses:
        rows = Rows(*(stream_N[part] for stream_N in self.tokens.rows if stream_N is not None))
        targets, number = self.tokens.targets_in(part), self._group_at(part.start)
        group = None if number is None else self.batch.groups[number]
        objective = Objective(self.ratio_cap, bool(self.ledger.counts.tokens[POLICY]), self.reference_kl)
        teacher = TeacherLogits([], [])
        if number is not None and group is not None:
            objective = replace(objective, distill=group.distill, shares=self.teachers[number].shares)
            own = slice(targets.start - group.tokens.start, targets.stop - group.tokens.start)
            with torch.no_grad():
                teacher = self.teachers[number].logits(own)
        score = compile_once(chunk_terms) if self.compile else chunk_terms
        terms: Terms = score(logits_NV, teacher, rows, self._targets(targets), objective)
        self._record(terms, rows)
        return self._losses(terms, group)

    def _group_at(self, token: int) -> int | None:
        """The group whose targets a chunk has that begins at this token."""
        for number, group in enumerate(self.batch.groups):
            if group.tokens.start <= token < group.tokens.stop:
                return number
        return None

    def _targets(self, part: slice) -> Targets:
        tokens = self.tokens
        open_B, gate_B = torch.ones_like(tokens.gate_B), tokens.gate_B
        if self.judged_B is not None:
            open_B, gate_B = torch.eq(self.judged_B, 0).float(), torch.zeros_like(gate_B)
        return Targets(tokens.weight_M[part], tokens.branch_M[part], gate_B, open_B)

    def _losses(self, terms: Terms, group: BranchGroup | None) -> Losses:
        counts = self.ledger.counts.shared
        parts = {POLICY: terms.rl, IMITATION: terms.ce}
        found = {name: total / counts[name] for name, total in parts.items() if counts[name]}
        if group is not None:
            by_policy = counts[POLICY] if group.distill.by_policy else 0  # without any RL there is nothing to go by
            found[group.distill.part] = terms.distill / (by_policy or counts[group.distill.part])
        return found

    def _record(self, terms: Terms, rows: Rows) -> None:
        counts = self.ledger.counts.tokens
        if terms.scores is not None:
            self.scores.append(terms.scores)
        if count := counts[POLICY]:
            sampled_N = (rows.rl_weight_N != 0).float()
            above_N = terms.logp_N - rows.behaviour_N
            self.ledger.add("rl/loss", terms.rl, count)
            self.ledger.add("rl/signal_tokens", sampled_N * (rows.advantage_N != 0), 1)
            self.ledger.add("rl/mismatch", above_N.abs() * sampled_N, count)
            self.ledger.add("rl/truncated", (above_N > math.log(self.ratio_cap)) * sampled_N, count)
            self.ledger.apart.append(torch.where(sampled_N > 0, above_N.detach(), math.nan))
            self.ledger.add("rl/entropy", terms.entropy_N * sampled_N, count)
            if rows.reference_N is not None:
                self.ledger.add("rl/reference_kl", k1(terms.logp_N, rows.reference_N) * sampled_N, count)
        if count := counts[IMITATION]:
            self.ledger.add("ce/loss", terms.ce, count)

    @torch.no_grad()
    def record_targets(self, chunk_rows: int) -> None:
        """After all chunks: what the branches did, and which of them taught."""
        scores = _joined(self.scores)
        shift = self._shift(scores)
        verdict_B = self._verdicts(shift) if self.judged_B is None else self.judged_B
        for number, group in enumerate(self.batch.groups):
            of_group = TargetScores(*(values_M[group.tokens] for values_M in scores))
            self._record_group(number, group, of_group, shift, verdict_B[group.numbers], chunk_rows)

    def _record_group(
        self, number: int, group: BranchGroup, scores: TargetScores, shift: Shift, verdict_B: Tensor, most: int
    ) -> None:
        part, counts = group.distill.part, self.ledger.counts
        branches = [branch for _, branch in group.branches]
        if any(branch.key for branch in branches):
            count = group.distill.top
            likeliest = self._compared(number, group).top(scores.divergence_M, count, most) if count else None
            self.ledger.reports.append(BranchReport(branches, scores, verdict_B, likeliest).on_host())
        by_token = {"kl": scores.divergence_M, "capped": scores.divergence_M > group.distill.cap}
        by_branch = {
            "shift": shift.own_nats_B[group.numbers],
            "gain": shift.own_gain_B[group.numbers],
            **{reason or "taught": verdict_B == index for index, reason in enumerate(VERDICTS)},
        }
        sizes_B = sent(torch.tensor([branch.num_targets for branch in branches]), verdict_B.device)
        taught_M = torch.repeat_interleave(verdict_B == 0, sizes_B, output_size=len(scores.moved_M))
        if group.distill.token_gate:
            taught_M = taught_M & (scores.moved_M >= group.distill.token_gate)
        self.ledger.add(f"{part}/signal_tokens", taught_M, 1)
        for values, count in ((by_token, counts.tokens[part]), (by_branch, counts.branches[part])):
            for name, value in values.items():
                self.ledger.add(f"{part}/{name}", value, count)

    def _compared(self, number: int, group: BranchGroup) -> Compared:
        head, hidden_MD = self.student
        ids_M, temperature_M = (
            stream_N[group.tokens] for stream_N in (self.tokens.rows.ids_N, self.tokens.rows.temperature_N)
        )
        student = head, hidden_MD[group.tokens]
        return Compared(student, self.teachers[number], ids_M, temperature_M, group.distill.direction)

    def _shift(self, scores: TargetScores) -> Shift:
        return shift_of(scores, self.tokens.branch_M, len(self.tokens.sizes))

    def _verdicts(self, shift: Shift) -> Tensor:
        branches = [branch for _, branch in self.batch.branches]
        verdict_B, known = decided(shift, branches), self.ledger.verdicts
        if not known:
            return verdict_B
        known_B = sent(torch.tensor([known.get(id(branch), -1) for branch in branches]), verdict_B.device)
        return torch.where(known_B < 0, verdict_B, known_B)


def percentiles(log_ratios_N: Tensor) -> dict[str, float]:
    """Of pi / mu, and of its distance from 1 in nats. Of all ranks' tokens together: theirs cannot be joined later."""

    def at(percent: int, values_N: Tensor) -> float:
        return float(values_N.kthvalue(max(1, math.ceil(percent / 100 * len(values_N)))).values)

    if not len(log_ratios_N):
        return {}
    ratios = {f"rl/ratio_p{percent}": math.exp(at(percent, log_ratios_N)) for percent in (1, 50, 99)}
    return {"rl/mismatch_p99": at(99, log_ratios_N.abs()), **ratios}


def _joined(parts: list[TargetScores]) -> TargetScores:
    return TargetScores(*(torch.cat(column) for column in zip(*parts, strict=True)))
