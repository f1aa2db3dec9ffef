"""Samples that lie end to end in one row: each is read and learned from as if it were alone."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from conftest import TEACHERS, random_ids, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from test_branches import sample_with_branches, trainer_for
from torch import Tensor

from offbook.core.config import TrainConfig
from offbook.train import attention
from offbook.train.attention import attend, attend_apart
from offbook.train.batches import Batch, BranchBatch, Packed
from offbook.train.trainer import Trainer
from offbook.types import Distill, Sample

CPU = torch.device("cpu")
LENGTHS = (64, 52, 60, 52)
WAYS = {
    "plain": Distill(),
    "gate": Distill(gate=0.02, cap=1.5, token_gate=0.001, top=3),
    "bound": Distill(by_policy=True, bound=0.01),
}


def mixed_samples(way: str) -> list[Sample]:
    """With branches and without, to imitate and to reinforce, hot and cold; two are of one length. Their first tokens
    have a weight too: the sample before must not be taken to predict them."""
    samples = []
    for number, length in enumerate(LENGTHS):
        sample = sample_with_branches(random.Random(number), length)
        branches = [replace(one, distill=WAYS[way], key=f"{number} {one.key}") for one in sample.branches]
        ce_weight = [float(place % (5 + number) == 0) for place in range(length - number)]
        temperature = 1.0 + 0.1 * number
        samples.append(replace(sample, branches=branches, ce_weight=ce_weight, temperature=temperature))
    samples[2].branches.clear()
    return samples


def learned(teacher: str, way: str, recompute: str, micro_tokens: int) -> tuple[int, Tensor, dict[str, float]]:
    """How many micro-batches there were, the gradient of all weights, and the losses."""
    trainer = Trainer(tiny_model(), TrainConfig(micro_tokens=micro_tokens, recompute=recompute), TEACHERS[teacher])
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.mul_(1.1)  # so that live and frozen differ
    found = trainer.gradients(mixed_samples(way))
    assert found is not None
    gradient = torch.cat([parameter.grad.flatten() for parameter in trainer.model.parameters()])
    return trainer.micro_batches, gradient, {**found.ledger.read()[0], **found.of_parts}


@pytest.mark.parametrize("recompute", ["none", "layers", "all"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("teacher", ["live", "frozen"])
def test_a_row_teaches_what_its_samples_teach_alone(teacher: str, way: str, recompute: str) -> None:
    together, gradient, losses = learned(teacher, way, recompute, 1000)
    alone, wanted, told = learned(teacher, way, recompute, 1)
    assert (together, alone) == (1, len(LENGTHS))
    assert (gradient - wanted).norm() < 1e-6 * wanted.norm()
    assert losses.keys() == told.keys()
    for name, value in told.items():
        assert losses[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
    if way == "gate":
        assert 0 < losses["distill/taught"] < 1, "it has to refuse some and let others through"
    if way == "bound":
        assert losses["distill/scale"] < 1


@torch.no_grad()
@pytest.mark.parametrize("changed", range(len(LENGTHS)))
def test_what_one_sample_says_does_not_reach_the_others(changed: int) -> None:
    """Nor what is read behind them."""
    trainer, samples = trainer_for(tiny_model(), "live"), mixed_samples("plain")

    def read() -> tuple[Batch, list[Tensor], Tensor]:
        batch = Batch.collate(samples, CPU)
        hidden_1FD, branch_MD = trainer.student.hidden(batch.row, BranchBatch.collate(batch, batch.branches))
        logp_FV = trainer.student.head(hidden_1FD[0]).log_softmax(-1)
        return batch, list(logp_FV.split(batch.row.lengths)), branch_MD

    _, before, branch_before = read()
    samples[changed] = replace(samples[changed], ids=random_ids(random.Random(99), LENGTHS[changed]))
    batch, after, branch_after = read()
    for number, (one, other) in enumerate(zip(before, after, strict=True)):
        apart = float((one - other).abs().max())
        assert apart > 0.1 if number == changed else apart < 1e-6
    sizes = [branch.num_targets for _, branch in batch.branches]
    both = zip(batch.branches, branch_before.split(sizes), branch_after.split(sizes), strict=True)
    for (number, _), one, other in both:
        apart = float((one - other).abs().max())
        assert apart > 0.1 if number == changed else apart < 1e-6


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.booleans())
@settings(max_examples=40, deadline=None)
def test_attention_is_that_of_each_sequence(lengths: list[int], in_order: bool) -> None:
    torch.manual_seed(0)
    lengths = sorted(lengths) if in_order else lengths  # neighbours of one length are read in one call
    row = Packed.of([[0] * length for length in lengths], CPU)
    inputs = [torch.randn(1, heads, sum(lengths), 8, requires_grad=True) for heads in (4, 2, 2)]
    outer = torch.randn(1, 4, sum(lengths), 8)
    found = attend_apart(*inputs, row, 0.3)
    parts = zip(*(tensor.split(lengths, dim=2) for tensor in inputs), strict=True)
    wanted = torch.cat([attend(*part, None, 0.3) for part in parts], dim=2)
    assert (found - wanted).abs().max() < 1e-6
    for one, other in zip(*(torch.autograd.grad(out, inputs, outer) for out in (found, wanted)), strict=True):
        assert (one - other).abs().max() < 1e-5


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernel needs a GPU")
@pytest.mark.parametrize("heads", [(4, 4), (9, 3)])
def test_on_a_gpu_bounds_keep_sequences_apart(heads: tuple[int, int]) -> None:
    torch.manual_seed(0)
    lengths = [700, 33, 1, 400]
    row = Packed.of([[0] * length for length in lengths], torch.device("cuda"))
    made = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": True}
    inputs = [torch.randn(1, count, sum(row.lengths), 64, **made) for count in (heads[0], heads[1], heads[1])]
    assert attention._takes_bounds(*inputs)
    found = attend_apart(*inputs, row, None)
    parts = zip(*(tensor.float().split(row.lengths, dim=2) for tensor in inputs), strict=True)
    wanted = torch.cat([attend(*part, None, None) for part in parts], dim=2)
    outer = torch.randn_like(found)
    grads = torch.autograd.grad(found, inputs, outer), torch.autograd.grad(wanted, inputs, outer.float())
    for one, other in ((found, wanted), *zip(*grads, strict=True)):
        assert (one.float() - other.float()).norm() < 0.01 * other.float().norm()
