"""From hidden states to losses and to what branches do to their targets, without ever holding a batch's logits.

Rows go through the vocabulary in chunks, and each chunk's gradients are taken at once, in the forward pass: nothing of
size [rows, vocabulary] outlives its chunk, and nothing is computed twice.

The gate decides which branches may teach. A branch that hardly moves its target has nothing to teach; one that makes
what was sampled likelier teaches the fault. Both are seen twice: from the student to the teacher, which is what would
be taught, and from the teacher without what the branch inserts to the teacher with it, which is what the insertion
does. A student that has drifted away from its teacher is far from it whatever is inserted; and a teacher that is no
better than the student holds it back. Nothing here waits for the device.

Axes as in losses.py; D is the width, M target tokens, B branches (a branch's tokens are neighbours, branch after
branch), P of the tokens, K likeliest entries.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from offbook.train import losses
from offbook.train.batches import IMITATION, POLICY, Batch, BranchGroup, Rows, Tokens
from offbook.train.host import compile_once, sent
from offbook.train.losses import k1
from offbook.types import Branch, Direction, Distill, Likely, Sample

VERDICTS = ("", "no_shift", "towards_mistake", "over_limit")  # why a branch does not teach; the first is: it does


class TargetScores(NamedTuple):
    """Of each target token the sampled one's log-probability, by the student, by the teacher, and by the teacher
    without what the branch inserts; and the divergence of the teacher from both others."""

    student_M: Tensor
    teacher_M: Tensor
    plain_M: Tensor
    divergence_M: Tensor
    moved_M: Tensor


class Shift(NamedTuple):
    """What branches do to their targets, nats per token: the divergence, and how much less likely what was sampled
    becomes. From the student, and from the teacher without the insertion."""

    nats_B: Tensor
    gain_B: Tensor
    own_nats_B: Tensor
    own_gain_B: Tensor

    @property
    def least_B(self) -> Tensor:
        """What both agree on."""
        return torch.minimum(self.nats_B, self.own_nats_B)


def shift_of(scores: TargetScores, branch_M: Tensor, num_branches: int) -> Shift:
    """Means over the tokens of each branch."""
    nothing_B = scores.divergence_M.new_zeros(num_branches)
    sizes_B = nothing_B.index_add(0, branch_M, torch.ones_like(scores.divergence_M)).clamp(min=1)

    def mean_B(values_M: Tensor) -> Tensor:
        return nothing_B.index_add(0, branch_M, values_M) / sizes_B

    return Shift(
        mean_B(scores.divergence_M),
        mean_B(scores.student_M - scores.teacher_M),
        mean_B(scores.moved_M),
        mean_B(scores.plain_M - scores.teacher_M),
    )


def decided(shift: Shift, branches: Sequence[Branch]) -> Tensor:
    """The verdict on each branch, where all branches of their contests are here."""
    names = list(dict.fromkeys(branch.contest for branch in branches))
    rows = [
        [
            branch.distill.gate,
            names.index(branch.contest),
            branch.distill.places if branch.contest and branch.distill.places else math.inf,
        ]
        for branch in branches
    ]
    gate_B, contest_B, places_B = sent(torch.tensor(rows), shift.nats_B.device).unbind(1)
    return within_places(verdicts(shift, gate_B), shift, contest_B, places_B)


def verdicts(shift: Shift, gate_B: Tensor) -> Tensor:
    """Numbers in VERDICTS. A branch has to move its target by as many nats per token as its gate, and away; 0 lets all
    pass."""
    verdict_B = torch.where(torch.minimum(shift.gain_B, shift.own_gain_B) <= 0, 2, 0)
    verdict_B = torch.where(shift.least_B < gate_B, 1, verdict_B)
    return torch.where(gate_B > 0, verdict_B, 0)


def within_places(verdict_B: Tensor, shift: Shift, contest_B: Tensor, places_B: Tensor) -> Tensor:
    """Of the branches of one contest those that move most teach, at most as many as there are places."""
    score_B = torch.where(verdict_B == 0, shift.least_B, -torch.inf)
    order_B = torch.arange(len(score_B), device=score_B.device)
    ahead_BB = (score_B[None] > score_B[:, None]) | (
        (score_B[None] == score_B[:, None]) & (order_B[None] < order_B[:, None])
    )
    rank_B = (ahead_BB & (contest_B[None] == contest_B[:, None])).sum(1)
    return torch.where((verdict_B == 0) & (rank_B >= places_B), 3, verdict_B)


CHUNK_ENTRIES = 2**25  # logits in one chunk: 220 rows of a vocabulary of 152k, 128 MiB in float32
COMPILED_CHUNK_ENTRIES = 2**27  # fused kernels hold far fewer copies


@dataclass(frozen=True, slots=True)
class Objective:
    """What does not change from token to token of a chunk."""

    ratio_cap: float
    policy: bool  # whether any token of the step carries an RL weight; without, its terms are not computed
    reference_kl: float = 0.0
    distill: Distill = field(default_factory=Distill)
    shares: tuple[float, ...] = (1.0,)  # of the teachers


class Targets(NamedTuple):
    """Of the first rows, which are targets: what each counts for, and its branch. A branch is whole in its chunk, or it
    has been judged before."""

    weight_M: Tensor
    branch_M: Tensor
    gate_B: Tensor
    open_B: Tensor  # 0 where it is known that a branch may not teach, else 1


class TeacherLogits(NamedTuple):
    """Of the models that a teacher is, with what the branches insert and without. Of a model that is the student itself
    the latter are left out, since they are the student's."""

    hinted: list[Tensor]  # [M, V] each
    plain: list[Tensor]


