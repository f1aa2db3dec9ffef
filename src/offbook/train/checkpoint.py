"""Checkpoints: a folder that `AutoModelForCausalLM.from_pretrained` loads, the optimizer beside the weights. Of a model
with an adapter that alone, in PEFT's format.

DONE is written last; a folder without it is an unfinished write and counts for nothing. No pickle anywhere.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from offbook.train.lora import adapter_of, save_adapter
from offbook.train.trainer import Trainer
from offbook.types import OffbookError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
MASTER = "master"  # a float32 weight, beside the optimizer's state of it


def checkpoint_path(root: Path, step: int) -> Path:
    return root / f"step_{step:05d}"


def finished_steps(root: Path) -> list[int]:
    return sorted(int(done.parent.name.removeprefix("step_")) for done in root.glob("step_*/DONE"))


def save_checkpoint(trainer: Trainer, root: Path, step: int, tokenizer_from: Path, keep: int) -> Path:
    path = checkpoint_path(root, step)
    shutil.rmtree(path, ignore_errors=True)
    try:
        _write(trainer, path, step, tokenizer_from)
    except SafetensorError as error:  # how that library says that the disk is full
        raise OffbookError(f"cannot write the checkpoint {path}: {error}; the last finished one is kept") from None
    for old in finished_steps(root)[:-keep]:
        (checkpoint_path(root, old) / "DONE").unlink()  # first, so that a half-removed folder is not taken for whole
        shutil.rmtree(checkpoint_path(root, old))
    return path


def _write(trainer: Trainer, path: Path, step: int, tokenizer_from: Path) -> None:
    if adapter_of(trainer.model) is None:
        trainer.model.save_pretrained(path)
    else:
        save_adapter(trainer.model, path)
    copy_tokenizer(tokenizer_from, path)
    save_file(_optimizer_tensors(trainer), path / "optimizer.safetensors")
    for name, weights in trainer.own_weights().items():
        if weights.kind.moves:
            own = dict(weights.decoder.model.named_parameters())
            trained = {key: own[key] for key in trainer.masters.named}  # the rest is the student's too
            save_file(trained, path / f"teacher.{name}.safetensors")
    (path / "state.json").write_text(json.dumps({"step": step, "updates": trainer.steps}) + "\n")
    (path / "DONE").touch()


def copy_tokenizer(source: Path, target: Path) -> None:
    for name in TOKENIZER_FILES:
        if (source / name).exists():
            shutil.copyfile(source / name, target / name)


def load_training_state(trainer: Trainer, path: Path) -> None:
    """Optimizer and teacher; the weights came with the model, and a frozen teacher is the run's starting model."""
    tensors = load_file(path / "optimizer.safetensors")
    masters = trainer.masters.named
    for key, tensor in tensors.items():
        name, state = key.rsplit("/", 1)
        if state == MASTER:
            masters[name].data.copy_(tensor)
        else:
            trainer.optimizer.state[masters[name]][state] = tensor.to(masters[name].device)
    state = json.loads((path / "state.json").read_text())
    trainer.steps = state.get("updates", state["step"])  # fewer where steps were skipped
    for name, weights in trainer.own_weights().items():
        weights.steps = trainer.steps
        if weights.kind.moves:
            named = path / f"teacher.{name}.safetensors"
            slow = load_file(named if named.is_file() else path / "teacher.safetensors")  # from before they had names
            with torch.no_grad():
                for key, parameter in weights.decoder.model.named_parameters():
                    if key in trainer.masters.named:
                        parameter.copy_(slow[key])


def _optimizer_tensors(trainer: Trainer) -> dict[str, Tensor]:
    masters = trainer.masters
    tensors = {f"{name}/{MASTER}": masters.named[name].detach() for name in masters.copies}
    for name, master in masters.named.items():
        for key, value in trainer.optimizer.state.get(master, {}).items():
            tensors[f"{name}/{key}"] = value.contiguous()
    return tensors
