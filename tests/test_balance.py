"""Hints beside RL: what their part of the loss is divided by, and how large its gradient may be."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import TEACHERS, distilled, in_bfloat16, saved, tiny_model
from test_branches import places_of, reencoded, sample_with_branches
from torch import Tensor
from transformers import PreTrainedModel

from offbook.core.config import LoraConfig, TrainConfig
from offbook.train.batches import Batch
from offbook.train.checkpoint import load_training_state
from offbook.train.head import Counts, Ledger, divergence
from offbook.train.lora import make_trainable
from offbook.train.trainer import Trainer
from offbook.types import Sample

WAYS = {"own": {}, "rl": {"by_policy": True}, "bounded": {"by_policy": True, "bound": 0.2}}
CPU = torch.device("cpu")
FROZEN = TEACHERS["frozen"]


def batch_of(way: str, **how: object) -> list[Sample]:
    rng = random.Random(5)
    samples = [sample_with_branches(rng, length) for length in (60, 52, 57)]
    samples.append(replace(sample_with_branches(rng, 58), branches=[]))
    return distilled(samples, **WAYS[way], **how)


def student(kind: str) -> PreTrainedModel:
    model = tiny_model()
    if kind == "lora":
        make_trainable(model, LoraConfig(rank=4), "", 0)
        torch.manual_seed(1)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.05)
    return model


def trained(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: one for name, one in model.named_parameters() if one.requires_grad}


def naive(model: PreTrainedModel, samples: list[Sample], way: str) -> dict[str, dict[str, Tensor]]:
    """Gradients of the two parts, each target read from scratch with its hint, which the start itself teaches."""
    policy_tokens = sum(map(bool, (weight for one in samples for weight in one.rl_weight)))
    target_tokens = sum(branch.num_targets for one in samples for branch in one.branches)
    found = {}
    for part in ("rl", "distill"):
        model.zero_grad()
        for sample in samples:
            ids = torch.tensor(sample.ids)
            logp = model(input_ids=ids[None], use_cache=False).logits[0].log_softmax(-1)
            own = logp[:-1].gather(1, ids[1:, None])[:, 0]
            ratio = (own.detach() - torch.tensor(sample.logprobs[1:])).exp().clamp(max=2.0)
            weight = torch.tensor(sample.rl_weight[1:]) * torch.tensor(sample.advantage[1:])
            loss = -(weight * ratio * own).sum() / policy_tokens
            if part == "distill":
                loss = 0 * loss
                for branch in sample.branches:
                    with torch.no_grad():
                        teacher = reencoded(model, sample, branch)
                    nats = divergence(logp[[place - 1 for place in places_of(branch)]], teacher, "forward")
                    loss = loss + branch.weight * nats.sum() / (target_tokens if way == "own" else policy_tokens)
            loss.backward()
        found[part] = {name: one.grad.clone() for name, one in trained(model).items()}
    return found


def norm(gradients: dict[str, Tensor]) -> float:
    return float(torch.stack([one.norm() for one in gradients.values()]).norm())


@pytest.mark.parametrize("kind", ["full", "lora"])
@pytest.mark.parametrize("micro_tokens", [8192, 64])
@pytest.mark.parametrize("way", list(WAYS))
def test_gradients_equal_reencoding(way: str, micro_tokens: int, kind: str) -> None:
    samples = batch_of(way)
    parts = naive(student(kind), samples, way)
    scale = min(1.0, 0.2 * norm(parts["rl"]) / norm(parts["distill"])) if way == "bounded" else 1.0
    assert scale < 1.0 or way != "bounded", "the bound has to bind, or this shows nothing"
    trainer = Trainer(student(kind), TrainConfig(micro_tokens=micro_tokens), TEACHERS["live"])
    gradients = trainer.gradients(samples)
    assert gradients is not None
    found = gradients.of_parts
    for name, ours in trained(trainer.model).items():
        wanted = parts["rl"][name] + scale * parts["distill"][name]
        assert (ours.grad - wanted).abs().max() < 2e-4 * max(1e-2, float(wanted.abs().max())), name
    if way == "bounded":
        assert found["rl/gradient_norm"] == pytest.approx(norm(parts["rl"]), rel=1e-3)
        assert found["distill/gradient_norm"] == pytest.approx(norm(parts["distill"]), rel=1e-3)
        assert found["distill/scale"] == pytest.approx(scale, rel=1e-3)


def exact_hints(samples: list[Sample]) -> dict[str, Tensor]:
    """The bounded part's gradients of single micro-batches, summed in float32."""
    trainer = Trainer(in_bfloat16(tiny_model()), TrainConfig(precision="bfloat16"), FROZEN)
    ledger, found = Ledger(Counts.of(samples)), dict[str, Tensor]()
    for sample in (one for one in samples if one.branches):
        kept: dict[str, Tensor] = {}
        trainer._backward_separately(Batch.collate([sample], CPU), ledger, (), {"distill": kept})
        for name, gradient in kept.items():
            found[name] = found.get(name, 0) + gradient.float()
    return found


