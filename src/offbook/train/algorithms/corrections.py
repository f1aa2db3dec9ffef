"""Rejection-sampled corrections: the hinted model writes the faulty message anew, and what passes is imitated.

    L = mean over the tokens of m' of -log pi(m' | context without the hint),    m' from pi(. | context, hint)

and m' keeps the rule and, where that is asked, is followed by a rollout that passes the tests (loop/corrections.py).
It is context distillation by samples (STaR, 2203.14465, for one message): a right message is made likelier, where a
hint branch also makes the faulty one less likely.

Left out: an importance weight for the hint's part in m', which would take back most of what the hint added.
"""

from __future__ import annotations

from offbook.types import Sample, Segment


def correction_sample(segment: Segment, message: int, weight: float, temperature: float = 1.0) -> Sample:
    """Of a segment in which the message is already the new one, and no hint stands before it."""
    cut = segment.up_to(message + 1)
    start = cut.messages[message].start
    weights = [weight if sampled and place >= start else 0.0 for place, sampled in enumerate(cut.sampled)]
    return Sample(cut.ids, ce_weight=weights, temperature=temperature, routes=cut.routes)
