"""Muon's kernel in Triton's interpreter, against what torch computes. Without Triton there is nothing to try."""

from __future__ import annotations

from conftest import interpreted

CHECK = """
import torch
from offbook.train.optim.newton_schulz import symmetric_product as plain_product
from offbook.train.optim.triton_symmetric import half_product

torch.manual_seed(0)
for count, rows, inner in ((1, 520, 136), (2, 200, 72), (2, 136, 40)):  # whole tiles and cut ones
    x = torch.randn(count, rows, inner).div(inner**0.5).half()
    gram = plain_product(x.float(), x.float()).half()
    wanted = plain_product(gram.float(), gram.float(), 0.5, gram.float(), -1.0, 2.0)
    found = half_product(x, x)
    assert (found - gram).norm() < 1e-3 * gram.norm(), rows
    found = half_product(gram, gram, 0.5, gram, -1.0, 2.0)
    assert (found - wanted).norm() < 1e-3 * wanted.norm(), rows
    assert torch.equal(found.tril(-256), found.triu(256).mT), rows
"""


def test_the_kernel_computes_what_torch_does() -> None:
    interpreted(CHECK)
