"""kill -9 at the worst moments, with the real pocket model: nothing is lost or counted twice."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fault_injection import damage, finish, inject_faults, is_store_whole, start, store_of
from test_async import run
from test_held import given
from test_loop import SMALL

from offbook.core.config import load_config
from offbook.core.runfolder import RunFolder, latest_checkpoint
from offbook.rl.resume import weights_digest
from offbook.rl.rollout_buffer import read_journal

__all__ = ["given"]  # a fixture


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "staleness"), [("lockstep", "1"), ("continuous", "2")])
def test_nothing_is_lost(cache: Path, model: Path, tmp_path: Path, mode: str, staleness: str) -> None:
    """Lockstep samples a batch again and ends at the same bits; continuous mode repeats no rollout and no turn."""
    out, env = tmp_path / "run", {**os.environ, "OFFBOOK_CACHE": str(cache)}
    small = dict(zip((key.removeprefix("--") for key in SMALL[::2]), SMALL[1::2], strict=True))
    more = {"model": str(model), "train.steps": "6", "checkpoint.keep": "9", "loop.store": str(store_of(out))}
    config = load_config([], {**small, **more, "engine.kind": mode, "loop.max_staleness": staleness})
    assert inject_faults(config, out, env) == []
    lines, folder = list(read_journal(out)), RunFolder(out)
    ids = Counter(rollout.id for step in folder.steps() for rollout in folder.rollouts(step)[0])
    assert set(ids.values()) == {1}, "counted once"
    assert is_store_whole(out)
    if mode == "continuous":
        scored = [line["slot"] for line in lines if line["state"] == "scored"]
        turns = [(line["slot"], line["turn"]) for line in lines if line["state"] == "turn"]
        assert len(scored) == len(set(scored)) == 6 * 2 * 3
        assert len(turns) == len(set(turns)) > len(scored)
    else:
        straight = tmp_path / "straight"
        finish(start(config, straight, env), straight)
        digests = [weights_digest(latest_checkpoint(RunFolder(one))) for one in (out, straight)]
        assert digests[0] == digests[1]


def wait_for(holds: Callable[[], bool], seconds: float = 20.0) -> None:
    """What is published is written beside training."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_run_heals_itsstore_of(given: dict[str, str], tmp_path: Path) -> None:
    """A store that is damaged during a run serves the last weights at its end."""
    out, told = tmp_path / "run", {"train.steps": "4", "loop.store": str(store_of(tmp_path / "run"))}

    def strike(row: dict[str, Any]) -> None:
        if row["step"] == 1:
            wait_for(lambda: json.loads((store_of(out) / "HEAD").read_bytes())["number"] == 2)  # the start is 1
            damage(store_of(out))

    run(given, out, strike, **told)
    assert is_store_whole(out)
    damage(store_of(out))
    assert not is_store_whole(out)
