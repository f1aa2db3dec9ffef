"""The imitation loss on samples that nothing is learned from."""

from __future__ import annotations

import torch

from offbook.train.batches import Batch, micro_batches
from offbook.train.head import CHUNK_ENTRIES
from offbook.train.targets import sampled_logp
from offbook.train.trainer import Trainer
from offbook.types import Sample


@torch.no_grad()
def imitation_loss(trainer: Trainer, samples: list[Sample]) -> float:
    """Nats a token: a mean over all tokens with a weight, each counted with it."""
    chunk_rows = max(1, CHUNK_ENTRIES // trainer.model.config.vocab_size)
    loss = weight = 0.0
    for micro in micro_batches(samples, trainer.settings.micro_tokens):
        batch = Batch.collate(micro, trainer.model.device)
        tokens = batch.tokens(chunk_rows)
        hidden_BTD, _ = trainer.student.hidden(batch.ids_BT)
        scorer = trainer.student.head, hidden_BTD.flatten(0, 1).index_select(0, tokens.predictor_N)
        logp_N = sampled_logp(scorer, tokens.rows.ids_N, tokens.rows.temperature_N, chunk_rows)
        loss -= float((logp_N.double() * tokens.rows.ce_weight_N).sum())
        weight += float(tokens.rows.ce_weight_N.double().sum())
    return loss / weight
