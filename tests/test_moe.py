"""Mixtures of experts: what engines record of routes, and training that follows them."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import in_bfloat16, random_ids
from test_branches import plain_sample, sample_with_branches
from torch import Tensor
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from offbook.core.config import TrainConfig
from offbook.core.routers import routers_of
from offbook.engine.local import LocalEngine, Mode
from offbook.train.batches import Batch
from offbook.train.forward import Live
from offbook.train.replay import Replay, figures_of
from offbook.train.trainer import Trainer, weights_of
from offbook.types import Branch, Completion, Prompt, Routes, Sample

SHAPE: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
}
EXPERTS, TOP = 8, 2
TEACHERS = {"live": Live()}


def make(kind: str = "qwen3", seed: int = 0) -> PreTrainedModel:
    """The first layer of two of them is dense."""
    torch.manual_seed(seed)
    if kind == "qwen3":
        own = {"num_experts": EXPERTS, "moe_intermediate_size": 32, "head_dim": 12, "mlp_only_layers": [0]}
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE, **own, norm_topk_prob=True))
    elif kind == "mixtral":
        model = MixtralForCausalLM(MixtralConfig(**SHAPE, num_local_experts=EXPERTS))
    elif kind == "olmoe":
        model = OlmoeForCausalLM(OlmoeConfig(**SHAPE, num_experts=EXPERTS))
    else:
        latent = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
        groups = {"n_routed_experts": EXPERTS, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
        shape = SHAPE | {"num_key_value_heads": 4}
        model = DeepseekV3ForCausalLM(DeepseekV3Config(**shape, **latent, **groups, moe_intermediate_size=32))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                parameter.normal_(std=0.5 if "mlp.gate." in name else 0.15)
    return model.eval()


def chosen_by(model: PreTrainedModel, ids: list[int]) -> Tensor:
    """[tokens, layers, experts], in a forward of all tokens."""
    found: list[Tensor] = []
    hooks = [one.register_forward_hook(lambda _m, _i, out: found.append(out[2])) for one in routers_of(model)]
    with torch.no_grad():
        model(input_ids=torch.tensor([ids]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.stack(found, dim=1)


def as_routes(routes_TLK: Tensor) -> Routes:
    _, layers, top = routes_TLK.shape
    return Routes.pack(layers, top, routes_TLK.to(torch.int16).numpy().tobytes())


def as_tensor(routes: Routes) -> Tensor:
    return torch.frombuffer(bytearray(routes.unpack()), dtype=torch.int16).view(-1, routes.layers, routes.top).long()


def written(
    model: PreTrainedModel, prompts: list[list[int]], mode: Mode, turns: int = 2
) -> list[tuple[list[int], Completion]]:
    """Rollouts of some turns: what was fed and sampled, and the routes at the end."""
    engine = LocalEngine(model, frozenset(), mode=mode, kv_tokens=4096)

    async def rollout(key: str, prompt: list[int]) -> tuple[list[int], Completion]:
        session, ids = engine.open(key), list(prompt)
        for turn in range(turns):
            completion = await session.complete(Prompt(ids), 12)
            ids += [*completion.ids, *([7, 8, 9] if turn + 1 < turns else [])]
        session.close()
        return ids, completion

    async def all_of_them() -> list[tuple[list[int], Completion]]:
        return await asyncio.gather(*(rollout(str(number), prompt) for number, prompt in enumerate(prompts)))

    return asyncio.run(all_of_them())


@pytest.mark.parametrize("mode", ["lockstep", "continuous"])
def test_the_engine_records_where_each_token_went(mode: Mode) -> None:
    """Of prompts that begin alike, over two turns, of which the second reads only what is new."""
    model, rng = make(), random.Random(0)
    shared = random_ids(rng, 30)
    for ids, completion in written(model, [[*shared, *random_ids(rng, 5 + number)] for number in range(3)], mode):
        assert completion.routes is not None
        found, wanted = as_tensor(completion.routes), chosen_by(make(), ids)
        assert found.shape == (len(ids) - 1, 2, TOP)  # the last token was not read; the first layer has no experts
        agree = (found.sort(-1).values == wanted[:-1].sort(-1).values).all(-1)
        assert agree.float().mean() > 0.98


@pytest.mark.parametrize("mode", ["lockstep", "continuous"])
def test_new_weights_leave_the_routes_of_earlier_tokens(mode: Mode) -> None:
    """A token's routes are those of the forward that sampled the one behind it. New weights come between two messages
    or, in the continuous mode, within the first one, where all that was read is read again."""
    models = [make(), make(seed=1)]
    engine = LocalEngine(make(), frozenset(), mode=mode, kv_tokens=4096)
    prompt, tools = random_ids(random.Random(0), 30), [7, 8, 9]

    def swap(ids: list[int]) -> None:
        if len(ids) >= 10 and engine.version == 0:
            engine.apply(weights_of(models[1], 1))

    async def rollout() -> tuple[list[int], list[int], Completion]:
        session = engine.open("r")
        first = await session.complete(Prompt(prompt, heard=swap), 24)
        swap(first.ids)
        ids = [*prompt, *first.ids, *tools]
        last = await session.complete(Prompt(ids), 12)
        read_by = [0] * (len(prompt) - 1) + first.versions + [1] * (1 + len(tools)) + last.versions[1:]
        return [*ids, *last.ids], read_by, last

    ids, read_by, last = asyncio.run(rollout())
    assert last.routes is not None
    found = as_tensor(last.routes).sort(-1).values
    both = [chosen_by(model, ids).sort(-1).values for model in models]
    wanted = torch.stack([both[version][place] for place, version in enumerate(read_by)])
    assert len(set(read_by)) == 2
    assert found.shape == wanted.shape
    assert (found == wanted).all(-1).float().mean() > 0.98


@pytest.mark.parametrize("kind", ["qwen3", "mixtral", "olmoe", "deepseek"])
def test_replaying_its_own_choice_changes_nothing(kind: str) -> None:
    """Gates and all, for families that make gates in different ways."""
    sample = sample_with_branches(random.Random(1))
    own = as_routes(chosen_by(make(kind), sample.ids))
    metrics = []
    for routes in (None, own):
        trainer = Trainer(make(kind), TrainConfig(), TEACHERS)
        metrics.append(trainer.step([replace(sample, routes=routes)]).metrics)
    free, replayed = metrics
    assert free["moe/replayed"] == 0.0
    assert replayed["moe/replayed"] == 1.0
    for name in ("rl/mismatch", "distill/kl", "gradient_norm"):
        assert replayed[name] == pytest.approx(free[name], rel=1e-4)


def forced(sample: Sample, seed: int, layers: int = 2) -> Sample:
    """Other experts than the router's, without one twice."""
    rng = torch.Generator().manual_seed(seed)
    routes = torch.rand(len(sample.ids), layers, EXPERTS, generator=rng).topk(TOP).indices
    return replace(sample, routes=as_routes(routes))


