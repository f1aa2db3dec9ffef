"""The imitation loss on samples that nothing is learned from."""

from __future__ import annotations

from offbook.train.batches import Batch
from offbook.train.forward import Decoder
from offbook.train.head import CHUNK_ENTRIES, sampled_logp
from offbook.train.trainer import Trainer
from offbook.types import Sample


def imitation_loss(trainer: Trainer, samples: list[Sample]) -> float:
    """Nats a token: a mean over all tokens with a weight, each counted with it."""
    micro = trainer.student.micro_batches(samples, trainer.settings.micro_tokens)
    sums = [trainer.student.together(_loss_and_weight, one) for one in micro]
    return sum(loss for loss, _ in sums) / sum(weight for _, weight in sums)


def _loss_and_weight(decoder: Decoder, samples: list[Sample]) -> tuple[float, float]:
    chunk_rows = max(1, CHUNK_ENTRIES // decoder.vocabulary)
    batch = Batch.collate(samples, decoder.model.device)
    tokens = batch.tokens(chunk_rows)
    hidden_1FD, _ = decoder.hidden(batch.row)
    scorer = decoder.head, hidden_1FD[0].index_select(0, tokens.predictor_N)
    logp_N = sampled_logp(scorer, tokens.rows.ids_N, tokens.rows.temperature_N, chunk_rows)
    weight_N = tokens.rows.ce_weight_N.double()
    return -float((logp_N.double() * weight_N).sum()), float(weight_N.sum())
