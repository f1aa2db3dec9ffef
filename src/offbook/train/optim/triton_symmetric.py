"""The kernel of symmetric.py. One program computes a tile on or below the diagonal and stores it twice."""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

Tiles = tuple[int, int, int, int]  # rows and columns, inner, stages, warps
CHOICES: tuple[Tiles, ...] = ((128, 64, 4, 8), (128, 64, 3, 4), (128, 64, 4, 4), (128, 128, 2, 8))
REPEATS = 3


@triton.jit
def _half_product(  # type: ignore[no-untyped-def]
    a_ptr, b_ptr, add_ptr, out_ptr,
    rows, inner, alpha, beta, diagonal,
    HAS_ADD: tl.constexpr, DESCRIPTORS: tl.constexpr, TILE: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    # Tiles below the diagonal, row after row: number i (i + 1) / 2 is the first of row i.
    number = tl.program_id(0)
    i = ((tl.sqrt(8.0 * number + 1.0) - 1.0) / 2.0).to(tl.int32)
    i += ((i + 1) * (i + 2) // 2 <= number).to(tl.int32)
    i -= (i * (i + 1) // 2 > number).to(tl.int32)
    j = number - i * (i + 1) // 2
    batch = tl.program_id(1).to(tl.int64)
    a_ptr += batch * rows * inner
    b_ptr += batch * rows * inner
    down = i * TILE + tl.arange(0, TILE)
    across = j * TILE + tl.arange(0, TILE)
    total = tl.zeros((TILE, TILE), dtype=tl.float32)
    if DESCRIPTORS:
        a_tiles = tl.make_tensor_descriptor(a_ptr, [rows, inner], [inner, 1], [TILE, INNER])
        b_tiles = tl.make_tensor_descriptor(b_ptr, [rows, inner], [inner, 1], [TILE, INNER])
        for start in range(0, inner, INNER):
            a = a_tiles.load([i * TILE, start])
            b = b_tiles.load([j * TILE, start])
            total = tl.dot(a, b.T, total)
    else:
        within = tl.arange(0, INNER)
        a_at = a_ptr + down[:, None] * inner + within[None, :]
        b_at = b_ptr + across[:, None] * inner + within[None, :]
        for start in range(0, inner, INNER):
            is_inside = within[None, :] < inner - start
            a = tl.load(a_at + start, mask=(down[:, None] < rows) & is_inside, other=0.0)
            b = tl.load(b_at + start, mask=(across[:, None] < rows) & is_inside, other=0.0)
            total = tl.dot(a, tl.trans(b), total)
    total = alpha * total + tl.where(down[:, None] == across[None, :], diagonal, 0.0)
    square = batch * rows * rows
    is_there = (down[:, None] < rows) & (across[None, :] < rows)
    at = square + down[:, None].to(tl.int64) * rows + across[None, :]
    if HAS_ADD:
        total += beta * tl.load(add_ptr + at, mask=is_there, other=0.0).to(tl.float32)
    out = total.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at, out, mask=is_there)
    if i != j:
        mirrored = square + across[:, None].to(tl.int64) * rows + down[None, :]
        tl.store(out_ptr + mirrored, tl.trans(out), mask=(across[:, None] < rows) & (down[None, :] < rows))


def half_product(
    a: Tensor, b: Tensor, alpha: float = 1.0, add: Tensor | None = None, beta: float = 0.0, diagonal: float = 0.0,
    descriptors: bool = False,
) -> Tensor:  # fmt: skip
    a, b = a.contiguous(), b.contiguous()
    add = None if add is None else add.contiguous()
    descriptors = descriptors and a.shape[2] % 8 == 0  # rows that a descriptor can read start at 16 bytes
    tiles = CHOICES[0] if not a.is_cuda else _fastest(a.device, a.shape[1], a.shape[2], add is not None, descriptors)
    return _launch(a, b, alpha, add, beta, diagonal, descriptors, tiles)


def _launch(
    a: Tensor, b: Tensor, alpha: float, add: Tensor | None, beta: float, diagonal: float, descriptors: bool, how: Tiles
) -> Tensor:
    count, rows, inner = a.shape
    tile, step, stages, warps = how
    out = torch.empty(count, rows, rows, dtype=a.dtype, device=a.device)
    if descriptors:
        triton.set_allocator(lambda size, _align, _stream: torch.empty(size, dtype=torch.int8, device=a.device))
    side = triton.cdiv(rows, tile)
    _half_product[(side * (side + 1) // 2, count)](
        a, b, out if add is None else add, out,
        rows, inner, float(alpha), float(beta), float(diagonal),
        HAS_ADD=add is not None, DESCRIPTORS=descriptors, TILE=tile, INNER=step, num_stages=stages, num_warps=warps,
    )  # fmt: skip
    return out


@functools.cache
def _fastest(device: torch.device, rows: int, inner: int, has_add: bool, descriptors: bool) -> Tiles:
    """Tried once for each size, on a batch that fills the GPU."""
    count = max(1, 2**26 // (rows * max(rows, inner)))
    a = torch.randn(count, rows, inner, device=device, dtype=torch.float16)
    add = torch.randn(count, rows, rows, device=device, dtype=torch.float16) if has_add else None
    times = {}
    for tiles in CHOICES:
        try:
            _launch(a, a, 1.0, add, 1.0, 0.0, descriptors, tiles)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(REPEATS):
                _launch(a, a, 1.0, add, 1.0, 0.0, descriptors, tiles)
            end.record()
            torch.cuda.synchronize(device)
            times[tiles] = begin.elapsed_time(end)
        except triton.runtime.errors.OutOfResources:
            continue
    return min(times, key=lambda tiles: times[tiles])
