"""Low-precision formats in float32 arithmetic, on any device: what a number becomes when it is stored in few bits.

A tensor in, the same tensor out with every entry on the format's grid, rounded to the nearest, ties to even.

    E2M1    0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives
    E4M3    eight steps from one power of two to the next, from 2^-9 up to 448
    E8M0    powers of two: scales alone
    NVFP4   E2M1, an E4M3 scale for each block of 16 and a float32 scale above those, for a tensor or for each row
    MXFP8   E4M3, an E8M0 scale for each block of 32 (OCP Microscaling, 1.0)

Blocks lie along the last axis, the one that a product sums over; a last block may be short. An infinity, or what is no
number, makes no numbers of all that is under its scale: nothing of it is clipped in silence.

Left out: stochastic rounding and Hadamard transforms, which pretraining in NVFP4 adds (2509.25149); E5M2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Division = Callable[[Tensor, Tensor], Tensor]
Scope = Literal["tensor", "token"]
NVFP4_BLOCK, MXFP8_BLOCK = 16, 32
ALIGNED = 16  # sizes of FP8 matrices that _scaled_mm takes on a GPU are multiples of it
EXPONENT = 0x7F800000  # the bits of a float32 that hold it
LEAST_SCALE = 2.0**-126  # E8M0 has 2^-127 too, which float32 has only as a subnormal


@dataclass(frozen=True, slots=True)
class Grid:
    mantissa: int  # bits
    least: float  # the power of two below which steps do not get smaller
    largest: float  # to which larger numbers are clipped

    def rounded(self, x: Tensor) -> Tensor:
        step = _power_below(x).clamp(self.least, self.largest) * 2.0**-self.mantissa
        return ((x / step).round() * step).clamp(-self.largest, self.largest)


E2M1 = Grid(1, 1.0, 6.0)
E4M3 = Grid(3, 2.0**-6, 448.0)


def e8m0(x: Tensor) -> Tensor:
    """Of positive numbers, up: a scale that is rounded down clips what it was made for (2506.08027)."""
    below = _power_below(x)
    return torch.where(x > below, 2 * below, below).clamp(min=LEAST_SCALE)


def ieee_division(x: Tensor, by: Tensor) -> Tensor:
    """Rounded once."""
    return torch.where(by == 0, 0.0, x / by)


def approximate_division(x: Tensor, by: Tensor) -> Tensor:
    """By the reciprocal, as fast kernels do: rounded twice, so that it may end a last bit beside the quotient, and a
    number that lies between two of the grid on the other side."""
    return torch.where(by == 0, 0.0, x * by.reciprocal())


def nvfp4(x_NK: Tensor, scope: Scope, divide: Division = ieee_division) -> Tensor:
    """The scale above is such that the largest number of its scope is the largest that a block can hold."""
    blocks_NBS = _in_blocks(x_NK, NVFP4_BLOCK)
    largest_NB1 = blocks_NBS.abs().amax(-1, keepdim=True)
    largest = largest_NB1.amax() if scope == "tensor" else largest_NB1.amax(1, keepdim=True)
    above = divide(largest, torch.full_like(largest, E2M1.largest * E4M3.largest))
    scale_NB1 = E4M3.rounded(divide(largest_NB1, E2M1.largest * above)) * above
    return _out_of_blocks(E2M1.rounded(divide(blocks_NBS, scale_NB1)) * scale_NB1, x_NK.shape[1])


def mxfp8(x_NK: Tensor) -> Tensor:
    blocks_NBS = _in_blocks(x_NK, MXFP8_BLOCK)
    scale_NB1 = e8m0(blocks_NBS.abs().amax(-1, keepdim=True) / E4M3.largest)
    return _out_of_blocks(E4M3.rounded(blocks_NBS / scale_NB1) * scale_NB1, x_NK.shape[1])


def _power_below(x: Tensor) -> Tensor:
    """The largest power of two that is not above |x|; 0 of 0 and of subnormals."""
    return (x.view(torch.int32) & EXPONENT).view(torch.float32)


def _in_blocks(x_NK: Tensor, size: int) -> Tensor:
    x_NK = torch.nn.functional.pad(x_NK.float(), (0, -x_NK.shape[1] % size))
    return x_NK.unflatten(1, (-1, size))


def _out_of_blocks(blocks_NBS: Tensor, length: int) -> Tensor:
    return blocks_NBS.flatten(1)[:, :length]
