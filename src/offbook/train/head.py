"""From hidden states to losses and to what branches do to their targets, without ever holding a batch's logits.

Rows go through the vocabulary in chunks, and each chunk's gradients are taken at once, in the forward pass: nothing of
size [rows, vocabulary] outlives its chunk, and nothing is computed twice.

The gate decides which branches may teach. A branch that hardly moves its target has nothing to teach; one that makes
the sampled tokens likelier teaches the fault. Both are measured twice: from the student to the teacher, which is what
would be taught, and from the teacher without the insertion to the teacher with it, which is what the insertion does. A
student that has drifted away is far from its teacher whatever is inserted. Where there is a gate or a limit, all
targets are scored once without gradients before the losses. Nothing here waits for the device.

Axes: N tokens that carry weight, V vocabulary entries, D the width, M target tokens, B branches (a branch's tokens are
neighbours, branch after branch), P of the tokens, K likeliest entries.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from offbook.core.config import TrainConfig
from offbook.train.batches import IMITATION, POLICY, Batch, BranchGroup, Rows, Tokens
from offbook.train.host import compile_once, sent
from offbook.types import Branch, Direction, Distill, Likely, Sample

VERDICTS = ("", "no_shift", "towards_mistake", "over_limit")  # why a branch does not teach; the first one does
CHUNK_ENTRIES = 2**25  # logits in one chunk: 220 rows of a vocabulary of 152k, 128 MiB in float32
COMPILED_CHUNK_ENTRIES = 2**27  # fused kernels hold far fewer copies
TOP_NATS = 0.01  # where student and teacher agree better than this the likeliest tokens are not reported
TOP_TOKENS = 256  # of a micro-batch: sorting a large vocabulary at every token would cost more than all the rest
Losses = dict[str, Tensor]  # by part
Top = tuple[Tensor, Tensor, Tensor]  # target tokens, log-probabilities and ids [P, K] of their likeliest entries
Scorer = tuple[nn.Module, Tensor]  # an output head and hidden states [M, D]
Teacher = list[Scorer]  # with what is inserted and, where a gate needs it of a teacher with weights of its own, without


class TargetScores(NamedTuple):
    """At each target token the sampled one's log-probability, by the student, by the teacher, and by the teacher
    without the insertion; and the divergence of the teacher from both others."""

    student_M: Tensor
    teacher_M: Tensor
    plain_M: Tensor
    divergence_M: Tensor
    moved_M: Tensor


class Shift(NamedTuple):
    """What branches do to their targets, nats per token: the divergence, and how much less likely the sampled tokens
    become. From the student, and from the teacher without the insertion."""

    nats_B: Tensor
    gain_B: Tensor
    own_nats_B: Tensor
    own_gain_B: Tensor


def shift_of(scores: TargetScores, branch_M: Tensor, num_branches: int) -> Shift:
    """Means over the tokens of each branch."""
    nothing_B = scores.divergence_M.new_zeros(num_branches)
    sizes_B = nothing_B.index_add(0, branch_M, torch.ones_like(scores.divergence_M)).clamp(min=1)
    gains = scores.student_M - scores.teacher_M, scores.plain_M - scores.teacher_M
    each = scores.divergence_M, gains[0], scores.moved_M, gains[1]
    return Shift(*(nothing_B.index_add(0, branch_M, values_M) / sizes_B for values_M in each))


def verdicts(shift: Shift, gate: float, places: int, sample_B: Tensor) -> Tensor:
    """Numbers in VERDICTS. A branch has to move its target by `gate` nats per token, and away. Of those in one sample
    the `places` that move most teach. 0 is no gate and no limit."""
    least_B = torch.minimum(shift.nats_B, shift.own_nats_B)
    verdict_B = torch.zeros_like(sample_B)
    if gate:
        verdict_B = torch.where(torch.minimum(shift.gain_B, shift.own_gain_B) <= 0, 2, verdict_B)
        verdict_B = torch.where(least_B < gate, 1, verdict_B)
    if places:
        score_B = torch.where(verdict_B == 0, least_B, -torch.inf)
        order_B = score_B.argsort(descending=True, stable=True)
        is_rival_BB = sample_B[order_B] == sample_B[order_B, None]
        rank_B = torch.zeros_like(order_B).scatter(0, order_B, is_rival_BB.tril(-1).sum(1))
        verdict_B = torch.where((verdict_B == 0) & (rank_B >= places), 3, verdict_B)
    return verdict_B


class Terms(NamedTuple):
    """What a chunk adds up to, differentiable, and what is recorded of its tokens."""

    rl: Tensor
    ce: Tensor
    distill: Tensor
    logp_N: Tensor
    entropy_N: Tensor
    scores: TargetScores | None  # where it has targets


def importance(logp_N: Tensor, behaviour_logp_N: Tensor, cap: float) -> Tensor:
    """min(pi / mu, cap), not differentiated. On-policy it is 1."""
    return torch.exp(logp_N.detach() - behaviour_logp_N).clamp(max=cap)


def policy_gradient(logp_N: Tensor, behaviour_logp_N: Tensor, advantage_N: Tensor, ratio_cap: float) -> Tensor:
    """REINFORCE with a truncated importance weight: -min(pi / mu, cap) * A * log pi.

    There is no trust-region clip that zeroes gradients, no division by the length of the rollout and none by the
    spread of its group (Composer 2, section 4.1).
    """
    return -importance(logp_N, behaviour_logp_N, ratio_cap) * advantage_N * logp_N


def divergence(student_logp_MV: Tensor, teacher_logp_MV: Tensor, direction: Direction) -> Tensor:
    """Exact divergence over the whole vocabulary at each token, in nats. The teacher is a constant.

    forward: KL(teacher || student); reverse: KL(student || teacher); jsd: Jensen-Shannon, bounded by log 2.
    Left out: a cap on single entries. What an entry adds to the softmax's gradient only means something together with
    all others; scaled one by one they push tokens up that the teacher wants down.
    """
    teacher_logp_MV = teacher_logp_MV.detach()
    if direction == "forward":
        return _kl(teacher_logp_MV, student_logp_MV)
    if direction == "reverse":
        return _kl(student_logp_MV, teacher_logp_MV)
    half = torch.log(torch.tensor(0.5, dtype=student_logp_MV.dtype, device=student_logp_MV.device))
    middle_logp_MV = torch.logaddexp(student_logp_MV, teacher_logp_MV) + half
    entries_MV = _entries(student_logp_MV, middle_logp_MV) + _entries(teacher_logp_MV, middle_logp_MV)
    return (0.5 * entries_MV).sum(-1)


def _kl(logp_MV: Tensor, logq_MV: Tensor) -> Tensor:
    return _entries(logp_MV, logq_MV).sum(-1)


def _entries(logp_MV: Tensor, logq_MV: Tensor) -> Tensor:
    return logp_MV.exp() * (logp_MV - logq_MV)


def cap_values(values: Tensor, cap: float) -> Tensor:
    """No value counts for more than `cap`. The surplus is scaled away instead of clamped, because a clamp would take
    the gradient from the very tokens where student and teacher disagree most."""
    return values * (cap / values.detach().clamp(min=cap)) if cap < torch.inf else values


def chunk_terms(
    logits_NV: Tensor, teacher: list[Tensor], rows: Rows, weight_M: Tensor, ratio_cap: float, distill: Distill
) -> Terms:
    """The first M rows are also distilled; `teacher`: its logits there. A `ratio_cap` of 0: no token of the step has an
    RL weight."""
    logp_NV = log_probabilities(logits_NV, rows.temperature_N)
    logp_N = logp_NV.gather(1, rows.ids_N[:, None])[:, 0]
    rl_N = entropy_N = distill_M = logp_N.detach()[:0]
    if ratio_cap:
        gradient_N = policy_gradient(logp_N, rows.behaviour_N, rows.advantage_N, ratio_cap)
        rl_N = rows.rl_weight_N * gradient_N
        entropy_N = -(logp_NV.detach().exp() * logp_NV.detach()).sum(-1)
    ce_N = rows.ce_weight_N * -logp_N
    scores = None
    if teacher:
        targets = rows.part(slice(len(weight_M)))
        nats_M, scores = compared(logp_NV[: len(weight_M)], teacher, targets, distill.direction)
        distill_M = weight_M * cap_values(nats_M, distill.cap)
        if distill.token_gate:
            distill_M = distill_M * (scores.moved_M >= distill.token_gate)
    return Terms(rl_N.sum(), ce_N.sum(), distill_M.sum(), logp_N.detach(), entropy_N, scores)


def log_probabilities(logits_NV: Tensor, temperature_N: Tensor) -> Tensor:
    return torch.log_softmax(logits_NV.float() / temperature_N[:, None], dim=-1)


def compared(logp_MV: Tensor, teacher: list[Tensor], rows: Rows, direction: Direction) -> tuple[Tensor, TargetScores]:
    """The divergence of the teacher from the student, differentiable, and the scores."""
    ids_M1 = rows.ids_N[:, None]
    hinted_MV, *plain = [log_probabilities(logits_MV, rows.temperature_N) for logits_MV in teacher]
    nats_M = divergence(logp_MV, hinted_MV, direction)
    plain_MV = plain[0] if plain else logp_MV.detach()
    moved_M = divergence(plain_MV, hinted_MV, direction) if plain else nats_M.detach()
    student_M, teacher_M, plain_M = (
        each_MV.detach().gather(1, ids_M1)[:, 0] for each_MV in (logp_MV, hinted_MV, plain_MV)
    )
    return nats_M, TargetScores(student_M, teacher_M, plain_M, nats_M.detach(), moved_M)


def _chunk_scores(logits_MV: Tensor, teacher: list[Tensor], rows: Rows, direction: Direction) -> TargetScores:
    return compared(log_probabilities(logits_MV, rows.temperature_N), teacher, rows, direction)[1]


def logits_of(scorer: Scorer, part: slice | Tensor) -> Tensor:
    head, hidden_MD = scorer
    logits: Tensor = head(hidden_MD[part])
    return logits


@torch.no_grad()
def sampled_logp(scorer: Scorer, ids_N: Tensor, temperature_N: Tensor, chunk_rows: int) -> Tensor:
    """The log-probabilities of tokens by one model."""
    found_N = torch.empty_like(temperature_N)
    for start in range(0, len(ids_N), chunk_rows):
        part = slice(start, start + chunk_rows)
        logp_NV = log_probabilities(logits_of(scorer, part), temperature_N[part])
        found_N[part] = logp_NV.gather(1, ids_N[part, None])[:, 0]
    return found_N


@dataclass
class Measured:
    """What a branch did to its target tokens: the lists are those of `TargetScores`."""

    student: list[float]
    teacher: list[float]
    plain: list[float]
    divergence: list[float]
    moved: list[float]
    skipped: str = ""  # why it did not teach
    student_top: list[Likely] = field(default_factory=list)
    teacher_top: list[Likely] = field(default_factory=list)


@dataclass
class Targets:
    """Student and teacher at the target tokens of a group of branches."""

    group: BranchGroup
    student: Scorer
    teacher: Teacher
    rows: Rows
    scores: list[TargetScores] = field(default_factory=list)  # of the chunks so far

    def teacher_logits(self, part: slice | Tensor) -> list[Tensor]:
        return [logits_of(scorer, part) for scorer in self.teacher]

    @torch.no_grad()
    def score(self, chunk_rows: int, compiled: bool = False) -> TargetScores:
        """At every target token, without any gradient."""
        score: Callable[..., TargetScores] = compile_once(_chunk_scores) if compiled else _chunk_scores
        parts = []
        for start in range(0, len(self.rows.ids_N), chunk_rows):
            part = slice(start, start + chunk_rows)
            logits_MV = logits_of(self.student, part)
            rows, direction = self.rows.part(part), self.group.distill.direction
            parts.append(score(logits_MV, self.teacher_logits(part), rows, direction))
        return joined(parts)

    def shift(self, scores: TargetScores) -> Shift:
        return shift_of(scores, self.group.owner_M, len(self.group.branches))

    def verdicts(self, chunk_rows: int, compiled: bool) -> Tensor:
        """Which branches may teach, before anything is differentiated."""
        distill = self.group.distill
        samples = [number for number, _ in self.group.branches]
        sample_B = sent(torch.tensor(samples), self.rows.ids_N.device)
        if not distill.gate and not 0 < distill.places < max(Counter(samples).values()):
            return torch.zeros_like(sample_B)
        return verdicts(self.shift(self.score(chunk_rows, compiled)), distill.gate, distill.places, sample_B)

    @torch.no_grad()
    def likeliest(self, divergence_M: Tensor, most: int) -> list[Top]:
        """By student and teacher, where they differ most: at so many target tokens."""
        if not self.group.distill.top:
            return []
        token_P = divergence_M.topk(min(TOP_TOKENS, most, len(divergence_M))).indices
        tops = []
        for scorer in (self.student, self.teacher[0]):
            logp_PV = log_probabilities(logits_of(scorer, token_P), self.rows.temperature_N[token_P])
            tops.append((token_P, *logp_PV.topk(self.group.distill.top)))
        return tops


def joined(parts: list[TargetScores]) -> TargetScores:
    return TargetScores(*(torch.cat(column) for column in zip(*parts, strict=True)))


def measured_of(
    branches: list[Branch], scores: TargetScores, verdict_B: Tensor, tops: list[Top]
) -> dict[str, Measured]:
    """What branches did to their targets as plain numbers, by the branch's key."""
    columns = [values.float().tolist() for values in scores]
    likely: list[list[Likely]] = []
    for top in tops:
        likely.append([[] for _ in columns[3]])
        for token, logprobs, ids in zip(*(part.tolist() for part in top), strict=True):
            if columns[3][token] > TOP_NATS:
                likely[-1][token] = list(zip(ids, logprobs, strict=True))
    found = {}
    start = 0
    for branch, verdict in zip(branches, verdict_B.tolist(), strict=True):
        part = slice(start, start + branch.num_targets)
        start = part.stop
        if branch.key:
            measured = Measured(*(column[part] for column in columns))
            measured.skipped = VERDICTS[verdict]
            if tops:
                measured.student_top, measured.teacher_top = (by_token[part] for by_token in likely)
            found[branch.key] = measured
    return found


