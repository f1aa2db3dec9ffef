"""The engine's log-probabilities are the trainer's; its dice are the rollout's own."""

from __future__ import annotations

import asyncio
import random

import torch
from conftest import random_ids, tiny_model
from transformers import PreTrainedModel

from offbook.config import FeedbackConfig, TrainConfig
from offbook.engine import LocalEngine
from offbook.train.trainer import Trainer
from offbook.types import Completion, Sample

STOP = 7


def complete_all(
    engine: LocalEngine, prompts: dict[str, list[int]], turns: int = 1, max_tokens: int = 12
) -> dict[str, list[Completion]]:
    """Every prompt for some turns at once; turn n+1 continues turn n, as a rollout does."""

    async def rollout(key: str, prompt: list[int]) -> list[Completion]:
        session = sessions[key]
        completions = []
        for _ in range(turns):
            await asyncio.sleep(random.random() * 0.01)  # tools take however long they take
            completions.append(await session.complete(prompt, max_tokens))
            prompt = [*prompt, *completions[-1].ids]
        session.close()
        return completions

    async def main() -> list[list[Completion]]:
        return await asyncio.gather(*(rollout(key, prompt) for key, prompt in prompts.items()))

    sessions = {key: engine.open(key) for key in prompts}
    return dict(zip(prompts, asyncio.run(main()), strict=True))


def prompts_of_different_lengths() -> dict[str, list[int]]:
    rng = random.Random(0)
    return {f"rollout {number}": random_ids(rng, rng.randrange(3, 40)) for number in range(9)}


def trainer_logprobs(model: PreTrainedModel, ids: list[int], temperature: float) -> list[float]:
    """What the trainer computes for these tokens in its own forward."""
    trainer = Trainer(model, TrainConfig(), FeedbackConfig(teacher="live"), temperature)
    hidden = trainer.model.base_model(input_ids=torch.tensor([ids]), use_cache=False).last_hidden_state[0, :-1]
    return trainer._log_softmax(trainer.model, hidden).gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()


def test_logprobs_equal_a_full_forward_of_the_trainer() -> None:
    for temperature in (1.0, 0.7):
        engine = LocalEngine(tiny_model(), STOP, temperature, max_rows=4)
        prompts = prompts_of_different_lengths()
        for key, completions in complete_all(engine, prompts, turns=2).items():
            ids = [*prompts[key], *completions[0].ids, *completions[1].ids]
            sampled = [*completions[0].logprobs, *completions[1].logprobs]
            reference = trainer_logprobs(tiny_model(), ids, temperature)[-len(sampled) :]
            assert max(abs(a - b) for a, b in zip(sampled, reference, strict=True)) < 1e-4


def test_the_same_seed_gives_the_same_tokens_whatever_the_timing() -> None:
    first, second, other = (
        complete_all(LocalEngine(tiny_model(), STOP, seed=seed), prompts_of_different_lengths(), turns=3)
        for seed in (0, 0, 1)
    )
    assert first == second
    assert first != other


def test_a_rollout_draws_the_same_alone_and_in_company() -> None:
    prompts = prompts_of_different_lengths()
    together = complete_all(LocalEngine(tiny_model(), STOP), prompts)
    for key, prompt in prompts.items():
        alone = complete_all(LocalEngine(tiny_model(), STOP), {key: prompt})[key][0]
        assert alone.ids == together[key][0].ids


def test_messages_end_at_the_stop_token_or_at_the_limit() -> None:
    completions = complete_all(LocalEngine(tiny_model(vocabulary=12), STOP), {str(n): [1, 2] for n in range(32)})
    lengths = set()
    for (completion,) in completions.values():
        assert STOP not in completion.ids[:-1]
        assert completion.ids[-1] == STOP or len(completion.ids) == 12
        assert len(completion.ids) == len(completion.logprobs) == len(completion.versions)
        lengths.add(len(completion.ids))
    assert len(lengths) > 3


def test_sampling_follows_the_model() -> None:
    """2,000 draws of one token against the model's own probabilities."""
    engine = LocalEngine(tiny_model(vocabulary=12), STOP, max_rows=2000)
    drawn = complete_all(engine, {str(n): [1, 2, 3] for n in range(2000)}, max_tokens=1)
    counts = torch.zeros(12)
    for (completion,) in drawn.values():
        counts[completion.ids[0]] += 1
    expected = tiny_model(vocabulary=12)(torch.tensor([[1, 2, 3]])).logits[0, -1].softmax(-1)
    assert (counts / 2000 - expected).abs().max() < 0.05


def test_new_weights_take_effect_and_are_stamped() -> None:
    engine = LocalEngine(tiny_model(seed=0), STOP)
    prompts = {"a": [1, 2, 3, 4]}
    old = complete_all(engine, prompts)["a"][0]
    engine.load_weights(tiny_model(seed=1).state_dict(), version=5)
    new = complete_all(engine, prompts)["a"][0]
    assert set(old.versions) == {0}
    assert set(new.versions) == {5}
    assert new == complete_all(LocalEngine(tiny_model(seed=1), STOP, version=5), prompts)["a"][0]
    assert new.logprobs != old.logprobs


def test_a_rollout_that_gives_up_does_not_stop_the_others() -> None:
    engine = LocalEngine(tiny_model(), STOP)

    async def impatient(session) -> str:
        try:
            await asyncio.wait_for(session.complete([1, 2], 4), timeout=0.01)
        except TimeoutError:
            return "gave up"
        finally:
            session.close()

    async def late(session) -> Completion:
        await asyncio.sleep(0.05)
        completion = await session.complete([3, 4], 4)
        session.close()
        return completion

    async def main() -> tuple[str, Completion]:
        first, second = engine.open("impatient"), engine.open("late")
        return await asyncio.gather(impatient(first), late(second))

    gave_up, completion = asyncio.run(main())
    assert gave_up == "gave up"
    assert completion.ids
    assert engine.open_sessions == 0
    assert engine.waiting == []


def test_on_policy_the_trainer_agrees_with_the_engine() -> None:
    """`rl/mismatch`, the metric a run watches, is rounding error when nothing is off-policy."""
    prompts = prompts_of_different_lengths()
    samples = []
    for key, (completion,) in complete_all(LocalEngine(tiny_model(), STOP), prompts).items():
        prompt, count = prompts[key], len(completion.ids)
        mask = [0.0] * len(prompt) + [1.0] * count
        logprobs = [0.0] * len(prompt) + completion.logprobs
        ids = prompt + completion.ids
        samples.append(Sample(ids, logprobs, [1.0] * len(ids), mask, [0.0] * len(ids)))
    trainer = Trainer(tiny_model(), TrainConfig(), FeedbackConfig(teacher="live"))
    assert trainer.step(samples).metrics["rl/mismatch"] < 1e-5
