"""Checkpoints: a folder that `AutoModelForCausalLM.from_pretrained` and vLLM load. Of a model with an adapter that
alone, in PEFT's format. What only training needs is in a folder in it: vLLM loads every .safetensors that lies beside
the weights. Of a model that lies over ranks each writes some of the tensors, whole, to files of its own, and a run goes
on from them on any number of ranks, each reading its own rows.

DONE is written last; a folder without it is an unfinished write and counts for nothing. No pickle anywhere.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from offbook.core.adapters import adapter_tensors
from offbook.train.lora import adapter_of, save_adapter
from offbook.train.parallel.dense import put
from offbook.train.parallel.gather import assign_holders, gathered
from offbook.train.trainer import Trainer, first_names
from offbook.types import OffbookError

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",  # which tokens end a message
)
TRAINING = "training"  # optimizer and slow teachers
ANOTHER = "remove its DONE, and the run goes on from the one before"
MASTER = "master"  # a float32 weight, beside the optimizer's state of it


def checkpoint_path(root: Path, step: int) -> Path:
    return root / f"step_{step:05d}"


def finished_steps(root: Path) -> list[int]:
    return sorted(int(done.parent.name.removeprefix("step_")) for done in root.glob("step_*/DONE"))


@dataclass(frozen=True, slots=True)
class Contents:
    """What a checkpoint holds. How the weights are spelled in files, and what goes beside them, the model says."""

    model: PreTrainedModel
    weights: dict[str, Tensor]
    tensors: dict[str, dict[str, Tensor]]  # by file
    texts: dict[str, str]  # by file
    tokenizer_from: Path
    base: str  # of an adapter
    part: str = ""  # of the weights, where ranks have some each: the end of its file's name

    @classmethod
    def of(cls, trainer: Trainer, step: int, tokenizer_from: Path) -> Contents:
        """The trainer's own tensors: they change with its next step, and a rank may have parts of them only."""
        model = trainer.model
        tensors = {f"{TRAINING}/optimizer": _optimizer_tensors(trainer)}
        for name, own in trainer.own_weights().items():
            if own.kind.moves:
                tensors[f"{TRAINING}/teacher.{name}"] = _trained(own.decoder.model, trainer)
        texts = {}
        state = {"step": step, "updates": trainer.steps, "policy_norm": trainer.policy_norm}
        weights = model.state_dict() if adapter_of(model) is None else adapter_tensors(model)
        texts["state.json"] = json.dumps(state) + "\n"
        return cls(model, weights, tensors, texts, tokenizer_from, trainer.base)

    def all_tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.weights.items()
        for file, tensors in self.tensors.items():
            yield from ((f"{file}/{name}", tensor) for name, tensor in tensors.items())

    def on_host(self, buffers: dict[str, Tensor]) -> Contents:
        """As they are now, in `buffers`, which are made where they are missing. Tied weights stay tied."""
        taken: dict[tuple[int, torch.Size], Tensor] = {}
        copies: dict[str, Tensor] = {}
        for name, tensor in self.all_tensors():
            place = tensor.data_ptr(), tensor.shape
            if place not in taken:
                taken[place] = _copied(tensor, name, buffers)
            copies[name] = taken[place]
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        files = {file: {name: copies[f"{file}/{name}"] for name in tensors} for file, tensors in self.tensors.items()}
        return replace(self, weights={name: copies[name] for name in self.weights}, tensors=files)

    def gathered_share(self, buffers: dict[str, Tensor]) -> Contents:
        """Of tensors that lie over ranks those that this one writes, whole and in `buffers`. All have to call it.

        Tensors of one block stay together, since files may spell several of them as one; an adapter is one file. Of
        tied ones the first is written.
        """
        firsts = first_names(self.model, self.weights)
        blocks = {name: "" if self.base else firsts[name].rpartition(".")[0].rpartition(".")[0] for name in firsts}
        own = {name: tensor for name, tensor in self.weights.items() if firsts[name] == name}
        weights, part = _held(own, blocks, "", buffers)
        files = {}
        for file, tensors in self.tensors.items():
            held, end = _held(tensors, {name: name for name in tensors}, f"{file}/", buffers)
            if held or not (tensors or dist.get_rank()):
                files[file + end] = held
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return replace(self, weights=weights, tensors=files, part=part)

    def write(self, path: Path) -> dict[str, set[str]]:
        """The tensors. Returns their names by file; of weights that are not in parts it says nothing."""
        written: dict[str, set[str]] = {}
        try:
            if self.weights:
                written |= self._write_weights(path)
            for file, tensors in self.tensors.items():
                (path / file).parent.mkdir(parents=True, exist_ok=True)
                save_file({name: one.contiguous() for name, one in tensors.items()}, path / f"{file}.safetensors")
                written[f"{file}.safetensors"] = {*tensors}
        except SafetensorError as error:  # how that library says that the disk is full
            kept = max(finished_steps(path.parent), default=0)
            last = f"the last finished one, of step {kept}, is kept" if kept else "there is no finished one"
            raise OffbookError(f"cannot write the checkpoint {path}: {error}; {last}") from None
        return written

    def _write_weights(self, path: Path) -> dict[str, set[str]]:
        if self.base:
            save_adapter(self.model, self.weights, path, self.base)
        elif not self.part:
            self.model.save_pretrained(path, state_dict=dict(self.weights))
        else:  # save_pretrained writes on rank 0 alone
            path.mkdir(parents=True, exist_ok=True)
            spelled = revert_weight_conversion(self.model, dict(self.weights))
            tensors = {name: tensor.contiguous() for name, tensor in spelled.items()}
            save_file(tensors, path / f"model{self.part}.safetensors", {"format": "pt"})
            return {f"model{self.part}.safetensors": {*tensors}}
        return {}

    def finish(self, path: Path) -> None:
        """When all tensors are written."""
        if parts := sorted(path.glob("model-*.safetensors")):
            with TemporaryDirectory(dir=path) as room:  # what goes beside them; here it would remove the parts
                self.model.save_pretrained(room, state_dict={})
                for beside in Path(room).glob("*.json"):
                    beside.rename(path / beside.name)
            index: dict[str, Any] = {"metadata": {"total_size": 0}, "weight_map": {}}
            for part in parts:
                with safe_open(part, "pt") as opened:
                    index["weight_map"] |= dict.fromkeys(opened.keys(), part.name)
                with part.open("rb") as raw:  # its header's length comes first
                    index["metadata"]["total_size"] += part.stat().st_size - 8 - int.from_bytes(raw.read(8), "little")
            (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
        copy_tokenizer(self.tokenizer_from, path)
        for file, text in self.texts.items():
            (path / file).write_text(text)
        (path / "DONE").touch()


def _held(
    tensors: Mapping[str, Tensor], bundles: Mapping[str, str], prefix: str, buffers: dict[str, Tensor]
) -> tuple[dict[str, Tensor], str]:
    """Those that this rank holds, on the host, and the end of their file's name."""
    holders = assign_holders(tensors, bundles, dist.get_world_size())
    held = {}
    for name, whole in gathered(tensors, holders):
        held[name] = _copied(whole, prefix + name, buffers)
        del whole  # before the next is put together
    members = sorted({*holders.values()})
    if not held or len(members) == 1:
        return held, ""
    return held, f"-{members.index(dist.get_rank()) + 1:05d}-of-{len(members):05d}"


def _copied(tensor: Tensor, name: str, buffers: dict[str, Tensor]) -> Tensor:
    if name not in buffers:
        buffers[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return buffers[name].copy_(tensor.detach(), non_blocking=True)


def remove_old(root: Path, keep: int) -> None:
    for old in finished_steps(root)[:-keep]:
        (checkpoint_path(root, old) / "DONE").unlink()  # first, so that a half-removed folder is not taken for whole
        shutil.rmtree(checkpoint_path(root, old))


def copy_tokenizer(source: Path, target: Path) -> None:
    for name in TOKENIZER_FILES:
        if (source / name).exists():
            shutil.copyfile(source / name, target / name)


def load_training_state(trainer: Trainer, path: Path) -> None:
    """Optimizer and teacher; the weights came with the model, and a frozen teacher is the run's starting model."""
    kept = path / TRAINING
    _load_optimizer(trainer, kept, "optimizer")
    state = json.loads((path / "state.json").read_text())
    trainer.steps = state["updates"]  # fewer than steps where some were skipped
    trainer.policy_norm = state["policy_norm"]
    for name, weights in trainer.own_weights().items():
        weights.steps = trainer.steps
        if weights.kind.moves:
            own = dict(weights.decoder.model.named_parameters())
            missing = {*trainer.masters.named}
            for key, stored in _stored(kept, f"teacher.{name}"):
                put(own[key], stored)
                missing.discard(key)
            if missing:
                raise OffbookError(f"the checkpoint {path} lacks {min(missing)} of the teacher {name}; {ANOTHER}")


def _trained(teacher: PreTrainedModel, trainer: Trainer) -> dict[str, Tensor]:
    """The rest is the student's too."""
    own = dict(teacher.named_parameters())
    return {name: own[name] for name in trainer.masters.named}


def is_there(file: Path, names: set[str]) -> bool:
    """Whether it holds these tensors, whole."""
    try:
        with safe_open(file, "pt") as opened:
            return {*opened.keys()} == names
    except (OSError, SafetensorError):
        return False


def _stored(folder: Path, file: str) -> Iterator[tuple[str, Any]]:
    """What a file has, or the files that ranks wrote in its place: by name, slices that are read where they are cut."""
    parts = sorted(folder.glob(f"{file}-*-of-*.safetensors")) or [folder / f"{file}.safetensors"]
    of = int(parts[0].stem.rpartition("-of-")[2]) if parts[0].stem != file else 1
    if len(parts) != of or not parts[0].is_file():
        there = len(parts) if parts[0].is_file() else 0
        raise OffbookError(f"the checkpoint {folder} lacks some of {file}: {there} of {of} files are there; {ANOTHER}")
    for part in parts:
        with safe_open(part, "pt") as opened:
            yield from ((name, opened.get_slice(name)) for name in opened.keys())  # noqa: SIM118 - it is no dict


def _load_optimizer(trainer: Trainer, folder: Path, file: str) -> None:
    masters = trainer.masters.named
    for key, stored in _stored(folder, file):
        name, state = key.rsplit("/", 1)
        master = masters[name]
        if stored.get_shape() not in ([], list(master.shape)):
            raise OffbookError(f"the checkpoint {folder} has {key} in another shape; start anew from the model in it")
        if state == MASTER:
            put(master, stored)
        elif stored.get_shape():
            trainer.optimizer.state[master][state] = torch.zeros_like(master, dtype=stored[:0].dtype).detach()
            put(trainer.optimizer.state[master][state], stored)
        else:
            trainer.optimizer.state[master][state] = stored[...].to(master.device)


def _optimizer_tensors(trainer: Trainer) -> dict[str, Tensor]:
    masters = trainer.masters
    tensors = {f"{name}/{MASTER}": masters.named[name].detach() for name in masters.copies}
    for name, master in masters.named.items():
        for key, value in trainer.optimizer.state.get(master, {}).items():
            tensors[f"{name}/{key}"] = value
    return tensors
