"""Muon's kernels in Triton's interpreter, against what torch computes. Without Triton there is nothing to try."""

from __future__ import annotations

import pytest
from conftest import interpreted

CHECK = """
import torch
from offbook.train.optim.symmetric import plain_product
from offbook.train.optim.triton_symmetric import WAYS, half_product

torch.manual_seed(0)
for count, rows, inner in ((1, 520, 136), (2, 200, 72), (2, 136, 40)):  # whole tiles and cut ones
    x = torch.randn(count, rows, inner).div(inner**0.5).half()
    gram = plain_product(x.float(), x.float()).half()
    wanted = plain_product(gram.float(), gram.float(), 0.5, gram.float(), -1.0, 2.0)
    for way in WAYS:
        found = half_product(x, x, way=way)
        assert (found - gram).norm() < 1e-3 * gram.norm(), (rows, way)
        found = half_product(gram, gram, 0.5, gram, -1.0, 2.0, way=way)
        assert (found - wanted).norm() < 1e-3 * wanted.norm(), (rows, way)
        below = found.tril(-256)
        assert torch.equal(below, found.triu(256).mT), (rows, way)
"""


PASSES = """
import torch
from offbook.train.optim import passes, triton_passes

torch.manual_seed(0)
for rows, columns in ((64, 128), (70, 33), (7, 600)):
    average, gradient = torch.randn(2, rows, columns), torch.randn(2, rows, columns)
    moved, out, wanted_out = average.clone(), torch.empty_like(average), torch.empty_like(average)
    norms = triton_passes.advance(moved, gradient, 0.9, out)
    wanted = passes._advance(average, gradient, 0.9, wanted_out)
    for found, right in ((moved, average), (out, wanted_out), (norms, wanted)):
        assert torch.allclose(found, right, atol=1e-5), (rows, columns)
    scale = torch.tensor([0.5, -3.0])
    for x in (out, out.mT.contiguous().mT, out.half()):
        for keep in (0.0, 1.0, 0.25):
            found, right = gradient.half(), gradient.half()
            triton_passes.combine(found, keep, scale, x)
            passes._combine(right, keep, scale, x)
            assert torch.allclose(found, right, atol=1e-2, rtol=1e-2), (rows, columns, keep)
        found, right = gradient.clone().mT, gradient.clone().mT
        triton_passes.combine(found, 0.25, scale, x.mT)
        passes._combine(right, 0.25, scale, x.mT)
        assert torch.allclose(found, right, atol=1e-5), (rows, columns)
"""


@pytest.mark.parametrize("check", [CHECK, PASSES], ids=["products", "passes"])
def test_kernels_compute_what_torch_does(check: str) -> None:
    interpreted(check)
