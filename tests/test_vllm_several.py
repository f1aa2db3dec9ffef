"""Several vLLM servers as one engine: who goes where, and weights that all of them get. Servers are played."""

from __future__ import annotations

import asyncio
import os
import threading
from array import array
from collections import Counter
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_held import given as small
from test_plan import HALF, large
from test_vllm import Played, interpreter, tokens

from offbook.core.config import VllmConfig, load_config
from offbook.core.weights import Gathered, Weights
from offbook.engine import VllmEngine
from offbook.engine.vllm import SeveralEngines, gpus, refuse_missing_engine, servers_of
from offbook.engine.vllm import engine as one_engine
from offbook.engine.vllm.gpus import gpus_of_copies
from offbook.engine.vllm.several import Balance
from offbook.rl.collector import Collector, Job
from offbook.rl.plan import VLLM, Device, make_plan
from offbook.rl.tasks import task_sets
from offbook.rl.train import train
from offbook.types import ModelLost, OffbookError, Prompt, ServerLost

__all__ = ["large", "small"]  # fixtures
Answer = tuple[int, bytes] | None
LOADED, UNLOADED, TOKENS = "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/offbook/tokens"


def playing(path: str, body: bytes) -> Answer:
    return tokens([5, 7]) if path == TOKENS else (200, b"{}")


def engines_of(folder: Path, *played: Played, timeout_s: float = 5.0) -> SeveralEngines:
    settings = VllmConfig(url=",".join(one.url for one in played), start_s=2)
    servers = servers_of(folder / "model", settings, 64, folder / "logs", lambda what, share: None, None)
    return SeveralEngines([VllmEngine(server, frozenset({7}), timeout_s=timeout_s) for server in servers])


def adapter(version: int) -> Weights:
    return Weights(version, {"a": torch.zeros(4)}, {"r": 4})


# Who goes where


def test_a_group_stays_together_and_groups_are_spread() -> None:
    balance = Balance(3)
    places = {group: {balance.enter(group) for _ in range(8)} for group in "abcdef"}
    assert all(len(servers) == 1 for servers in places.values())
    assert balance.open == [16, 16, 16]
    for _ in range(8):
        balance.leave("b", *places["b"])
    assert balance.enter("new") == next(iter(places["b"])), "the least busy one"


@given(st.integers(1, 5), st.lists(st.tuples(st.booleans(), st.integers(0, 4)), max_size=200))
def test_open_sessions_are_counted(servers: int, acts: list[tuple[bool, int]]) -> None:
    balance, opened = Balance(servers), list[tuple[str, int]]()
    for enters, number in acts:
        group = str(number) if number else ""
        if enters:
            opened.append((group, balance.enter(group)))
        elif opened:
            balance.leave(*opened.pop(number % len(opened)))
        assert balance.open == [Counter(server for _, server in opened)[place] for place in range(servers)]
    assert set(balance._home) == {group for group, _ in opened} - {""}


def test_sessions_without_a_group_are_spread() -> None:
    balance = Balance(2)
    assert [balance.enter("") for _ in range(4)] == [0, 1, 0, 1]


def test_a_session_asks_the_server_that_it_was_opened_at(tmp_path: Path) -> None:
    played = Played(playing), Played(playing)
    engine = engines_of(tmp_path, *played)

    async def main() -> None:
        sessions = [engine.open(f"step1/{task}/{number}") for task in ("a", "b") for number in range(3)]
        for turn in range(2):
            await asyncio.gather(*(each.complete(Prompt([place, turn]), 8) for place, each in enumerate(sessions)))
        assert engine.balance.open == [3, 3]
        for session in [*sessions, *sessions]:  # twice is once
            session.close()
        assert engine.balance.open == [0, 0]
        await engine.aclose()

    asyncio.run(main())
    asked = [[array("i", body.partition(b"\n")[2]).tolist() for body in one.of(TOKENS)] for one in played]
    assert sorted(asked[0]) == [[0, 0], [0, 1], [1, 0], [1, 1], [2, 0], [2, 1]]
    assert sorted(asked[1]) == [[3, 0], [3, 1], [4, 0], [4, 1], [5, 0], [5, 1]]


# Weights