def flat_model() -> PreTrainedModel:
    """Whose routers are so undecided that any choice is plausible, and whose experts differ."""
    model = make()
    with torch.no_grad():
        for router in routers_of(model):
            router.weight.mul_(0.05)
    return model


def gradients_of(trainer: Trainer, samples: list[Sample]) -> dict[str, Tensor]:
    assert trainer.gradients(samples) is not None
    return {name: master.grad.clone() for name, master in trainer.masters.named.items()}


def assert_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    for name, tensor in theirs.items():
        assert (ours[name] - tensor).norm() <= 1e-5 * tensor.norm().clamp(min=1e-6), name


@pytest.mark.parametrize("recompute", ["none", "layers", "all"])
def test_recorded_experts_are_taken_with_gates_of_the_training_forward(recompute: Any) -> None:
    """Two samples in one batch, branches in one of them, against a forward that is told the experts one sample at a
    time; also where layers run again in the backward pass."""
    samples = [forced(sample_with_branches(random.Random(2)), 1), forced(plain_sample(random.Random(3), 40), 2)]
    trainer = Trainer(flat_model(), TrainConfig(recompute=recompute), TEACHERS)
    found = gradients_of(trainer, [replace(sample, branches=[]) for sample in samples])
    assert all(found[f"model.layers.{layer}.mlp.gate.weight"].norm() > 0 for layer in (1, 2))

    model, total = flat_model(), torch.zeros(())
    count = sum(sum(map(bool, sample.rl_weight)) for sample in samples)
    for sample in samples:
        routes = as_tensor(sample.routes)
        told = [
            router.register_forward_hook(
                lambda _m, _i, out, layer=layer, routes=routes: (
                    out[0],
                    torch.softmax(out[0].gather(1, routes[:, layer]), -1),
                    routes[:, layer],
                )
            )
            for layer, router in enumerate(routers_of(model))
        ]
        logp = model(input_ids=torch.tensor([sample.ids])).logits[0, :-1].log_softmax(-1)
        for hook in told:
            hook.remove()
        taken = logp.gather(1, torch.tensor(sample.ids[1:])[:, None])[:, 0]
        weight = torch.tensor(sample.rl_weight[1:]) * torch.tensor(sample.advantage[1:])
        ratio = (taken.detach() - torch.tensor(sample.logprobs[1:])).exp().clamp(max=2.0)
        total = total - (weight * ratio * taken).sum() / count
    total.backward()
    wanted = {name: parameter.grad for name, parameter in model.named_parameters()}
    for name, tensor in wanted.items():
        assert (found[name] - tensor).norm() <= 1e-4 * tensor.norm().clamp(min=1e-6), name


