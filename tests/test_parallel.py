"""Sharded training against one process: the same loss, gradients and weights, on forked gloo ranks."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import distilled, in_bfloat16, tiny_model
from ranks import on_ranks, whole
from test_branches import plain_sample, sample_with_branches
from test_moe import flat_model as mixture
from test_moe import forced
from test_muon import random_gradients, tiny_moe
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from offbook.core.config import LinearConfig, LoraConfig, TrainConfig
from offbook.train.batches import Packed
from offbook.train.forward import Ema, Frozen, Kind, Live, imitation_loss, measure_branches
from offbook.train.lora import make_trainable
from offbook.train.optim.muon import Muon
from offbook.train.optim.units import local, units_of
from offbook.train.parallel.sharding import make_expert_mesh, make_mesh
from offbook.train.parallel.spmd import SpmdTrainer, step_on_all
from offbook.train.trainer import NotFinite, Ranks, Trainer
from offbook.types import Sample

KINDS: dict[str, Mapping[str, Kind]] = {
    "live": {"live": Live()},
    "ema": {"live": Ema(0.5)},
    "frozen": {"live": Frozen()},
}

ON_ATTENTION = LoraConfig(rank=2, targets=["q_proj", "o_proj"])
STEADY = TrainConfig(optimizer="muon", learning_rate=1e-3, weight_decay=0.1, micro_tokens=128)


def samples_of(ranks: int) -> list[list[Sample]]:
    """Of each rank: the first has branches, the second none, the third more micro-batches than others, the last one
    nothing at all."""
    rng = random.Random(3)
    found = [
        [sample_with_branches(rng, 60), plain_sample(rng, 40)],
        [plain_sample(rng, 50)],
        [sample_with_branches(rng, 60) for _ in range(3)],
        [],
    ]
    return [found[rank % 4] for rank in range(ranks)]


def whole_gradients(trainer: Trainer) -> dict[str, Tensor]:
    return whole({name: master.grad for name, master in trainer.masters.named.items() if master.grad is not None})


def assert_close(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], tolerance: float = 1e-5) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        apart = float((found[name] - tensor).norm() / tensor.norm().clamp(min=1e-12))
        # A router's gradient is a difference of nearly equal numbers, whose rounding counts for more.
        assert apart < (3 * tolerance if ".gate." in name else tolerance), (name, apart)


def make(kind: str) -> PreTrainedModel:
    """`lora` has adapters that do something; `fresh` ones do nothing yet."""
    model = mixture() if "moe" in kind else tiny_model()
    if "lora" in kind:
        make_trainable(model, ON_ATTENTION if "moe" in kind else LoraConfig(rank=2), "", seed=0)
        rng = torch.Generator().manual_seed(0)
        for name, parameter in model.named_parameters():
            if "lora_B" in name and "fresh" not in kind:
                parameter.data.normal_(std=0.1, generator=rng)
    return model if kind != "bfloat16" else in_bfloat16(model)


def ranks_of(layout: tuple[int, ...]) -> Ranks:
    """Replicas and shards of dense weights; where there are more numbers, replicas, shards and parts of experts."""
    experts = make_expert_mesh(*layout[2:], "cpu") if layout[2:] else None
    return Ranks(make_mesh(*layout[:2], "cpu"), experts)


def sharded_gradients(kind: str, layout: tuple[int, ...], settings: TrainConfig, teachers: Any, samples: Any) -> Any:
    ranks = ranks_of(layout)
    trainer = Trainer(make(kind), settings, teachers, ranks)
    gradients = trainer.gradients(samples[torch.distributed.get_rank()])
    assert gradients is not None
    return whole_gradients(trainer), ranks.summed(gradients.ledger.read()[0]), gradients.of_parts


@pytest.mark.parametrize(
    ("kind", "layout", "teachers", "recompute", "bound"),
    [
        ("dense", (1, 4), "live", "layers", 0.0),
        ("dense", (2, 2), "frozen", "all", 0.0),
        ("dense", (4, 1), "live", "none", 0.2),
        ("lora", (1, 2), "frozen", "all", 0.0),
        pytest.param("moe", (2, 2), "live", "none", 0.0, marks=pytest.mark.slow),
        ("moe", (1, 4, 1, 1, 4), "live", "layers", 0.2),
        ("moe", (2, 2, 1, 2, 2), "frozen", "all", 0.0),
        ("moe", (2, 4, 1, 1, 8), "live", "all", 0.0),
        ("moe", (1, 8, 2, 2, 2), "live", "none", 0.0),
        pytest.param("moe", (4, 2, 1, 2, 4), "ema", "layers", 0.0, marks=pytest.mark.slow),
        ("moe lora", (1, 2), "frozen", "all", 0.0),
        ("moe lora", (2, 1, 1, 1, 2), "frozen", "none", 0.2),
        ("moe lora fresh", (1, 2, 1, 1, 2), "frozen", "layers", 0.0),
        ("moe lora", (1, 8, 1, 2, 4), "live", "layers", 0.0),
    ],
)
def test_gradients_are_those_of_one_process(
    kind: str, layout: tuple[int, ...], teachers: str, recompute: str, bound: float
) -> None:
    """With branches on some ranks only, another number of micro-batches on each, and one rank that has nothing. Experts
    are replayed, others than the router's."""
    world = layout[0] * layout[1]
    samples = [distilled(mine, bound=bound) for mine in samples_of(world)]
    if "moe" in kind:
        samples = [[forced(sample, number) for number, sample in enumerate(mine)] for mine in samples]
    settings = TrainConfig(micro_tokens=64, recompute=recompute)
    alone = Trainer(make(kind), settings, KINDS[teachers])
    wanted = alone.gradients([sample for mine in samples for sample in mine])
    assert wanted is not None
    for found, means, of_parts in on_ranks(world, sharded_gradients, kind, layout, settings, KINDS[teachers], samples):
        assert_close(found, whole_gradients(alone))
        for name in ("rl/loss", "distill/kl", "distill/taught"):
            assert means[name] == pytest.approx(wanted.ledger.read()[0][name], rel=1e-4)
        assert of_parts == pytest.approx(wanted.of_parts, rel=1e-4)


