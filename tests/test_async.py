"""Sampling beside training: what a run is given follows from the seed or stays young, and nothing is lost or redone."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_held import given

from offbook.core import processes
from offbook.core.config import load_config
from offbook.core.runfolder import RunFolder, latest_checkpoint
from offbook.engine import LocalEngine
from offbook.engine.sync import Reader, open_store
from offbook.rl import scheduler as reconcile
from offbook.rl.collector import Collector
from offbook.rl.scheduler import Selected, read_journal
from offbook.rl.train import Run, train
from offbook.sandbox import isolation
from offbook.train.trainer import Trainer
from offbook.types import Hung, ModelLost, OffbookError, Rollout

__all__ = ["given"]  # a fixture
needs_isolation = pytest.mark.skipif(not isolation().works, reason=isolation().missing)
TOOLS = ("read_file", "edit_file", "run_command", "todo", "finish")


def run(
    given: dict[str, str], out: Path, on_step: Callable[[dict[str, Any]], None] = lambda row: None, **more: str
) -> RunFolder:
    return train(load_config(["standard"], {**given, **more, "out": str(out)}), on_step)


def weights(folder: RunFolder) -> dict[str, torch.Tensor]:
    return load_file(latest_checkpoint(folder) / "model.safetensors")


def are_same(one: RunFolder, other: RunFolder) -> bool:
    ours, theirs = weights(one), weights(other)
    return all(torch.equal(ours[name], theirs[name]) for name in theirs)


LOCKSTEP = {"loop.max_staleness": "1", "train.steps": "4", "train.groups": "2", "checkpoint.keep": "9"}
CONTINUOUS = {"engine.kind": "continuous", "loop.max_staleness": "2", "train.steps": "6"}


class Stopped(Exception):
    """What ends a run from outside."""


def test_in_lockstep_all_follows_from_the_seed_and_a_restart_changes_nothing(
    given: dict[str, str], tmp_path: Path
) -> None:
    store = str(tmp_path / "store")
    straight = run(given, tmp_path / "straight", **LOCKSTEP, **{"loop.store": store})
    published = Reader(open_store(store)).poll()
    assert published is not None
    assert published.version == 4
    assert all(torch.equal(published.tensors[name], weight) for name, weight in weights(straight).items())
    versions = [
        {version for rollout in straight.rollouts(step)[0] for version in rollout.segments[0].versions} - {-1}
        for step in (1, 2, 3, 4)
    ]
    assert versions == [{0}, {0}, {1}, {2}], "each batch by the weights of the step before the last"
    rows, _ = straight.metrics()
    assert [row["staleness"] for row in rows] == [0.0, 1.0, 1.0, 1.0]

    def stop(row: dict[str, Any]) -> None:
        if row["step"] == 2:
            raise Stopped

    with pytest.raises(Stopped):
        run(given, tmp_path / "stopped", stop, **LOCKSTEP)
    again = run(given, tmp_path / "stopped", **LOCKSTEP)
    assert are_same(again, straight)
    assert not list((again.path / "slots").glob("*.*.*")), "all of them are in steps"


def test_a_step_that_was_given_its_rollouts_gets_them_again(given: dict[str, str], tmp_path: Path) -> None:
    """Also where it is trained anew, because its checkpoint is older: nothing is sampled a second time."""
    settings = {"train.steps": "3", "checkpoint.every": "3"}
    straight = run(given, tmp_path / "straight", **settings)
    copy = RunFolder(tmp_path / "copy")
    shutil.copytree(straight.path, copy.path)
    shutil.rmtree(copy.path / "ckpt")
    (copy.path / "rollouts" / "step_00003.jsonl").unlink()
    before = Counter(line["state"] for line in read_journal(copy.path))
    assert are_same(run(given, copy.path, **settings), straight)
    after = Counter(line["state"] for line in read_journal(copy.path))
    assert after["scored"] - before["scored"] == 2, "those of the step that had no file"


def test_in_the_continuous_mode_every_group_is_trained_once_and_none_too_old(
    given: dict[str, str], tmp_path: Path
) -> None:
    folder = run(given, tmp_path / "run", **CONTINUOUS)
    rollouts = [rollout for step in folder.steps() for rollout in folder.rollouts(step)[0]]
    assert len({rollout.id for rollout in rollouts}) == len(rollouts) == 6 * 2
    rows, _ = folder.metrics()
    assert all(row["staleness/max"] <= 2 and row["staleness/too_old"] == 0 for row in rows)
    assert max(row["staleness/max"] for row in rows) > 0
    assert rows[-1]["rl/mismatch"] >= 0


@pytest.mark.parametrize("mode", ["lockstep", "continuous"])
def test_a_model_that_is_lost_once_is_asked_again(
    given: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    straight = run(given, tmp_path / "straight", **{"engine.kind": mode})
    real, calls = LocalEngine._go_on, Counter[str]()

    def lost_at(*numbers: int) -> Callable[..., Any]:
        def write(*arguments: Any) -> Any:
            calls["all"] += 1
            if calls["all"] in numbers or not numbers:
                raise RuntimeError("the device is gone")
            return real(*arguments)

        return write

    monkeypatch.setattr(LocalEngine, real.__name__, lost_at(1))
    folder = run(given, tmp_path / "run", **{"engine.kind": mode})
    assert [line["why"] for line in read_journal(folder.path) if line["state"] == "died"]
    assert folder.metrics()[0][0]["deaths"] == 1
    if mode == "lockstep":
        assert are_same(folder, straight)
    monkeypatch.setattr(LocalEngine, real.__name__, lost_at())
    sentence = "the device is gone.*; that was the third time between two steps.*; the same command goes on"
    with pytest.raises(ModelLost, match=sentence):
        run(given, tmp_path / "lost", **{"engine.kind": mode})
    died = [line for line in read_journal(tmp_path / "lost") if line["state"] == "died"]
    assert len(died) == reconcile.DEATHS
    monkeypatch.setattr(LocalEngine, real.__name__, real)
    row = run(given, tmp_path / "lost", **{"engine.kind": mode}).metrics()[0][-1]
    assert (row["deaths"], row["restarts"]) == (reconcile.DEATHS, 1), "of the whole run"
    shown = json.loads((tmp_path / "lost" / "slots" / "now.json").read_text())
    assert (shown["restarts of the model"], shown["restarts of the run"]) == (reconcile.DEATHS, 1)


def test_servers_that_are_lost_at_once_count_once_each(
    given: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, servers = Collector.side_by_side, [ModelLost("the first"), ModelLost("the second")]
    struck = iter(servers * 2)  # their rollouts take turns

    async def lost(*arguments: Any, **more: Any) -> list[Rollout]:
        for problem in struck:
            raise problem
        return await real(*arguments, **more)

    monkeypatch.setattr(Collector, "side_by_side", lost)
    folder = run(given, tmp_path / "run", **{"engine.kind": "continuous"})
    died = [line["why"] for line in read_journal(folder.path) if line["state"] == "died"]
    assert died == ["the first", "the second"]


def test_nothing_is_waited_for_without_end_or_word(
    given: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def never(*_: Any) -> list[Rollout]:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(processes, "TELL_S", 0.05)
    monkeypatch.setattr("offbook.rl.collector.Collector.side_by_side", never)
    reason = r"nothing has happened for \d+ s .*waiting for the rollouts of step 1 \(0 of 1 groups are over"
    with pytest.raises(OffbookError, match=reason):
        run(given, tmp_path / "run", **{"loop.deadline_s": "0.2"})
    assert "waiting for the rollouts of step 1" in caplog.text


HANGS = """
import sys, time
from offbook.core import processes
from offbook.cli import main
from offbook.rl import train
processes.TELL_S = 0.2
train.train_step = lambda *_: time.sleep(600)
main()
"""


def test_a_step_that_hangs_ends_the_process_with_its_place(given: dict[str, str], tmp_path: Path) -> None:
    """Python itself would wait for the thread."""
    words = [word for key, value in given.items() for word in (f"--{key}", value)]
    command = [sys.executable, "-c", HANGS, "train", "--out", str(tmp_path / "run"), *words, "--loop.deadline_s", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    sentence = r"offbook: nothing has happened for \d+ s \(loop.deadline_s\), waiting for step 1 to be trained"
    assert re.search(sentence, done.stderr), done.stderr
    assert done.stderr.endswith("; the same command goes on from what is kept\n")


def test_a_long_step_lives_by_its_micro_batches(
    given: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, seen = Trainer._losses, list[int]()

    def slow(trainer: Trainer, *arguments: Any) -> tuple[torch.Tensor, ...]:
        seen.append(trainer.micro_batches)
        time.sleep(1.0)
        return real(trainer, *arguments)

    monkeypatch.setattr(processes, "TELL_S", 0.05)
    monkeypatch.setattr(Trainer, "_losses", slow)
    settings = {"train.group_size": "4", "train.micro_tokens": "1", "train.steps": "1", "loop.deadline_s": "3"}
    run(given, tmp_path / "run", **settings)
    assert seen == [0, 1, 2, 3]


def test_a_checkpoint_that_hangs_ends_the_run(
    given: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    monkeypatch.setattr(processes, "TELL_S", 0.05)
    monkeypatch.setattr("offbook.train.checkpoint.Contents.finish", lambda *_: go_on.wait())
    reason = r"nothing has happened for \d+ s .*waiting for the checkpoint"
    try:
        with pytest.raises(Hung, match=reason):
            run(given, tmp_path / "run", **{"loop.deadline_s": "2"})
    finally:
        go_on.set()


def test_a_store_that_hangs_is_named(given: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, store = threading.Event(), tmp_path / "store"
    monkeypatch.setattr(processes, "TELL_S", 0.05)
    monkeypatch.setattr("offbook.engine.sync.publisher.Publisher._publish", lambda *_: go_on.wait())
    try:
        with pytest.raises(Hung, match=rf"nothing has happened for \d+ s .*waiting for the store {store} to take"):
            run(given, tmp_path / "run", **{"loop.deadline_s": "2", "loop.store": str(store)})
    finally:
        go_on.set()


@pytest.mark.parametrize(
    ("where", "call"),
    [
        ("offbook.train.trainer.Trainer.step", 2),
        ("offbook.rl.train.Run._to_store", 3),
    ],
)
def test_ctrl_c_in_a_step_ends_it_first_and_keeps_it(
    where: str,
    call: int,
    given: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """While it is trained, or while its weights go to the store; and those before it, of which none was kept yet."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a background job
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    calls: list[int] = []
    _, _, name = where.rpartition(".")
    usual = getattr(Trainer if name == "step" else Run, name)

    def interrupted(*arguments: Any, **more: Any) -> Any:
        calls.append(1)
        if len(calls) == call:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.3)
        return usual(*arguments, **more)

    monkeypatch.setattr(where, interrupted)
    more = {"train.steps": "4", "checkpoint.every": "10", "loop.store": str(tmp_path / "store")}
    with pytest.raises(KeyboardInterrupt):
        run(given, tmp_path / "run", **more)
    folder = RunFolder(tmp_path / "run")
    assert [row["step"] for row in folder.metrics()[0]] == [1, 2]
    assert max(folder.checkpoints()) == 2


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"loop.max_staleness": "2"}, "loop.max_staleness above 1 needs --engine.kind continuous"),
        ({"loop.max_staleness": "1", "engine.kind": "vllm", "engine.vllm.sleep": "true"}, "--engine.vllm.sleep false"),
        ({"tasks.harden": "0.8"}, "tasks.harden needs --tasks.order select"),
    ],
)
def test_what_cannot_be_beside_training_is_refused(settings: dict[str, str], sentence: str) -> None:
    with pytest.raises(OffbookError, match=sentence):
        load_config(["standard"], settings)


