"""Teacher `shift`: what the hint does to the start, on top of the student as it is."""

from __future__ import annotations

import copy
import random
from dataclasses import replace

import pytest
import torch
from conftest import TEACHERS, distilled, tiny_model
from test_branches import gradients, places_of, reencoded, sample_with_branches
from torch import Tensor

from offbook.config import TrainConfig
from offbook.train import losses
from offbook.train.losses import divergence
from offbook.train.trainer import Trainer
from offbook.types import Direction, Sample


def drifted(teacher: str, factor: float = 1.2, compile: bool = False) -> Trainer:
    """A student that has gone away from its start."""
    trainer = Trainer(tiny_model(), TrainConfig(learning_rate=1e-2, compile=compile), TEACHERS[teacher])
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.mul_(factor)
    return trainer


def hints_alone(seed: int, **how: object) -> Sample:
    sample = sample_with_branches(random.Random(seed))
    return distilled([replace(sample, rl_weight=[0.0] * len(sample.ids))], **how)[0]


def naive_gradients(trainer: Trainer, sample: Sample, direction: Direction) -> list[Tensor]:
    """Each context encoded from scratch, three times over."""
    student, start = copy.deepcopy(trainer.model), tiny_model()
    total = torch.zeros(())
    for branch in sample.branches:
        bare = replace(branch, inserted=[])
        with torch.no_grad():
            hinted, plain = reencoded(start, sample, branch), reencoded(start, sample, bare)
        own = reencoded(student, sample, bare)
        taught = own.detach().exp() * (hinted.exp() + 1e-4) / (plain.exp() + 1e-4)
        nats = divergence(own, (taught / taught.sum(-1, keepdim=True)).log(), direction)
        for token, place in enumerate(places_of(branch)):
            its = [float(logp[token, sample.ids[place]]) for logp in (own.detach(), hinted, plain)]
            is_behind = its[0] > its[1] if its[2] > its[1] else its[0] < its[1]
            total = total + branch.weight * nats[token] * is_behind
    (total / sum(branch.num_targets for branch in sample.branches)).backward()
    return [parameter.grad for parameter in student.parameters()]


@pytest.mark.parametrize("direction", ["forward", "reverse", "jsd"])
def test_gradients_equal_reencoding(direction: Direction) -> None:
    sample, trainer = hints_alone(3, direction=direction), drifted("shift")
    reference = naive_gradients(trainer, sample, direction)
    for ours, theirs in zip(gradients(trainer, [sample]), reference, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6)
    assert max(float(grad.abs().max()) for grad in reference) > 1e-4


def test_where_the_student_is_its_start_it_is_the_frozen_teacher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "SUPPORT", 1e-12)
    sample = hints_alone(4)
    both = [gradients(drifted(teacher, factor=1.0), [sample]) for teacher in ("shift", "frozen")]
    for ours, theirs in zip(*both, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6)


def test_a_hint_that_says_nothing_teaches_nothing() -> None:
    """However far the student has gone: a frozen teacher would pull it back."""
    sample = hints_alone(5)
    sample = replace(sample, branches=[replace(branch, inserted=[]) for branch in sample.branches])
    largest = {
        teacher: max(float(grad.abs().max()) for grad in gradients(drifted(teacher), [sample]))
        for teacher in ("shift", "frozen")
    }
    assert largest["shift"] < 1e-6
    assert largest["frozen"] > 1e-3


def test_it_comes_to_an_end() -> None:
    """The same messages again and again, without a gate: the student comes as far as the hinted start, not further."""
    trainer, sample = drifted("shift", factor=1.1), hints_alone(7)
    trainer.settings = trainer.settings.model_copy(update={"learning_rate": 3e-4})
    rows = [trainer.step([sample]) for _ in range(120)]
    kl = [row.metrics["distill/kl"] for row in rows]
    assert max(kl[-10:]) < 0.2 * kl[0]
    assert max(kl) < 3 * kl[0]
    for one in rows[-1].measured.values():
        for student, teacher, plain in zip(one.student, one.teacher, one.plain, strict=True):
            beyond = (student - teacher) * (1 if teacher > plain else -1)
            assert beyond < 1.0


def test_ratios_of_what_hardly_occurs_move_nothing() -> None:
    """Both readings of the start are far below a ten-thousandth, one a thousand times the other."""
    rest = torch.tensor([0.9, 0.1])
    hinted, plain = (torch.cat([rest * (1 - tail), torch.tensor([tail])]).log()[None] for tail in (6e-6, 6e-9))
    student = torch.tensor([[0.6, 0.35, 0.05]]).log()
    assert losses.shifted(student, hinted, plain).exp()[0, 2] == pytest.approx(0.05, rel=0.1)


def test_compiled_it_is_the_same() -> None:
    """Also where branches compete, and are scored before anything is differentiated."""
    sample = hints_alone(6, places=2)
    sample = replace(sample, branches=[replace(branch, contest="r") for branch in sample.branches])
    plain, compiled = (drifted("shift", compile=compile).step([sample]) for compile in (False, True))
    assert plain.metrics["distill/kl"] == pytest.approx(compiled.metrics["distill/kl"], rel=1e-4)
    assert plain.metrics["gradient_norm"] == pytest.approx(compiled.metrics["gradient_norm"], rel=1e-4)
    assert {key: one.skipped for key, one in plain.measured.items()} == {
        key: one.skipped for key, one in compiled.measured.items()
    }