def test_all_get_new_weights_at_once_and_give_them_up_in_the_end(tmp_path: Path) -> None:
    both = threading.Barrier(2, timeout=10)

    def answer(path: str, body: bytes) -> Answer:
        if path == LOADED:
            both.wait()  # nobody has them before both are asked
        return playing(path, body)

    played = Played(answer), Played(answer)
    engine = engines_of(tmp_path, *played)
    for version in (3, 4):
        engine.apply(adapter(version))
        assert engine.version == version
    assert engine.positions == 64

    async def main() -> None:
        async with aclosing(engine):
            for task in "ab":
                assert (await engine.open(f"{task}/0").complete(Prompt([1]), 8)).versions == [4, 4]
            engine.apply(adapter(5))  # in an event loop in which nothing is on its way
            assert engine.version == 5

    asyncio.run(main())
    assert [[len(one.of(path)) for path in (LOADED, UNLOADED, TOKENS)] for one in played] == [[3, 3, 1]] * 2


def test_where_one_refuses_new_weights_the_next_bring_all_to_the_same(tmp_path: Path) -> None:
    refuses = [False]

    def answer(path: str, body: bytes) -> Answer:
        return (400, b"no room") if path == LOADED and refuses[0] else playing(path, body)

    good, bad = Played(playing), Played(answer)
    engine = engines_of(tmp_path, good, bad)

    async def versions() -> list[list[int]]:
        sessions = [engine.open(f"{task}/0") for task in "ab"]
        try:
            return [(await session.complete(Prompt([1]), 8)).versions for session in sessions]
        finally:
            for session in sessions:
                session.close()

    async def main() -> None:
        async with aclosing(engine):
            await asyncio.to_thread(engine.apply, adapter(1))
            refuses[0] = True
            with pytest.raises(ModelLost, match=rf"^vLLM at {bad.url} refused /v1/load_lora_adapter with 400: no room"):
                await asyncio.to_thread(engine.apply, adapter(2))
            assert engine.version == 1, "not all have the second"
            assert await versions() == [[2, 2], [1, 1]], "each token carries what sampled it"
            refuses[0] = False
            await asyncio.to_thread(engine.apply, adapter(3))
            assert engine.version == 3
            assert await versions() == [[3, 3], [3, 3]]

    asyncio.run(main())


def test_new_weights_while_requests_run_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_engine, "LATE_S", 0.2)

    def answers_later() -> Callable[[str, bytes], Answer]:
        asked = Counter[str]()

        def answer(path: str, body: bytes) -> Answer:
            asked[path] += 1
            return None if path == TOKENS and asked[path] == 1 else playing(path, body)

        return answer

    played = Played(answers_later()), Played(answers_later())
    engine = engines_of(tmp_path, *played)

    async def main() -> None:
        async with aclosing(engine):
            await asyncio.to_thread(engine.apply, adapter(1))
            sessions = [engine.open(f"{task}/0") for task in "ab"]
            writing = [asyncio.create_task(each.complete(Prompt([1]), 8)) for each in sessions]
            while not all(one.of(TOKENS) for one in played):
                await asyncio.sleep(0.01)
            with pytest.raises(RuntimeError, match=r"with asyncio\.to_thread"):
                engine.apply(adapter(2))
            await asyncio.to_thread(engine.apply, adapter(2))
            assert [(await each).versions for each in writing] == [[2, 2], [2, 2]]

    asyncio.run(main())
    assert all([path.partition("?")[0] for path, _ in one.asked].count("/pause") == 1 for one in played)


def test_tensors_that_lie_over_ranks_are_put_together_one_at_a_time(tmp_path: Path) -> None:
    free, whole = threading.Lock(), {str(number): torch.zeros(4) for number in range(50)}

    def gather(name: str) -> torch.Tensor:
        assert free.acquire(blocking=False), "ranks take part in one at a time"
        threading.Event().wait(0.001)
        free.release()
        return whole[name]

    engine = engines_of(tmp_path, Played(playing), Played(playing))
    engine.apply(Weights(1, Gathered(whole, {name: name for name in whole}, gather), {"r": 4}))
    assert engine.version == 1
    asyncio.run(engine.aclose())


# Losing one


def test_a_lost_server_ends_what_is_there_and_nothing_stays_counted(small: dict[str, str], tmp_path: Path) -> None:
    """Also not what had not begun."""
    dies = [False]
    good, bad = Played(playing), Played(lambda path, body: (500, b"gone") if dies[0] else playing(path, body))
    more = {"engine.kind": "vllm", "engine.vllm.url": f"{bad.url},{good.url}", "engine.vllm.start_s": "2"}
    config = load_config(["standard"], {**small, **more, "out": str(tmp_path / "run")})
    collector, sets = Collector(config, Path(config.model)), task_sets(config)
    engine = collector.engine
    assert isinstance(engine, SeveralEngines)

    async def main() -> None:
        async with aclosing(collector):
            jobs = [Job(sets.train[0], f"step1/{task}/{number}", task) for task in "ab" for number in range(3)]
            rollouts = await collector.rollouts(jobs)
            assert {rollout.id for rollout in rollouts} == {job.id for job in jobs}
            assert engine.balance.open == [0, 0]
            dies[0] = True
            with pytest.raises(ServerLost, match=rf"^vLLM at {bad.url} answered 500: gone, after it was waited for"):
                await collector.rollouts(jobs, limit=asyncio.Semaphore(1))
            assert engine.balance.open == [0, 0]

    asyncio.run(main())
    assert good.of(TOKENS)


