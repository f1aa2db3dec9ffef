"""What offbook adds to a worker of vLLM: new weights out of memory that both processes see.

Runs in vLLM's environment, which has nothing of offbook's: torch and vLLM are all there is. A flat buffer is opened
once; each call then names the tensors that lie in it, which vLLM's own loader copies to where they belong, fused and
sharded as it keeps them. What comes back lets the sender check that all bytes and all parameters have arrived.
"""

import base64
import json
from typing import Any

import torch
from vllm.platforms import current_platform

if current_platform.is_cpu():
    from vllm.model_executor.layers import utils

    def _keep_weight(layer: torch.nn.Module, remove_weight: bool) -> None:
        """vLLM would repack the weight and throw it away, and nothing could be loaded into it any more."""
        layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = _keep_weight


class OffbookWorker:
    """Mixed into vLLM's worker: `self.model_runner` is that one's."""

    model_runner: Any
    offbook_flat: torch.Tensor
    offbook_loaded: set[str]

    def offbook_open(self, where: str) -> dict[str, str]:
        """`where` is JSON: a file that is mapped, or a CUDA allocation of another process on a GPU seen here."""
        asked = json.loads(where)
        if "path" in asked:
            self.offbook_flat = torch.from_file(asked["path"], shared=True, size=asked["bytes"], dtype=torch.uint8)
            return {}
        devices = range(torch.cuda.device_count())
        found = [each for each in devices if str(torch.cuda.get_device_properties(each).uuid) == asked["gpu"]]
        if not found:
            return {"problem": "the trainer's GPU is not visible to vLLM"}
        parts = [base64.b64decode(part) if isinstance(part, str) else part for part in asked["handle"]]
        try:
            storage = torch.UntypedStorage._new_shared_cuda(found[0], *parts)
        except RuntimeError as error:
            return {"problem": str(error).splitlines()[0]}
        self.offbook_flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        return {}

    @torch.no_grad()
    def offbook_load(self, bucket: str) -> dict[str, Any]:
        """`bucket` is JSON: `tensors`, each a name, dtype, shape and the byte where it begins; `first` of an update."""
        asked = json.loads(bucket)
        if asked["first"]:
            self.offbook_loaded = set()
        flat = self.offbook_flat[: asked["bytes"]]
        total = int(flat.view(torch.int32).sum(dtype=torch.int64))
        tensors = []
        for name, dtype, shape, start in asked["tensors"]:
            kind = getattr(torch, dtype)
            size = torch.Size(shape).numel() * kind.itemsize
            tensors.append((name, flat[start : start + size].view(kind).view(shape)))
        model = self.model_runner.get_model()
        self.offbook_loaded |= model.load_weights(iter(tensors)) or set()
        if flat.is_cuda:
            torch.cuda.synchronize()  # the sender fills the buffer again as soon as this returns
        if not asked["last"]:
            return {"sum": str(total)}
        missing = sorted({name for name, _ in model.named_parameters()} - self.offbook_loaded)
        return {"sum": str(total), "missing": missing}
