"""Teacher `shift`: what the hint does to the start, on top of the student as it is."""

from __future__ import annotations

import copy
import random
from dataclasses import replace

import pytest
import torch
from conftest import TEACHERS, distilled, tiny_model
from test_branches import gradients, reencoded, sample_with_branches
from torch import Tensor

from offbook.config import TrainConfig
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
            moved = reencoded(start, sample, branch) - reencoded(start, sample, bare)
        own = reencoded(student, sample, bare)
        taught = (own.detach() + moved).log_softmax(-1)
        total = total + branch.weight * divergence(own, taught, direction).sum()
    (total / sum(branch.num_targets for branch in sample.branches)).backward()
    return [parameter.grad for parameter in student.parameters()]


@pytest.mark.parametrize("direction", ["forward", "reverse", "jsd"])
def test_gradients_equal_reencoding(direction: Direction) -> None:
    sample, trainer = hints_alone(3, direction=direction), drifted("shift")
    reference = naive_gradients(trainer, sample, direction)
    for ours, theirs in zip(gradients(trainer, [sample]), reference, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6)
    assert max(float(grad.abs().max()) for grad in reference) > 1e-4


def test_where_the_student_is_its_start_it_is_the_frozen_teacher() -> None:
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
