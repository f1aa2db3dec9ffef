"""A run on several ranks is the run of one process, and goes on at another number of them."""

from __future__ import annotations

import os
import re
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from test_loop import SMALL, weights
from test_loop import uninterrupted as uninterrupted
from test_parallel import KINDS, STEADY, make
from test_pretrain import config_for as pretrain_config
from test_pretrain import repository
from test_sft import chat_line, settings, written
from test_sft import tiny as tiny
from torch.distributed import get_rank

from offbook.core.config import load_config, recipe_for
from offbook.core.runfolder import RunFolder, is_adapter, latest_checkpoint
from offbook.engine.sync import FolderStore, Reader
from offbook.rl.ranks import joined
from offbook.rl.train import train
from offbook.stages.pretrain import pretrain
from offbook.stages.sft import sft
from offbook.train.parallel import spmd as led
from offbook.train.parallel.spmd import SpmdTrainer
from offbook.types import OffbookError

NOBODY, ALL = -1, -2
NOT_EQUAL = ("train_s", "rollout_s", "probe_s", "grades", "checkpoint_wait_s", "padding_share")  # how, and not what


def trained(cache: Path, model: Path, out: Path, steps: int, **more: str) -> int:
    os.environ["OFFBOOK_CACHE"] = str(cache)
    given = dict(zip((word.removeprefix("--") for word in SMALL[::2]), SMALL[1::2], strict=True))
    given |= {"model": str(model), "out": str(out), "train.steps": str(steps), "checkpoint.keep": "9", "threads": "1"}
    train(load_config([recipe_for(str(model))], given | {key.replace("__", "."): value for key, value in more.items()}))
    return get_rank()


def sampled(run: Path, step: int) -> list[list[list[int]]]:
    return [[segment.ids for segment in rollout.segments] for rollout in RunFolder(run).rollouts(step)[0]]


def assert_alike(run: Path, other: Path, steps: int, at_least: int) -> None:
    """As long as both sampled the same: weights that differ in their last bits let a token fall otherwise one day, and
    on which day depends on the processor. `at_least` so many steps are before it."""
    rows, expected = RunFolder(run).metrics()[0], RunFolder(other).metrics()[0]
    assert [row["step"] for row in rows] == [*range(1, steps + 1)]
    while sampled(run, steps) != sampled(other, steps):
        steps -= 1
    assert steps >= at_least
    for row, wanted in zip(rows[:steps], expected, strict=False):
        for key in ("solved", "train_tokens", "rl/loss", "gradient_norm", "hinted_targets", "hint/kl"):
            assert row[key] == pytest.approx(wanted[key], rel=1e-3, abs=1e-5), (row["step"], key)
        assert {*row} ^ {*wanted} <= {"ranks/cost_spread", *NOT_EQUAL}
    for name, tensor in weights(other, steps).items():
        assert float((weights(run, steps)[name] - tensor).norm() / tensor.norm()) < 1e-5, name


