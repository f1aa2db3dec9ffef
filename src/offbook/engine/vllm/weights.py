"""Sends the trainer's weights to vLLM through shared memory: a GPU's own (CUDA IPC) or a mapped file.

A flat buffer of a few hundred megabytes is filled until all tensors are sent. The worker returns a checksum of the
buffer and the parameters that nothing was loaded into, so an update that did not arrive is an error.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from torch import Tensor

from offbook.core.weights import Weights
from offbook.types import ModelLost, OffbookError

if TYPE_CHECKING:
    from offbook.engine.vllm.server import Server

BUCKET_BYTES = 256 << 20
ALIGN = 256  # bytes, so that any dtype may begin there
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM has room for

_GATHERING = threading.Lock()  # all ranks take part in gathering a tensor, one at a time
Place = tuple[str, Tensor, int]  # a tensor's name, what it is like, and the byte where it begins


class Sender:
    """Of all updates to one server. `dtype` is what the server keeps matrices in; `deadline_s` is for one bucket."""

    def __init__(self, server: Server, dtype: torch.dtype, deadline_s: float = 300.0):
        self.server = server
        self.dtype = dtype
        self.deadline_s = deadline_s
        self._flat: Tensor | None = None
        self.folder = Path(tempfile.mkdtemp(prefix="offbook-vllm-"))  # of adapters

    def forget(self) -> None:
        """The server is a new one: it has opened nothing yet."""
        self._flat = None

    def close(self) -> None:
        self._flat = None
        shutil.rmtree(self.folder, ignore_errors=True)

    @torch.no_grad()
    def send(self, weights: Weights) -> None:
        buckets = list(_buckets(_distinct(weights, self.dtype), BUCKET_BYTES))
        size = max(end for _, end in buckets)
        if self._flat is None or self._flat.numel() < size:  # none that the server has opened is large enough
            device = next(iter(weights.like.values())).device
            shared = self._on_gpu(size, device) if device.type == "cuda" else None
            self._flat = self._in_file(size) if shared is None else shared
        flat = self._flat
        for number, (bucket, end) in enumerate(buckets):
            sent = []
            for name, like, start in bucket:
                dtype = _sent_dtype(like, self.dtype)
                room = flat[start : start + like.numel() * dtype.itemsize]
                with _GATHERING:
                    tensor = weights.tensors[name]
                room.view(dtype).view(like.shape).copy_(tensor)
                del tensor  # before the next is gathered
                sent.append([name, str(dtype).removeprefix("torch."), list(like.shape), start])
            total = int(flat[:end].view(torch.int32).sum(dtype=torch.int64))  # waits for the copies, too
            about = {"tensors": sent, "bytes": end, "first": not number, "last": number == len(buckets) - 1}
            for answer in self.server.rpc("offbook_load", json.dumps(about), self.deadline_s):
                if int(answer["sum"]) != total:
                    raise ModelLost("the weights that arrived at vLLM are not those that were sent")
                if missing := answer.get("missing"):
                    some = ", ".join(missing[:3]) + (" ..." if len(missing) > 3 else "")
                    raise ModelLost(f"vLLM has {len(missing)} parameters that no new weights were loaded into: {some}")

    def adapter(self, weights: Weights, name: str) -> Path:
        """A folder in PEFT's format. All have names of their own: vLLM's prefix cache goes by name and path."""
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        with _GATHERING:
            tensors = {name: tensor.detach().contiguous().cpu() for name, tensor in weights.tensors.items()}
        save_file(tensors, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text(json.dumps(weights.adapter, default=sorted))  # it has sets in it
        return folder

    def _on_gpu(self, size: int, device: torch.device) -> Tensor | None:
        """None where the two processes cannot share the GPU's memory: another GPU, an allocator that cannot."""
        flat = torch.empty(size, dtype=torch.uint8, device=device)
        with contextlib.suppress(RuntimeError):
            # device, handle, bytes, offset, reference counter and its offset, event, whether to wait for it
            _, *parts = flat.untyped_storage()._share_cuda_()
            coded = [base64.b64encode(part).decode() if isinstance(part, bytes) else part for part in parts]
            gpu = str(torch.cuda.get_device_properties(device).uuid)
            opened = self.server.rpc("offbook_open", json.dumps({"gpu": gpu, "handle": coded}), self.deadline_s)
            if not any(answer.get("problem") for answer in opened):
                return flat
        return None

    def _in_file(self, size: int) -> Tensor:
        folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        with tempfile.NamedTemporaryFile(prefix="offbook-vllm-", dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, size)  # a full /dev/shm would else kill the process on a write
            flat = torch.from_file(file.name, shared=True, size=size, dtype=torch.uint8)
            self.server.rpc("offbook_open", json.dumps({"path": file.name, "bytes": size}), self.deadline_s)
        return flat  # both processes have it mapped, so its memory is freed when they end


def _sent_dtype(tensor: Tensor, wanted: torch.dtype) -> torch.dtype:
    """Matrices as the server keeps them; small ones (norms, biases) as they are, which it may keep more exactly."""
    return wanted if tensor.ndim >= 2 and tensor.is_floating_point() else tensor.dtype


def _distinct(weights: Weights, dtype: torch.dtype) -> Iterator[tuple[str, Tensor, int]]:
    """Each tensor once, with its bytes: an output layer that is tied to the input's is sent under the first name."""
    for name in dict.fromkeys(weights.firsts().values()):
        like = weights.like[name]
        yield name, like, like.numel() * _sent_dtype(like, dtype).itemsize


def _buckets(sized: Iterator[tuple[str, Tensor, int]], limit: int) -> Iterator[tuple[list[Place], int]]:
    """Tensors with the byte where each begins, and where the last ends. One larger than the limit goes alone."""
    bucket: list[Place] = []
    end = 0
    for name, tensor, size in sized:
        if bucket and end + size > limit:
            yield bucket, end
            bucket = []
            end = 0
        bucket.append((name, tensor, end))
        end += -(-size // ALIGN) * ALIGN
    if bucket:
        yield bucket, end


def room_for(rank: int) -> int:
    if rank > LORA_RANKS[-1]:
        raise OffbookError(f"vLLM takes adapters of rank {LORA_RANKS[-1]} at most, not {rank}; lower train.lora.rank")
    return min(room for room in LORA_RANKS if room >= rank)