def five_steps(kind: str, layout: tuple[int, ...], samples: Any) -> Any:
    trainer = Trainer(make(kind), STEADY, KINDS["ema"], ranks_of(layout))
    mine = trainer.ranks.share_of([sample for one in samples for sample in one], 48)
    metrics = [trainer.step(mine).metrics for _ in range(5)]
    (own,) = trainer.own_weights
    return whole(trainer.model.state_dict()), whole(own.decoder.model.state_dict()), metrics


@pytest.mark.parametrize(("kind", "layout"), [("dense", (1, 4)), ("dense", (2, 2)), ("moe", (1, 8, 2, 1, 4))])
def test_five_steps_of_muon_are_those_of_one_process(kind: str, layout: tuple[int, ...]) -> None:
    """The teacher too, which follows the student on every rank. Heads of 12 rows lie across ranks."""
    world = layout[0] * layout[1]
    samples = samples_of(world)
    alone = Trainer(make(kind), STEADY, KINDS["ema"])
    wanted = [alone.step([sample for mine in samples for sample in mine]).metrics for _ in range(5)]
    (own,) = alone.own_weights
    for weights, teacher, metrics in on_ranks(world, five_steps, kind, layout, samples):
        assert_close(weights, alone.model.state_dict())
        assert_close(teacher, own.decoder.model.state_dict())
        for found, one in zip(metrics, wanted, strict=True):
            assert found["gradient_norm"] == pytest.approx(one["gradient_norm"], rel=1e-3)
            assert found["train_tokens"] == one["train_tokens"]
            for name in ("rl/mismatch", "rl/truncated", "rl/entropy"):
                assert found[name] == pytest.approx(one[name], rel=1e-3), name


def read_without_what_is_shared(kind: str, layout: tuple[int, ...], samples: list[Sample]) -> float:
    """By the teacher, after a step; then what the student does not train is made zero."""
    trainer = Trainer(make(kind), STEADY, KINDS["ema"], ranks_of(layout))
    trainer.step(samples)
    for parameter in trainer.model.parameters():
        if not parameter.requires_grad:
            local(parameter).zero_()
    (own,) = trainer.own_weights
    row = Packed.of([samples[0].ids], torch.device("cpu"))
    return own.decoder.read(lambda decoder: float(decoder.hidden(row)[0].abs().max()))


@pytest.mark.parametrize(("kind", "layout"), [("lora", (1, 4)), ("moe lora", (2, 2, 1, 2, 2))])
def test_a_rank_has_what_is_under_adapters_once(kind: str, layout: tuple[int, ...]) -> None:
    assert on_ranks(4, read_without_what_is_shared, kind, layout, samples_of(1)[0]) == [0.0] * 4


def a_step_in_bfloat16(samples: Any) -> Any:
    settings = STEADY.model_copy(update={"precision": "bfloat16"})
    trainer = Trainer(make("bfloat16"), settings, KINDS["live"], ranks_of((2, 2)))
    metrics = trainer.step(samples[torch.distributed.get_rank()]).metrics
    return whole(trainer.model.state_dict()), metrics["gradient_norm"]


@pytest.mark.parametrize("bound", [0.0, 0.2])
def test_masters_of_bfloat16_weights_are_sharded_too(bound: float) -> None:
    samples = [distilled(mine, bound=bound) for mine in samples_of(4)]
    alone = Trainer(make("bfloat16"), STEADY.model_copy(update={"precision": "bfloat16"}), KINDS["live"])
    norm = alone.step([sample for mine in samples for sample in mine]).metrics["gradient_norm"]
    for weights, found in on_ranks(4, a_step_in_bfloat16, samples):
        assert found == pytest.approx(norm, rel=0.02)
        assert weights["model.embed_tokens.weight"].dtype == torch.bfloat16
        assert_close(weights, alone.model.state_dict(), 0.01)


