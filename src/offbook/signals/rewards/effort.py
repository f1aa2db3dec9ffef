"""Effort: what a rollout that solves its task pays for the tokens, calls and turns it took.

C(x) = log(1 + k x) / k is the nonlinear length penalty of Composer 2 (section 4.1) at q = 1. It is concave: the first
tokens cost most, so that a short task is made shorter while a long one hardly pays for one token more. k and the
weights are not published; here x is 1 when a rollout has used all it may, and the part is -C(x)/C(1), so the weight of
the part is the most that effort can ever cost. Left out: other q, which bend more or less.

A rollout that fails pays all of it, whatever it spent. Then failing fast earns no more than failing slowly, and failing
never earns more than solving, also where a failure gets partial credit. docs/rewards.md has the argument.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from offbook.types import Rollout, Task, Usage

TOKEN_KINDS = ("thinking_tokens", "call_tokens", "output_tokens", "final_tokens", "summary_tokens")
ACT_KINDS = ("calls", "turns")
K = 4.0  # how early the cost levels off


@dataclass(frozen=True, slots=True)
class Effort:
    """The part `effort` as a function of task and rollout, between -1 and 0.

    `weights` says what a share of all tokens (or turns) counts for, by the names of Usage.
    """

    full_tokens: int
    full_turns: int
    weights: dict[str, float]
    k: float = K

    def __call__(self, task: Task, rollout: Rollout) -> float:
        if not rollout.solved:
            return -1.0
        return -penalty(self.spent(rollout.usage), self.k) / penalty(1.0, self.k)

    def spent(self, usage: Usage) -> float:
        """x: the weighted share of what may be used, 1 where all of it went into the dearest kind of token."""
        tokens = sum(self.weights[kind] * getattr(usage, kind) for kind in TOKEN_KINDS) / self.full_tokens
        acts = sum(self.weights[kind] * getattr(usage, kind) for kind in ACT_KINDS) / self.full_turns
        whole = max(self.weights[kind] for kind in TOKEN_KINDS) + sum(self.weights[kind] for kind in ACT_KINDS)
        # Parallel calls may be more than the turns.
        return min(1.0, (tokens + acts) / whole) if whole else 0.0


def penalty(x: float, k: float) -> float:
    """C(x) for x >= 0 and k > 0. C(0) = 0 and C'(0) = 1."""
    return math.log1p(k * x) / k
