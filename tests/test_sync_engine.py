"""Published weights go into a local engine while rollouts are open, and each token is of the version that it says."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import in_bfloat16, random_ids, tiny_model
from test_branches import sample_with_branches
from torch import Tensor
from transformers import PreTrainedModel

from offbook.core.config import LoraConfig, TrainConfig
from offbook.core.weights import Weights
from offbook.engine import LocalEngine
from offbook.engine.local import Mode
from offbook.engine.sync import FolderStore, Publisher, Reader
from offbook.train.lora import make_trainable
from offbook.train.trainer import Trainer
from offbook.types import Completion, ModelLost, OffbookError, Prompt

PROMPT = random_ids(random.Random(1), 40)


def later(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    """Some weights have moved far enough to show."""
    rng = torch.Generator().manual_seed(seed)
    new = type(model)(model.config).to(model.dtype).eval()
    new.load_state_dict(model.state_dict())
    with torch.no_grad():
        for parameter in new.parameters():
            where = torch.rand(parameter.shape, generator=rng) < 0.04
            parameter[where] *= -1
    return new


def errors(model: PreTrainedModel, prompt: list[int], completion: Completion) -> list[float]:
    """Of each log-probability against a plain forward over all tokens before it."""
    ids = torch.tensor([[*prompt, *completion.ids]])
    with torch.no_grad():
        logp = model(ids).logits[0, len(prompt) - 1 : -1].double().log_softmax(-1)
    reference = logp.gather(1, ids[0, len(prompt) :, None])[:, 0].tolist()
    return [abs(a - b) for a, b in zip(completion.logprobs, reference, strict=True)]


def check(models: list[PreTrainedModel], prompt: list[int], completion: Completion, bound: float = 1e-5) -> None:
    by_version = [errors(model, prompt, completion) for model in models]
    for place, version in enumerate(completion.versions):
        assert by_version[version][place] < bound


def same(one: PreTrainedModel, other: PreTrainedModel) -> bool:
    return all(map(torch.equal, one.state_dict().values(), other.state_dict().values()))


def copied(model: PreTrainedModel) -> PreTrainedModel:
    new = type(model)(model.config).to(model.dtype).eval()
    new.load_state_dict(model.state_dict())
    return new


def slowed(model: PreTrainedModel, **how) -> LocalEngine:
    own = copied(model)
    own.register_forward_pre_hook(lambda *_: time.sleep(0.002))
    return LocalEngine(own, frozenset(), **how)


@pytest.mark.parametrize("static", [False, True])
def test_a_message_is_of_three_versions_and_each_token_of_its_own(static: bool, tmp_path) -> None:
    """Fetched and unpacked while the message is written; then it goes in, between two steps."""
    models = [tiny_model()]
    models += [later(models[0], 1)]
    models += [later(models[1], 2)]
    store = FolderStore(tmp_path)
    publisher, reader = Publisher(store, shard_bytes=50_000), Reader(store)
    engine = slowed(models[0], mode="continuous", static=static)

    async def bring(version: int) -> None:
        publisher.publish(Weights(version, models[version].state_dict()))
        publisher.wait()
        weights = await asyncio.to_thread(reader.poll)
        assert weights is not None
        await asyncio.to_thread(engine.apply, weights)

    async def main() -> tuple[Completion, Completion]:
        await bring(0)
        session = engine.open("a")
        writing = asyncio.create_task(session.complete(Prompt(PROMPT), 250))
        await asyncio.sleep(0.1)
        await bring(1)
        await asyncio.sleep(0.1)
        await bring(2)
        other = await engine.open("b").complete(Prompt([*PROMPT, 5]), 10)  # begins as the one that is being written
        return await writing, other

    long, other = asyncio.run(main())
    assert set(long.versions) == {0, 1, 2}
    assert long.versions == sorted(long.versions)
    assert set(other.versions) == {2}
    check(models, PROMPT, long)
    check(models, [*PROMPT, 5], other)
    assert max(errors(models[0], PROMPT, long)[long.versions.index(1) :]) > 0.1  # the weights do differ
    assert same(engine.model, models[2])


@pytest.mark.parametrize("mode", ["lockstep", "continuous"])
def test_a_rollout_goes_on_with_new_weights_and_nothing_of_the_old_is_read(mode: Mode, tmp_path: Path) -> None:
    """Two messages of one session with a swap in between, and a session that begins after it with the same tokens."""
    models = [tiny_model()]
    models += [later(models[0], 1)]
    store = FolderStore(tmp_path)
    publisher, reader = Publisher(store), Reader(store)
    engine = LocalEngine(copied(models[0]), frozenset(), mode=mode)

    async def main() -> list[tuple[list[int], Completion]]:
        session = engine.open("a")
        first = await session.complete(Prompt(PROMPT), 20)
        publisher.publish(Weights(1, models[1].state_dict()))
        publisher.wait()
        weights = reader.poll()
        assert weights is not None
        engine.apply(weights)
        ids = [*PROMPT, *first.ids, 3, 4]
        turns = [(PROMPT, first), (ids, await session.complete(Prompt(ids), 20))]
        session.close()
        return [*turns, (PROMPT, await engine.open("b").complete(Prompt(PROMPT), 20))]

    turns = asyncio.run(main())
    assert [set(completion.versions) for _, completion in turns] == [{0}, {1}, {1}]
    for prompt, completion in turns:
        check(models, prompt, completion)


def test_in_bfloat16_the_engine_has_the_trainers_bits_after_each_of_many_versions(tmp_path: Path) -> None:
    """Real steps."""
    trained = in_bfloat16(tiny_model())
    masters = [parameter.detach().float() for parameter in trained.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=3e-6)
    store = FolderStore(tmp_path)
    publisher, reader = Publisher(store, anchor_every=3), Reader(store)
    engine = LocalEngine(copied(trained), frozenset())
    for version in range(8):
        loss = trained(torch.tensor([PROMPT]), labels=torch.tensor([PROMPT])).loss
        loss.backward()
        for master, parameter in zip(masters, trained.parameters(), strict=True):
            master.grad = parameter.grad.float()
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, trained.parameters(), strict=True):
                parameter.copy_(master)
        publisher.publish(Weights(version, trained.state_dict()))
        publisher.wait()
        weights = reader.poll()
        assert weights is not None
        engine.apply(weights)
        assert engine.version == version
        assert same(engine.model, trained)


def test_a_real_adapter_reaches_the_engine(tmp_path: Path) -> None:
    """peft's own configuration has sets and enums in it."""
    trained, served = tiny_model(), tiny_model()
    for model in (trained, served):
        make_trainable(model, LoraConfig(rank=4), "", seed=0)
    trainer = Trainer(trained, TrainConfig(learning_rate=0.01, lora=LoraConfig(rank=4)))
    store = FolderStore(tmp_path)
    publisher, reader = Publisher(store), Reader(store)
    engine = LocalEngine(served, frozenset())
    ids = torch.tensor([PROMPT])
    for version in (1, 2):
        trainer.step([replace(sample_with_branches(random.Random(version)), branches=[])])
        publisher.publish(trainer.publish(version))
        publisher.wait()
        weights = reader.poll()
        assert weights is not None
        assert weights.adapter is not None
        assert weights.adapter["r"] == 4
        engine.apply(weights)
        with torch.no_grad():
            assert torch.allclose(engine.model(ids).logits, trained(ids).logits, atol=1e-4)