def test_a_run_of_two_steps(small: dict[str, str], tmp_path: Path) -> None:
    played = Played(playing), Played(playing)
    more = {"engine.kind": "vllm", "engine.vllm.url": ",".join(one.url for one in played), "train.lora.rank": "2"}
    folder = train(load_config(["standard"], {**small, **more, "train.groups": "1", "out": str(tmp_path / "run")}))
    rows, _ = folder.metrics()
    assert [row["step"] for row in rows] == [1, 2]
    for step in (1, 2):
        segments = [segment for rollout in folder.rollouts(step)[0] for segment in rollout.segments]
        assert {version for segment in segments for version in segment.versions} == {-1, step - 1}
    assert [len(one.of(LOADED)) for one in played] == [2, 2]
    assert not played[1].of(TOKENS), "the one group of a step is at one server"


# Configuration


@pytest.mark.parametrize(
    ("given", "sentence"),
    [({"url": "http://a", "copies": "2"}, "copies are started by offbook"), ({"copies": "0"}, "engine.vllm.copies")],
)
def test_what_cannot_be(given: dict[str, str], sentence: str) -> None:
    with pytest.raises(OffbookError, match=sentence):
        load_config([], {f"engine.vllm.{name}": value for name, value in given.items()})


def test_copies_have_gpus_of_their_own_the_last_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpus_of_copies(VllmConfig(copies=2, gpus=2)) == ["", ""], "no GPU: the CPU is for all"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 5)
    assert gpus_of_copies(VllmConfig(gpus=2)) == [""]
    assert gpus_of_copies(VllmConfig(copies=2, gpus=2)) == ["1,2", "3,4"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,GPU-abc,2,3,0")
    assert gpus_of_copies(VllmConfig(copies=4)) == ["GPU-abc", "2", "3", "0"]
    copies = {"engine.kind": "vllm", "engine.vllm.python": interpreter(tmp_path), "engine.vllm.gpus": "2"}
    refuse_missing_engine(load_config([], copies | {"engine.vllm.copies": "2"}))
    with pytest.raises(OffbookError, match=r"copies 3 with engine\.vllm\.gpus 2 need 6 GPUs, and this run sees 5;"):
        refuse_missing_engine(load_config([], copies | {"engine.vllm.copies": "3"}))


def test_copies_are_started_with_gpus_ports_and_logs_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    python = Path(interpreter(tmp_path, said="x"))
    python.write_text(
        python.read_text().replace(f"cat {tmp_path}/said", 'echo "RuntimeError: sees $CUDA_VISIBLE_DEVICES"')
    )
    settings = VllmConfig(python=str(python), copies=2, gpu_share=0.5)
    servers = servers_of(tmp_path / "model", settings, 64, tmp_path / "logs", lambda what, share: None, None)
    engine = SeveralEngines([VllmEngine(server, frozenset()) for server in servers])
    with pytest.raises(ModelLost, match=r"^vLLM [01] did not start: RuntimeError: sees [56]; .*logs/vllm-[01]\.log$"):
        engine.apply(adapter(0))
    assert [(tmp_path / "logs" / f"vllm-{n}.log").read_text() for n in (0, 1)] == [
        "RuntimeError: sees 5\n",
        "RuntimeError: sees 6\n",
    ]
    assert len({server.url for server in servers}) == 2
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "4,5,6"


def test_copies_beside_the_trainers_gpu_take_nothing_of_it(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device, options = Device("the GPU", 80e9, is_gpu=True), {"model": str(large), **HALF, "train.lora.rank": "16"}
    config = load_config([], options | {"engine.kind": "vllm", "engine.vllm.copies": "2"})
    monkeypatch.setattr(gpus, "_visible", lambda: ["0", "1"])
    beside = make_plan(config, device)
    monkeypatch.setattr(gpus, "_visible", lambda: ["0", "1", "2"])
    apart = make_plan(config, device)
    assert VLLM in beside.parts
    assert VLLM not in apart.parts
    assert beside.gpu_share is not None
    assert apart.gpu_share is not None
    assert apart.gpu_share > beside.gpu_share