def measured_branches(
    student: Scorer, teacher: Scorer, batch: Batch, tokens: Tokens, chunk_rows: int
) -> dict[str, Measured]:
    """What all branches of a batch did to their targets, without any gradient."""
    found: dict[str, Measured] = {}
    for group in batch.groups:
        part = group.tokens
        own, its = ((output, hidden_MD[part]) for output, hidden_MD in (student, teacher))
        scores = Targets(group, own, [its], tokens.rows.part(part)).score(chunk_rows)
        branches = [branch for _, branch in group.branches]
        found |= measured_of(branches, scores, torch.zeros(len(branches), dtype=torch.long), [])
    return found


@dataclass
class Counts:
    """The denominators of a step, by part of the loss: tokens and branches.

    The only place where they are counted. Data-parallel ranks sum theirs before any mean is taken.
    """

    tokens: Counter[str]
    branches: Counter[str]

    @classmethod
    def of(cls, samples: list[Sample]) -> Counts:
        counts = cls(Counter(), Counter())
        for sample in samples:
            counts.tokens[POLICY] += sum(map(bool, sample.rl_weight))
            counts.tokens[IMITATION] += sum(map(bool, sample.ce_weight))
            for branch in sample.branches:
                counts.tokens[branch.distill.part] += branch.num_targets
                counts.branches[branch.distill.part] += 1
        return counts

    def __add__(self, other: Counts) -> Counts:
        return Counts(self.tokens + other.tokens, self.branches + other.branches)


