"""A teacher of whole responses: all that the model sampled is distilled, read behind what the teacher alone sees.

SDPO, OPSD, SDFT and OPD are this with other things to see, and other weights to see them with.
"""

from __future__ import annotations

from offbook.types import Branch, Distill, Rollout, Segment


def response_branches(rollout: Rollout, inserted: list[int], weight: float, distill: Distill) -> dict[int, Branch]:
    """By segment, of those that have sampled tokens. What is inserted stands before the first sampled message."""
    found = {}
    for number, segment in enumerate(rollout.segments):
        if spans := sampled_spans(segment):
            start = segment.messages[first_sampled(segment)].start
            found[number] = Branch(start, inserted, spans, weight, distill)
    return found


def first_sampled(segment: Segment) -> int:
    """The number of the first message with sampled tokens. There has to be one."""
    start = segment.sampled.index(True)
    return next(index for index, message in enumerate(segment.messages) if message.end > start)


def sampled_spans(segment: Segment) -> tuple[tuple[int, int], ...]:
    """Runs of tokens that the model sampled."""
    shifted = zip([False, *segment.sampled], [*segment.sampled, False], strict=True)
    edges = [place for place, (before, here) in enumerate(shifted) if before != here]
    return tuple(zip(edges[::2], edges[1::2], strict=True))
