"""Checkpoints: a folder that `AutoModelForCausalLM.from_pretrained` and vLLM load. Of a model with an adapter that
alone, in PEFT's format. What only training needs is in a folder in it: vLLM loads every .safetensors that lies beside
the weights.

DONE is written last; a folder without it is an unfinished write and counts for nothing. No pickle anywhere.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from offbook.draft import FOLDER
from offbook.train.draft import DraftTrainer
from offbook.train.lora import adapter_of, adapter_tensors, save_adapter
from offbook.train.parallel.dense import put
from offbook.train.trainer import Trainer
from offbook.types import OffbookError

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",  # which tokens end a message
)
TRAINING = "training"  # optimizer and slow teachers; beside the weights in checkpoints from before
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

    @classmethod
    def of(cls, trainer: Trainer, step: int, tokenizer_from: Path) -> Contents:
        """The trainer's own tensors: they change with its next step. All ranks have to call it."""
        model, optimizer = trainer.model, trainer.whole(_optimizer_tensors(trainer))
        tensors = {f"{TRAINING}/optimizer.safetensors": optimizer}
        for name, own in trainer.own_weights().items():
            if own.kind.moves:
                tensors[f"{TRAINING}/teacher.{name}.safetensors"] = trainer.whole(_trained(own.decoder.model, trainer))
        texts = {}
        if trainer.draft is not None:
            tensors[f"{FOLDER}/model.safetensors"] = trainer.draft.head.tensors()
            tensors[f"{TRAINING}/draft.optimizer.safetensors"] = _optimizer_tensors(trainer.draft)
            texts[f"{FOLDER}/config.json"] = json.dumps(trainer.draft.head.described(model), indent=1) + "\n"
        state = {"step": step, "updates": trainer.steps, "policy_norm": trainer.policy_norm}
        return cls(
            model=model,
            weights=trainer.whole(model.state_dict() if adapter_of(model) is None else adapter_tensors(model)),
            tensors=tensors,
            texts={**texts, "state.json": json.dumps(state) + "\n"},
            tokenizer_from=tokenizer_from,
        )

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
                if name not in buffers:
                    buffers[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
                taken[place] = buffers[name].copy_(tensor.detach(), non_blocking=True)
            copies[name] = taken[place]
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        files = {file: {name: copies[f"{file}/{name}"] for name in tensors} for file, tensors in self.tensors.items()}
        return replace(self, weights={name: copies[name] for name in self.weights}, tensors=files)

    def write(self, path: Path) -> None:
        shutil.rmtree(path, ignore_errors=True)
        try:
            if adapter_of(self.model) is None:
                self.model.save_pretrained(path, state_dict=dict(self.weights))
            else:
                save_adapter(self.model, self.weights, path)
            copy_tokenizer(self.tokenizer_from, path)
            for file, tensors in self.tensors.items():
                (path / file).parent.mkdir(exist_ok=True)
                save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / file)
        except SafetensorError as error:  # how that library says that the disk is full
            kept = max(finished_steps(path.parent), default=0)
            last = f"the last finished one, of step {kept}, is kept" if kept else "there is no finished one"
            raise OffbookError(f"cannot write the checkpoint {path}: {error}; {last}") from None
        for file, text in self.texts.items():
            (path / file).write_text(text)
        (path / "DONE").touch()


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
    kept = path / TRAINING if (path / TRAINING).is_dir() else path
    _load_optimizer(trainer, kept / "optimizer.safetensors")
    if trainer.draft is not None:
        if not (path / FOLDER).is_dir():
            raise OffbookError(f"{path} has no draft head, so it cannot be trained along; leave mtp.along false")
        trainer.draft.head.load_state_dict(load_file(path / FOLDER / "model.safetensors"))
        _load_optimizer(trainer.draft, kept / "draft.optimizer.safetensors")
    state = json.loads((path / "state.json").read_text())
    trainer.steps = state.get("updates", state["step"])  # fewer where steps were skipped
    if trainer.draft is not None:
        trainer.draft.steps = trainer.steps
    trainer.policy_norm = state.get("policy_norm", 0.0)
    for name, weights in trainer.own_weights().items():
        weights.steps = trainer.steps
        if weights.kind.moves:
            named = kept / f"teacher.{name}.safetensors"
            slow = load_file(named if named.is_file() else kept / "teacher.safetensors")  # from before they had names
            with torch.no_grad():
                for key, parameter in weights.decoder.model.named_parameters():
                    if key in trainer.masters.named:
                        put(parameter, slow[key])


def _trained(teacher: PreTrainedModel, trainer: Trainer) -> dict[str, Tensor]:
    """The rest is the student's too."""
    own = dict(teacher.named_parameters())
    return {name: own[name] for name in trainer.masters.named}


def _load_optimizer(trainer: Trainer | DraftTrainer, path: Path) -> None:
    masters = trainer.masters.named
    for key, tensor in load_file(path).items():
        name, state = key.rsplit("/", 1)
        if state == MASTER:
            put(masters[name], tensor)
        elif tensor.shape == masters[name].shape:
            trainer.optimizer.state[masters[name]][state] = torch.zeros_like(masters[name], dtype=tensor.dtype).detach()
            put(trainer.optimizer.state[masters[name]][state], tensor)
        else:
            trainer.optimizer.state[masters[name]][state] = tensor.to(masters[name].device)


def _optimizer_tensors(trainer: Trainer | DraftTrainer) -> dict[str, Tensor]:
    masters = trainer.masters
    tensors = {f"{name}/{MASTER}": masters.named[name].detach() for name in masters.copies}
    for name, master in masters.named.items():
        for key, value in trainer.optimizer.state.get(master, {}).items():
            tensors[f"{name}/{key}"] = value
    return tensors
