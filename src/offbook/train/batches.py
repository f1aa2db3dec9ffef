"""Samples to padded micro-batches, and hint branches to one flat row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from offbook.train.attention import BranchRow
from offbook.train.head import Rows
from offbook.train.host import round_length, sent
from offbook.types import Branch, Sample


def micro_batches(samples: list[Sample], max_tokens: int) -> list[list[Sample]]:
    """Samples of like length together, padding counted, at most `max_tokens` a batch; a longer sample goes alone.

    Anchors have another teacher than lessons, so the two are never in one batch.
    """
    batches: list[list[Sample]] = []
    for sample in sorted(samples, key=lambda sample: (is_anchor(sample), -len(sample.ids))):
        room = batches and (len(batches[-1]) + 1) * len(batches[-1][0].ids) <= max_tokens
        if room and is_anchor(batches[-1][0]) == is_anchor(sample):
            batches[-1].append(sample)
        else:
            batches.append([sample])
    return batches


def is_anchor(sample: Sample) -> bool:
    return any(branch.anchor for branch in sample.branches)


@dataclass(frozen=True, slots=True)
class Batch:
    """Right-padded rows. A stream's value at t is the weight of *predicting* token t from what stands before it.

    Which tokens count is worked out on the host, so that a GPU is never waited for.
    """

    samples: list[Sample]
    ids_BT: Tensor
    branches: list[tuple[int, Branch]]  # (row, branch)
    anchors: bool

    @classmethod
    def collate(cls, samples: list[Sample], device: torch.device) -> Batch:
        length = row_length(samples, device)
        return cls(
            samples=samples,
            ids_BT=sent(_padded([sample.ids for sample in samples], length, torch.long), device),
            branches=[(row, branch) for row, sample in enumerate(samples) for branch in sample.branches],
            anchors=is_anchor(samples[0]),
        )

    @property
    def is_contested(self) -> bool:
        """Whether some sample has more branches than may teach."""
        return any(sample.lessons is not None and sample.lessons < len(sample.branches) for sample in self.samples)

    def owners(self) -> tuple[Tensor, Tensor]:
        """Of each branch: the row of its sample, and how many branches of that may teach."""
        limits = [len(sample.branches) if sample.lessons is None else sample.lessons for sample in self.samples]
        pairs = torch.tensor([[row, limits[row]] for row, _ in self.branches])
        row_B, limit_B = sent(pairs, self.ids_BT.device).unbind(1)
        return row_B, limit_B

    def tokens(self, chunk_rows: int) -> Tokens:
        """What is to be predicted: the targets first, branch after branch, so that few chunks have any."""
        device, length = self.ids_BT.device, self.ids_BT.shape[1]
        weights_2F = torch.stack([self._flat("rl_weight"), self._flat("ce_weight")])
        weights_2F[:, ::length] = 0  # nothing predicts the first token of a row
        places, weights = [torch.empty(0, dtype=torch.long)], [torch.empty(2, 0)]
        for row, branch in self.branches:
            part = slice(row * length + branch.target_start, row * length + branch.target_end)
            places.append(torch.arange(part.start, part.stop))
            weights.append(weights_2F[:, part].clone())
            weights_2F[:, part] = 0  # has been counted, also where a message has a second branch
        target_M, other = torch.cat(places), weights_2F.any(0).nonzero()[:, 0]
        place_N = torch.cat([target_M, other])
        rl_weight_N, ce_weight_N = torch.cat([*weights, weights_2F[:, other]], dim=1)
        ids_N, logprobs_N, advantage_N = (
            self._flat(name, dtype)[place_N]
            for name, dtype in (("ids", torch.long), ("logprobs", torch.float32), ("advantage", torch.float32))
        )
        streams = (ids_N, logprobs_N, advantage_N, rl_weight_N, ce_weight_N)
        sizes = [len(part) for part in places[1:]]
        of_branches = torch.tensor([branch.weight for _, branch in self.branches])
        branch_M = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes, dtype=torch.long))
        return Tokens(
            rows=Rows(*(sent(stream_N, device) for stream_N in streams)),
            predictor_N=sent(place_N - 1, device),
            weight_M=sent(of_branches[branch_M], device),
            branch_M=sent(branch_M, device),
            sizes=sizes,
            chunks=_chunks(sizes, len(place_N), chunk_rows),
        )

    def _flat(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """A stream of all samples, padded, row after row."""
        return _padded([getattr(sample, name) for sample in self.samples], self.ids_BT.shape[1], dtype).flatten()


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of a batch that are predicted, in chunks; the first M of them are targets."""

    rows: Rows
    predictor_N: Tensor  # the place, all rows of the batch counted through, whose output predicts each
    weight_M: Tensor
    branch_M: Tensor  # the number of each target's branch
    sizes: list[int]  # of the branches' targets
    chunks: list[slice]

    def targets_in(self, chunk: slice) -> slice:
        """Those of a chunk, which are its first rows."""
        return slice(min(chunk.start, len(self.weight_M)), min(chunk.stop, len(self.weight_M)))

    @property
    def has_cut_target(self) -> bool:
        """Whether a target lies in several chunks."""
        ends = {0, *accumulate(self.sizes)}
        return any(chunk.start < len(self.weight_M) and chunk.start not in ends for chunk in self.chunks)


def _chunks(targets: list[int], num_tokens: int, size: int) -> list[slice]:
    """One, if that is enough. Else chunks of targets are smaller, since a teacher's logits lie beside the student's,
    and no target is cut unless it is too long for one."""
    if num_tokens <= size:
        return [slice(0, num_tokens)]
    bounds, end, half = [0], 0, -(-size // 2)
    for length in targets:
        if end + length - bounds[-1] > half:
            bounds.append(end)
        end += length
        while end - bounds[-1] > half:
            bounds.append(bounds[-1] + half)
    return [slice(*pair) for pair in pairwise(sorted({*bounds, *range(end, num_tokens, size), num_tokens}))]


def row_length(samples: list[Sample], device: torch.device) -> int:
    return round_length(max(len(sample.ids) for sample in samples), device)


def _padded(rows: Sequence[Sequence[float]], length: int, dtype: torch.dtype) -> Tensor:
    padded = torch.zeros(len(rows), length, dtype=dtype)
    for place, row in enumerate(rows):
        padded[place, : len(row)] = torch.tensor(row, dtype=dtype)
    return padded


@dataclass(frozen=True, slots=True)
class BranchBatch:
    """All branches of a micro-batch as one flat row of `hint + message` pieces."""

    ids_1L: Tensor
    positions_1L: Tensor
    rows: list[BranchRow]  # in the order of the batch's branches
    predictors: Tensor  # flat positions whose output predicts the target tokens, branch after branch

    @classmethod
    def collate(cls, batch: Batch) -> BranchBatch:
        ids: list[int] = []
        positions: list[Tensor] = []
        rows: dict[int, BranchRow] = {}
        longest_first = sorted(enumerate(batch.branches), key=lambda item: -item[1][1].insert)  # evens out a GPU's load
        for number, (trunk_row, branch) in longest_first:
            start = len(ids)
            ids += branch.hint_ids
            ids += batch.samples[trunk_row].ids[branch.insert : branch.target_end]
            positions.append(torch.arange(branch.insert, branch.insert + len(ids) - start))
            rows[number] = BranchRow(trunk_row, branch.insert, start, len(ids))
        predictors = [
            torch.arange(rows[number].end - 1 - branch.target_end + branch.target_start, rows[number].end - 1)
            for number, (_, branch) in enumerate(batch.branches)
        ]
        device = batch.ids_BT.device
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
