"""bfloat16 with float32 master weights, against float32."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from conftest import TEACHERS, in_bfloat16, tiny_model
from test_branches import plain_sample, sample_with_branches
from torch import Tensor, nn

from offbook.core.config import TrainConfig
from offbook.train.batches import Batch
from offbook.train.head import Counts, Ledger
from offbook.train.trainer import NotFinite, Trainer

HALF = TrainConfig(precision="bfloat16", micro_tokens=64)


def flat(tensors: dict[str, nn.Parameter]) -> Tensor:
    return torch.cat([tensor.detach().float().flatten() for tensor in tensors.values()])


def test_small_steps_add_up_in_the_masters_and_as_float32_takes_them() -> None:
    """Of bfloat16 weights without masters a few per cent would have moved."""
    trainer = Trainer(in_bfloat16(tiny_model()), HALF, TEACHERS["frozen"])
    whole = Trainer(in_bfloat16(tiny_model()).float(), TrainConfig(micro_tokens=64), TEACHERS["frozen"])
    start = flat(trainer.masters.named)
    for seed in range(10):
        for each in (trainer, whole):
            each.step([sample_with_branches(random.Random(seed))])
    moved, wanted = flat(trainer.masters.named) - start, flat(whole.masters.named) - start
    assert (moved != 0).float().mean() > 0.95
    assert (flat(trainer.masters.copies) != start).float().mean() < 0.1
    assert torch.nn.functional.cosine_similarity(moved, wanted, dim=0) > 0.9
    assert moved.norm() == pytest.approx(float(wanted.norm()), rel=0.05)


def test_gradients_of_many_micro_batches_add_up_in_float32() -> None:
    samples = [plain_sample(random.Random(seed), 40) for seed in range(40)]
    counts = Counts.of(samples)

    def gradient(of: list[int], trainer: Trainer) -> Tensor:
        for number in of:
            trainer.loss(Batch.collate([samples[number]], torch.device("cpu")), Ledger(counts)).backward()
        assert all(parameter.grad is None for parameter in trainer.model.parameters()), "it would take memory twice"
        found = torch.cat([master.grad.flatten() for master in trainer.masters.named.values()])
        trainer.optimizer.zero_grad()
        return found

    trainer = Trainer(in_bfloat16(tiny_model()), HALF)
    alone = torch.stack([gradient([number], trainer) for number in range(len(samples))])
    together = gradient(list(range(len(samples))), trainer)
    wanted = alone.double().sum(0)
    assert (together - wanted).norm() < 1e-6 * wanted.norm()
    rounded = alone[0].bfloat16()
    for one in alone[1:]:
        rounded += one.bfloat16()
    assert (rounded - wanted).norm() > 1e-3 * wanted.norm(), "or bfloat16 would do as well"


def test_a_second_trainer_of_a_model_gets_its_gradients() -> None:
    model, samples = in_bfloat16(tiny_model()), [plain_sample(random.Random(0), 40)]
    begin = {name: parameter.clone() for name, parameter in model.state_dict().items()}
    trained = []
    for trainer in (lambda: Trainer(model, HALF), lambda: Trainer(model, HALF)):
        model.load_state_dict(begin)
        one = trainer()
        one.step(samples)
        trained.append({name: master.detach().clone() for name, master in one.masters.named.items()})
    assert all(torch.equal(trained[0][name], trained[1][name]) for name in trained[0])


def test_a_step_that_is_no_number_leaves_masters_and_gradients_alone() -> None:
    trainer = Trainer(in_bfloat16(tiny_model()), HALF)
    good = plain_sample(random.Random(0), 40)
    before = flat(trainer.masters.named)
    with pytest.raises(NotFinite):
        trainer.step([replace(good, advantage=[float("nan")] * 40)])
    assert torch.equal(flat(trainer.masters.named), before)
    assert all(master.grad is None for master in trainer.masters.named.values())
