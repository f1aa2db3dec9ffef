"""kill -9 at the worst moments, with the real pocket model: nothing is lost or counted twice."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest
from fault_injection import damage, finish, inject_faults, is_store_whole, start, store_of
from test_async import run
from test_held import given
from test_loop import SMALL

from offbook.core.config import load_config
from offbook.core.runfolder import RunFolder, latest_checkpoint
from offbook.rl.resume import weights_digest
from offbook.rl.scheduler import read_journal

__all__ = ["given"]  # a fixture


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "staleness"), [("lockstep", "1"), ("continuous", "2")])
def test_nothing_is_lost(cache: Path, model: Path, tmp_path: Path, mode: str, staleness: str) -> None:
    """Lockstep samples a batch again and ends at the same bits; continuous mode repeats no rollout that was scored."""
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
        assert len(scored) == len(set(scored)) == 6 * 2 * 3
    else:
        straight = tmp_path / "straight"
        finish(start(config, straight, env), straight)
        digests = [weights_digest(latest_checkpoint(RunFolder(one))) for one in (out, straight)]
        assert digests[0] == digests[1]


def test_a_damaged_store_is_whole_again_when_the_run_goes_on(given: dict[str, str], tmp_path: Path) -> None:
    """The next publisher starts with an anchor."""
    out, told = tmp_path / "run", {"loop.store": str(store_of(tmp_path / "run"))}
    run(given, out, **told)
    assert is_store_whole(out)
    damage(store_of(out))
    assert not is_store_whole(out)
    run(given, out, **told, **{"train.steps": "3"})
    assert is_store_whole(out)
