"""The kernel that reads keys, in Triton's interpreter: against torch, and as the engine's. Without Triton there is
nothing to try."""

from __future__ import annotations

import pytest
from conftest import interpreted

AGAINST_TORCH = """
import torch
from offbook.engine import triton_kernels
from offbook.engine.kernels import APART, TRIED, _apart, by_torch
from offbook.engine.triton_kernels import attend

torch.manual_seed(0)
shapes = [(2, 3, 3, 1, 5, 700, 64), (8, 1, 4, 3, 8, 200, 32), (3, 2, 2, 40, 4, 520, 64), (1, 2, 7, 1, 1, 64, 16)]
for rows, heads, shared, width, count, length, size in shapes:
    for dtype, most in ((torch.float32, 1e-6), (torch.float16, 1e-3)):
        query = torch.randn(rows, width, heads * shared, size).to(dtype).transpose(1, 2)
        keys, values = torch.randn(2, count, heads, length, size).to(dtype)
        first = torch.randint(0, length - 1 - width, (rows, 1))
        first[0], first[-1] = 0, length - 1 - width  # the last real one
        for programs, place_R in ((512, None), (8, torch.randperm(count)[:rows])):  # parts of a tile, and of several
            triton_kernels.PROGRAMS = programs
            given = first + torch.arange(width), place_R, 0.2
            found = attend(query, keys, values, *given).float()
            wanted = by_torch(query.float(), keys.float(), values.float(), *given)
            assert (found - wanted).norm() < most * wanted.norm(), (rows, heads, shared, width, dtype)

# What lies behind a row's own tokens is not looked at, and what lies among them spoils that row alone.
query, (keys, values) = torch.randn(3, 2, 1, 16), torch.randn(2, 3, 2, 200, 16)
position_RW = torch.tensor([[90], [120], [199]])  # the last is nobody's
values[0, :, 91:], keys[1, 0, 70], keys[2, :, 1:] = float("nan"), float("nan"), float("nan")
found = attend(query, keys, values, position_RW, None, 0.2)
assert found[0].isfinite().all() and found[2].isfinite().all() and found[1, 0, 1].isfinite().all()
assert found[1, 0, 0].isnan().all()

for width, place_R in TRIED:  # what a GPU is asked before it is used
    assert _apart(attend, torch.device("cpu"), torch.float32, 16, width, place_R) < APART[torch.float32]
"""

IN_THE_ENGINE = """
from functools import partial
from conftest import tiny_model
from test_engine_kv import STOPS, conversations, errors, run
from test_speculate import drafting
from offbook.engine import LocalEngine, attention, triton_kernels
from offbook.engine import kv_slots as places

triton_kernels.PROGRAMS = 8
make = partial(tiny_model, head_width=16)
engines = LocalEngine(make(), STOPS, mode="continuous", static=True), drafting(make, static=True)
wanted = run(LocalEngine(make(), STOPS), *conversations(2))
calls = []
def kernel(*given):
    calls.append(given[0].shape[2])
    return triton_kernels.attend(*given)
places.kernel_for = attention.kernel_for = lambda keys, values: kernel
for engine in engines:
    found = run(engine, *conversations(2))
    assert engine.decoder.places.own_keys
    for one, other in zip(found, wanted, strict=True):
        assert max(errors(make(), one)) < 1e-5
        assert engine.draft or [done.ids for _, done in one] == [done.ids for _, done in other]
assert {1, 64, 4} <= {*calls}, {*calls}  # steps, short readings, steps with three drafts
"""


@pytest.mark.parametrize(
    "check",
    [pytest.param(AGAINST_TORCH, id="torch"), pytest.param(IN_THE_ENGINE, id="engine", marks=pytest.mark.slow)],
)
def test_the_kernel_reads_what_torch_reads(check: str) -> None:
    interpreted(check)