class Terms(NamedTuple):
    """What a chunk adds up to, differentiable, and what is recorded of its tokens."""

    rl: Tensor
    ce: Tensor
    distill: Tensor
    logp_N: Tensor
    entropy_N: Tensor
    scores: TargetScores | None  # where it has targets


def chunk_terms(logits_NV: Tensor, teacher: TeacherLogits, rows: Rows, targets: Targets, objective: Objective) -> Terms:
    """The first M rows are also distilled, if their branch may teach."""
    logp_NV = log_probabilities([logits_NV], rows.temperature_N)
    logp_N = logp_NV.gather(1, rows.ids_N[:, None])[:, 0]
    rl_N = entropy_N = none = logp_N.detach()[:0]
    if objective.policy:
        advantage_N = rows.advantage_N
        if rows.reference_N is not None:
            advantage_N = advantage_N - objective.reference_kl * losses.k1(logp_N, rows.reference_N)
        gradient_N = losses.policy_gradient(logp_N, rows.behaviour_N, advantage_N, objective.ratio_cap)
        rl_N = rows.rl_weight_N * gradient_N
        entropy_N = -(logp_NV.detach().exp() * logp_NV.detach()).sum(-1)
    ce_N = rows.ce_weight_N * losses.imitation(logp_N, rows.ce_power_N)
    if not teacher.hinted:
        return Terms(rl_N.sum(), ce_N.sum(), none.sum(), logp_N.detach(), entropy_N, None)
    distill, first = objective.distill, slice(len(targets.weight_M))
    student = logits_NV[first].detach(), logp_NV[first]
    streams = rows.ids_N[first], rows.temperature_N[first]
    nats_M, scores = compared(student, teacher, *streams, distill.direction, objective.shares)
    distill_M = _weight(targets, scores) * losses.cap_values(nats_M, distill.cap)
    if distill.token_gate:
        distill_M = distill_M * (scores.moved_M >= distill.token_gate)
    return Terms(rl_N.sum(), ce_N.sum(), distill_M.sum(), logp_N.detach(), entropy_N, scores)


def log_probabilities(logits_NV: list[Tensor], temperature_N: Tensor, shares: tuple[float, ...] = (1.0,)) -> Tensor:
    """Of several models, taken together."""
    each = [torch.log_softmax(logits.float() / temperature_N[:, None], dim=-1) for logits in logits_NV]
    return losses.log_mix(each, shares)


def compared(
    student: tuple[Tensor, Tensor],
    teacher: TeacherLogits,
    ids_M: Tensor,
    temperature_M: Tensor,
    direction: Direction,
    shares: tuple[float, ...],
) -> tuple[Tensor, TargetScores]:
    """The divergence of the teacher from the student, differentiable, and all that is known of the targets. Of the
    student: its logits and what follows from them."""

    def sampled_M(logp_MV: Tensor) -> Tensor:
        return logp_MV.detach().gather(1, ids_M[:, None])[:, 0]

    logits_MV, logp_MV = student
    teacher_logp_MV = log_probabilities(teacher.hinted, temperature_M, shares)
    nats_M = losses.divergence(logp_MV, teacher_logp_MV, direction)
    plain_M, moved_M = sampled_M(logp_MV), nats_M.detach()
    if teacher.plain:
        models = [*teacher.plain, logits_MV][: len(teacher.hinted)]
        plain_logp_MV = log_probabilities(models, temperature_M, shares)
        plain_M, moved_M = sampled_M(plain_logp_MV), losses.divergence(plain_logp_MV, teacher_logp_MV, direction)
    scores = TargetScores(sampled_M(logp_MV), sampled_M(teacher_logp_MV), plain_M, nats_M.detach(), moved_M)
    return nats_M, scores


