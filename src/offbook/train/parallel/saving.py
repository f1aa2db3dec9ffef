"""Sharded checkpoints by DCP: every rank writes what it has, and any number of ranks in any layout reads it again.

Masters, optimizer and teachers that move, by name; the weights that the model runs are the masters, rounded. Tensors
are copied to the host, and written while training goes on. DONE is written last, as in checkpoint.py.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader

from offbook.train.trainer import Trainer
from offbook.types import OffbookError

MASTER, STATE, TEACHER = "master", "state", "teacher"


def save(trainer: Trainer, folder: Path, step: int) -> Callable[[], None]:
    """Starts writing. What is returned waits until all ranks are done; only then is the checkpoint whole."""
    tensors = {f"{MASTER}/{name}": master.detach() for name, master in trainer.masters.named.items()}
    for name, master in trainer.masters.named.items():
        for key, value in trainer.optimizer.state.get(master, {}).items():
            tensors[f"{STATE}/{name}/{key}"] = value
    tensors |= _teachers(trainer)
    writing = dcp.async_save(tensors, checkpoint_id=folder, process_group=_group())

    def finish() -> None:
        writing.result()
        dist.barrier()
        if dist.get_rank() == 0:
            state = {"step": step, "updates": trainer.steps, "policy_norm": trainer.policy_norm}
            (folder / "state.json").write_text(json.dumps(state) + "\n")
            (folder / "DONE").touch()
        dist.barrier()

    return finish


def load(trainer: Trainer, folder: Path) -> int:
    """Into a trainer of the same model, alone or on ranks. Returns the step that it was saved after."""
    if not (folder / "DONE").exists():
        raise OffbookError(f"{folder} is a checkpoint that was not finished; take an earlier one")
    stored = FileSystemReader(folder).read_metadata().state_dict_metadata
    tensors: dict[str, Tensor] = {}
    for name, master in trainer.masters.named.items():
        tensors[f"{MASTER}/{name}"] = master.detach()
        prefix = f"{STATE}/{name}/"
        for key, about in stored.items():
            if key.startswith(prefix):
                is_like = tuple(about.size) == tuple(master.shape)
                empty = torch.zeros_like(master) if is_like else torch.zeros(about.size, dtype=about.properties.dtype)
                trainer.optimizer.state[master][key.removeprefix(prefix)] = tensors[key] = empty.detach()
    tensors |= _teachers(trainer)
    dcp.load(tensors, checkpoint_id=folder, no_dist=trainer.ranks.mesh is None)
    trainer.masters.write_back()
    state = json.loads((folder / "state.json").read_text())
    trainer.steps, trainer.policy_norm = state["updates"], state["policy_norm"]
    for own in trainer.own_weights().values():
        own.steps = trainer.steps
    return int(state["step"])


@functools.cache
def _group() -> Any:
    """Of its own: what is said while a checkpoint is written must not meet what training says."""
    return dist.new_group(backend="gloo")


def _teachers(trainer: Trainer) -> dict[str, Tensor]:
    return {
        f"{TEACHER}/{name}/{key}": parameter.detach()
        for name, own in trainer.own_weights().items()
        if own.kind.moves
        for key, parameter in own.decoder.model.named_parameters()
        if key in trainer.masters.named
    }