def raised_by(samples: Any) -> str:
    trainer = SpmdTrainer(tiny_model(), TrainConfig(), KINDS["live"], dist.new_group(backend="gloo"))
    try:
        step_on_all(trainer, samples, 1.0)
    except (NotFinite, ValueError) as error:
        return str(error)
    return ""


FAULTS = {
    "not finite": {"logprobs": [float("nan")] * 20},
    "a sample has the token 5000": {"ids": [5000] * 20},
    "has 23 weights": {"rl_weight": [1.0] * 23},
}


@pytest.mark.parametrize("said", FAULTS)
def test_a_fault_in_one_rank_is_raised_on_all(said: str) -> None:
    good = plain_sample(random.Random(0), 20)
    first, second = on_ranks(2, raised_by, [good, replace(good, **FAULTS[said])])
    assert said in first
    assert first == second


def in_fp8(samples: list[list[Sample]]) -> float:
    settings = TrainConfig(micro_tokens=64, linear=LinearConfig(kind="fp8"))
    trainer = Trainer(tiny_model(), settings, KINDS["live"], Ranks(make_mesh(1, 2, "cpu")))
    return trainer.step(samples[dist.get_rank()]).metrics["gradient_norm"]


def test_a_rank_without_samples_takes_part() -> None:
    rng = random.Random(0)
    first, second = on_ranks(2, in_fp8, [[plain_sample(rng, 50) for _ in range(3)], []])
    assert first == second > 0


def muon_steps(layout: tuple[int, int]) -> dict[str, Tensor]:
    """Five on gradients that are given, on a mixture of experts whose experts are sharded by expert."""
    mesh = make_mesh(*layout, "cpu")
    model, source = tiny_moe(), tiny_moe()
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    named = dict(model.named_parameters())
    optimizer = Muon(named.items(), units_of(named.items(), model.config), lr=0.01, weight_decay=0.1)
    for step in range(5):
        random_gradients(source, step)
        for name, parameter in source.named_parameters():
            like = named[name]
            named[name].grad = distribute_tensor(parameter.grad, like.device_mesh, like.placements)
        optimizer.step()
    return whole(model.state_dict())


@pytest.mark.parametrize("layout", [(1, 8), (2, 4), (4, 2)])
def test_sharded_muon_is_muon(layout: tuple[int, int]) -> None:
    """On eight ranks: units that are whole, that lie across two ranks and across all of them, and ranks with none."""
    alone = tiny_moe()
    optimizer = Muon(alone.named_parameters(), units_of(alone.named_parameters(), alone.config), 0.01, weight_decay=0.1)
    for step in range(5):
        random_gradients(alone, step)
        optimizer.step()
    for found in on_ranks(8, muon_steps, layout):
        assert_close(found, alone.state_dict())


def reads(trainer: Trainer, samples: list[Sample]) -> list[Any]:
    """By the student and by its teacher, before a step and after it."""
    found = []
    (own,) = trainer.own_weights
    for _ in range(2):
        for decoder in (trainer.student, own.decoder):
            measured = {key: one for each in measure_branches(decoder, samples, 128) for key, one in each.items()}
            found.append([(key, one.student, one.teacher) for key, one in sorted(measured.items())])
        counted = [replace(one, ce_weight=[1.0] * len(one.ids)) for one in samples]
        found.append(imitation_loss(trainer.student, counted, 128))
        trainer.step(samples)
    return found


def led_reads(kind: str, ranks: dict[str, int], samples: list[Sample]) -> list[Any]:
    orders = torch.distributed.new_group(backend="gloo")
    trainer = SpmdTrainer(make(kind), STEADY.model_copy(update={"ranks": ranks}), KINDS["ema"], orders)
    if torch.distributed.get_rank():
        trainer.follow()
        return []
    list(measure_branches(trainer.student, samples, 128))
    assert all(isinstance(one, DTensor) for one in trainer.model.parameters()), "what was gathered is not given up"
    found = reads(trainer, samples)
    torch.distributed.broadcast_object_list([None], 0, orders)
    return found


@pytest.mark.parametrize(("kind", "ranks"), [("dense", {"replicate": 2}), ("moe", {"experts": 4})])
def test_what_a_led_trainer_reads_is_what_one_process_reads(kind: str, ranks: dict[str, int]) -> None:
    rng = random.Random(5)
    samples = [sample_with_branches(rng, 60) for _ in range(3)]
    for number, sample in enumerate(samples):
        for place, branch in enumerate(sample.branches):
            branch.key = f"{number} {place}"
    wanted = reads(Trainer(make(kind), STEADY, KINDS["ema"]), samples)
    found, *_ = on_ranks(4, led_reads, kind, ranks, samples)
    assert wanted[0] != wanted[3]
    for ours, theirs in zip(found, wanted, strict=True):
        if isinstance(theirs, float):
            assert ours == pytest.approx(theirs, rel=1e-4)
            continue
        assert [key for key, *_ in ours] == [key for key, *_ in theirs]
        for (_, *mine), (_, *its) in zip(ours, theirs, strict=True):
            for one, other in zip(mine, its, strict=True):
                assert one == pytest.approx(other, rel=1e-3, abs=1e-3)