def _weight(targets: Targets, scores: TargetScores) -> Tensor:
    shift = shift_of(scores, targets.branch_M, len(targets.open_B))
    open_B = targets.open_B * (verdicts(shift, targets.gate_B) == 0)
    return targets.weight_M * open_B[targets.branch_M]


Losses = dict[str, Tensor]  # by part; what is differentiated is their sum


def in_chunks(
    hidden_ND: Tensor,
    head: nn.Module,
    losses_of: Callable[[Tensor, slice], Losses],
    chunks: list[slice],
    apart: tuple[str, ...] = (),
) -> tuple[Tensor, ...]:
    """The sum of `losses_of(logits of some rows, which rows)` over chunks of rows, as one node of the graph.

    With `apart` one sum for each of these parts and no others, so that each can be differentiated by itself. That costs
    one more pass back through the head a part.
    """
    trained = [parameter for parameter in head.parameters() if parameter.requires_grad]
    return _InChunks.apply(hidden_ND, head, losses_of, chunks, apart, *trained)


class _InChunks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        head: nn.Module,
        losses_of: Callable[[Tensor, slice], Losses],
        chunks: list[slice],
        apart: tuple[str, ...],
        *trained: Tensor,
    ) -> tuple[Tensor, ...]:
        sums = [_Sum(hidden_ND) for _ in apart or ("all",)]
        for part in chunks:
            with torch.enable_grad():
                hidden = hidden_ND[part].detach().requires_grad_()
                losses = losses_of(head(hidden), part)
                whole = sum(losses.values(), torch.zeros((), device=hidden.device))
            wanted = [losses.get(name) for name in apart] if apart else [whole]
            there = [(one, loss) for one, loss in zip(sums, wanted, strict=True) if loss is not None]
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
            if factor is None:  # another part is being differentiated
                continue
            scaled = [factor.to(grad.dtype) * grad for grad in ctx.saved_tensors[number * size : (number + 1) * size]]
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
        """Of the hidden states, then of what is trained of the head."""
        grads = self.grads or [torch.zeros((), device=like.device) for like in trained]
        of_head = [grad.to(like.dtype).expand_as(like) for grad, like in zip(grads, trained, strict=True)]
        return [self.hidden_grad_ND, *of_head]


TOP_NATS = 0.01  # where the two agree better than this the likeliest tokens are not worth reporting
TOP_TOKENS = 256  # of a micro-batch: sorting a large vocabulary at every token would cost more than all the rest

Scorer = tuple[nn.Module, Tensor]  # a head and hidden states [M, D]


class Scorers(NamedTuple):
    """A teacher, which may be several models, and how much each of them counts for."""

    models: list[Scorer]
    shares: tuple[float, ...] = (1.0,)
    plain: Sequence[Scorer] = ()  # those with weights of their own, without what branches insert, where that is asked

    def logits(self, part: slice | Tensor) -> TeacherLogits:
        hinted, plain = ([head(hidden_MD[part]) for head, hidden_MD in each] for each in (self.models, self.plain))
        return TeacherLogits(hinted, plain)


class TopTokens(NamedTuple):
    """The likeliest entries at those target tokens where student and teacher differ most."""

    token_P: Tensor
    student: tuple[Tensor, Tensor]  # log-probabilities and ids [P, K]
    teacher: tuple[Tensor, Tensor]


