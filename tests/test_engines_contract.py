"""What every engine that a trainer's weights go to has to do, asked of each with the same model.

vLLM's part needs vLLM: `make test-vllm`.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from offbook.core.config import VllmConfig
from offbook.core.weights import Weights
from offbook.engine import Engine, LocalEngine, VllmEngine
from offbook.engine.vllm import Server, find_vllm
from offbook.types import Completion, ModelLost, OffbookError, Prompt, PromptTooLong

VOCABULARY, POSITIONS = 300, 256
STOPS = frozenset(range(12))
TEMPERATURE = 0.8


def model(seed: int) -> PreTrainedModel:
    """vLLM's CPU build has attention for heads of width 32 and up."""
    torch.manual_seed(seed)
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        num_hidden_layers=3,
        head_dim=32,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=True,
        **shape,
    )
    network = Qwen3ForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4)
    return network


def weights(seed: int, version: int) -> Weights:
    return Weights(version, model(seed).state_dict())


@dataclass
class Subject:
    """An engine with the weights of seed 0, which are version 0, and how to take its model away from it."""

    engine: Engine
    lose: Callable[[], None]
    close: Callable[[], None]

    def ask(self, prompts: list[list[int]], max_tokens: int = 24) -> list[Completion]:
        return asyncio.run(self._all(prompts, max_tokens))

    async def _all(self, prompts: list[list[int]], max_tokens: int) -> list[Completion]:
        sessions = [self.engine.open(f"rollout {number}") for number in range(len(prompts))]

        async def one(number: int) -> Completion:
            try:
                return await sessions[number].complete(Prompt(prompts[number]), max_tokens)
            finally:
                sessions[number].close()

        return await asyncio.gather(*map(one, range(len(prompts))))


def local(folder: Path) -> Subject:
    network = model(0)

    def lose() -> None:
        def broken(*args: object, **more: object) -> None:
            raise RuntimeError("the weights are gone")

        network.forward = broken

    return Subject(LocalEngine(network, STOPS, TEMPERATURE), lose, lambda: None)


def vllm(folder: Path) -> Subject:
    try:
        found = find_vllm()
    except OffbookError as reason:
        pytest.skip(str(reason))
    model(0).save_pretrained(folder / "model")
    settings = VllmConfig(python=found.python, start_s=240, options=["--enforce-eager"] if found.on_cpu else [])
    server = Server(folder / "model", settings, POSITIONS, folder / "vllm.log", lambda what, share: None)
    engine = VllmEngine(server, STOPS, TEMPERATURE)

    def lose() -> None:
        server.settings = settings.model_copy(update={"python": "/bin/true"})
        server.stop()

    return Subject(engine, lose, lambda: asyncio.run(engine.aclose()))


@pytest.fixture(scope="module", params=["local", pytest.param("vllm", marks=pytest.mark.vllm)])
def opened(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    subject = {"local": local, "vllm": vllm}[request.param](tmp_path_factory.mktemp("engine"))
    yield subject
    subject.close()


@pytest.fixture
def subject(opened: Subject) -> Subject:
    opened.engine.apply(weights(seed=0, version=0))
    return opened


def prompts(count: int, length: int = 20) -> list[list[int]]:
    rng = random.Random(count)
    return [[rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, length))] for _ in range(count)]


@torch.no_grad()
def error(network: PreTrainedModel, prompt: list[int], completion: Completion, start: int = 0) -> float:
    """By how much log-probabilities, from a token on, differ from those of a full forward."""
    logits = network(torch.tensor([prompt + completion.ids])).logits[0].float() / TEMPERATURE
    logp = logits.log_softmax(-1)[len(prompt) - 1 : -1].gather(1, torch.tensor(completion.ids)[:, None])[:, 0]
    return float((logp - torch.tensor(completion.logprobs))[start:].abs().max())


def test_ids_come_with_their_processed_logprobs_and_one_version_each(subject: Subject) -> None:
    asked = prompts(12)
    for prompt, completion in zip(asked, subject.ask(asked), strict=True):
        assert len(completion.ids) == len(completion.logprobs) == len(completion.versions)
        assert all(0 <= token < VOCABULARY for token in completion.ids)
        assert set(completion.versions) == {0} == {subject.engine.version}
        assert error(model(0), prompt, completion) < 1e-4


def test_a_message_ends_with_the_first_stop_id_or_is_full(subject: Subject) -> None:
    completions = subject.ask(prompts(40), max_tokens=30)
    for completion in completions:
        assert not STOPS.intersection(completion.ids[:-1])
        assert completion.ids[-1] in STOPS or len(completion.ids) == 30
    ends = {completion.ids[-1] in STOPS for completion in completions}
    assert ends == {True, False}  # both were seen


def test_positions_cut_a_message_and_a_prompt_that_fills_them_is_refused(subject: Subject) -> None:
    (almost,) = subject.ask([[40] * (POSITIONS - 2)], max_tokens=30)
    assert 1 <= len(almost.ids) <= 2
    with pytest.raises(PromptTooLong, match=f"{POSITIONS} tokens"):
        subject.ask([[40] * POSITIONS])


def test_one_token_is_one_token(subject: Subject) -> None:
    assert [len(completion.ids) for completion in subject.ask(prompts(5), max_tokens=1)] == [1] * 5


def test_new_weights_sample_other_tokens_and_carry_their_version(subject: Subject) -> None:
    asked = prompts(6)
    subject.engine.apply(weights(seed=1, version=7))
    assert subject.engine.version == 7
    for prompt, completion in zip(asked, subject.ask(asked), strict=True):
        assert set(completion.versions) == {7}
        assert error(model(1), prompt, completion) < 1e-4
        assert error(model(0), prompt, completion) > 0.05


def test_weights_that_come_while_messages_are_written(subject: Subject) -> None:
    """Each token is of the version that it says, in the light of everything before it."""
    asked, networks = prompts(6), {0: model(0), 1: model(1)}

    async def main() -> list[Completion]:
        writing = asyncio.create_task(subject._all(asked, 200))
        await asyncio.sleep(0.15)
        await asyncio.to_thread(subject.engine.apply, weights(seed=1, version=1))
        return await writing

    for prompt, completion in zip(asked, asyncio.run(main()), strict=True):
        assert completion.versions == sorted(completion.versions)
        for version in set(completion.versions):
            first = completion.versions.index(version)
            of_it = Completion(*(part[: first + completion.versions.count(version)] for part in _parts(completion)))
            assert error(networks[version], prompt, of_it, first) < 1e-4


def _parts(completion: Completion) -> tuple[list[int], list[float], list[int]]:
    return completion.ids, completion.logprobs, completion.versions


def test_whoever_gives_up_disturbs_nobody(subject: Subject) -> None:
    asked = prompts(6)

    async def main() -> list[Completion]:
        given_up = asyncio.create_task(subject._all(asked, 200))
        kept = asyncio.create_task(subject._all(asked, 40))
        await asyncio.sleep(0.05)
        given_up.cancel()
        with suppress(asyncio.CancelledError):
            await given_up
        return await kept

    for prompt, completion in zip(asked, asyncio.run(main()), strict=True):
        assert error(model(0), prompt, completion) < 1e-4
    assert len(subject.ask(asked)) == 6  # and it goes on


def test_a_model_that_is_lost_ends_the_run_and_not_a_rollout(subject: Subject) -> None:
    """The last: the engine is no good afterwards."""
    subject.lose()
    with pytest.raises(ModelLost):
        subject.ask(prompts(3))
