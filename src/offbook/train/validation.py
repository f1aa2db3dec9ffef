"""The imitation loss on samples that nothing is learned from."""

from __future__ import annotations

from functools import partial

import torch

from offbook.train.batches import Batch, micro_batches
from offbook.train.forward import Decoder
from offbook.train.head import CHUNK_ENTRIES
from offbook.train.targets import sampled_logp
from offbook.train.trainer import Trainer
from offbook.types import Sample


def imitation_loss(trainer: Trainer, samples: list[Sample]) -> float:
    """Nats a token: a mean over all tokens with a weight, each counted with it."""
    loss, weight = trainer.together(_weighed, samples)
    return loss / weight


@torch.no_grad()
def _weighed(trainer: Trainer, samples: list[Sample]) -> tuple[float, float]:
    """The sum over tokens, and that of their weights. Left out: ranks that each take some of the samples."""
    loss = weight = 0.0
    for micro in micro_batches(samples, trainer.settings.micro_tokens):
        found = trainer.student.inside(partial(_of_batch, trainer.student, Batch.collate(micro, trainer.model.device)))
        loss, weight = loss + found[0], weight + found[1]
    return loss, weight


def _of_batch(decoder: Decoder, batch: Batch) -> tuple[float, float]:
    chunk_rows = max(1, CHUNK_ENTRIES // decoder.model.config.vocab_size)
    tokens = batch.tokens(chunk_rows)
    hidden_BTD, _ = decoder.hidden(batch.ids_BT)
    scorer = decoder.head, hidden_BTD.flatten(0, 1).index_select(0, tokens.predictor_N)
    logp_N = sampled_logp(scorer, tokens.rows.ids_N, tokens.rows.temperature_N, chunk_rows)
    weight_N = tokens.rows.ce_weight_N.double()
    return -float((logp_N.double() * weight_N).sum()), float(weight_N.sum())
