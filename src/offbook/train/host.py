"""What the host prepares for a device, and how it gets there."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

BLOCK = 128  # rows and columns that GPU kernels take at a time


def sent(host: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device. A GPU is not waited for: only pinned memory is copied while it works."""
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


def round_length(length: int, device: torch.device) -> int:
    """On a GPU one of 64 between a power of two and the next: kernels are planned for each new length."""
    step = max(BLOCK, 1 << length.bit_length() >> 7) if device.type == "cuda" else 1
    return -(-length // step) * step


@functools.cache
def compile_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled on first use, once for all that use it."""
    return torch.compile(function)