def test_in_bfloat16_the_bounded_part_is_rounded_and_nothing_else() -> None:
    """Against float32 sums of the same gradients: three micro-batches with hints, so that the sum is rounded twice."""

    def gradients(samples: list[Sample]) -> tuple[dict[str, Tensor], dict[str, float]]:
        settings = TrainConfig(micro_tokens=64, precision="bfloat16")
        trainer = Trainer(in_bfloat16(tiny_model()), settings, FROZEN)
        made = trainer.gradients(samples)
        assert made is not None
        return {name: master.grad for name, master in trainer.masters.named.items()}, made.of_parts

    policy, _ = gradients([replace(one, branches=[]) for one in batch_of("rl")])
    hints = exact_hints(batch_of("bounded"))
    ours, found = gradients(batch_of("bounded"))
    scale = 0.2 * norm(policy) / norm(hints)
    assert scale < 1.0
    assert found["rl/gradient_norm"] == pytest.approx(norm(policy), rel=1e-6)
    assert found["distill/gradient_norm"] == pytest.approx(norm(hints), rel=1e-3)
    assert found["distill/scale"] == pytest.approx(scale, rel=1e-3)
    off = norm({name: ours[name] - policy[name] - found["distill/scale"] * hints[name] for name in ours})
    assert 5e-4 < off / (scale * norm(hints)) < 3**0.5 / 600
    assert {gradient.dtype for gradient in ours.values()} == {torch.float32}


@pytest.mark.parametrize("recompute", ["layers", "all"])
def test_what_is_recomputed_can_be_taken_apart(recompute: str) -> None:
    found = []
    for mode in ("none", recompute):
        trainer = Trainer(tiny_model(), TrainConfig(recompute=mode), TEACHERS["frozen"])
        trainer.gradients(batch_of("bounded"))
        found.append([parameter.grad for parameter in trainer.model.parameters()])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))


@pytest.mark.slow
def test_compiled_layers_can_be_taken_apart() -> None:
    """Also where they were compiled for a step that did not need it."""
    plain, compiled = (
        Trainer(tiny_model(), TrainConfig(compile=compile, recompute="layers"), TEACHERS["frozen"])
        for compile in (False, True)
    )
    for way in ("own", "bounded"):
        theirs, ours = (trainer.step(batch_of(way)).metrics for trainer in (plain, compiled))
        assert ours["gradient_norm"] == pytest.approx(theirs["gradient_norm"], rel=1e-3)


def test_divided_by_rl_tokens_hints_fade_as_faults_get_rare() -> None:
    """The same faulty rollout once, and four times, among four."""
    faulty = sample_with_branches(random.Random(9))
    plain = replace(faulty, branches=[])

    def hint_norm(way: str, samples: list[Sample]) -> float:
        trainer = Trainer(tiny_model(), TrainConfig(), TEACHERS["live"])
        return trainer.step(distilled(samples, bound=1e9, **WAYS[way])).metrics["distill/gradient_norm"]

    often, rarely = [faulty] * 4, [faulty, plain, plain, plain]
    assert hint_norm("rl", rarely) == pytest.approx(hint_norm("rl", often) / 4, rel=1e-4)
    assert hint_norm("own", rarely) == pytest.approx(hint_norm("own", often), rel=1e-4)


def test_a_step_without_an_outcome_to_tell_goes_by_the_last_that_had_one(tmp_path: Path) -> None:
    samples = batch_of("bounded")
    silent = [replace(sample, advantage=[0.0] * len(sample.ids)) for sample in samples]
    trainer = Trainer(tiny_model(), TrainConfig(learning_rate=1e-5), TEACHERS["frozen"])
    assert trainer.step(silent).metrics["distill/scale"] == 1.0, "nothing to drown yet"
    known = trainer.step(samples).metrics
    assert known["distill/scale"] == pytest.approx(0.2 * known["rl/gradient_norm"] / known["distill/gradient_norm"])
    goes_on = Trainer(tiny_model(), TrainConfig(), TEACHERS["frozen"])
    load_training_state(goes_on, saved(trainer, tmp_path))
    assert goes_on.policy_norm == known["rl/gradient_norm"], "a run that goes on knows it"
    after = trainer.step(silent).metrics
    assert after["rl/gradient_norm"] == 0.0
    bounded = 0.2 * known["rl/gradient_norm"] / after["distill/gradient_norm"]
    assert after["distill/scale"] == pytest.approx(bounded)
