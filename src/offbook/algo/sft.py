"""Imitation: cross-entropy on what the demonstrator wrote, some of its messages preceded by a hint."""

from __future__ import annotations

from offbook.types import Sample, Segment


def sft_sample(segment: Segment, hints: dict[int, list[int]] | None = None, context_weight: float = 0.0) -> Sample:
    """`hints` maps a message's index to the hint block that stands before it.

    `context_weight` is for a model that starts from nothing: predicting what others wrote teaches it to read.
    """
    starts = {segment.messages[index].start: block for index, block in (hints or {}).items()}
    ids: list[int] = []
    weight: list[float] = []
    for position, (token, sampled) in enumerate(zip(segment.ids, segment.sampled, strict=True)):
        block = starts.get(position, [])
        ids += [*block, token]
        weight += [*[context_weight] * len(block), 1.0 if sampled else context_weight]
    return Sample(ids, ce_weight=weight)
