"""The parts of the loss against each other.

A part can be held to a share of RL's gradient. Which share that is, is known when all micro-batches have been through,
so the gradients of the parts are kept apart until then, under any optimizer. It costs one more backward pass through
the model for each micro-batch that has such a part (none where there is nothing of it), and a set of gradients.

That set is in the precision of the weights. In float32 everything is exact. In bfloat16 a micro-batch's gradient comes
out of the backward pass in bfloat16 anyway, so the first one is stored as it is, and each one after it rounds the sum
once. After N micro-batches with hints that is off by about sqrt(N) / 800 of the part's norm (0.7% after 32), and the
part is at most `bound` of RL's gradient. RL's own sum, and that of every part without a bound, is in float32.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import Tensor

from offbook.train.batches import POLICY
from offbook.train.parallel.ranks import total_norm
from offbook.train.trainer import Masters


class PartGradients:
    """Of each part of the loss by itself, summed over the micro-batches of a step. Data-parallel ranks add theirs up
    before anyone takes a norm."""

    def __init__(self, masters: Masters, bounded: Collection[str]):
        self.masters = masters
        self.bounded = bounded
        self.of: dict[str, dict[str, Tensor]] = {}  # by part, by parameter

    def add(self, losses: Mapping[str, Tensor]) -> None:
        """Differentiate each. They hang on one graph."""
        for number, (part, loss) in enumerate(losses.items(), 1):
            is_bounded = part in self.bounded
            holders = self.masters.named | self.masters.copies if is_bounded else self.masters.named
            before = self.of.get(part, {})
            for name, holder in holders.items():
                holder.grad = before.get(name)
            with self.masters.handing_over(not is_bounded):
                loss.backward(retain_graph=number < len(losses))
            self.of[part] = {name: holder.grad for name, holder in holders.items() if holder.grad is not None}
            for holder in holders.values():
                holder.grad = None

    def norms(self) -> dict[str, float]:
        return {part: float(total_norm(list(grads.values()))) for part, grads in self.of.items()}

    def join(self, scales: Mapping[str, float]) -> None:
        """Their sum, some of them scaled, is the gradient of the step. They are used up by it."""
        for name, master in self.masters.named.items():
            master.grad = None
            for part, grads in self.of.items():
                gradient = grads.pop(name, None)
                if gradient is None:
                    continue
                gradient = gradient.float()
                if part in scales:
                    gradient.mul_(scales[part])
                master.grad = gradient if master.grad is None else master.grad.add_(gradient)


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
