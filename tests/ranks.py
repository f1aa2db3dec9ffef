"""Ranks for tests: processes forked from this one, so that everything is imported once, joined by gloo."""

from __future__ import annotations

import os
import pickle
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

DEADLINE_S = 120.0


def on_ranks(world: int, work: Callable[..., Any], *args: Any) -> list[Any]:
    """What `work(*args)` returns on each of them. Any that fails ends all."""
    folder = tempfile.mkdtemp(prefix="ranks-")
    sys.stdout.flush()
    sys.stderr.flush()
    children = {}
    for rank in range(world):
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reader)
            _serve(rank, world, folder, writer, work, args)
        os.close(writer)
        children[pid] = reader
    try:
        answers = _collect(list(children.values()))
    finally:
        for pid, reader in children.items():
            os.close(reader)
            if os.waitpid(pid, os.WNOHANG)[0] == 0:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        shutil.rmtree(folder)
    failed = [text for is_fine, text in answers if not is_fine]
    assert not failed, "\n".join(failed)
    return [value for _, value in answers]


def whole(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """By name, each gathered on every rank."""
    return {name: one.full_tensor() if isinstance(one, DTensor) else one for name, one in tensors.items()}


def _serve(rank: int, world: int, folder: str, writer: int, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    answer: tuple[bool, Any]
    # The ranks meet in a file: a free port may be another worker's by the time it is used.
    meeting = f"file://{folder}/store"
    try:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", meeting, timedelta(seconds=20), rank=rank, world_size=world)
        answer = True, work(*args)
        dist.barrier()
    except BaseException:  # whatever it is belongs in the parent's report
        answer = False, f"rank {rank}:\n{traceback.format_exc()}"
    with os.fdopen(writer, "wb") as pipe:
        pickle.dump(answer, pipe)
    os._exit(0)


def _collect(readers: list[int]) -> list[tuple[bool, Any]]:
    """All answers, or those of the ranks that failed first and what is there of the others."""
    found: dict[int, bytes] = dict.fromkeys(readers, b"")
    left, end = set(readers), time.monotonic() + DEADLINE_S
    while left and time.monotonic() < end:
        for reader in select.select(list(left), [], [], 1.0)[0]:
            chunk = os.read(reader, 1 << 20)
            found[reader] += chunk
            if not chunk:
                left.discard(reader)
                if found[reader] and not pickle.loads(found[reader])[0]:
                    end = min(end, time.monotonic() + 1.0)
    lost = False, "a rank gave no answer in time"
    return [pickle.loads(data) if reader not in left and data else lost for reader, data in found.items()]
