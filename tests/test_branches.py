"""Hint branches against the naive reference: re-encode prefix + hint + message from scratch."""

from __future__ import annotations

import random

import pytest
import torch
from conftest import random_ids, tiny_model
from torch import Tensor
from transformers import PreTrainedModel

from offbook.config import FeedbackConfig, TrainConfig
from offbook.train.attention import Trunk
from offbook.train.batches import Batch
from offbook.train.losses import divergence
from offbook.train.trainer import Trainer, _Ledger
from offbook.types import Branch, OffbookError, Sample

UNCAPPED = 1e9
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def sample_with_branches(rng: random.Random, length: int = 60) -> Sample:
    """Targets in the first message, in the middle and in the last; sampled tokens elsewhere too."""
    branches = [
        Branch(0, random_ids(rng, 5), 3, 10, 1.0, "first"),
        Branch(24, random_ids(rng, 9), 26, 33, 0.5, "middle"),
        Branch(45, random_ids(rng, 2), 48, length, 2.0, "last"),
    ]
    return Sample(
        ids=random_ids(rng, length),
        logprobs=[-rng.random() * 3 for _ in range(length)],
        advantage=[0.7] * length,
        rl_weight=[float(position % 3 == 1) for position in range(length)],
        ce_weight=[0.0] * length,
        branches=branches,
    )


def reencoded(model: PreTrainedModel, sample: Sample, branch: Branch) -> Tensor:
    """The reference: log-probabilities over the vocabulary at each target token, hint in place, from scratch."""
    ids = [*sample.ids[: branch.insert], *branch.hint_ids, *sample.ids[branch.insert : branch.target_end]]
    count = branch.target_end - branch.target_start
    inputs = torch.tensor([ids], device=model.device)
    return model(input_ids=inputs, use_cache=False).logits[0, -count - 1 : -1].log_softmax(-1)


def trainer_for(model: PreTrainedModel, **feedback: object) -> Trainer:
    return Trainer(model, TrainConfig(micro_tokens=128), FeedbackConfig(token_cap=UNCAPPED, **feedback))


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
@pytest.mark.parametrize("teacher", ["live", "frozen"])
@pytest.mark.parametrize("device", DEVICES)
def test_hinted_logits_equal_reencoding(kind: str, teacher: str, device: str) -> None:
    rng = random.Random(1)
    samples = [sample_with_branches(rng, 60), sample_with_branches(rng, 52)]
    trainer = trainer_for(tiny_model(kind).to(device), teacher=teacher)
    batch = Batch.collate(samples, torch.device(device))
    trunk = Trunk()
    if teacher == "live":
        trainer.model.base_model(input_ids=batch.ids_BT, use_cache=False, trunk=trunk)
    hinted = trainer._teacher_logp(batch, trunk)
    model = tiny_model(kind).to(device)
    reference = torch.cat([reencoded(model, s, b) for s in samples for b in s.branches])
    assert hinted.shape == reference.shape
    assert (hinted - reference).abs().max() < 1e-4
    student = model(input_ids=batch.ids_BT[:1], use_cache=False).logits[0, 25:32].log_softmax(-1)
    assert (hinted[7:14] - student).abs().max() > 0.1, "the hint must matter, or the test shows nothing"


@pytest.mark.parametrize("direction", ["forward", "reverse", "jsd"])
@pytest.mark.parametrize("device", DEVICES)
def test_gradients_equal_reencoding(direction: str, device: str) -> None:
    rng = random.Random(2)
    samples = [sample_with_branches(rng, 60), sample_with_branches(rng, 52), sample_with_branches(rng, 57)]
    ledger = _Ledger.open(samples)
    trainer = trainer_for(tiny_model().to(device), teacher="live", direction=direction)
    for micro in (samples[:2], samples[2:]):
        trainer._loss(Batch.collate(micro, torch.device(device)), ledger).backward()

    model = tiny_model().to(device)
    for sample in samples:
        ids = torch.tensor(sample.ids, device=device)
        behaviour, weight = (torch.tensor(s[1:], device=device) for s in (sample.logprobs, sample.rl_weight))
        logp = model(input_ids=ids[None], use_cache=False).logits[0].log_softmax(-1)
        own = logp[:-1].gather(1, ids[1:, None])[:, 0]
        ratio = (own.detach() - behaviour).exp().clamp(max=2.0)
        loss = -(weight * ratio * 0.7 * own).sum() / ledger.counts["rl"]
        for branch in sample.branches:
            student = logp[branch.target_start - 1 : branch.target_end - 1]
            with torch.no_grad():
                teacher = reencoded(model, sample, branch)
            loss = loss + branch.weight * divergence(student, teacher, direction).sum() / ledger.counts["hint"]
        loss.backward()

    for (name, ours), reference in zip(trainer.model.named_parameters(), model.parameters(), strict=True):
        scale = reference.grad.abs().max()
        assert (ours.grad - reference.grad).abs().max() < 1e-4 * max(1.0, scale), name
        assert scale > 1e-5, name


def test_no_gradient_reaches_the_teacher() -> None:
    """With the student's own probabilities as the only other term, a live teacher must be a constant."""
    trainer = trainer_for(tiny_model(), teacher="frozen")
    trainer.step([sample_with_branches(random.Random(3))])
    assert all(parameter.grad is None for parameter in trainer.teacher.parameters())


def test_ema_teacher_follows_and_frozen_stays() -> None:
    for kind, moves in (("ema", True), ("frozen", False)):
        trainer = trainer_for(tiny_model(), teacher=kind)
        before = [parameter.clone() for parameter in trainer.teacher.parameters()]
        trainer.step([sample_with_branches(random.Random(4))])
        moved = any((b != p).any() for b, p in zip(before, trainer.teacher.parameters(), strict=True))
        assert moved == moves


def test_a_padded_row_does_not_change_its_neighbour() -> None:
    rng = random.Random(5)
    short, long = sample_with_branches(rng, 50), sample_with_branches(rng, 64)
    for branch in long.branches:
        branch.key += " of the longer"
    together = trainer_for(tiny_model(), teacher="live").step([short, long]).measured
    alone = trainer_for(tiny_model(), teacher="live").step([short]).measured
    assert len(together) == 6
    for key, measured in alone.items():
        assert measured.teacher == pytest.approx(together[key].teacher, abs=1e-4)
        assert measured.student == pytest.approx(together[key].student, abs=1e-4)


def test_sliding_windows_are_refused() -> None:
    model = tiny_model()
    model.config.layer_types = ["sliding_attention", "full_attention", "full_attention"]
    with pytest.raises(OffbookError, match="full attention in every layer"):
        trainer_for(model)
