"""What branches do to their target tokens, one by one, and how that is reported.

Axes: M target tokens, B branches (a branch's tokens are neighbours, branch after branch), P of the tokens, K likeliest
entries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from offbook.train.gate import VERDICTS, TargetScores
from offbook.train.head import TeacherLogits, compared, log_probabilities
from offbook.train.host import compile_once
from offbook.types import Branch, Direction, Likely

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
