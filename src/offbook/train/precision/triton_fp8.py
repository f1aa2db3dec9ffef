"""The kernels of fp8.py: codes and scales of a matrix by rows, by columns, or both, as torch has them to the last bit.

    by rows       a program holds whole rows: every number is read once
    by columns    tiles are read for their largest numbers and once more for the codes, which are stored turned;
                  codes by rows can come out of the same two readings

Sizes of what is stored are multiples of ALIGNED. What lies beyond the matrix is zero, and its scales are the least.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from offbook.train.precision.formats import ALIGNED, E4M3, LEAST_SCALE

TILE = 128
HELD = 4096  # numbers that a program holds at least, where it holds rows
LARGEST, LEAST = tl.constexpr(E4M3.largest), tl.constexpr(LEAST_SCALE)


@triton.jit
def _sizes(x):  # type: ignore[no-untyped-def]
    """Bits of |x|. They are ordered as the numbers are, and what is no number is above infinity: a maximum keeps it."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _quotient(x, by, inverse):  # type: ignore[no-untyped-def]
    """x / by, rounded once, without a division, of which there would be too many: what the product with the reciprocal
    leaves over mends it (Markstein 1990)."""
    quotient = x * inverse
    return tl.fma(tl.fma(quotient, -by, x), inverse, quotient)


@triton.jit
def _scale(size):  # type: ignore[no-untyped-def]
    scale = _quotient(size.to(tl.float32, bitcast=True), LARGEST, 1.0 / LARGEST)
    return tl.maximum(scale, LEAST, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _codes(x, scale):  # type: ignore[no-untyped-def]
    """With the scale brought between 1 and 2 what is left over has all of its bits. A scale that is no number, as that
    of an infinity is, makes no numbers of all."""
    power = ((254 - (scale.to(tl.int32, bitcast=True) >> 23)) << 23).to(tl.float32, bitcast=True)
    near = scale * power
    inverse = 1.0 / near  # to two last bits; to one after the next line
    inverse = tl.fma(tl.fma(inverse, -near, 1.0), inverse, inverse)
    return _quotient(x * power, near, inverse).to(tl.float8e4nv)


@triton.jit(do_not_specialize=["rows", "full_rows"])
def _by_rows(  # type: ignore[no-untyped-def]
    x, codes, scales, rows, columns, full_rows, full_columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    first = tl.program_id(0).to(tl.int64) * ROWS
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    is_there = (first + row < rows) & (column < columns)
    held = tl.load(x + first * columns + row * columns + column, mask=is_there, other=0.0).to(tl.float32)
    scale = _scale(tl.max(_sizes(held), 1, keep_dims=True))
    is_row = first + row < full_rows
    tl.store(scales + first + row, scale, mask=is_row)
    at = first * full_columns + row * full_columns + column
    tl.store(codes + at, _codes(held, scale), mask=is_row & (column < full_columns))


@triton.jit
def _tile(x, rows, columns, full_columns, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Its numbers, where its rows and columns are in the matrix, and where it begins."""
    across = tl.cdiv(full_columns, TILE)
    top, left = tl.program_id(0) // across * TILE, tl.program_id(0) % across * TILE
    row, column = tl.arange(0, TILE)[:, None], tl.arange(0, TILE)[None, :]
    is_there = (top + row < rows) & (left + column < columns)
    at = top.to(tl.int64) * columns + left + row * columns + column
    return tl.load(x + at, mask=is_there, other=0.0).to(tl.float32), row, column, top, left


@triton.jit(do_not_specialize=["rows"])
def _find(  # type: ignore[no-untyped-def]
    x, row_sizes, column_sizes, rows, columns, full_columns, BOTH: tl.constexpr, TILE: tl.constexpr
):
    held, row, column, top, left = _tile(x, rows, columns, full_columns, TILE)
    sizes = _sizes(held)
    if BOTH:
        largest = tl.max(sizes, 1, keep_dims=True)
        tl.atomic_max(row_sizes + top + row, largest, mask=top + row < rows, sem="relaxed")
    largest = tl.max(sizes, 0, keep_dims=True)
    tl.atomic_max(column_sizes + left + column, largest, mask=left + column < columns, sem="relaxed")


@triton.jit(do_not_specialize=["rows"])
def _write(  # type: ignore[no-untyped-def]
    x, row_sizes, column_sizes, codes, scales, turned_codes, turned_scales,
    rows, columns, full_rows, full_columns, BOTH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    held, row, column, top, left = _tile(x, rows, columns, full_columns, TILE)
    is_row, is_column = top + row < full_rows, left + column < full_columns
    if BOTH:
        scale = _scale(tl.load(row_sizes + top + row, mask=is_row, other=0))
        if left == 0:
            tl.store(scales + top + row, scale, mask=is_row)
        at = top.to(tl.int64) * full_columns + left + row * full_columns + column
        tl.store(codes + at, _codes(held, scale), mask=is_row & is_column)
    scale = _scale(tl.load(column_sizes + left + column, mask=is_column, other=0))
    if top == 0:
        tl.store(turned_scales + left + column, scale, mask=is_column)
    at = left.to(tl.int64) * full_rows + top + column * full_rows + row
    tl.store(turned_codes + at, _codes(held, scale), mask=is_row & is_column)


def by_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    x, (full_rows, full_columns) = x.contiguous(), _full(x)
    codes, scales = _empty(x, full_rows, full_columns)
    wide = triton.next_power_of_2(full_columns)
    held = max(1, HELD // wide)
    warps = min(16, max(4, held * wide // 1024))
    _by_rows[(triton.cdiv(full_rows, held),)](
        x, codes, scales, *x.shape, full_rows, full_columns, ROWS=held, COLUMNS=wide, num_warps=warps
    )
    return codes, scales


def by_columns(x: Tensor) -> tuple[Tensor, Tensor]:
    return _in_tiles(x, both=False)[2:]


def both_ways(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _in_tiles(x, both=True)


def _in_tiles(x: Tensor, both: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, (full_rows, full_columns) = x.contiguous(), _full(x)
    sizes = torch.zeros(full_rows + full_columns, dtype=torch.int32, device=x.device)
    turned = _empty(x, full_columns, full_rows)
    straight = _empty(x, full_rows, full_columns) if both else turned
    tiles, options = (triton.cdiv(full_rows, TILE) * triton.cdiv(full_columns, TILE),), {"BOTH": both, "TILE": TILE}
    found = sizes[:full_rows], sizes[full_rows:]
    _find[tiles](x, *found, *x.shape, full_columns, **options, num_warps=8)
    _write[tiles](x, *found, *straight, *turned, *x.shape, full_rows, full_columns, **options, num_warps=8)
    return *straight, *turned


def _full(x: Tensor) -> tuple[int, int]:
    rows, columns = x.shape
    return triton.cdiv(rows, ALIGNED) * ALIGNED, triton.cdiv(columns, ALIGNED) * ALIGNED


def _empty(x: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    codes = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device=x.device)
    return codes, torch.empty(rows, 1, device=x.device)