def test_branches_route_freely_also_where_they_are_as_long_as_the_base() -> None:
    sample = plain_sample(random.Random(5), 20)
    branch = Branch(0, random_ids(random.Random(6), 4), ((3, 16),), key="hint")  # 20 rows, as the base has
    measured = []
    for seed in (1, 2):
        trainer = Trainer(flat_model(), TrainConfig(), TEACHERS)
        measured.append(trainer.step([replace(forced(sample, seed), branches=[branch])]).measured["hint"])
    assert measured[0].teacher == pytest.approx(measured[1].teacher)
    assert measured[0].student != pytest.approx(measured[1].student)


@pytest.mark.parametrize("fault", ["twice", "unknown", "unlikely"])
def test_a_record_that_cannot_be_right_falls_back_to_the_router(fault: str) -> None:
    sample = plain_sample(random.Random(4), 40)
    own = chosen_by(make(), sample.ids)
    wrong = own.clone()
    if fault == "twice":
        wrong[:, :, 1] = wrong[:, :, 0]
    elif fault == "unknown":
        wrong[:, :, 0] = EXPERTS
    else:  # the experts that the router likes least
        found: list[Tensor] = []
        model = make()
        hooks = [one.register_forward_hook(lambda _m, _i, out: found.append(out[0])) for one in routers_of(model)]
        with torch.no_grad():
            model(input_ids=torch.tensor([sample.ids]))
        wrong = torch.stack([(-logits).topk(TOP).indices for logits in found], dim=1)
        assert hooks
    free, faulty = (Trainer(make(), TrainConfig(), TEACHERS) for _ in range(2))
    wanted = gradients_of(free, [sample])
    assert_equal(gradients_of(faulty, [replace(sample, routes=as_routes(wrong))]), wanted)
    assert figures_of([faulty.replay.counted()])["moe/implausible"] > 0.95


def test_replay_brings_a_bfloat16_engine_nearer() -> None:
    engine, rng = in_bfloat16(make()), random.Random(0)
    rollouts = written(engine, [random_ids(rng, 60) for _ in range(6)], "lockstep")
    mismatch = []
    for replays in (False, True):
        trainer = Trainer(make(), TrainConfig(), TEACHERS)
        samples = []
        for ids, completion in rollouts:
            start = len(ids) - len(completion.ids)
            zeros = [0.0] * start
            samples.append(
                Sample(
                    ids=ids,
                    logprobs=zeros + completion.logprobs,
                    advantage=zeros + [1.0] * len(completion.ids),
                    rl_weight=zeros + [1.0] * len(completion.ids),
                    routes=completion.routes if replays else None,
                )
            )
        mismatch.append(trainer.step(samples).metrics)
    free, replayed = mismatch
    assert replayed["moe/replayed"] > 0.9
    assert replayed["rl/mismatch"] < 0.95 * free["rl/mismatch"]


@pytest.mark.parametrize(("layers", "top"), [(2, 1), (2, 5), (3, 2)])
def test_records_of_another_model_are_refused(layers: int, top: int) -> None:
    sample = replace(plain_sample(random.Random(4), 40), routes=as_routes(torch.zeros(40, layers, top)))
    with pytest.raises(ValueError, match=f"of {layers} layers with {top} experts per token, and the model has 2 and 2"):
        Trainer(make(), TrainConfig(), TEACHERS).step([sample])


@pytest.mark.parametrize("ids", ["AAAA", "A"])
def test_damaged_records_are_refused(ids: str) -> None:
    sample = replace(plain_sample(random.Random(4), 40), routes=Routes(2, TOP, ids))
    with pytest.raises(ValueError, match="recorded routes are cut off or damaged"):
        Trainer(make(), TrainConfig(), TEACHERS).step([sample])


def test_load_is_told_layer_by_layer() -> None:
    model = make()
    replay = Replay(model)
    batch = Batch.collate([Sample(random_ids(random.Random(0), 50))], torch.device("cpu"))
    replay.begin(batch)
    with torch.no_grad():
        model(input_ids=batch.row.ids_1F)
    figures = figures_of([replay.counted()])
    assert figures.keys() == {"moe/replayed", "moe/implausible", "moe/load.00", "moe/load.01"}
    assert 1.0 < figures["moe/load.00"] <= EXPERTS / TOP
    assert not figures_of([replay.counted()])
