"""Samples to micro-batches, each one flat row, and their branches to another."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, groupby, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from offbook.train.attention import BranchRow, Packed
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


class Rows(NamedTuple):
    """Tokens whose prediction matters, and what each counts for."""

    ids_N: Tensor
    behaviour_N: Tensor
    advantage_N: Tensor
    rl_weight_N: Tensor
    ce_weight_N: Tensor
    temperature_N: Tensor
    ce_power_N: Tensor
    reference_N: Tensor | None = None  # log-probability under the reference model, where one is held to


@dataclass(frozen=True, slots=True)
class BranchGroup:
    """Branches of a batch that teach in the same way, and where their target tokens lie."""

    distill: Distill
    branches: list[BranchAt]
    numbers: slice  # of the batch's branches
    tokens: slice  # of its target tokens


@dataclass(frozen=True)
class Batch:
    """Samples end to end. A stream's value at t is the weight of *predicting* token t from what stands before it.

    Which tokens count is worked out on the host, so that a GPU is never waited for.
    """

    samples: list[Sample]
    row: Packed
    branches: list[BranchAt]  # those that teach in the same way are neighbours

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
        found, number, token = [], 0, 0
        for distill, members in groupby(self.branches, key=lambda item: item[1].distill):
            branches = list(members)
            last = number + len(branches), token + sum(branch.num_targets for _, branch in branches)
            found.append(BranchGroup(distill, branches, slice(number, last[0]), slice(token, last[1])))
            number, token = last
        return found

    @property
    def parts(self) -> tuple[str, ...]:
        """Of the loss, that there is anything of in this batch."""
        own = {POLICY: "rl_weight", IMITATION: "ce_weight"}
        there = [part for part, stream in own.items() if any(any(getattr(one, stream)) for one in self.samples)]
        return (*there, *dict.fromkeys(group.distill.part for group in self.groups))

    def tokens(self, chunk_rows: int) -> Tokens:
        """What is to be predicted: the targets first, branch after branch, so that few chunks have any."""
        device, starts = self.row.ids_1F.device, self.row.starts
        weights_2F = torch.stack([self._flat("rl_weight"), self._flat("ce_weight")])
        weights_2F[:, starts] = 0  # nothing predicts the first token of a sample
        places, weights = [torch.empty(0, dtype=torch.long)], [torch.empty(2, 0)]
        for number, branch in self.branches:
            places.append(starts[number] + _positions(branch))
            weights.append(weights_2F[:, places[-1]])
            weights_2F[:, places[-1]] = 0  # has been counted, also where a message has a second branch
        target_M, other = torch.cat(places), weights_2F.any(0).nonzero()[:, 0]
        place_N = torch.cat([target_M, other])
        rl_weight_N, ce_weight_N = torch.cat([*weights, weights_2F[:, other]], dim=1)
        ids_N, logprobs_N, advantage_N = (
            self._flat(name, dtype)[place_N]
            for name, dtype in (("ids", torch.long), ("logprobs", torch.float32), ("advantage", torch.float32))
        )
        of_samples = [[sample.temperature, sample.ce_power] for sample in self.samples]
        sample_F = torch.arange(len(starts)).repeat_interleave(torch.tensor(self.row.lengths))
        temperature_N, ce_power_N = torch.tensor(of_samples)[sample_F[place_N]].T.contiguous()
        streams = (ids_N, logprobs_N, advantage_N, rl_weight_N, ce_weight_N, temperature_N, ce_power_N)
        sizes = [branch.num_targets for _, branch in self.branches]
        of_branches = torch.tensor([branch.weight for _, branch in self.branches])
        branch_M = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes, dtype=torch.long))
        gates = torch.tensor([branch.distill.gate for _, branch in self.branches])
        return Tokens(
            rows=Rows(*(sent(stream_N, device) for stream_N in streams)),
            predictor_N=sent(place_N - 1, device),
            weight_M=sent(of_branches[branch_M], device),
            branch_M=sent(branch_M, device),
            gate_B=sent(gates, device),
            sizes=sizes,
            chunks=_chunks([group.tokens for group in self.groups], sizes, len(place_N), chunk_rows),
        )

    def routes(self, layers: int) -> Tensor | None:
        """Recorded experts [layers, tokens, experts per token], -1 where there are none; None without a record."""
        known = [(number, sample.routes) for number, sample in enumerate(self.samples) if sample.routes is not None]
        if not known:
            return None
        starts, top = self.row.starts, known[0][1].top
        routes_FLK = torch.full((self.row.ids_1F.shape[1], layers, top), -1, dtype=torch.int16)
        for number, routes in known:
            of_sample = torch.frombuffer(bytearray(routes.unpack()), dtype=torch.int16).view(-1, layers, top)
            of_sample = of_sample[: len(self.samples[number].ids)]
            routes_FLK[starts[number] : starts[number] + len(of_sample)] = of_sample
        return sent(routes_FLK.transpose(0, 1).contiguous(), self.row.ids_1F.device)

    def _flat(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """A stream of all samples; 0 where one ends early."""
        flat_F = torch.zeros(self.row.ids_1F.shape[1], dtype=dtype)
        for start, sample in zip(self.row.starts, self.samples, strict=True):
            stream = torch.tensor(getattr(sample, name), dtype=dtype)
            flat_F[start : start + len(stream)] = stream
        return flat_F


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of a batch that are predicted, in chunks; the first M of them are targets."""

    rows: Rows
    predictor_N: Tensor  # the place in the row whose output predicts each
    weight_M: Tensor
    branch_M: Tensor  # the number of each target's branch
    gate_B: Tensor
    sizes: list[int]  # of the branches' targets
    chunks: list[slice]  # none has targets of two groups

    def targets_in(self, chunk: slice) -> slice:
        """Those of a chunk, which are its first rows."""
        return slice(min(chunk.start, len(self.weight_M)), min(chunk.stop, len(self.weight_M)))

    @property
    def has_cut_target(self) -> bool:
        """Whether a branch's targets lie in several chunks."""
        ends = {0, *accumulate(self.sizes)}
        return any(chunk.start < len(self.weight_M) and chunk.start not in ends for chunk in self.chunks)


