"""Which attention kernel runs, what it takes and how exact it is:
`python bench/gpu/attention.py --json attention.json`.

One layer, forward and backward, in the head shapes of the models people train. The peak is of what attention itself
allocates beside its inputs; the error is that of the output against float64, as a share of its norm. `mask` rows are
the branch pass without a compiled kernel. Without a GPU the CPU's kernel is shown.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from offbook.train.attention import attend

HEADS = {  # queries, keys, width
    "pocket": (4, 4, 32),
    "SmolLM2-135M": (9, 3, 64),
    "Qwen3-0.6B": (16, 8, 128),
    "Qwen3-32B": (64, 8, 128),
    "width 96": (8, 4, 96),
    "width 256": (8, 4, 256),
    "width 12": (4, 2, 12),
    "width 13": (4, 2, 13),
}


class Kernels(TorchDispatchMode):
    """The names of the attention operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(operator)
        if "scaled_dot_product" in name and "backward" not in name:
            short = name.removeprefix("aten._scaled_dot_product_").split(".")[0].removesuffix("_attention")
            self.names.append(short)
        return operator(*args, **(kwargs or {}))


def exact(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """In float64, in parts that fit."""
    groups = query.shape[1] // key.shape[1]
    key, value = (shared.double().repeat_interleave(groups, dim=1) for shared in (key, value))
    scores = query.double() @ key.mT / query.shape[-1] ** 0.5
    return scores.masked_fill(~mask, -torch.inf).softmax(-1) @ value


def measure(shape: tuple[int, int, int], dtype: torch.dtype, length: int, masked: bool, device: str) -> dict[str, Any]:
    heads, shared, width = shape
    torch.manual_seed(0)
    rows = min(256, length) if masked else length
    sizes = ((heads, rows), (shared, length), (shared, length))
    query, key, value = (
        torch.randn(1, count, size, width, device=device, dtype=dtype, requires_grad=not masked)
        for count, size in sizes
    )
    whole = torch.ones(rows, length, dtype=torch.bool, device=device).tril(length - rows)
    before = 0
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    kernels = Kernels()
    with kernels, torch.set_grad_enabled(not masked):
        out = attend(query, key, value, whole if masked else None, None)
    if not masked:
        out.sum().backward()
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20 if device == "cuda" else 0.0
    part = slice(max(0, rows - 256), rows)  # the last rows, which see the most
    wanted = exact(query[:, :, part].detach(), key.detach(), value.detach(), whole[part])
    apart = float((out[:, :, part].detach().double() - wanted).norm() / wanted.norm())
    finite = masked or bool(torch.isfinite(key.grad).all())
    return {"kernel": "+".join(kernels.names) or "plain", "peak_mib": peak, "error": apart, "finite_gradient": finite}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--length", type=int, default=8192 if device == "cuda" else 256)
    options = parser.parse_args()
    print(f"{device}, torch {torch.__version__}, {options.length} tokens")
    print(f"{'heads':14}{'dtype':>10}{'mask':>6}  {'kernel':28}{'peak MiB':>10}{'error':>10}")
    rows = []
    for name, shape in HEADS.items():
        for dtype in (torch.float32, torch.bfloat16):
            for masked in (False, True):
                row: dict[str, Any] = {"heads": name, "dtype": str(dtype).removeprefix("torch."), "masked": masked}
                try:
                    row |= measure(shape, dtype, options.length, masked, device)
                    figures = f"{row['kernel']:28}{row['peak_mib']:10.0f}{row['error']:10.1e}"
                    figures += "" if row["finite_gradient"] else "  the gradient is no number"
                except Exception as error:  # the other rows are worth their minutes
                    row["failed"] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
                    figures = row["failed"]
                print(f"{name:14}{row['dtype']:>10}{'yes' if masked else '':>6}  {figures}", flush=True)
                rows.append(row)
    if options.json:
        options.json.write_text(json.dumps({"length": options.length, "device": device, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