@dataclass
class Ledger:
    """What one step adds up over its micro-batches.

    Values are not read until the step is over: reading one would wait for all the work before it.
    """

    counts: Counts
    sums: dict[str, list[Tensor]] = field(default_factory=dict)
    over: dict[str, int] = field(default_factory=dict)  # what each sum is divided by
    reports: list[Callable[[], dict[str, Measured]]] = field(default_factory=list)

    def add(self, name: str, values: Tensor, count: int) -> None:
        self.sums.setdefault(name, []).append(values.detach().sum())
        self.over[name] = count

    def read(self) -> tuple[dict[str, float], dict[str, Measured]]:
        """The means, which wait for the device, and what branches did, by their keys. `rl/loss` is a mean over tokens
        of that part, `PART/kl` over those of a part that branches name."""
        means = {name: sum(torch.stack(values).tolist()) / self.over[name] for name, values in self.sums.items()}
        return means, {key: value for report in self.reports for key, value in report().items()}


class LossHead:
    """The student's output head with the losses behind it."""

    def __init__(self, output: nn.Module, vocabulary: int, settings: TrainConfig):
        self.output = output
        self.settings = settings
        self.compiled = settings.compile is True
        self.chunk_rows = max(1, (COMPILED_CHUNK_ENTRIES if self.compiled else CHUNK_ENTRIES) // vocabulary)
        self.target_rows = -(-self.chunk_rows // 2)  # a teacher's logits come on top of the student's

    def losses(
        self,
        hidden_1FD: Tensor,
        batch: Batch,
        tokens: Tokens,
        teachers: list[Teacher],
        ledger: Ledger,
        separate: Sequence[str] = (),
    ) -> tuple[Tensor, ...]:
        """The sum of all parts but `separate` ones, then each of those. `teachers`: one for each group of branches."""
        hidden_ND = hidden_1FD[0].index_select(0, tokens.predictor_N)
        targets: list[Targets] = []
        verdicts: list[Tensor] = []
        weights = [torch.empty(0, device=hidden_ND.device)]
        for group, teacher in zip(batch.groups, teachers, strict=True):
            student = self.output, hidden_ND.detach()[group.tokens]
            targets.append(Targets(group, student, teacher, tokens.rows.part(group.tokens)))
            verdicts.append(targets[-1].verdicts(self.target_rows, self.compiled))
            weight_B = sent(torch.tensor([branch.weight for _, branch in group.branches]), hidden_ND.device)
            weights.append((weight_B * (verdicts[-1] == 0))[group.owner_M])
        weight_M = torch.cat(weights)
        score = compile_once(chunk_terms) if self.compiled else chunk_terms
        ratio_cap = self.settings.ratio_cap if ledger.counts.tokens[POLICY] else 0.0

        def losses_of(logits_NV: Tensor, part: slice) -> Losses:
            rows = tokens.rows.part(part)
            own = next((one for one in targets if part.start < one.group.tokens.stop), None)
            if own is None:
                terms: Terms = score(logits_NV, [], rows, weight_M[:0], ratio_cap, Distill())
            else:
                start = own.group.tokens.start
                stop = min(part.stop, own.group.tokens.stop)
                with torch.no_grad():
                    teacher = own.teacher_logits(slice(part.start - start, stop - start))
                terms = score(logits_NV, teacher, rows, weight_M[part.start : stop], ratio_cap, own.group.distill)
                assert terms.scores is not None
                own.scores.append(terms.scores)
            _record(ledger, terms, rows, self.settings.ratio_cap)
            return _parts(ledger.counts, terms, own.group.distill if own else None)

        found = in_chunks(hidden_ND, self.output, losses_of, tokens.chunks, tuple(separate))
        for own, verdict_B in zip(targets, verdicts, strict=True):
            self._record_group(ledger, own, verdict_B)
        return found

    @torch.no_grad()
    def _record_group(self, ledger: Ledger, targets: Targets, verdict_B: Tensor) -> None:
        group = targets.group
        distill = group.distill
        scores = joined(targets.scores)
        branches = [branch for _, branch in group.branches]
        if any(branch.key for branch in branches):
            tops = targets.likeliest(scores.divergence_M, self.target_rows)
            ledger.reports.append(partial(measured_of, branches, scores, verdict_B, tops))
        taught_M = (verdict_B == 0)[group.owner_M]
        if distill.token_gate:
            taught_M = taught_M & (scores.moved_M >= distill.token_gate)
        num_tokens = ledger.counts.tokens[distill.part]
        num_branches = ledger.counts.branches[distill.part]
        shift = targets.shift(scores)
        ledger.add(f"{distill.part}/signal_tokens", taught_M, 1)
        ledger.add(f"{distill.part}/kl", scores.divergence_M, num_tokens)
        ledger.add(f"{distill.part}/capped", scores.divergence_M > distill.cap, num_tokens)
        ledger.add(f"{distill.part}/shift", shift.own_nats_B, num_branches)
        ledger.add(f"{distill.part}/gain", shift.own_gain_B, num_branches)
        for number, reason in enumerate(VERDICTS):
            ledger.add(f"{distill.part}/{reason or 'taught'}", verdict_B == number, num_branches)


def _parts(counts: Counts, terms: Terms, distill: Distill | None) -> Losses:
    """Each sum over its denominator, in all micro-batches of the step."""
    parts = {POLICY: terms.rl, IMITATION: terms.ce}
    found = {name: total / counts.tokens[name] for name, total in parts.items() if counts.tokens[name]}
    if distill is not None:
        by_policy = counts.tokens[POLICY] if distill.by_policy else 0  # 0: without any RL there is nothing to go by
        found[distill.part] = terms.distill / (by_policy or counts.tokens[distill.part])
    return found


def _record(ledger: Ledger, terms: Terms, rows: Rows, ratio_cap: float) -> None:
    if count := ledger.counts.tokens[POLICY]:
        sampled_N = (rows.rl_weight_N != 0).float()
        above_N = terms.logp_N - rows.behaviour_N
        ledger.add("rl/loss", terms.rl, count)
        ledger.add("rl/signal_tokens", sampled_N * (rows.advantage_N != 0), 1)
        ledger.add("rl/mismatch", above_N.abs() * sampled_N, count)
        ledger.add("rl/truncated", (above_N > math.log(ratio_cap)) * sampled_N, count)
        ledger.add("rl/entropy", terms.entropy_N * sampled_N, count)
    if count := ledger.counts.tokens[IMITATION]:
        ledger.add("ce/loss", terms.ce, count)


def in_chunks(
    hidden_ND: Tensor,
    head: nn.Module,
    losses_of: Callable[[Tensor, slice], Losses],
    chunks: list[slice],
    separate: tuple[str, ...] = (),
) -> tuple[Tensor, ...]:
    """Sums of `losses_of(logits of some rows, which rows)` over chunks of rows, as one node of the graph: one of all
    parts but those `separate`, then one of each of these. Each costs one more pass back through the head."""
    trained = [parameter for parameter in head.parameters() if parameter.requires_grad]
    return _InChunks.apply(hidden_ND, head, losses_of, chunks, separate, *trained)


class _InChunks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        head: nn.Module,
        losses_of: Callable[[Tensor, slice], Losses],
        chunks: list[slice],
        separate: tuple[str, ...],
        *trained: Tensor,
    ) -> tuple[Tensor, ...]:
        sums = [_Sum(hidden_ND) for _ in (None, *separate)]
        for part in chunks:
            with torch.enable_grad():
                hidden = hidden_ND[part].detach().requires_grad_()
                parts = losses_of(head(hidden), part)
                each = [parts.pop(name, None) for name in separate]
                each.insert(0, sum(parts.values(), torch.zeros((), device=hidden.device)))
            there = [
                (one, loss) for one, loss in zip(sums, each, strict=True) if loss is not None and loss.requires_grad
            ]
            for number, (one, loss) in enumerate(there, 1):
                one.add(loss, torch.autograd.grad(loss, [hidden, *trained], retain_graph=number < len(there)), part)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*(grad for one in sums for grad in one.gradients(trained)))
        return tuple(one.total for one in sums)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor | None) -> tuple[Tensor | None, ...]:
        size = len(ctx.saved_tensors) // len(outer)
        found: list[Tensor] = []
        for number, factor in enumerate(outer):
            if factor is not None:  # else another part is being differentiated
                grads = ctx.saved_tensors[number * size : (number + 1) * size]
                scaled = [factor.to(grad.dtype) * grad for grad in grads]
                found = [ours.add_(more) for ours, more in zip(found, scaled, strict=True)] if found else scaled
        return found[0], None, None, None, None, *found[1:]


class _Sum:
    """A loss over all chunks, with its gradients."""

    def __init__(self, hidden_ND: Tensor):
        self.total = torch.zeros((), device=hidden_ND.device)
        self.hidden_grad_ND = torch.zeros_like(hidden_ND)
        self.grads: list[Tensor] = []

    def add(self, loss: Tensor, grads: tuple[Tensor, ...], part: slice) -> None:
        self.total += loss.detach()
        self.hidden_grad_ND[part] = grads[0]
        if self.grads:
            for mine, grad in zip(self.grads, grads[1:], strict=True):
                mine.add_(grad)
        else:  # summed in float32: many small chunks vanish in bfloat16
            self.grads = [grad.float() for grad in grads[1:]]

    def gradients(self, trained: tuple[Tensor, ...]) -> list[Tensor]:
        """Of the hidden states, then of the head's trained parameters."""
        grads = self.grads or [torch.zeros((), device=like.device) for like in trained]
        of_head = [grad.to(like.dtype).expand_as(like) for grad, like in zip(grads, trained, strict=True)]
        return [self.hidden_grad_ND, *of_head]
