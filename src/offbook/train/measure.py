"""What branches do to their targets under the model as it is: the training forward without any gradient."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from offbook.train import head
from offbook.train.attention import Packed
from offbook.train.batches import Batch, BranchBatch
from offbook.train.forward import Decoder
from offbook.train.targets import BranchReport, Compared, Measured, Scorers, sampled_logp
from offbook.types import Direction, Sample


def measure_branches(
    decoder: Decoder, samples: list[Sample], micro_tokens: int, direction: Direction = "forward"
) -> Iterator[dict[str, Measured]]:
    """By the branch's key, micro-batch by micro-batch. Teacher and student are the same model."""
    for micro in decoder.micro_batches(samples, micro_tokens):
        yield decoder.together(_measured, micro, direction)


@torch.no_grad()
def token_logprobs(decoder: Decoder, ids: list[int], temperature: float) -> list[float]:
    """What the model makes of each token, after all those before it; 0 for the first."""
    device, chunk_rows = decoder.model.device, max(1, head.CHUNK_ENTRIES // decoder.model.config.vocab_size)
    row = Packed.of([ids], device)
    hidden_1FD, _ = decoder.hidden(row)
    temperature_N, ids_N = torch.full((len(ids) - 1,), temperature, device=device), row.ids_1F[0, 1 : len(ids)]
    logp_N = sampled_logp((decoder.head, hidden_1FD[0, : len(ids) - 1]), ids_N, temperature_N, chunk_rows)
    return [0.0, *logp_N.tolist()]


@torch.no_grad()
def _measured(decoder: Decoder, samples: list[Sample], direction: Direction) -> dict[str, Measured]:
    batch = Batch.collate(samples, decoder.model.device)
    chunk_rows = max(1, head.CHUNK_ENTRIES // 2 // decoder.model.config.vocab_size)
    tokens = batch.tokens(chunk_rows)
    hidden_1FD, branch_MD = decoder.hidden(batch.row, BranchBatch.collate(batch, batch.branches))
    assert branch_MD is not None
    targets = slice(len(tokens.weight_M))  # what else a sample is to learn does not matter here
    student = decoder.head, hidden_1FD[0, tokens.predictor_N[targets]]
    streams = tokens.rows.ids_N[targets], tokens.rows.temperature_N[targets]
    compared = Compared(student, Scorers([(decoder.head, branch_MD)]), *streams, direction)
    scores = compared.scores(chunk_rows)
    branches = [branch for _, branch in batch.branches]
    return BranchReport(branches, scores, torch.zeros(len(branches), dtype=torch.long)).by_key()
