"""The local engine in a process of its own: the same tokens, and a kill that is told to whoever waits."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from contextlib import aclosing
from pathlib import Path

import pytest
import torch
from conftest import tiny_model
from test_held import given
from test_moe import EXPERTS, TOP, as_tensor
from test_moe import make as make_mixture

from offbook.core.config import TrainConfig, load_config
from offbook.core.routers import routers_of
from offbook.engine import LocalEngine
from offbook.engine.subprocess_engine import ApartEngine
from offbook.rl.collector import Collector, Job
from offbook.rl.models import weights_in
from offbook.rl.tasks import task_sets
from offbook.train.trainer import Trainer, weights_of
from offbook.types import Completion, ModelLost, Prompt, PromptTooLong, Sample

__all__ = ["given"]  # a fixture
PROMPTS = [[5, 6, 7, 8], [9, 10, 11], [5, 6, 7, 12, 13]]
NO_STOP: frozenset[int] = frozenset()


async def written(engine: LocalEngine | ApartEngine, turns: int = 2, count: int = 12) -> list[list[Completion]]:
    """By three sessions side by side, each behind what it wrote before."""
    sessions = [engine.open(str(number)) for number in range(len(PROMPTS))]

    async def one(number: int) -> list[Completion]:
        ids, said = list(PROMPTS[number]), list[Completion]()
        for _ in range(turns):
            said.append(await sessions[number].complete(Prompt(ids), count))
            ids = [*ids, *said[-1].ids, 3]
        sessions[number].close()
        return said

    return await asyncio.gather(*map(one, range(len(PROMPTS))))


def test_it_writes_what_the_engine_here_writes_and_comes_back_after_a_kill(tmp_path: Path) -> None:
    first, second = tiny_model("qwen3"), tiny_model("qwen3", seed=1)
    first.save_pretrained(tmp_path / "model")
    config = load_config(["standard"], {"out": str(tmp_path / "run"), "seed": "3"})
    apart = ApartEngine(config, tmp_path / "model", NO_STOP)

    async def main() -> None:
        apart.apply(weights_of(first, 0))
        here = LocalEngine(tiny_model("qwen3"), NO_STOP, seed=3)
        assert await written(apart) == await written(here)
        await asyncio.to_thread(apart.apply, weights_of(second, 1))
        here.apply(weights_of(second, 1))
        after = await written(apart)
        assert after == await written(here)
        assert {version for said in after for one in said for version in one.versions} == {1} == {apart.version}

        waiting = apart.open("long")
        idle = apart.open("idle")  # in lockstep nothing is written while it is open
        asked = asyncio.create_task(waiting.complete(Prompt([1, 2, 3]), 50))
        await asyncio.sleep(0.1)
        assert apart._process is not None
        os.kill(apart._process.pid, signal.SIGKILL)
        with pytest.raises(ModelLost, match="the engine's process ended with code -9") as lost:
            await asked
        idle.close()
        assert await written(apart) == after, "it has the weights it had"
        assert apart.starts == 2
        with pytest.raises(ModelLost) as again:
            await waiting.complete(Prompt([1]), 1)
        assert again.value is lost.value, "one death"

        late = apart.open("late")
        other = apart.open("other")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(late.complete(Prompt([1]), 5), 0.2)
        late.close()
        assert len((await other.complete(Prompt([1]), 5)).ids) == 5, "whoever gave up is not waited for"
        with pytest.raises(PromptTooLong):
            await other.complete(Prompt([1] * 200_000), 5)
        await apart.aclose()

    torch.set_num_threads(1)
    asyncio.run(main())


@pytest.mark.parametrize("wall_s", ["1", "60"])
def test_a_process_that_hangs_is_ended_and_no_rollout_is_to_blame(
    given: dict[str, str], tmp_path: Path, wall_s: str
) -> None:
    """Whether a rollout's time or the engine's is over first."""
    more = {
        "out": str(tmp_path / "run"),
        "harness.wall_s": wall_s,
        "engine.timeout_s": "3",
        "engine.mode": "continuous",
    }
    config = load_config(["standard"], {**given, **more})
    sets, collector = task_sets(config), Collector(config, Path(config.model), apart=True)
    jobs = [Job(sets.train[0], f"r{number}", "g") for number in range(2)]
    apart = collector.engine
    assert isinstance(apart, ApartEngine)

    async def main() -> None:
        async with aclosing(collector):
            await asyncio.to_thread(apart.apply, weights_in(Path(config.model), 0))
            assert {one.stop for one in await collector.rollouts(jobs)} <= {"answer", "turns", "tokens"}
            assert apart._process is not None
            os.kill(apart._process.pid, signal.SIGSTOP)
            with pytest.raises(ModelLost, match=r"the engine's process said nothing for 3 s \(engine.timeout_s"):
                await collector.rollouts(jobs)
            assert {one.stop for one in await collector.rollouts(jobs)} <= {"answer", "turns", "tokens"}
            assert apart.starts == 2

    asyncio.run(main())


def test_weights_that_are_not_in_are_not_taken_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that hangs is started again with them; one that lives and has not taken them is not believed."""
    first, second = tiny_model("qwen3"), tiny_model("qwen3", seed=1)
    first.save_pretrained(tmp_path / "model")
    config = load_config(["standard"], {"out": str(tmp_path / "run"), "seed": "3", "engine.timeout_s": "3"})
    apart = ApartEngine(config, tmp_path / "model", NO_STOP)

    async def main() -> None:
        apart.apply(weights_of(first, 0))
        assert apart._process is not None
        os.kill(apart._process.pid, signal.SIGSTOP)
        apart.apply(weights_of(second, 1))
        assert (apart.version, apart.starts) == (1, 2)
        here = LocalEngine(tiny_model("qwen3", seed=1), NO_STOP, seed=3, version=1)
        assert await written(apart) == await written(here)
        with pytest.raises(ModelLost, match=r"which is .* here; publish the weights of this model"):
            apart.apply(weights_of(tiny_model("llama", vocabulary=300), 2))
        assert apart.version == 1
        os.kill(apart._process.pid, signal.SIGSTOP)
        monkeypatch.setattr("offbook.engine.subprocess_engine.START_S", 0.0)
        with pytest.raises(ModelLost, match="had not taken its weights within 0 s and was ended"):
            apart.apply(weights_of(first, 3))
        assert apart.version == 1
        await apart.aclose()

    torch.set_num_threads(1)
    asyncio.run(main())


