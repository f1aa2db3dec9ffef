"""FP8 by torchao: forward and backward, what stays plain, and that engine and trainer agree."""

from __future__ import annotations

import asyncio
import math
import random

import pytest
import torch
from conftest import TEACHERS, random_ids, tiny_model
from test_branches import sample_with_branches
from test_moe import make as make_moe
from torch import Tensor, nn

from offbook.core.config import LinearConfig, LoraConfig, TrainConfig, load_config
from offbook.core.routers import routers_of
from offbook.engine import LocalEngine
from offbook.rl.plan import Device, make_plan
from offbook.train.batches import Packed
from offbook.train.forward import sharing_copy
from offbook.train.lora import make_trainable
from offbook.train.precision import LowLinear, compute_linears, plainly, refuse_lacking
from offbook.train.trainer import Trainer
from offbook.types import Distill, OffbookError, Prompt, Sample

pytest.importorskip("torchao")
FP8, PLAIN = LinearConfig(kind="fp8"), LinearConfig()


def samples() -> list[Sample]:
    rng = random.Random(0)
    return [sample_with_branches(rng) for _ in range(2)]


def layers(settings: LinearConfig) -> tuple[nn.Linear, nn.Linear]:
    """A layer in this format and the same plain one, out of a model."""
    model, plain = tiny_model(), tiny_model()
    compute_linears(model, settings)
    name = "layers.0.mlp.up_proj"
    low = model.base_model.get_submodule(name)
    assert isinstance(low, LowLinear)
    return low, plain.base_model.get_submodule(name)


def test_gradients_are_near_those_of_the_plain_layer() -> None:
    low, plain = layers(FP8)
    found = []
    for layer in (plain, low):
        torch.manual_seed(1)
        x = torch.randn(2, 9, layer.in_features, requires_grad=True)
        out = layer(x)
        out.mul(torch.randn(out.shape)).sum().backward()
        found.append([out.detach(), x.grad, layer.weight.grad])
    for one, other in zip(*found, strict=True):
        assert 0 < float((one - other).norm() / one.norm()) < 0.06


def test_a_row_does_not_depend_on_the_other_rows() -> None:
    """Sampling and training see a token in different batches."""
    layer, _ = layers(FP8)
    row, others = torch.randn(1, layer.in_features), 50 * torch.randn(7, layer.in_features)
    assert torch.allclose(layer(row)[0], layer(torch.cat([row, others]))[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("rank", "recompute"), [(0, "none"), (0, "layers"), (4, "all")])
def test_an_rl_step_with_hints(rank: int, recompute: str) -> None:
    model = tiny_model()
    make_trainable(model, LoraConfig(rank=rank), "", seed=0)
    settings = TrainConfig(linear=FP8, recompute=recompute, lora=LoraConfig(rank=rank), learning_rate=1e-3)
    trainer = Trainer(model, settings, TEACHERS["frozen"])
    assert trainer.student.plain
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    metrics = trainer.step(samples()).metrics
    assert metrics[f"{Distill().part}/kl"] > 0
    assert math.isfinite(metrics["gradient_norm"])
    moved = {name for name, value in model.named_parameters() if not torch.equal(value, before[name])}
    assert moved
    assert all(("lora_" in name) == bool(rank) for name in moved)


def test_what_is_not_a_plain_linear_layer_stays_as_it_is() -> None:
    model = make_moe("qwen3")
    make_trainable(model, LoraConfig(rank=2, targets=["q_proj"]), "", seed=0)
    names = set(model.state_dict())
    compute_linears(model, FP8)
    low = {name for name, layer in model.named_modules() if isinstance(layer, LowLinear)}
    assert low
    assert not any("lora_" in name or "lm_head" in name or "embed" in name for name in low)
    assert any(name.endswith("q_proj.base_layer") for name in low)
    assert not any(isinstance(part, LowLinear) for router in routers_of(model) for part in router.modules())
    assert set(model.state_dict()) == names
    assert {name for name, layer in sharing_copy(model).named_modules() if isinstance(layer, LowLinear)} == low
    with plainly(model):
        assert not any(isinstance(layer, LowLinear) for layer in model.modules())
    compute_linears(model, PLAIN)
    assert not any(isinstance(layer, LowLinear) for layer in model.modules())


def test_the_engine_agrees_with_the_trainer() -> None:
    """A prompt is read and its answer written in another batch than that of the training forward."""
    network = tiny_model()
    compute_linears(network, FP8)
    engine = LocalEngine(network, frozenset(), mode="continuous")
    rng, trainer = random.Random(0), Trainer(tiny_model(), TrainConfig(linear=FP8))

    async def answer(key: str) -> tuple[list[int], list[float]]:
        ids, session = random_ids(rng, 20), engine.open(key)
        completion = await session.complete(Prompt(ids), 12)
        session.close()
        return [*ids, *completion.ids], completion.logprobs

    async def answers() -> list[tuple[list[int], list[float]]]:
        return await asyncio.gather(*(answer(str(number)) for number in range(4)))

    found = asyncio.run(answers())
    ids_BT = torch.tensor([ids for ids, _ in found])
    difference = logprobs(trainer, ids_BT)[:, -12:] - torch.tensor([sampled for _, sampled in found])
    assert float(difference.abs().median()) < 1e-3


@torch.no_grad()
def logprobs(trainer: Trainer, ids_BT: Tensor) -> Tensor:
    hidden, _ = trainer.student.hidden(Packed.of(ids_BT.tolist(), ids_BT.device))
    logits = trainer.student.head(hidden[0].unflatten(0, ids_BT.shape)[:, :-1])
    return logits.log_softmax(-1).gather(2, ids_BT[:, 1:, None])[..., 0]


def test_a_chip_that_lacks_fp8_is_refused_and_told_what_to_do() -> None:
    refuse_lacking(FP8, "NVIDIA H200", (9, 0))
    refuse_lacking(PLAIN, "NVIDIA A100", (8, 0))
    refuse_lacking(FP8, "a CPU", None)
    config = load_config(["pocket"], {"train.linear.kind": "fp8"})
    with pytest.raises(OffbookError, match=r"NVIDIA A100 has no FP8 .* leave train.linear.kind plain"):
        make_plan(config, Device("NVIDIA A100", 80e9, is_gpu=True, capability=(8, 0)))
