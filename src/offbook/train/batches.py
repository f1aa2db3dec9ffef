"""Samples to micro-batches, each one flat row, and their branches to another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, groupby, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from offbook.train.attention import BranchRow
from offbook.train.host import round_length, sent
from offbook.types import Branch, Distill, Sample

POLICY, IMITATION = "rl", "ce"  # parts of the loss; the others are named by branches
BranchAt = tuple[int, Branch]  # and the number of its sample


def micro_batches(samples: list[Sample], max_tokens: int) -> list[list[Sample]]:
    """At most `max_tokens` in one, the longest first, each where it fits first; a longer sample goes alone."""
    batches: list[list[Sample]] = []
    room: list[int] = []
    for sample in sorted(samples, key=lambda sample: -len(sample.ids)):
        size = len(sample.ids)
        place = next((number for number, left in enumerate(room) if size <= left), len(room))
        if place == len(room):
            batches.append([])
            room.append(max_tokens)
        batches[place].append(sample)
        room[place] -= size
    return batches


@dataclass
class Packed:
    """Sequences end to end in one row. Positions start at 0 in each, and none of them sees another.

    On a GPU there may be filler behind the last, which counts as its own: nothing looks at it.
    """

    ids_1F: Tensor
    positions_1F: Tensor
    lengths: list[int]
    bounds: Tensor  # where each begins, and the end

    @classmethod
    def of(cls, sequences: Sequence[Sequence[int]], device: torch.device) -> Packed:
        lengths = list(map(len, sequences))
        filler = round_length(sum(lengths), device) - sum(lengths)
        lengths[-1] += filler
        ids = torch.tensor([*chain(*sequences), *[0] * filler])
        both = sent(torch.stack([ids, torch.cat(list(map(torch.arange, lengths)))]), device)
        bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        return cls(both[:1], both[1:], lengths, sent(bounds, device))

    @property
    def starts(self) -> list[int]:
        return [0, *accumulate(self.lengths[:-1])]


class Rows(NamedTuple):
    """Tokens whose prediction matters, and what each counts for."""

    ids_N: Tensor
    behaviour_N: Tensor
    advantage_N: Tensor
    rl_weight_N: Tensor
    ce_weight_N: Tensor
    temperature_N: Tensor

    def part(self, part: slice) -> Rows:
        return Rows(*(stream_N[part] for stream_N in self))


@dataclass
class BranchGroup:
    """Branches of a batch with the same distillation settings, and the range of their target tokens."""

    distill: Distill
    branches: list[BranchAt]
    tokens: slice  # of the batch's target tokens
    owner_M: Tensor  # the number of the branch of each of them

    @property
    def sizes(self) -> list[int]:
        return [branch.num_targets for _, branch in self.branches]


@dataclass
class Batch:
    """Samples end to end. A stream's value at t is the weight of *predicting* token t from the tokens before it.

    Everything is prepared on the host, so a GPU is never waited for.
    """

    samples: list[Sample]
    row: Packed
    branches: list[BranchAt]  # those of one group are neighbours

    @classmethod
    def collate(cls, samples: list[Sample], device: torch.device) -> Batch:
        branches = [(number, branch) for number, sample in enumerate(samples) for branch in sample.branches]
        ways = list(dict.fromkeys(branch.distill for _, branch in branches))
        return cls(
            samples=samples,
            row=Packed.of([sample.ids for sample in samples], device),
            branches=sorted(branches, key=lambda item: ways.index(item[1].distill)),
        )

    @cached_property
    def groups(self) -> list[BranchGroup]:
        groups = []
        start = 0
        for distill, members in groupby(self.branches, key=lambda item: item[1].distill):
            branches = list(members)
            sizes_B = torch.tensor([branch.num_targets for _, branch in branches])
            owner_M = torch.arange(len(branches)).repeat_interleave(sizes_B)
            stop = start + len(owner_M)
            owner_M = sent(owner_M, self.row.ids_1F.device)
            groups.append(BranchGroup(distill, branches, slice(start, stop), owner_M))
            start = stop
        return groups

    def tokens(self, chunk_rows: int) -> Tokens:
        """The tokens to be predicted: targets first, branch after branch, so that few chunks have any."""
        starts = self.row.starts
        weights_2F = torch.stack([self._flat("rl_weight"), self._flat("ce_weight")])
        weights_2F[:, starts] = 0  # nothing predicts the first token of a sample
        places: list[Tensor] = []
        weights: list[Tensor] = []
        for number, branch in self.branches:
            places.append(starts[number] + _positions(branch))
            weights.append(weights_2F[:, places[-1]])
            weights_2F[:, places[-1]] = 0  # counted once, also where a message has a second branch
        num_targets = sum(map(len, places))
        places.append(weights_2F.any(0).nonzero()[:, 0])
        weights.append(weights_2F[:, places[-1]])
        place_N = torch.cat(places)
        rl_weight_N, ce_weight_N = torch.cat(weights, dim=1)
        temperature = torch.tensor([sample.temperature for sample in self.samples])
        sample_F = torch.arange(len(starts)).repeat_interleave(torch.tensor(self.row.lengths))
        rows = Rows(
            ids_N=self._flat("ids", torch.long)[place_N],
            behaviour_N=self._flat("logprobs")[place_N],
            advantage_N=self._flat("advantage")[place_N],
            rl_weight_N=rl_weight_N,
            ce_weight_N=ce_weight_N,
            temperature_N=temperature[sample_F[place_N]],
        )
        device = self.row.ids_1F.device
        return Tokens(
            rows=Rows(*(sent(stream_N, device) for stream_N in rows)),
            predictor_N=sent(place_N - 1, device),
            num_targets=num_targets,
            chunks=_chunks([group.tokens for group in self.groups], len(place_N), chunk_rows),
        )

    def routes(self, layers: int) -> Tensor | None:
        """Recorded experts [layers, tokens, experts per token], -1 where there are none; None without a record."""
        known = [(number, sample.routes) for number, sample in enumerate(self.samples) if sample.routes is not None]
        if not known:
            return None
        top = known[0][1].top
        routes_FLK = torch.full((self.row.ids_1F.shape[1], layers, top), -1, dtype=torch.int16)
        for number, routes in known:
            of_sample = torch.frombuffer(bytearray(routes.unpack()), dtype=torch.int16).view(-1, layers, top)
            of_sample = of_sample[: len(self.samples[number].ids)]
            start = self.row.starts[number]
            routes_FLK[start : start + len(of_sample)] = of_sample
        return sent(routes_FLK.transpose(0, 1).contiguous(), self.row.ids_1F.device)

    def _flat(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """A stream of all samples; 0 where one ends early."""
        flat_F = torch.zeros(self.row.ids_1F.shape[1], dtype=dtype)
        for start, sample in zip(self.row.starts, self.samples, strict=True):
            stream = torch.tensor(getattr(sample, name), dtype=dtype)
            flat_F[start : start + len(stream)] = stream
        return flat_F


@dataclass
class Tokens:
    """The tokens of a batch that are predicted, in chunks; the first `num_targets` are targets of branches."""

    rows: Rows
    predictor_N: Tensor  # the place in the row whose output predicts each
    num_targets: int
    chunks: list[slice]  # none has targets of two groups


def _chunks(groups: list[slice], num_tokens: int, size: int) -> list[slice]:
    """A chunk begins with each group. Chunks of targets are half as large, since a teacher's logits come on top of the
    student's."""
    starts = {group.start for group in groups}
    if num_tokens > size:
        for group in groups:
            starts.update(range(group.start, group.stop, -(-size // 2)))
        starts.update(range(groups[-1].stop if groups else 0, num_tokens, size))
    return [slice(*pair) for pair in pairwise(sorted({0, *starts, num_tokens}))] or [slice(0, 0)]


def _positions(branch: Branch) -> Tensor:
    """Of its target tokens, in the sample."""
    return torch.cat([torch.arange(start, end) for start, end in branch.spans])


@dataclass
class BranchBatch:
    """Branches of a micro-batch as one flat row of pieces: what is inserted, then the sample's own tokens."""

    ids_1L: Tensor
    positions_1L: Tensor
    rows: list[BranchRow]  # in the order of the branches
    predictors: Tensor  # flat positions whose output predicts the target tokens, branch after branch

    @classmethod
    def collate(cls, batch: Batch, branches: list[BranchAt]) -> BranchBatch:
        device = batch.row.ids_1F.device
        starts = batch.row.starts
        ids: list[int] = []
        positions: list[int] = []
        rows: dict[int, BranchRow] = {}
        for number, (sample, branch) in sorted(enumerate(branches), key=_by_length):
            # Without an insertion the token before the first target predicts it, so that token is read once more.
            insert = branch.insert if branch.inserted else min(branch.insert, branch.spans[0][0] - 1)
            start = len(ids)
            ids += branch.inserted
            ids += batch.samples[sample].ids[insert : branch.end]
            positions += range(insert, insert + len(ids) - start)
            rows[number] = last = BranchRow(starts[sample], insert, start, len(ids))
        predictors = [
            _positions(branch) - branch.end + rows[number].end - 1 for number, (_, branch) in enumerate(branches)
        ]
        filler = round_length(len(ids), device) - len(ids)
        last.end += filler  # behind the last branch, where nothing reads it
        positions += range(positions[-1] + 1, positions[-1] + 1 + filler)
        both = sent(torch.tensor([ids + [0] * filler, positions]), device)
        in_order = [rows[number] for number in range(len(rows))]
        return cls(both[:1], both[1:], in_order, sent(torch.cat(predictors), device))


def _by_length(branch: tuple[int, BranchAt]) -> int:
    """The longest first, which evens out a GPU's load."""
    return -branch[1][1].insert
