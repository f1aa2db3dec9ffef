"""What hints do to their messages, token by token, and how that is told.

Axes: M tokens of targets, B branches (a target's tokens are neighbours, branch after branch), P of the tokens, K
likeliest entries.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from offbook.train import losses
from offbook.train.gate import VERDICTS
from offbook.train.head import Objective, Reading, log_probabilities, reading_of
from offbook.types import Branch, Likely

TOLD_NATS = 0.01  # a token at which the two agree better than this is not worth telling its likeliest
TOLD_TOKENS = 256  # of a micro-batch: sorting a large vocabulary at every token would cost more than all the rest

Reader = tuple[nn.Module, Tensor]  # a head and hidden states [M, D]


class Likeliest(NamedTuple):
    """The likeliest entries at those target tokens where student and teacher differ most."""

    token_P: Tensor
    student: tuple[Tensor, Tensor]  # log-probabilities and ids [P, K]
    teacher: tuple[Tensor, Tensor]


@dataclass(slots=True)
class Measured:
    """What a hint did to the tokens of its target: log-probabilities of the sampled tokens and divergence, each."""

    student: list[float]
    teacher: list[float]
    divergence: list[float]
    skipped: str = ""  # why it did not teach
    student_top: list[Likely] = field(default_factory=list)
    teacher_top: list[Likely] = field(default_factory=list)


@torch.no_grad()
def read_targets(
    student: Reader, teachers: list[Reader], ids_M: Tensor, objective: Objective, chunk_rows: int, compiled: bool
) -> Reading:
    """Student and teachers at every target token, without any gradient."""
    read = _compiled_chunk if compiled else _read_chunk
    parts = []
    for start in range(0, len(ids_M), chunk_rows):
        part = slice(start, start + chunk_rows)
        logits = [head(hidden_MD[part]) for head, hidden_MD in (student, *teachers)]
        parts.append(read(logits, ids_M[part], objective))
    return Reading(*(torch.cat(column) for column in zip(*parts, strict=True)))


def _read_chunk(logits: list[Tensor], ids_M: Tensor, objective: Objective) -> Reading:
    student_MV, teacher_MV = _both(logits, objective)
    divergence_M = losses.divergence(student_MV, teacher_MV, objective.direction)
    return reading_of(student_MV.gather(1, ids_M[:, None])[:, 0], teacher_MV, divergence_M, ids_M)


_compiled_chunk = torch.compile(_read_chunk)


def _both(logits: list[Tensor], objective: Objective) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the student, and of its teachers taken together."""
    return log_probabilities(logits[:1], objective, (1.0,)), log_probabilities(logits[1:], objective, objective.shares)


@torch.no_grad()
def likeliest(
    student: Reader, teachers: list[Reader], divergence_M: Tensor, objective: Objective, top: int, most: int
) -> Likeliest:
    token_P = divergence_M.topk(min(TOLD_TOKENS, most, len(divergence_M))).indices
    logits = [head(hidden_MD[token_P]) for head, hidden_MD in (student, *teachers)]
    of_student, of_teacher = (logp_PV.topk(top) for logp_PV in _both(logits, objective))
    return Likeliest(token_P, tuple(of_student), tuple(of_teacher))


@dataclass(frozen=True, slots=True)
class Record:
    """All that is told of the branches of a micro-batch."""

    branches: list[Branch]
    reading: Reading
    likeliest: Likeliest
    verdict_B: Tensor

    def on_host(self) -> Record:
        """On its way there: not to be looked at before the device has been waited for."""
        tensors = (self.reading, self.likeliest, self.verdict_B)
        return Record(self.branches, *tree_map(lambda values: values.to("cpu", non_blocking=True), tensors))

    def by_key(self) -> dict[str, Measured]:
        """As plain numbers, by the branch's key."""
        student, teacher, divergence = (values.float().tolist() for values in self.reading)
        tops = [self._by_token(top, divergence) for top in (self.likeliest.student, self.likeliest.teacher)]
        found, start = {}, 0
        for branch, verdict in zip(self.branches, self.verdict_B.tolist(), strict=True):
            part = slice(start, start + branch.target_end - branch.target_start)
            start = part.stop
            found[branch.key] = Measured(
                student[part], teacher[part], divergence[part], VERDICTS[verdict], *(likely[part] for likely in tops)
            )
        return found

    def _by_token(self, top: tuple[Tensor, Tensor], divergence: list[float]) -> list[Likely]:
        likely: list[Likely] = [[] for _ in divergence]
        for token, logprobs, ids in zip(self.likeliest.token_P.tolist(), *(part.tolist() for part in top), strict=True):
            if divergence[token] > TOLD_NATS:
                likely[token] = list(zip(ids, logprobs, strict=True))
        return likely
