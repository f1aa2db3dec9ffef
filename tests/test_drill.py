"""kill -9 at the worst moments, with the real pocket model: what `offbook drill` finds lost is nothing."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_async import run
from test_held import given
from test_loop import SMALL, offbook

from offbook.cli.drill import BLOWS, Report, _damage, _is_store_whole, _is_well, _store

__all__ = ["given"]  # a fixture


@pytest.mark.slow
def test_nothing_is_lost(cache: Path, model: Path, tmp_path: Path) -> None:
    more = ["--model", str(model), "--train.steps", "6", "--checkpoint.keep", "9", *SMALL]
    done = offbook(cache, "drill", "--out", "drill", "--json", *more, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lockstep, continuous = json.loads(done.stdout)
    assert lockstep["struck"] == continuous["struck"] == [blow.name for blow in BLOWS]
    assert lockstep["same_weights"] is True
    assert (continuous["rollouts_again"], continuous["turns_again"], continuous["counted_twice"]) == (0, 0, 0)
    assert lockstep["store_whole"]
    assert continuous["store_whole"]
    assert continuous["turns"] > continuous["rollouts"] == 6 * 2 * 3


def wait_for(holds: Callable[[], bool], seconds: float = 20.0) -> None:
    """What is published is written beside training."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_run_heals_its_store(given: dict[str, str], tmp_path: Path) -> None:
    """What the drill does to one, to a run that goes on: the last weights are there for whoever reads then."""
    out, told = tmp_path / "run", {"train.steps": "4", "loop.store": str(_store(tmp_path / "run"))}

    def strike(row: dict[str, Any]) -> None:
        if row["step"] == 1:
            wait_for(lambda: json.loads((_store(out) / "HEAD").read_bytes())["number"] == 2)  # the start is 1
            _damage(_store(out))

    run(given, out, strike, **told)
    assert _is_store_whole(out)
    _damage(_store(out))
    assert not _is_store_whole(out)


@pytest.mark.parametrize(
    ("changed", "is_well"),
    [
        ({}, True),
        ({"turns_again": 1}, False),
        ({"rollouts_again": 1}, False),
        ({"rollouts_again": 1, "same_weights": True}, True),  # in lockstep, where bits count
        ({"same_weights": False}, False),
        ({"counted_twice": 1, "same_weights": True}, False),
        ({"missed": ["engine"]}, False),
        ({"store_whole": False}, False),
    ],
)
def test_what_counts_as_lost(changed: dict[str, object], is_well: bool) -> None:
    report = {
        "schedule": "s", "struck": [], "missed": [], "rollouts": 9, "rollouts_again": 0, "turns": 9, "turns_again": 0,
        "counted_twice": 0, "steps": 2, "same_weights": None, "store_whole": True,
    }  # fmt: skip
    assert _is_well(Report(**{**report, **changed})) is is_well  # type: ignore[arg-type]


def test_a_folder_with_something_in_it_is_refused(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "drill").mkdir()
    (tmp_path / "drill" / "notes").touch()
    done = offbook(cache, "drill", "--out", "drill", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (1, "offbook: drill is not empty; give another --out\n")


def test_a_file_is_refused(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "drill").touch()
    done = offbook(cache, "drill", "--out", "drill", cwd=tmp_path)
    sentence = "offbook: drill is a file, and the runs need a folder; give another --out\n"
    assert (done.returncode, done.stderr) == (1, sentence)
