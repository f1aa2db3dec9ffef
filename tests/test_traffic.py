"""What a step moves between ranks: the formulas that `offbook plan` prints, beside what gloo ranks receive."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from ranks import on_ranks

sys.path.insert(0, str(Path(__file__).parents[1] / "bench" / "cpu"))
from traffic import counted

LAYOUTS = {
    "shards": ((1, 4), None, 1, {}),
    "replicas": ((2, 2), None, 1, {}),
    "experts": ((1, 4), (1, 2, 2), 1, {}),
    "replicas of experts": ((2, 2), (2, 1, 2), 1, {}),
    "recomputed": ((1, 4), (1, 1, 4), 1, {"recompute": "all"}),
    "recomputed but for attention": ((1, 4), (1, 1, 4), 2, {"recompute": "layers"}),
    "rows shared": ((1, 4), None, 2, {}),
    "two micro-batches": ((1, 4), (1, 1, 4), 1, {"micro_tokens": 64}),
    "adapters": ((1, 4), (1, 1, 4), 1, {"lora": 4}),
    "adapters on experts": ((1, 4), (1, 2, 2), 1, {"lora": 4, "on": ["experts.gate_up_proj", "experts.down_proj"]}),
    "parts apart": ((1, 4), (1, 1, 4), 1, {"log_parts": 1}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_receive_what_the_formulas_say(layout: str) -> None:
    answers = on_ranks(4, counted, *LAYOUTS[layout])
    for collective in ("all-gather", "reduce-scatter", "all-reduce", "all-to-all"):
        got = sum(answer["bytes"].get(collective, 0.0) for answer in answers) / 4
        needed = sum(answers[0]["needed"][collective].values())
        assert got == pytest.approx(needed, rel=1e-6), collective