def _chunks(groups: list[slice], targets: list[int], num_tokens: int, size: int) -> list[slice]:
    """One for each group, if that is enough. Else chunks of targets are smaller, since a teacher's logits lie beside
    the student's, and no target is cut unless it is too long for one."""
    bounds, end, half = [0], 0, -(-size // 2)
    starts = {group.start for group in groups}
    if num_tokens <= size:
        return [slice(*pair) for pair in pairwise([*sorted({0, *starts}), num_tokens])]
    for length in targets:
        if end + length - bounds[-1] > half or end in starts:
            bounds.append(end)
        end += length
        while end - bounds[-1] > half:
            bounds.append(bounds[-1] + half)
    return [slice(*pair) for pair in pairwise(sorted({*bounds, *range(end, num_tokens, size), num_tokens}))]


def _positions(branch: Branch) -> Tensor:
    """Of its target tokens, in the sample."""
    return torch.cat([torch.arange(start, end) for start, end in branch.spans])


@dataclass(frozen=True, slots=True)
class BranchBatch:
    """Branches of a micro-batch as one flat row of pieces: what is inserted, then the sample's own tokens."""

    ids_1L: Tensor
    positions_1L: Tensor
    rows: list[BranchRow]  # in the order of the branches
    predictors: Tensor  # flat positions whose output predicts the target tokens, branch after branch

    @classmethod
    def collate(cls, batch: Batch, branches: list[BranchAt]) -> BranchBatch:
        starts, ids = batch.row.starts, list[int]()
        positions: list[Tensor] = []
        rows: dict[int, BranchRow] = {}
        longest_first = sorted(enumerate(branches), key=lambda item: -item[1][1].insert)  # evens out a GPU's load
        for number, (sample, branch) in longest_first:
            # Where nothing is inserted the token before the first target predicts it, so that is read once more.
            insert = min(branch.insert, branch.spans[0][0] - 1) if not branch.inserted else branch.insert
            start = len(ids)
            ids += branch.inserted
            ids += batch.samples[sample].ids[insert : branch.end]
            positions.append(torch.arange(insert, insert + len(ids) - start))
            rows[number] = BranchRow(starts[sample], insert, start, len(ids))
        predictors = [
            _positions(branch) - branch.end + rows[number].end - 1 for number, (_, branch) in enumerate(branches)
        ]
        device = batch.row.ids_1F.device
        if filler := round_length(len(ids), device) - len(ids):  # behind the last message, where nothing reads it
            last = longest_first[-1][0]
            rows[last] = replace(rows[last], end=rows[last].end + filler)
            positions.append(positions[-1][-1:] + torch.arange(1, filler + 1))
            ids += [0] * filler
        ids_and_positions = sent(torch.stack([torch.tensor(ids), torch.cat(positions)]), device)
        return cls(
            ids_1L=ids_and_positions[:1],
            positions_1L=ids_and_positions[1:],
            rows=[rows[number] for number in range(len(rows))],
            predictors=sent(torch.cat(predictors), device),
        )