FLAT = """
def flat(task, rollout):
    return float(rollout.id.endswith("/1")) if task.id.endswith("-4") else 0.5
"""


def test_a_group_without_signal_is_replaced_if_asked_and_not_for_ever(
    given: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of seven tasks teaches something. Two of a batch are replaced at most, and none comes twice. What they showed
    is known to a run that goes on."""
    orders = list[Selected]()

    class Recorded(Selected):
        def __init__(self, *arguments: Any, **named: Any):
            super().__init__(*arguments, **named)
            orders.append(self)

    monkeypatch.setattr("offbook.rl.train.Selected", Recorded)
    (first,) = (Path(given["tasks.source"]) / "train").iterdir()
    for number in range(6):
        other = first.with_name(f"{first.name}-{number}")
        shutil.copytree(first, other)
        toml = other / "task.toml"
        toml.write_text(toml.read_text().replace(first.name, other.name))
    (tmp_path / "flat.py").write_text(FLAT)
    rewards = {"rewards.files": f'["{tmp_path / "flat.py"}"]', "rewards.weights.flat": "1"}
    given = {key: value for key, value in given.items() if not key.startswith("rewards.")} | rewards
    asked = {"tasks.order": "select", "engine.kind": "continuous", "loop.refill": "2"}

    def stop(row: dict[str, Any]) -> None:
        if row["step"] == 1:
            raise Stopped

    with pytest.raises(Stopped):
        run(given, tmp_path / "run", stop, **asked)
    folder = run(given, tmp_path / "run", **asked)
    shown = [{id: record.rollouts for id, record in order._history.records.items()} for order in orders]
    assert {*shown[0].values(), *shown[1].values()} == {2}
    assert shown[0].items() <= shown[1].items()
    drawn, taught = list[str](), list[set[float]]()
    for step in folder.steps():
        rollouts, _ = folder.rollouts(step)
        filtered = [line for line in read_journal(folder.path) if line["state"] == "refilled" and line["batch"] == step]
        drawn += [*(line["filtered"] for line in filtered), rollouts[0].task]
        taught.append({rollout.reward.total for rollout in rollouts})
        assert len(filtered) == 2 or (len(filtered) < 2 and len(taught[-1]) == 2), "until one teaches something"
        assert folder.metrics()[0][step - 1]["groups_filtered"] == len(filtered)
    assert len(drawn) == len({*drawn}) >= 4
    for settings in ({**asked, "tasks.order": "shuffle"}, {**asked, "engine.kind": "lockstep"}):
        with pytest.raises(OffbookError, match=r"loop\.refill"):
            load_config(["standard"], settings)


# --- beside training


def test_a_run_goes_on_when_all_its_tasks_were_drawn(
    given: dict[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It has one task, which comes in both steps. That it cannot be made harder is written down."""
    select = {"tasks.order": "select", "tasks.harden": "0.8"}
    folder = run(given, tmp_path / "run", **select)
    assert folder.metrics()[0][-1]["step"] == 2
    (id,) = (path.name for path in (Path(given["tasks.source"]) / "train").iterdir())
    with open(folder.path / "slots" / "journal.jsonl", "a") as journal:
        journal.write(json.dumps({"at": 1.0, "state": "easy", "task": id, "solved": 1.0}) + "\n")
    run(given, folder.path, **select, **{"train.steps": "3"})
    (tried,) = [line for line in read_journal(folder.path) if line["state"] == "harder"]
    assert tried["made"] == []
    assert "was not made from a repository" in tried["why"]