def test_a_run_on_ranks_is_that_of_one_process(cache: Path, model: Path, uninterrupted: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    assert on_ranks(2, trained_with, cache, model, tmp_path / "two", 2, {"loop__store": str(store)}) == [0, 1]
    assert_alike(tmp_path / "two", uninterrupted, 2, at_least=2)
    assert sorted(file.name for file in (tmp_path / "two" / "ckpt" / "step_00002").glob("*.safetensors")) == [
        "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    ]  # fmt: skip
    published = Reader(FolderStore(store)).poll()
    assert published is not None
    assert published.version == 2
    assert all(tensor.equal(published.tensors[name]) for name, tensor in weights(tmp_path / "two", 2).items())
    feedback = [RunFolder(run).feedback(1)[0] for run in (tmp_path / "two", uninterrupted)]
    ours, theirs = ([len(item.teacher) for item in items] for items in feedback)
    assert ours == theirs, "what hints did is gathered from whoever had the sample"


def test_it_goes_on_at_another_number_of_ranks(cache: Path, model: Path, uninterrupted: Path, tmp_path: Path) -> None:
    out = tmp_path / "grows"
    for steps, ranks in ((1, 1), (2, 2), (3, 4), (4, 1)):
        more = {"train__ranks__replicate": "2"} if ranks == 4 else {}
        on_ranks(ranks, trained_with, cache, model, out, steps, more)
    assert_alike(out, uninterrupted, 4, at_least=3)


def trained_with(cache: Path, model: Path, out: Path, steps: int, more: dict[str, str]) -> int:
    return trained(cache, model, out, steps, **more)


def imitated(tiny: Path, data: Path, out: Path) -> list[dict[str, float]]:
    more = {"learning_rate": 1e-3, "batch_tokens": 400, "validation_share": 0.3, "epochs": 2}
    sft(settings(tiny, data, out, **more))
    rows, _ = RunFolder(out).metrics()
    names = ("step", "ce/loss", "gradient_norm", "validation/loss", "train_tokens")
    return [{name: row[name] for name in names if name in row} for row in rows]


def test_imitation_on_ranks_is_that_of_one_process_and_goes_on_there(tiny: Path, tmp_path: Path) -> None:
    data = written(tmp_path / "a.jsonl", [chat_line(n) for n in range(8)])
    wanted = imitated(tiny, data, tmp_path / "one")
    assert len(wanted) > 2
    assert any("validation/loss" in row for row in wanted)
    rows, _ = on_ranks(2, imitated, tiny, data, tmp_path / "two")
    for ours, theirs in zip(rows, wanted, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3)
    rewound = tmp_path / "two" / "ckpt" / f"step_{len(wanted):05d}"
    shutil.rmtree(rewound)
    rows, _ = on_ranks(2, imitated, tiny, data, tmp_path / "two")
    assert rows[-1] == pytest.approx(wanted[-1], rel=1e-3)
    assert (rewound / "DONE").exists()


def test_an_adapter_is_trained_and_kept_by_ranks(cache: Path, model: Path, tmp_path: Path) -> None:
    out, more = tmp_path / "adapter", {"train__lora__rank": "2"}
    for steps, ranks in ((1, 2), (2, 2), (3, 1)):
        on_ranks(ranks, trained_with, cache, model, out, steps, more)
    assert [row["step"] for row in RunFolder(out).metrics()[0]] == [1, 2, 3]
    assert is_adapter(latest_checkpoint(RunFolder(out)))


def refused_run(cache: Path, model: Path, out: Path, more: dict[str, str]) -> str:
    """What the first rank says; the other is dismissed."""
    try:
        trained(cache, model, out, 1, **more)
    except OffbookError as problem:
        return str(problem)
    return "fine"


def test_ranks_that_cannot_be_are_refused_before_anything_is_made(cache: Path, model: Path, tmp_path: Path) -> None:
    first, second = on_ranks(2, refused_run, cache, model, tmp_path / "run", {"train__ranks__experts": "3"})
    assert re.match("train.ranks.experts is 3", first)
    assert second == "fine"
    assert not (tmp_path / "run").exists()


def failing(trainer: SpmdTrainer, rank: int) -> str:
    if rank in (dist.get_rank(), ALL):
        raise ValueError("this disk gives rubbish")
    return "fine"


def led_where_one_fails(rank: int) -> list[str]:
    orders = dist.new_group(backend="gloo")
    trainer, told = SpmdTrainer(make("dense"), STEADY, KINDS["live"], orders), list[str]()
    if dist.get_rank():
        trainer.follow()
        return told
    for failed in (NOBODY, rank, NOBODY):
        try:
            told.append(trainer.together(failing, failed))
        except (OffbookError, ValueError) as problem:
            told.append(f"{type(problem).__name__}: {problem}")
    dist.broadcast_object_list([None], 0, orders)
    return told


def test_a_rank_that_fails_alone_ends_the_run() -> None:
    parted = (
        "RanksDiverged: rank 1 failed alone (ValueError: this disk gives rubbish), so ranks no longer hold the same"
    )
    first, _ = on_ranks(2, led_where_one_fails, 1)
    assert first[0] == "fine"
    assert first[1].startswith(parted)
    assert first[2] == first[1], "nothing is done together any more"
    first, _ = on_ranks(2, led_where_one_fails, 0)
    assert first[1].startswith("RanksDiverged: rank 0 failed alone (ValueError")
    assert on_ranks(2, led_where_one_fails, ALL)[0] == ["fine", "ValueError: this disk gives rubbish", "fine"]


def hanging(trainer: SpmdTrainer, rank: int, kind: type[Exception]) -> None:
    if rank == dist.get_rank():
        raise kind("this disk gives rubbish")
    dist.all_reduce(torch.zeros(1))


def led_where_others_wait(rank: int, kind: type[Exception]) -> None:
    led.ANSWER_S = 1.0
    with joined() as orders:
        trainer = SpmdTrainer(make("dense"), STEADY, KINDS["live"], orders)
        trainer.follow() if dist.get_rank() else trainer.together(hanging, rank, kind)


@pytest.mark.parametrize(("rank", "kind"), [(1, ValueError), (2, MemoryError), (0, ValueError), (0, RuntimeError)])
def test_a_rank_that_fails_where_others_wait_for_it_ends_all_within_seconds(rank: int, kind: type[Exception]) -> None:
    """At the end of the group's 20 seconds it would be later."""
    with pytest.raises(AssertionError) as failed:
        on_ranks(3, led_where_others_wait, rank, kind)
    assert "this disk gives rubbish" in str(failed.value)
    assert "RankLost: another rank has ended, and its own output says why" in str(failed.value)


def pretrained(tiny: Path, out: Path, data: list[Path], stop: int = 0) -> int:
    def on_step(row: dict[str, Any]) -> None:
        if row["step"] == stop:
            raise OffbookError("stopped")

    with pytest.raises(OffbookError, match="stopped") if stop and get_rank() == 0 else nullcontext():
        pretrain(pretrain_config(tiny, out, data, batch_tokens=300), on_step=on_step)
    return get_rank()


def test_stages_go_on_at_another_number_of_ranks(tiny: Path, tmp_path: Path) -> None:
    """What is learned at which step does not depend on them, nor does the loss on what is not learned."""
    data = [repository(tmp_path, f"r{number}", first=10 * number) for number in range(4)]
    assert on_ranks(1, pretrained, tiny, tmp_path / "one", data) == [0]
    for ranks, stop in ((2, 2), (1, 3), (2, 0)):
        assert on_ranks(ranks, pretrained, tiny, tmp_path / "many", data, stop) == [*range(ranks)]
    rows, expected = (RunFolder(tmp_path / name).metrics()[0] for name in ("many", "one"))
    assert len(rows) == len(expected) > 3
    for row, wanted in zip(rows, expected, strict=True):
        for key in ("train_tokens", "windows", "ce/loss"):
            assert row[key] == pytest.approx(wanted[key], rel=1e-4), (row["step"], key)
    assert rows[-1]["validation/loss"] == pytest.approx(expected[-1]["validation/loss"], rel=1e-4)
    for name, tensor in weights(tmp_path / "one", len(rows)).items():
        assert float((weights(tmp_path / "many", len(rows))[name] - tensor).norm() / tensor.norm()) < 1e-4, name