@dataclass(slots=True)
class Measured:
    """What a branch did to its target tokens, each: log-probabilities of the sampled ones by the student, by the
    teacher and by the teacher without what is inserted, and the divergence of the teacher from both others."""

    student: list[float]
    teacher: list[float]
    plain: list[float]
    divergence: list[float]
    moved: list[float]
    skipped: str = ""  # why it did not teach
    student_top: list[Likely] = field(default_factory=list)
    teacher_top: list[Likely] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Compared:
    """Student and teacher at the same target tokens."""

    student: Scorer
    teacher: Scorers
    ids_M: Tensor
    temperature_M: Tensor
    direction: Direction

    @torch.no_grad()
    def scores(self, chunk_rows: int, compile: bool = False) -> TargetScores:
        """At every target token, without any gradient."""
        score: Callable[..., TargetScores] = compile_once(_chunk_scores) if compile else _chunk_scores
        parts = []
        for start in range(0, len(self.ids_M), chunk_rows):
            part = slice(start, start + chunk_rows)
            streams = self.ids_M[part], self.temperature_M[part]
            student_MV, teacher = self._student_logits(part), self.teacher.logits(part)
            parts.append(score(student_MV, teacher, *streams, self.direction, self.teacher.shares))
        return TargetScores(*(torch.cat(column) for column in zip(*parts, strict=True)))

    @torch.no_grad()
    def top(self, divergence_M: Tensor, count: int, most: int) -> TopTokens:
        token_P = divergence_M.topk(min(TOP_TOKENS, most, len(divergence_M))).indices
        temperature_P, hinted = self.temperature_M[token_P], self.teacher.logits(token_P).hinted
        of_student = log_probabilities([self._student_logits(token_P)], temperature_P).topk(count)
        of_teacher = log_probabilities(hinted, temperature_P, self.teacher.shares).topk(count)
        return TopTokens(token_P, tuple(of_student), tuple(of_teacher))

    def _student_logits(self, part: slice | Tensor) -> Tensor:
        head, hidden_MD = self.student
        return head(hidden_MD[part])


@torch.no_grad()
def sampled_logp(scorer: Scorer, ids_N: Tensor, temperature_N: Tensor, chunk_rows: int) -> Tensor:
    """What one model makes of tokens: their log-probabilities."""
    head, hidden_ND = scorer
    found_N = torch.empty_like(temperature_N)  # of a rank that has nothing to do there are none
    for start in range(0, len(ids_N), chunk_rows):
        part = slice(start, start + chunk_rows)
        logp_NV = log_probabilities([head(hidden_ND[part])], temperature_N[part])
        found_N[part] = logp_NV.gather(1, ids_N[part, None])[:, 0]
    return found_N


def _chunk_scores(
    logits_MV: Tensor,
    teacher: TeacherLogits,
    ids_M: Tensor,
    temperature_M: Tensor,
    direction: Direction,
    shares: tuple[float, ...],
) -> TargetScores:
    student = logits_MV, log_probabilities([logits_MV], temperature_M)
    return compared(student, teacher, ids_M, temperature_M, direction, shares)[1]


@dataclass(frozen=True, slots=True)
class BranchReport:
    """All that is reported of some branches of a micro-batch."""

    branches: list[Branch]
    scores: TargetScores
    verdict_B: Tensor
    top: TopTokens | None = None

    def on_host(self) -> BranchReport:
        """On its way there: not to be looked at before the device has been waited for."""
        tensors = (self.scores, self.verdict_B, self.top)
        moved = tree_map_only(Tensor, lambda values: values.to("cpu", non_blocking=True), tensors)
        return BranchReport(self.branches, *moved)

    def by_key(self) -> dict[str, Measured]:
        """As plain numbers, by the branch's key."""
        student, teacher, plain, divergence, moved = (values.float().tolist() for values in self.scores)
        tops = [self._by_token(top, divergence) for top in (self.top.student, self.top.teacher)] if self.top else []
        found, start = {}, 0
        for branch, verdict in zip(self.branches, self.verdict_B.tolist(), strict=True):
            part = slice(start, start + branch.num_targets)
            start = part.stop
            found[branch.key] = Measured(
                student=student[part],
                teacher=teacher[part],
                plain=plain[part],
                divergence=divergence[part],
                moved=moved[part],
                skipped=VERDICTS[verdict],
            )
            if tops:
                found[branch.key].student_top, found[branch.key].teacher_top = (likely[part] for likely in tops)
        return {key: measured for key, measured in found.items() if key}

    def _by_token(self, top: tuple[Tensor, Tensor], divergence: list[float]) -> list[Likely]:
        assert self.top is not None
        likely: list[Likely] = [[] for _ in divergence]
        for token, logprobs, ids in zip(self.top.token_P.tolist(), *(part.tolist() for part in top), strict=True):
            if divergence[token] > TOP_NATS:
                likely[token] = list(zip(ids, logprobs, strict=True))
        return likely


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
