"""alpha A B^T + beta C + gamma I where the result is symmetric: tiles on and below the diagonal are computed, and those
below it are stored twice.

A tile is 128 rows by 256 columns, which two warpgroups compute. Tiles are read and stored by Hopper's copy engine,
through descriptors that the host makes for whole batches. Their first dimension is the matrix, so that what reaches
over a matrix's end is cut there; a mirrored tile is transposed on its way to shared memory and written along rows. A
persistent program reads its next tile while it stores one.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

TILE, INNER = 128, 64
PARTS = 2  # squares of 128 by 128 that a tile is wide
STAGES = 4


@triton.jit(do_not_specialize=["count"])  # one kernel for batches of any size
def _half_product(  # type: ignore[no-untyped-def]
    a, b, add, out,
    count, rows, inner, alpha, beta, diagonal,
    HAS_ADD: tl.constexpr, PARTS: tl.constexpr, TILE: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    bands = tl.cdiv(rows, TILE * PARTS)
    tiles = PARTS * bands * (bands + 1) // 2
    for task in tl.range(tl.program_id(0), count * tiles, tl.num_programs(0), flatten=True):
        _tile(
            a, b, add, out, task // tiles, task % tiles, rows, inner, alpha, beta, diagonal,
            HAS_ADD, PARTS, TILE, INNER,
        )  # fmt: skip


@triton.jit
def _tile(  # type: ignore[no-untyped-def]
    a, b, add, out, batch, number, rows, inner, alpha, beta, diagonal,
    HAS_ADD: tl.constexpr, PARTS: tl.constexpr, TILE: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    # A band is as many rows of tiles as a tile is wide, so that what lies on the diagonal is made of squares, which
    # are computed in full. Block m (m + 1) / 2 is the first of band m.
    block = number // PARTS
    band = ((tl.sqrt(8.0 * block + 1.0) - 1.0) / 2.0).to(tl.int32)
    band += ((band + 1) * (band + 2) // 2 <= block).to(tl.int32)
    band -= (band * (band + 1) // 2 > block).to(tl.int32)
    place = block - band * (band + 1) // 2
    row, column = (band * PARTS + number % PARTS) * TILE, place * PARTS * TILE
    total = tl.zeros((TILE, TILE * PARTS), dtype=tl.float32)
    for start in tl.range(0, inner, INNER):
        left = a.load([batch, row, start]).reshape(TILE, INNER)
        right = b.load([batch, column, start]).reshape(TILE * PARTS, INNER)
        total = tl.dot(left, right.T, total)
    # A branch here keeps Triton 3.6 from flattening the loops: what is not to be mirrored goes below the matrix, where
    # nothing is written.
    mirrored = tl.where(place < band, column, rows)
    near, far = total.reshape(TILE, 2, TILE).permute(0, 2, 1).split()  # one at a time: half of the shared memory
    _store(near, add, out, batch, row, column, mirrored, alpha, beta, diagonal, HAS_ADD, TILE)
    _store(far, add, out, batch, row, column + TILE, mirrored + TILE, alpha, beta, diagonal, HAS_ADD, TILE)


@triton.jit
def _store(  # type: ignore[no-untyped-def]
    total, add, out, batch, row, column, mirrored, alpha, beta, diagonal, HAS_ADD: tl.constexpr, TILE: tl.constexpr
):
    down, across = row + tl.arange(0, TILE), column + tl.arange(0, TILE)
    total = alpha * total + tl.where(down[:, None] == across[None, :], diagonal, 0.0)
    if HAS_ADD:
        total += beta * add.load([batch, row, column]).reshape(TILE, TILE).to(tl.float32)
    square = total.to(out.dtype)
    out.store([batch, row, column], square.reshape(1, TILE, TILE))
    out.store([batch, mirrored, row], square.T.reshape(1, TILE, TILE))


def half_product(
    a: Tensor, b: Tensor, alpha: float = 1.0, add: Tensor | None = None, beta: float = 0.0, diagonal: float = 0.0
) -> Tensor:
    """Rows and columns are multiples of 8: lines that a descriptor can read start at 16 bytes."""
    count, rows, inner = a.shape
    out = torch.empty(count, rows, rows, dtype=a.dtype, device=a.device)
    bands = triton.cdiv(rows, TILE * PARTS)
    programs = count * PARTS * bands * (bands + 1) // 2
    if a.is_cuda:
        programs = min(programs, torch.cuda.get_device_properties(a.device).multi_processor_count)
    square = [1, TILE, TILE]
    _half_product[(programs,)](
        TensorDescriptor.from_tensor(a.contiguous(), [1, TILE, INNER]),
        TensorDescriptor.from_tensor(b.contiguous(), [1, TILE * PARTS, INNER]),
        TensorDescriptor.from_tensor(out if add is None else add.contiguous(), square),
        TensorDescriptor.from_tensor(out, square),
        count, rows, inner, float(alpha), float(beta), float(diagonal),
        HAS_ADD=add is not None, PARTS=PARTS, TILE=TILE, INNER=INNER,
        num_stages=STAGES - (add is not None),  # what is added takes the room of one
        num_warps=8,
    )  # fmt: skip
    return out
