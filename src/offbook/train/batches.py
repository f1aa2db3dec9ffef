"""Samples to padded micro-batches, and hint branches to one flat row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from offbook.train.attention import BranchRow
from offbook.types import Branch, Sample


def micro_batches(samples: list[Sample], max_tokens: int) -> list[list[Sample]]:
    """Samples of like length together, padding counted, at most `max_tokens` a batch; a longer sample goes alone."""
    batches: list[list[Sample]] = []
    for sample in sorted(samples, key=lambda sample: -len(sample.ids)):
        if batches and (len(batches[-1]) + 1) * len(batches[-1][0].ids) <= max_tokens:
            batches[-1].append(sample)
        else:
            batches.append([sample])
    return batches


@dataclass(frozen=True, slots=True)
class Batch:
    """Right-padded rows. A stream's value at t is the weight of *predicting* token t from what stands before it."""

    ids_BT: Tensor
    logprobs_BT: Tensor
    advantage_BT: Tensor
    rl_weight_BT: Tensor
    ce_weight_BT: Tensor
    branches: list[tuple[int, Branch]]  # (row, branch)

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
        )

    def predicted(self) -> Tensor:
        """[B, T] mask of the tokens whose prediction matters to some component."""
        mask = (self.rl_weight_BT != 0) | (self.ce_weight_BT != 0)
        for row, branch in self.branches:
            mask[row, branch.target_start : branch.target_end] = True
        mask[:, 0] = False
        return mask


@dataclass(frozen=True, slots=True)
class BranchBatch:
    """All branches of a micro-batch as one flat row of `hint + message` pieces."""

    ids_1L: Tensor
    positions_1L: Tensor
    rows: list[BranchRow]
    predictors: Tensor  # flat positions whose output predicts the target tokens, branch after branch

    @classmethod
    def collate(cls, batch: Batch) -> BranchBatch:
        ids: list[int] = []
        positions: list[int] = []
        predictors: list[int] = []
        rows = []
        for trunk_row, branch in batch.branches:
            message = batch.ids_BT[trunk_row, branch.insert : branch.target_end].tolist()
            start = len(ids)
            ids += [*branch.hint_ids, *message]
            positions += range(branch.insert, branch.insert + len(ids) - start)
            rows.append(BranchRow(trunk_row, branch.insert, start, len(ids)))
            first_target = start + len(branch.hint_ids) + branch.target_start - branch.insert
            predictors += range(first_target - 1, len(ids) - 1)
        device = batch.ids_BT.device
        return cls(
            ids_1L=torch.tensor([ids], device=device),
            positions_1L=torch.tensor([positions], device=device),
            rows=rows,
            predictors=torch.tensor(predictors, device=device),
        )
