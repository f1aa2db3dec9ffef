"""The loss components against references and numbers worked by hand."""

from __future__ import annotations

import math
import random

import pytest
import torch
from conftest import random_ids, tiny_model
from hypothesis import given
from hypothesis import strategies as st

from offbook.core.config import TrainConfig
from offbook.train import head
from offbook.train.algorithms import group_advantage
from offbook.train.batches import micro_batches
from offbook.train.head import cap_values, divergence, importance, policy_gradient
from offbook.train.trainer import Trainer
from offbook.types import Sample


def logp(*probabilities: float) -> torch.Tensor:
    return torch.tensor([probabilities]).log()


def test_divergence_by_hand() -> None:
    student, teacher = logp(0.5, 0.5), logp(0.75, 0.25)
    assert divergence(student, teacher, "forward").item() == pytest.approx(0.75 * math.log(1.5) + 0.25 * math.log(0.5))
    assert divergence(student, teacher, "reverse").item() == pytest.approx(0.5 * math.log(2 / 3) + 0.5 * math.log(2))
    middle = (0.625, 0.375)
    expected = 0.5 * sum(
        p * math.log(p / m) + q * math.log(q / m) for p, q, m in zip((0.5, 0.5), (0.75, 0.25), middle, strict=True)
    )
    assert divergence(student, teacher, "jsd").item() == pytest.approx(expected, abs=1e-6)


@given(st.integers(0, 10_000), st.sampled_from(["forward", "reverse", "jsd"]))
def test_divergence_is_zero_only_on_equals_and_never_negative(seed: int, direction: str) -> None:
    generator = torch.Generator().manual_seed(seed)
    student, teacher = (torch.randn(4, 11, generator=generator).log_softmax(-1) for _ in range(2))
    assert (divergence(student, teacher, direction) > 0).all()
    assert divergence(student, student, direction).abs().max() < 1e-6
    assert direction != "jsd" or (divergence(student, teacher, "jsd") <= math.log(2)).all()


def test_forward_gradient_is_student_minus_teacher() -> None:
    logits = torch.tensor([[0.3, -1.0, 2.0]], requires_grad=True)
    teacher = torch.tensor([[1.0, 0.0, -1.0]]).log_softmax(-1)
    divergence(logits.log_softmax(-1), teacher, "forward").sum().backward()
    assert torch.allclose(logits.grad, logits.softmax(-1) - teacher.exp(), atol=1e-6)


def test_cap_bounds_the_value_and_keeps_a_gradient() -> None:
    value = torch.tensor([0.5, 4.0], requires_grad=True)
    capped = cap_values(value, 2.0)
    assert capped.tolist() == [0.5, 2.0]
    capped.sum().backward()
    assert value.grad.tolist() == [1.0, 0.5]


@pytest.mark.parametrize("direction", ["forward", "reverse", "jsd"])
@pytest.mark.parametrize("cap", [0.05, math.inf])
def test_what_the_teacher_wants_down_goes_down(direction: str, cap: float) -> None:
    """In logits, where descent moves: a gradient taken a log-probability at a time cannot show it."""
    logits = torch.zeros(1, 2, requires_grad=True)
    cap_values(divergence(logits.log_softmax(-1), logp(0.9, 0.1), direction), cap).sum().backward()
    up, down = logits.grad.tolist()[0]
    assert up < 0 < down


def test_importance_is_capped_and_not_differentiated() -> None:
    new = logp(0.5, 0.4)[0].requires_grad_()
    ratio = importance(new, logp(0.5, 0.1)[0], cap=2.0)
    assert ratio.tolist() == pytest.approx([1.0, 2.0])
    assert not ratio.requires_grad


@pytest.mark.parametrize("chunk_rows", [1, 3, 7, 50])
def test_chunks_of_the_head_give_the_gradients_of_the_whole(chunk_rows: int) -> None:
    torch.manual_seed(0)
    linear, hidden, ids = torch.nn.Linear(5, 11), torch.randn(7, 5), torch.arange(7)

    def losses_of(logits: torch.Tensor, part: slice) -> dict[str, torch.Tensor]:
        return {"ce": torch.nn.functional.cross_entropy(logits, ids[part], reduction="sum")}

    found = []
    chunks = [slice(start, min(start + chunk_rows, 7)) for start in range(0, 7, chunk_rows)]
    for whole in (True, False):
        leaf = hidden.clone().requires_grad_()
        loss = (
            losses_of(linear(leaf), slice(0, 7))["ce"] if whole else head.in_chunks(leaf, linear, losses_of, chunks)[0]
        )
        (3 * loss).backward()
        found.append([loss.detach(), leaf.grad, linear.weight.grad, linear.bias.grad])
        linear.zero_grad()
    for reference, ours in zip(*found, strict=True):
        assert torch.allclose(reference, ours, atol=1e-5)
    assert found[0][1].abs().max() > 0.1


def test_policy_gradient_by_hand() -> None:
    new = torch.tensor([math.log(0.5), math.log(0.4)], requires_grad=True)
    old = torch.tensor([math.log(0.5), math.log(0.1)])  # the second ratio is 4, capped at 2
    loss = policy_gradient(new, old, torch.tensor([1.0, -0.5]), ratio_cap=2.0)
    loss.sum().backward()
    assert new.grad.tolist() == pytest.approx([-1.0, 1.0])


def test_group_advantage_has_no_std_and_sums_to_zero() -> None:
    assert group_advantage([1.0, 0.0, 0.0, 0.0]) == [0.75, -0.25, -0.25, -0.25]
    assert group_advantage([1.0, 1.0]) == [0.0, 0.0]


def plain_sample(rng: random.Random, length: int) -> Sample:
    mask = [float(position > length // 2) for position in range(length)]
    return Sample(random_ids(rng, length), [-1.0] * length, [0.5] * length, mask, [0.0] * length)


def test_the_split_into_micro_batches_does_not_change_the_step() -> None:
    """Components are divided by global counts, so one forward or many give the same weights."""
    rng = random.Random(0)
    samples = [plain_sample(rng, rng.randrange(8, 40)) for _ in range(9)]
    weights = []
    for micro_tokens in (10_000, 50):
        trainer = Trainer(tiny_model(), TrainConfig(micro_tokens=micro_tokens))
        trainer.step(samples)
        weights.append(torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()]))
    assert (weights[0] - weights[1]).abs().max() < 1e-5


@given(st.lists(st.integers(1, 60), min_size=1, max_size=30), st.integers(10, 200))
def test_micro_batches_hold_every_sample_once_within_the_budget(lengths: list[int], budget: int) -> None:
    samples = [plain_sample(random.Random(index), length) for index, length in enumerate(lengths)]
    batches = micro_batches(samples, budget)
    assert sorted(id(sample) for batch in batches for sample in batch) == sorted(id(sample) for sample in samples)
    for batch in batches:
        assert len(batch) == 1 or sum(len(sample.ids) for sample in batch) <= budget
    shortest = [min(len(sample.ids) for sample in batch) for batch in batches]
    left = [budget - sum(len(sample.ids) for sample in batch) for batch in batches]
    for number, size in enumerate(shortest):
        assert all(room < size for room in left[:number]), "nothing goes into a later one that fits into an earlier"
