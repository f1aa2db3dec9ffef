"""What lies over ranks is published and kept tensor by tensor: no rank ever has all of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import PeftModel
from ranks import on_ranks, whole
from safetensors import safe_open
from test_lora import logits
from test_parallel import KINDS, STEADY, assert_close, make, ranks_of, samples_of
from torch import Tensor
from transformers import AutoModelForCausalLM

from offbook.engine.sync import FolderStore, Publisher, Reader
from offbook.rl.models import load_weights
from offbook.rl.ranks import go_on
from offbook.train import checkpoint as writing
from offbook.train.checkpoint import begin, load_training_state
from offbook.train.optim.units import local
from offbook.train.parallel.spmd import SpmdTrainer
from offbook.train.trainer import Trainer
from offbook.types import OffbookError


def bytes_of(tensors: dict[str, Tensor]) -> dict[str, int]:
    return {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}


def published(kind: str, layout: tuple[int, ...]) -> Any:
    trainer = Trainer(make(kind), STEADY, KINDS["live"], ranks_of(layout))
    weights = trainer.publish(1)
    return {name: weights.tensors[name] for name in weights.tensors}, weights.firsts()


@pytest.mark.parametrize(
    ("kind", "layout"),
    [("dense", (1, 4)), ("dense", (2, 2)), ("lora", (1, 2)), ("moe", (2, 4, 2, 2, 2)), ("moe lora", (1, 4, 1, 2, 2))],
)
def test_weights_are_published_one_tensor_after_the_other(kind: str, layout: tuple[int, ...]) -> None:
    alone = Trainer(make(kind), STEADY, KINDS["live"]).publish(1)
    (first, names), *others = on_ranks(layout[0] * layout[1], published, kind, layout)
    assert first.keys() == alone.tensors.keys()
    assert all(torch.equal(first[name], tensor) for name, tensor in alone.tensors.items())
    assert names == alone.firsts()
    for tensors, _ in others:
        assert set(tensors.values()) == {None}


def moved(trainer: Trainer, version: int) -> None:
    """Another version of the weights: every third tensor is changed."""
    for number, parameter in enumerate(trainer.model.parameters()):
        if number % 3 == version % 3:
            local(parameter.data).mul_(1.5)


def versions_published(kind: str, folder: Path, ranks: dict[str, int]) -> None:
    orders = dist.new_group(backend="gloo")
    settings = STEADY.model_copy(update={"ranks": ranks})
    trainer = SpmdTrainer(make(kind), settings, KINDS["live"], orders)
    if dist.get_rank():
        trainer.follow()
        return
    publisher = Publisher(FolderStore(folder), shard_bytes=2000, anchor_every=3)
    for version in range(5):
        trainer.together(moved, version)
        publisher.publish(trainer.publish(version))
    publisher.close()
    dist.broadcast_object_list([None], 0, orders)


@pytest.mark.parametrize(("kind", "experts"), [("dense", 1), ("moe", 2)])
def test_ranks_publish_to_a_store(kind: str, experts: int, tmp_path: Path) -> None:
    alone = Trainer(make(kind), STEADY, KINDS["live"])
    on_ranks(4, versions_published, kind, tmp_path, {"experts": experts})
    late = Reader(FolderStore(tmp_path)).poll()
    for version in range(5):
        moved(alone, version)
    wanted = alone.publish(4).tensors
    assert late is not None
    assert late.version == 4
    assert late.tensors.keys() == wanted.keys()
    assert all(torch.equal(late.tensors[name], tensor) for name, tensor in wanted.items())


def two_steps_kept(kind: str, layout: tuple[int, ...], samples: Any, folder: Path) -> Any:
    """And a third while they are written. Bytes that this rank has on the host."""
    trainer = Trainer(make(kind), STEADY, KINDS["ema"], ranks_of(layout))
    for _ in range(2):
        trainer.step(samples[dist.get_rank()])
    kept = begin(trainer, folder, 2, folder.parent, 1)
    trainer.step(samples[dist.get_rank()])
    kept.result()
    dist.barrier()
    return bytes_of(trainer.snapshot)


def two_steps_more(kind: str, layout: tuple[int, ...], samples: Any, folder: Path) -> Any:
    trainer = Trainer(make(kind), STEADY, KINDS["ema"], ranks_of(layout))
    load_weights(trainer.model, folder, trainer.base)
    load_training_state(trainer, folder)
    for _ in range(2):
        trainer.step(samples[dist.get_rank()])
    (own,) = trainer.own_weights
    return whole(trainer.model.state_dict()), whole(own.decoder.model.state_dict())


def names_in(files: list[Path]) -> list[str]:
    names: list[str] = []
    for file in files:
        with safe_open(file, "pt") as opened:
            names += opened.keys()
    return names


@pytest.mark.parametrize(
    ("kind", "layout", "other"),
    [
        ("moe", (1, 4, 1, 2, 2), (2, 1, 1, 1, 2)),
        ("dense", (2, 2), (1, 2)),
        ("lora", (1, 4), (2, 1)),
        ("moe lora", (1, 4, 1, 2, 2), (2, 1, 1, 1, 2)),
        ("moe lora", (2, 2, 1, 1, 4), (1, 2)),
    ],
)
def test_each_rank_keeps_its_share_and_another_number_of_ranks_goes_on(
    kind: str, layout: tuple[int, ...], other: tuple[int, ...], tmp_path: Path
) -> None:
    """From four ranks to two with another layout, and to one process."""
    samples, folder = samples_of(4), tmp_path / "step_00002"
    together = [sample for mine in samples for sample in mine]
    straight = Trainer(make(kind), STEADY, KINDS["ema"])
    for _ in range(4):
        straight.step(together)
    told = on_ranks(4, two_steps_kept, kind, layout, samples, folder)
    assert (folder / "DONE").exists()
    total = sum(sum(sizes.values()) for sizes in told)
    for sizes in told:
        assert sum(sizes.values()) < total / 2 or "lora" in kind, "a rank had too much of it"  # an adapter is one file
    for stem, files in (("training/optimizer", 4), ("training/teacher.live", 4), ("model", 0 if "lora" in kind else 4)):
        found = sorted(folder.glob(f"{stem}*.safetensors"))
        assert len(found) == files, stem
        assert len(names_in(found)) == len({*names_in(found)}), "a tensor is in one file"
    assert not [file for file in folder.rglob("*") if file.suffix not in (".json", ".safetensors", "")]
    assert not [file for file in folder.iterdir() if file.is_dir() and file.name != "training"]

    (own,) = straight.own_weights
    halves = [samples[0] + samples[1], samples[2]]
    for weights, teacher in on_ranks(2, two_steps_more, kind, other, halves, folder):
        assert_close(weights, straight.model.state_dict())
        assert_close(teacher, own.decoder.model.state_dict())
    alone = Trainer(make(kind), STEADY, KINDS["ema"])
    load_weights(alone.model, folder)
    load_training_state(alone, folder)
    if "lora" not in kind:
        exported = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
        assert_close(exported.state_dict(), alone.model.state_dict(), 1e-7)
    else:
        theirs = PeftModel.from_pretrained(make(kind.removesuffix("lora").strip()), folder).eval()
        assert torch.allclose(logits(theirs), logits(alone.model), atol=1e-5)
    for _ in range(2):
        alone.step(together)
    assert_close(alone.model.state_dict(), straight.model.state_dict())


def kept_where_one_rank_cannot_write(folder: Path) -> str:
    trainer = Trainer(make("dense"), STEADY, KINDS["live"], ranks_of((1, 2)))
    place = folder if dist.get_rank() == 0 else Path("/proc/nothing")
    problem = begin(trainer, place, 1, folder.parent, 1).exception()
    return str(problem or "")


def test_a_rank_that_cannot_write_is_told_of_by_the_first(tmp_path: Path) -> None:
    first, second = on_ranks(2, kept_where_one_rank_cannot_write, tmp_path / "step_00001")
    assert "/proc/nothing" in first
    assert not second
    assert not (tmp_path / "step_00001" / "DONE").exists()


def kept_where_one_rank_sees_another_folder(folder: Path) -> str:
    trainer = Trainer(make("dense"), STEADY, KINDS["live"], ranks_of((1, 2)))
    writing.SEEN_S = 0.0
    place = folder if dist.get_rank() == 0 else folder.parent / "of_another_host" / folder.name
    problem = begin(trainer, place, 1, folder.parent, 1).exception()
    return str(problem or "")


def test_a_checkpoint_is_not_done_where_a_rank_writes_to_another_folder(tmp_path: Path) -> None:
    older = tmp_path / "step_00000"
    older.mkdir()
    (older / "DONE").touch()
    first, _ = on_ranks(2, kept_where_one_rank_sees_another_folder, tmp_path / "step_00001")
    assert "rank 1 wrote model-00002-of-00002.safetensors" in first
    assert "all ranks" in first
    assert not (tmp_path / "step_00001" / "DONE").exists()
    assert (older / "DONE").exists()


@pytest.mark.parametrize("lost", ["training/optimizer-00002-of-00002", "training/teacher.live-00001-of-00002", "model"])
def test_a_checkpoint_that_lacks_tensors_is_refused(lost: str, tmp_path: Path) -> None:
    folder = tmp_path / "step_00002"
    on_ranks(2, two_steps_kept, "dense", (1, 2), samples_of(2), folder)
    if lost == "model":  # as it was indexed where another host's part was not seen
        part, index = folder / "model-00002-of-00002.safetensors", folder / "model.safetensors.index.json"
        told = json.loads(index.read_text())
        told["weight_map"] = {name: file for name, file in told["weight_map"].items() if file != part.name}
        index.write_text(json.dumps(told))
        part.unlink()
    else:
        (folder / f"{lost}.safetensors").unlink()
    alone = Trainer(make("dense"), STEADY, KINDS["ema"])
    with pytest.raises(OffbookError, match="lacks"):
        go_on(alone, folder)