class Failing(dict[str, Tensor]):
    """One tensor cannot be read when its turn comes."""

    def __getitem__(self, name: str) -> Tensor:
        if name == "model.norm.weight":
            raise RuntimeError("out of memory")
        return super().__getitem__(name)


@pytest.mark.parametrize("mode", ["lockstep", "continuous"])
def test_of_weights_that_are_half_in_nothing_is_sampled_until_they_are(mode: Mode) -> None:
    engine, new = LocalEngine(tiny_model(), frozenset(), mode=mode), later(tiny_model(), 1)

    def ask(key: str) -> Completion:
        async def main() -> Completion:
            session = engine.open(key)
            try:
                return await session.complete(Prompt(PROMPT), 5)
            finally:
                session.close()

        return asyncio.run(main())

    with pytest.raises(RuntimeError, match="out of memory"):
        engine.apply(Weights(1, Failing(new.state_dict())))
    with pytest.raises(ModelLost, match="new weights were put in halfway; apply them again"):
        ask("a")
    engine.apply(Weights(1, new.state_dict()))
    completion = ask("b")
    assert set(completion.versions) == {1}
    assert max(errors(new, PROMPT, completion)) < 1e-5


@pytest.mark.parametrize("tensors", [{}, tiny_model("llama").state_dict(), tiny_model(vocabulary=301).state_dict()])
def test_weights_of_another_model_are_refused_and_the_old_ones_go_on(tensors: dict[str, Tensor]) -> None:
    model = tiny_model()
    engine = slowed(model, mode="continuous")

    async def main() -> Completion:
        writing = asyncio.create_task(engine.open("a").complete(Prompt(PROMPT), 60))
        await asyncio.sleep(0.05)
        with pytest.raises(OffbookError, match="publish the weights of this model"):
            await asyncio.to_thread(engine.apply, Weights(1, tensors))
        return await writing

    completion = asyncio.run(main())
    assert completion.versions == [0] * 60
    check([model], PROMPT, completion)
