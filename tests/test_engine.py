"""The engine's log-probabilities are the trainer's; its rng are the rollout's own."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable

import pytest
import torch
from conftest import random_ids, tiny_model

from offbook.core.config import TrainConfig
from offbook.core.weights import Weights
from offbook.engine import LocalEngine
from offbook.engine.local import LocalSession
from offbook.train.trainer import Trainer, weights_of
from offbook.types import Completion, ModelLost, Prompt, Sample

STOP = 7
STOPS = frozenset({STOP})


def complete_all(
    engine: LocalEngine, prompts: dict[str, list[int]], turns: int = 1, max_tokens: int = 12
) -> dict[str, list[Completion]]:
    """Every prompt for some turns at once; turn n+1 continues turn n, as a rollout does."""

    async def rollout(key: str, prompt: list[int]) -> list[Completion]:
        session = sessions[key]
        completions = []
        for _ in range(turns):
            await asyncio.sleep(random.random() * 0.01)  # tools take however long they take
            completions.append(await session.complete(Prompt(prompt), max_tokens))
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


def test_the_same_seed_gives_the_same_tokens_whatever_the_timing() -> None:
    first, second, other = (
        complete_all(LocalEngine(tiny_model(), STOPS, seed=seed), prompts_of_different_lengths(), turns=3)
        for seed in (0, 0, 1)
    )
    assert first == second
    assert first != other


def test_a_rollout_draws_the_same_alone_and_in_company() -> None:
    prompts = prompts_of_different_lengths()
    together = complete_all(LocalEngine(tiny_model(), STOPS), prompts)
    for key, prompt in prompts.items():
        alone = complete_all(LocalEngine(tiny_model(), STOPS), {key: prompt})[key][0]
        assert alone.ids == together[key][0].ids


def test_sampling_follows_the_model() -> None:
    """2,000 draws of one token against the model's own probabilities."""
    engine = LocalEngine(tiny_model(vocabulary=12), STOPS)
    drawn = complete_all(engine, {str(n): [1, 2, 3] for n in range(2000)}, max_tokens=1)
    counts = torch.zeros(12)
    for (completion,) in drawn.values():
        counts[completion.ids[0]] += 1
    expected = tiny_model(vocabulary=12)(torch.tensor([[1, 2, 3]])).logits[0, -1].softmax(-1)
    assert (counts / 2000 - expected).abs().max() < 0.05


def engine_that(before_forward: Callable[[], None], **settings: int) -> LocalEngine:
    """A real engine that does something before each forward: sleep, as a large model would, or fail."""
    model = tiny_model()
    model.register_forward_pre_hook(lambda *_: before_forward())
    return LocalEngine(model, frozenset(), **settings)


async def one_message(session: LocalSession, max_tokens: int = 4, prompt: tuple[int, ...] = (1, 2)) -> Completion:
    try:
        return await session.complete(Prompt(list(prompt)), max_tokens)
    finally:
        session.close()


def test_whoever_listens_hears_a_message_as_it_is_written() -> None:
    engine = LocalEngine(tiny_model(), frozenset(), mode="continuous")
    heard: list[list[int]] = []

    async def main() -> Completion:
        session = engine.open("one")
        return await session.complete(Prompt([1, 2, 3], heard=heard.append), 40)

    whole = asyncio.run(main())
    assert len(heard) >= 3
    assert all(ids == whole.ids[: len(ids)] for ids in heard)
    assert [len(ids) for ids in heard] == sorted({len(ids) for ids in heard})


def test_the_event_loop_goes_on_while_the_model_writes() -> None:
    engine = engine_that(lambda: time.sleep(0.02))

    async def main() -> tuple[int, str]:
        writing = asyncio.create_task(one_message(engine.open("a"), max_tokens=20))
        ticks = 0
        while not writing.done():
            await asyncio.sleep(0.005)
            ticks += 1
        return ticks, type(await writing).__name__

    ticks, name = asyncio.run(main())
    assert name == "Completion"
    assert ticks > 20  # 0.4 s of writing; a blocked loop ticks once


