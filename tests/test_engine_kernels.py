"""The kernel that reads keys, in Triton's interpreter: against torch, and as the engine's. Without Triton there is
nothing to try."""

from __future__ import annotations

import pytest
from conftest import interpreted

AGAINST_TORCH = """
import torch
from offbook.engine import triton_kernels
from offbook.engine.attention import TOLERANCE, TRIED, by_torch, difference
from offbook.engine.triton_kernels import attend

torch.manual_seed(0)
shapes = [(2, 3, 3, 1, 5, 700, 64), (8, 1, 4, 3, 8, 200, 32), (3, 2, 2, 40, 4, 520, 64), (1, 2, 7, 1, 1, 64, 16)]
for rows, heads, shared, width, count, length, size in shapes:
    for dtype, most in ((torch.float32, 1e-6), (torch.float16, 1e-3)):
        query = torch.randn(rows, width, heads * shared, size).to(dtype).transpose(1, 2)
        keys, values = torch.randn(2, count, heads, length, size).to(dtype)
        first_R1 = torch.randint(0, length - 1 - width, (rows, 1))
        first_R1[0], first_R1[-1] = 0, length - 1 - width  # up to the last real one
        given = first_R1 + torch.arange(width), torch.randperm(count)[:rows], 0.2
        for programs in (512, 8):  # parts of one tile, and of several
            triton_kernels.PROGRAMS = programs
            found = attend(query, keys, values, *given).float()
            wanted = by_torch(query.float(), keys.float(), values.float(), *given)
            assert (found - wanted).norm() < most * wanted.norm(), (rows, heads, shared, width, dtype)

# What follows a row's own tokens is not read, and a NaN among them spoils that head of that row alone.
query, (keys, values) = torch.randn(3, 2, 1, 16), torch.randn(2, 3, 2, 200, 16)
position_RW = torch.tensor([[90], [120], [199]])  # the last slot has no row
values[0, :, 91:], keys[1, 0, 70], keys[2, :, 1:] = float("nan"), float("nan"), float("nan")
found = attend(query, keys, values, position_RW, torch.arange(3), 0.2)
assert found[0].isfinite().all() and found[2].isfinite().all() and found[1, 0, 1].isfinite().all()
assert found[1, 0, 0].isnan().all()
for width in TRIED:
    assert difference(attend, torch.device("cpu"), torch.float32, 16, width) < TOLERANCE[torch.float32]
"""

IN_THE_ENGINE = """
from functools import partial
from conftest import tiny_model
from test_engine_kv import STOPS, conversations, errors, run
from offbook.engine import LocalEngine, attention, triton_kernels

triton_kernels.PROGRAMS = 8
make = partial(tiny_model, head_width=16)
engine = LocalEngine(make(), STOPS, mode="continuous", static=True)
wanted = run(LocalEngine(make(), STOPS), *conversations(2))
calls = []
def kernel(*given):
    calls.append(given[0].shape[2])
    return triton_kernels.attend(*given)
attention.kernel_for = lambda keys, values: kernel
found = run(engine, *conversations(2))
assert {*calls} == {1, 64}, {*calls}  # steps and short prefills
for one, other in zip(found, wanted, strict=True):
    assert max(errors(make(), one)) < 1e-5
    assert [done.ids for _, done in one] == [done.ids for _, done in other]
"""


@pytest.mark.parametrize(
    "check", [pytest.param(AGAINST_TORCH, id="torch"), pytest.param(IN_THE_ENGINE, id="engine", marks=pytest.mark.slow)]
)
def test_the_kernel_reads_what_torch_reads(check: str) -> None:
    interpreted(check)
