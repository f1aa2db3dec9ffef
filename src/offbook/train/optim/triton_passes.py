"""The kernels of passes.py. Each reads and writes every number once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

ENTRIES = 4096  # of a program
SIDE = 64


@triton.jit
def _advance(  # type: ignore[no-untyped-def]
    average_ptr, gradient_ptr, out_ptr, squares_ptr, size, momentum, ENTRIES: tl.constexpr
):
    unit, piece = tl.program_id(1).to(tl.int64), tl.program_id(0)
    within = piece * ENTRIES + tl.arange(0, ENTRIES)
    at, is_there = unit * size + within, within < size
    gradient = tl.load(gradient_ptr + at, mask=is_there, other=0.0).to(tl.float32)
    average = tl.load(average_ptr + at, mask=is_there, other=0.0).to(tl.float32)
    average = momentum * average + (1 - momentum) * gradient
    tl.store(average_ptr + at, average, mask=is_there)
    ahead = momentum * average + (1 - momentum) * gradient
    tl.store(out_ptr + at, ahead, mask=is_there)
    tl.store(squares_ptr + unit * tl.num_programs(0) + piece, tl.sum(ahead * ahead, 0))


def advance(average: Tensor, gradient: Tensor, momentum: float, out: Tensor) -> Tensor:
    units, size = len(average), average[0].numel()
    pieces = triton.cdiv(size, ENTRIES)
    squares = torch.empty(units, pieces, device=average.device)
    _advance[(pieces, units)](average, gradient, out, squares, size, momentum, ENTRIES=ENTRIES, num_warps=4)
    return squares.sum(1).sqrt()  # summed in the same order every time


@triton.jit
def _combine(  # type: ignore[no-untyped-def]
    out_ptr, x_ptr, scale_ptr, keep, rows, columns,
    out_unit, out_row, out_column, x_unit, x_row, x_column,
    KEEPS: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    across_tiles = tl.cdiv(columns, SIDE)
    down = tl.program_id(0) // across_tiles * SIDE + tl.arange(0, SIDE)[:, None]
    across = tl.program_id(0) % across_tiles * SIDE + tl.arange(0, SIDE)[None, :]
    unit = tl.program_id(1).to(tl.int64)
    is_there = (down < rows) & (across < columns)
    x = tl.load(x_ptr + unit * x_unit + down * x_row + across * x_column, mask=is_there, other=0.0).to(tl.float32)
    out = tl.load(scale_ptr + unit) * x
    out_at = out_ptr + unit * out_unit + down * out_row + across * out_column
    if KEEPS:
        out += keep * tl.load(out_at, mask=is_there, other=0.0).to(tl.float32)
    tl.store(out_at, out, mask=is_there)


def combine(out: Tensor, keep: float, scale_N: Tensor, x: Tensor) -> None:
    units, rows, columns = out.shape
    _combine[(triton.cdiv(rows, SIDE) * triton.cdiv(columns, SIDE), units)](
        out, x, scale_N, float(keep), rows, columns, *out.stride(), *x.stride(),
        KEEPS=keep != 0, SIDE=SIDE, num_warps=4,
    )  # fmt: skip
