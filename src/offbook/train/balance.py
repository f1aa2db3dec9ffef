"""The parts of the loss against each other.

A part can be held to a share of RL's gradient. Which share that is, is known when all micro-batches have been through,
so the gradients of the parts are kept apart until then: exact, and under any optimizer. It costs one more backward pass
through the model for each micro-batch that has such a part (none where there is nothing of it), and a second set of
gradients.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from offbook.train.batches import POLICY
from offbook.train.masters import Masters
from offbook.train.parallel.ranks import total_norm


class PartGradients:
    """Of each part of the loss by itself, summed over the micro-batches of a step. Data-parallel ranks add theirs up
    before anyone takes a norm."""

    def __init__(self, masters: Masters):
        self.masters = masters
        self.of: dict[str, dict[str, Tensor]] = {}  # by part, by parameter

    def add(self, losses: Mapping[str, Tensor]) -> None:
        """Differentiate each. They hang on one graph."""
        named = self.masters.named
        for number, (part, loss) in enumerate(losses.items(), 1):
            before = self.of.get(part, {})
            for name, master in named.items():
                master.grad = before.get(name)
            loss.backward(retain_graph=number < len(losses))
            self.of[part] = {name: master.grad for name, master in named.items() if master.grad is not None}

    def norms(self) -> dict[str, float]:
        return {part: float(total_norm(list(grads.values()))) for part, grads in self.of.items()}

    def join(self, scales: Mapping[str, float]) -> None:
        """Their sum, some of them scaled, is the gradient of the step. They are used up by it."""
        for name, master in self.masters.named.items():
            master.grad = None
            for part, grads in self.of.items():
                if (gradient := grads.pop(name, None)) is not None:
                    scaled = gradient.mul_(scales[part]) if part in scales else gradient
                    master.grad = scaled if master.grad is None else master.grad.add_(scaled)


def scales_of(norms: Mapping[str, float], bounds: Mapping[str, float], policy_norm: float) -> dict[str, float]:
    """What bounded parts are multiplied by. `policy_norm` is RL's in the last step in which it had a gradient, for a
    step in which it has none: all rollouts of a task are equal then, which says nothing about how much a fault matters.
    As long as there has been none at all, there is nothing that could be drowned."""
    policy = norms.get(POLICY, 0.0) or policy_norm
    return {
        part: min(1.0, bound * policy / norm)
        for part, bound in bounds.items()
        if policy and (norm := norms.get(part, 0.0))
    }
