"""Samples to padded micro-batches, and hint branches to one flat row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from offbook.train.attention import BranchRow
from offbook.train.head import Rows, Targets
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
    """Right-padded rows. A stream's value at t is the weight of *predicting* token t from what stands before it."""

    ids_BT: Tensor
    logprobs_BT: Tensor
    advantage_BT: Tensor
    rl_weight_BT: Tensor
    ce_weight_BT: Tensor
    branches: list[tuple[int, Branch]]  # (row, branch)
    limit_B: Tensor  # how many branches of a row may teach
    anchors: bool

    @classmethod
    def collate(cls, samples: list[Sample], device: torch.device) -> Batch:
        length = max(len(sample.ids) for sample in samples)

        def pad(rows: list[list[int]] | list[list[float]], dtype: torch.dtype) -> Tensor:
            padded = [[*row, *[0] * (length - len(row))] for row in rows]
            return torch.tensor(padded, dtype=dtype, device=device)

        return cls(
            ids_BT=pad([sample.ids for sample in samples], torch.long),
            logprobs_BT=pad([sample.logprobs for sample in samples], torch.float32),
            advantage_BT=pad([sample.advantage for sample in samples], torch.float32),
            rl_weight_BT=pad([sample.rl_weight for sample in samples], torch.float32),
            ce_weight_BT=pad([sample.ce_weight for sample in samples], torch.float32),
            branches=[(row, branch) for row, sample in enumerate(samples) for branch in sample.branches],
            limit_B=torch.tensor(
                [len(sample.branches) if sample.lessons is None else sample.lessons for sample in samples],
                device=device,
            ),
            anchors=is_anchor(samples[0]),
        )

    def predicted(self) -> Tensor:
        """[B, T] mask of the tokens whose prediction matters to some component."""
        mask = (self.rl_weight_BT != 0) | (self.ce_weight_BT != 0)
        for row, branch in self.branches:
            mask[row, branch.target_start : branch.target_end] = True
        mask[:, 0] = False
        return mask

    def tokens(self, chunk_rows: int) -> Tokens:
        """What is to be predicted. Where that takes several chunks the targets come first, so few chunks have any."""
        mask_BT = self.predicted()
        row_N, token_N = mask_BT.nonzero(as_tuple=True)
        index_BT = mask_BT.flatten().cumsum(0).view_as(mask_BT) - 1
        parts = [index_BT[row, branch.target_start : branch.target_end] for row, branch in self.branches]
        row_M = torch.cat(parts) if parts else index_BT.new_empty(0)
        num_first = 0
        if len(row_N) > chunk_rows and parts:
            other_N = torch.ones_like(row_N).index_fill_(0, row_M, 0)
            order_N = other_N.argsort(stable=True)
            row_N, token_N, row_M = row_N[order_N], token_N[order_N], order_N.argsort()[row_M]
            num_first = len(row_N) - int(other_N.sum())
        numbers = [number for number, part in enumerate(parts) for _ in range(len(part))]
        weights = [self.branches[number][1].weight for number in numbers]
        streams = (self.ids_BT, self.logprobs_BT, self.advantage_BT, self.rl_weight_BT, self.ce_weight_BT)
        return Tokens(
            rows=Rows(*(stream_BT[row_N, token_N] for stream_BT in streams)),
            predictors=(row_N, token_N - 1),
            targets=Targets(row_M, torch.tensor(weights, device=mask_BT.device)),
            branch_M=torch.tensor(numbers, dtype=torch.long, device=mask_BT.device),
            places=row_M.tolist(),
            chunks=[  # of targets smaller ones, since a teacher's logits lie beside the student's
                slice(start, min(start + size, end))
                for begin, end, size in ((0, num_first, -(-chunk_rows // 2)), (num_first, len(row_N), chunk_rows))
                for start in range(begin, end, size)
            ],
        )


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of a batch that are predicted, in chunks, and which of them are targets."""

    rows: Rows
    predictors: tuple[Tensor, Tensor]  # row and position whose output predicts each
    targets: Targets  # branch after branch
    branch_M: Tensor  # the number of each target's branch
    places: list[int]  # of the targets among the rows
    chunks: list[slice]

    def targets_in(self, chunk: slice) -> tuple[list[int], bool]:
        """Numbers of the targets in a chunk; and whether these are exactly its rows, one by one."""
        inside = [number for number, place in enumerate(self.places) if chunk.start <= place < chunk.stop]
        by_place = sorted(inside, key=self.places.__getitem__)
        if [self.places[number] for number in by_place] == list(range(chunk.start, chunk.stop)):
            return by_place, True
        return inside, False


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
        positions: list[int] = []
        rows: dict[int, BranchRow] = {}
        longest_first = sorted(enumerate(batch.branches), key=lambda item: -item[1][1].insert)  # evens out a GPU's load
        for number, (trunk_row, branch) in longest_first:
            message = batch.ids_BT[trunk_row, branch.insert : branch.target_end].tolist()
            start = len(ids)
            ids += [*branch.hint_ids, *message]
            positions += range(branch.insert, branch.insert + len(ids) - start)
            rows[number] = BranchRow(trunk_row, branch.insert, start, len(ids))
        predictors: list[int] = []
        for number, (_, branch) in enumerate(batch.branches):
            end = rows[number].end - 1
            predictors += range(end - (branch.target_end - branch.target_start), end)
        device = batch.ids_BT.device
        return cls(
            ids_1L=torch.tensor([ids], device=device),
            positions_1L=torch.tensor([positions], device=device),
            rows=[rows[number] for number in range(len(rows))],
            predictors=torch.tensor(predictors, device=device),
        )
