"""Imitation: cross-entropy on what the demonstrator wrote, some of its messages preceded by a hint."""

from __future__ import annotations

from offbook.types import Sample, Segment


def sft_sample(segment: Segment, hints: dict[int, list[int]] | None = None) -> Sample:
    """`hints` maps a message's index to the hint block that stands before it; hints are context, never imitated."""
    starts = {segment.messages[index].start: block for index, block in (hints or {}).items()}
    ids: list[int] = []
    weight: list[float] = []
    for position, (token, sampled) in enumerate(zip(segment.ids, segment.sampled, strict=True)):
        block = starts.get(position, [])
        ids += [*block, token]
        weight += [*[0.0] * len(block), float(sampled)]
    zeros = [0.0] * len(ids)
    return Sample(ids=ids, logprobs=zeros, advantage=zeros, rl_weight=zeros, ce_weight=weight)
