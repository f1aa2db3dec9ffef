"""A run whose rollouts are Ray actors' is the run that it would have been here, also where an actor is killed."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fault_injection import children
from test_async import are_same, run
from test_held import given

from offbook.core.config import ConfigError, load_config
from offbook.core.runfolder import RunFolder
from offbook.rl.hint_probe import NoHintHelps
from offbook.rl.scheduler import read_journal
from offbook.types import OffbookError

__all__ = ["given"]  # a fixture


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """All tests have one; to start it takes ten seconds."""
    ray = pytest.importorskip("ray", reason="the extra `ray` is not installed")
    os.environ["RAY_AUTH_MODE"] = "disabled"  # a token would be written to the home folder
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 * 2**20, log_to_driver=False)
    yield ray
    ray.shutdown()


def kill_while_it_samples(out: Path, version: int) -> threading.Thread:
    """Ray's own process is ours, and actors are its."""

    def strike() -> None:
        def is_sampling() -> bool:
            lines = list(read_journal(out))
            return bool(lines) and lines[-1]["state"] == "running" and lines[-1]["version"] >= version

        while not is_sampling():
            time.sleep(0.01)
        (raylet,) = children(os.getpid(), b"raylet/raylet")
        os.kill(next(children(raylet, b"ray::Sampler")), signal.SIGKILL)

    thread = threading.Thread(target=strike, daemon=True)
    thread.start()
    return thread


@pytest.mark.slow
def test_a_sampler_gives_the_same_bits_and_may_be_killed(cluster: Any, given: dict[str, str], tmp_path: Path) -> None:
    settings = {"train.steps": "3", "train.groups": "2", "harness.message_tokens": "200"}
    here = run(given, tmp_path / "here", **settings)
    killer = kill_while_it_samples(tmp_path / "there", version=1)
    there = run(given, tmp_path / "there", **settings, **{"loop.ray.samplers": "1"})
    assert not killer.is_alive()
    assert are_same(there, here)
    states = Counter(line["state"] for line in read_journal(there.path))
    assert states["died"] == 1
    assert [row["solved"] for row in there.metrics()[0]] == [row["solved"] for row in here.metrics()[0]]


@pytest.mark.slow
def test_hints_are_looked_at_by_what_a_sampler_writes(cluster: Any, given: dict[str, str], tmp_path: Path) -> None:
    """In lockstep, and so what it writes is what would have been written here."""
    for name, more in (("here", {}), ("there", {"loop.ray.samplers": "1"})):
        with pytest.raises(NoHintHelps):
            run(given, tmp_path / name, **{"feedback.look": "true"}, **more)
    looked = [RunFolder(tmp_path / name).looks(1) for name in ("here", "there")]
    assert looked[0] == looked[1]
    assert looked[0][0]["samples"]


@pytest.mark.slow
def test_many_samplers_beside_training(cluster: Any, given: dict[str, str], tmp_path: Path) -> None:
    """Every group once, none too old, and the run goes on where one is killed while it samples."""
    settings = {"engine.kind": "continuous", "loop.max_staleness": "2", "train.steps": "6"}
    killer = kill_while_it_samples(tmp_path / "run", version=2)
    folder = run(given, tmp_path / "run", **settings, **{"loop.ray.samplers": "2"})
    assert not killer.is_alive()
    rollouts = [rollout for step in folder.steps() for rollout in folder.rollouts(step)[0]]
    assert len({rollout.id for rollout in rollouts}) == len(rollouts) == 6 * 2
    rows, _ = folder.metrics()
    assert all(row["staleness/too_old"] == 0 for row in rows)


def test_what_cannot_be_elsewhere_is_refused() -> None:
    given = {"model": "pocket", "loop.ray.samplers": "2"}
    for more, said in (
        ({"train.lora.rank": "8"}, "takes no adapters"),
        ({"engine.kind": "vllm", "engine.vllm.url": "http://x/v1"}, "each Ray sampler starts one vLLM itself"),
    ):
        with pytest.raises(ConfigError, match=said):
            load_config([], given | more)


def test_without_ray_there_is_one_sentence(given: dict[str, str], tmp_path: Path) -> None:
    try:
        import ray  # noqa: F401
    except ImportError:
        with pytest.raises(OffbookError, match=r"Ray is not installed: pip install 'offbook\[ray\]'"):
            run(given, tmp_path / "run", **{"loop.ray.samplers": "1"})
    else:
        pytest.skip("Ray is installed")


@pytest.mark.slow
def test_a_cluster_that_is_not_there_is_one_sentence(given: dict[str, str], tmp_path: Path) -> None:
    ray = pytest.importorskip("ray", reason="the extra `ray` is not installed")
    ray.shutdown()
    with pytest.raises(OffbookError, match=r"Ray cannot be reached \(.*; start a cluster by `ray start --head`"):
        run(given, tmp_path / "run", **{"loop.ray.samplers": "1", "loop.ray.address": "auto"})
