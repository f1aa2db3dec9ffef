"""Imitation: cross-entropy on what the demonstrator wrote, some of its messages preceded by a hint."""

from __future__ import annotations

from dataclasses import replace

from offbook.types import Sample, Segment


def sft_sample(
    segment: Segment,
    hints: dict[int, list[int]] | None = None,
    context_weight: float = 0.0,
) -> Sample:
    """`hints` maps a message's index to the hint block that stands before it, at the place where a hint teaches.

    The loss is on the assistant's own messages. `context_weight` is for a model that starts from nothing: predicting
    what others wrote teaches it to read.
    """
    weights = [1.0 if sampled else context_weight for sampled in segment.sampled]
    ids: list[int] = []
    weight: list[float] = []
    done = 0
    for index, block in sorted((hints or {}).items()):
        start = segment.messages[index].start
        ids += [*segment.ids[done:start], *block]
        weight += [*weights[done:start], *[context_weight] * len(block)]
        done = start
    return Sample([*ids, *segment.ids[done:]], ce_weight=[*weight, *weights[done:]])


def dft_sample(sample: Sample) -> Sample:
    """DFT (dynamic fine-tuning, 2508.05629): each token's cross-entropy times its own probability, a constant. Seen as
    a policy gradient cross-entropy pays 1 / p for a token; that factor is what is taken away. Beside SFT a baseline."""
    return replace(sample, ce_power=1.0)