def test_an_error_in_the_decoding_reaches_everyone_who_waits() -> None:
    """Also those whose rows were to be decoded after the batch that failed; and the engine is usable again."""
    broken = True

    def fail() -> None:
        if broken:
            raise RuntimeError("out of memory")

    engine = engine_that(fail, kv_tokens=512)

    async def main() -> list[Completion | BaseException]:
        sessions = [engine.open(str(number)) for number in range(5)]
        waiting = asyncio.gather(*(one_message(session) for session in sessions), return_exceptions=True)
        return await asyncio.wait_for(waiting, 10)

    outcomes = asyncio.run(main())
    assert {type(outcome) for outcome in outcomes} == {ModelLost}, "which ends the run, and is no rollout's"
    assert [str(outcome) for outcome in outcomes] == ["the model stopped writing: RuntimeError: out of memory"] * 5
    assert engine.open_sessions == 0
    broken = False
    assert all(isinstance(outcome, Completion) for outcome in asyncio.run(main()))


def test_a_rollout_that_gives_up_while_it_is_decoded_leaves_the_batch() -> None:
    engine = engine_that(lambda: time.sleep(0.01))

    async def main() -> Completion:
        impatient, patient = engine.open("impatient"), engine.open("patient")
        quick = asyncio.wait_for(one_message(impatient, 400), timeout=0.1)
        outcome, completion = await asyncio.gather(quick, one_message(patient, 40), return_exceptions=True)
        assert isinstance(outcome, TimeoutError)
        return completion

    completion = asyncio.run(main())
    alone = asyncio.run(one_message(LocalEngine(tiny_model(), frozenset()).open("patient"), 40))
    assert completion.ids == alone.ids
    assert 40 < engine.decoder.tokens_sampled < 400
    assert (engine.open_sessions, engine.waiting) == (0, [])


def test_the_decoding_stops_when_the_run_is_stopped() -> None:
    """Ctrl-C must not wait for the end of a long message."""
    engine = engine_that(lambda: time.sleep(0.01))

    async def main() -> None:
        async with asyncio.timeout(0.1):
            await one_message(engine.open("a"), 30_000)

    with pytest.raises(TimeoutError):
        asyncio.run(main())
    started = time.monotonic()
    engine.apply(Weights(1, tiny_model().state_dict()))  # waits for the thread
    assert time.monotonic() - started < 30
    assert engine.decoder.tokens_sampled < 3000


def test_new_weights_wait_for_the_batch_in_the_making() -> None:
    started = threading.Event()

    def slow() -> None:
        started.set()
        time.sleep(0.01)

    engine = engine_that(slow)

    async def main() -> Completion:
        writing = asyncio.create_task(one_message(engine.open("a"), 20))
        await asyncio.to_thread(started.wait)
        engine.apply(Weights(1, tiny_model(seed=1).state_dict()))
        assert engine.version == 1
        return await writing

    completion = asyncio.run(main())
    assert completion == asyncio.run(one_message(LocalEngine(tiny_model(), frozenset()).open("a"), 20))
    assert completion.versions == [0] * 20


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_on_policy_the_trainer_agrees_with_the_engine(temperature: float) -> None:
    """`rl/mismatch`, the metric a run watches, is rounding error when nothing is off-policy."""
    prompts = prompts_of_different_lengths()
    samples = []
    for key, (completion,) in complete_all(LocalEngine(tiny_model(), STOPS, temperature), prompts).items():
        prompt, count = prompts[key], len(completion.ids)
        mask = [0.0] * len(prompt) + [1.0] * count
        logprobs = [0.0] * len(prompt) + completion.logprobs
        ids = prompt + completion.ids
        samples.append(Sample(ids, logprobs, [1.0] * len(ids), mask, temperature=temperature))
    trainer = Trainer(tiny_model(), TrainConfig())
    assert trainer.step(samples).metrics["rl/mismatch"] < 1e-5


def test_a_model_that_hangs_here_is_lost() -> None:
    engine, goes_on = LocalEngine(tiny_model("qwen3"), frozenset(), deadline_s=0.5), threading.Event()

    async def main() -> None:
        session = engine.open("a")
        engine._thread.submit(goes_on.wait)  # as a GPU does that never answers
        asked = asyncio.create_task(session.complete(Prompt([5, 6]), 3))
        await asyncio.sleep(0)
        with pytest.raises(ModelLost) as also:
            await engine.alive()
        with pytest.raises(ModelLost, match="the model has not written for") as lost:
            await asked
        assert lost.value is also.value
        with pytest.raises(ModelLost, match="the model hangs: it has not taken version 1"):
            await asyncio.to_thread(engine.apply, weights_of(tiny_model("qwen3", seed=1), 1))
        goes_on.set()
        assert len((await session.complete(Prompt([5, 6]), 3)).ids) == 3
        await engine.alive()
        assert engine.version == 0

    asyncio.run(main())
