"""The symmetric kernel in Triton's interpreter, against the plain product. Without Triton there is nothing to try."""

from __future__ import annotations

import subprocess
import sys

import pytest

CHECK = """
import torch
from offbook.train.optim.symmetric import plain_product
from offbook.train.optim.triton_symmetric import WAYS, half_product

torch.manual_seed(0)
for count, rows, inner in ((2, 640, 320), (1, 200, 72), (3, 136, 40), (1, 384, 64)):  # whole tiles and cut ones
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


def test_every_way_of_the_kernel_is_the_plain_product() -> None:
    """In a process of its own: whether Triton interprets is settled when it is imported."""
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-c", CHECK],
        env={"TRITON_INTERPRET": "1", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