def test_a_model_that_hangs_here_is_lost(tmp_path: Path) -> None:
    engine, goes_on = LocalEngine(tiny_model("qwen3"), NO_STOP, deadline_s=0.5), threading.Event()

    async def main() -> None:
        session = engine.open("a")
        engine._thread.submit(goes_on.wait)  # as a GPU does that never answers
        asked = asyncio.create_task(session.complete(Prompt([5, 6]), 3))
        await asyncio.sleep(0)
        with pytest.raises(ModelLost) as also:
            await engine.alive()
        with pytest.raises(ModelLost, match="the model has not written a token for") as lost:
            await asked
        assert lost.value is also.value
        with pytest.raises(ModelLost, match="has not taken version 1 of the weights: it hangs"):
            await asyncio.to_thread(engine.apply, weights_of(tiny_model("qwen3", seed=1), 1))
        goes_on.set()
        assert len((await session.complete(Prompt([5, 6]), 3)).ids) == 3
        await engine.alive()
        assert engine.version == 0

    asyncio.run(main())


def test_routes_come_back_and_are_replayed(tmp_path: Path) -> None:
    """Of two turns, the second of which reads only what is new: as the engine here records them. In a trainer whose
    routers would send all tokens to the first experts they go where they went."""
    make_mixture().save_pretrained(tmp_path / "model")
    config = load_config(["standard"], {"out": str(tmp_path / "run"), "seed": "3"})
    apart = ApartEngine(config, tmp_path / "model", NO_STOP)

    async def main() -> list[list[Completion]]:
        apart.apply(weights_of(make_mixture(), 0))
        found = await written(apart)
        assert found == await written(LocalEngine(make_mixture(), NO_STOP, seed=3))
        await apart.aclose()
        return found

    torch.set_num_threads(1)
    samples = []
    for prompt, (first, last) in zip(PROMPTS, asyncio.run(main()), strict=True):
        ids = [*prompt, *first.ids, 3, *last.ids]
        assert last.routes is not None
        assert as_tensor(last.routes).shape == (len(ids) - 1, 2, TOP)  # the last token was not read
        zeros = [0.0] * (len(ids) - len(last.ids))
        ones = zeros + [1.0] * len(last.ids)
        samples.append(Sample(ids, logprobs=zeros + last.logprobs, advantage=ones, rl_weight=ones, routes=last.routes))
    own, undecided = make_mixture(), make_mixture()
    for router in routers_of(undecided):
        torch.nn.init.zeros_(router.weight)
    metrics, loads = (Trainer(model, TrainConfig(), {}).step(samples).metrics for model in (own, undecided))
    assert metrics["rl/mismatch"] < 1e-5
    for found in (metrics, loads):
        assert found["moe/replayed"] > 0.9  # padding and last tokens have no record
        assert found["moe/implausible"] == 0.0
    assert loads["moe/load.00"] < 0.75 * EXPERTS / TOP
