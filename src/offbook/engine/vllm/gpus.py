"""Which GPUs the copies of a server get that a run starts.

The last ones: the trainer has the first, and keeps it for itself where there are more than the copies need.
"""

from __future__ import annotations

import os

import torch

from offbook.core.config import VllmConfig
from offbook.types import OffbookError

VISIBLE = "CUDA_VISIBLE_DEVICES"


def gpus_of_copies(settings: VllmConfig) -> list[str]:
    """For each copy, as CUDA takes them; empty where it sees what the run sees: one alone, or without a GPU."""
    visible = _visible()
    each = settings.gpus
    if settings.copies == 1 or not visible:
        return [""] * settings.copies
    needed = settings.copies * each
    if needed > len(visible):
        asked = f"engine.vllm.copies {settings.copies} with engine.vllm.gpus {each} need {needed} GPUs"
        raise OffbookError(f"{asked}, and this run sees {len(visible)}; lower one of the two, or give it more")
    taken = visible[-needed:]
    return [",".join(taken[start : start + each]) for start in range(0, needed, each)]


def leave_the_trainer_alone(settings: VllmConfig) -> bool:
    """Whether no copy is on a GPU of the trainer's, whose ranks have one each, from the first on."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return settings.copies > 1 and settings.copies * settings.gpus + ranks <= len(_visible())


def _visible() -> list[str]:
    """To this process, by the names that they have for CUDA."""
    count = torch.cuda.device_count()
    named = os.environ.get(VISIBLE)
    return [str(number) for number in range(count)] if named is None else named.split(",")[:count]
