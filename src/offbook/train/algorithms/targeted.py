"""Targeted feedback: a hint right before the faulty message, the hinted model as teacher for that message only."""

from __future__ import annotations

from offbook.agent.chat import Chat
from offbook.types import Branch, Distill, Hint, Sample, Segment, Target


def hint_block(chat: Chat, hint: Hint) -> list[int]:
    """A closed message of its own, so that the header of the target follows it exactly as it did without the hint."""
    return chat.block("user", hint.text) if hint.text else []


def target_key(target: Target) -> str:
    return f"{target.rollout}/{target.segment}/{target.message}"


def hint_weight(
    weight: float, step: int, anneal_steps: int = 0, anneal_to: float = 0.0, rule_weight: float = 1.0
) -> float:
    """Lambda of a branch at a step, the first being 1: a straight line from `weight` to `anneal_to`, then level."""
    share = min(1.0, (step - 1) / anneal_steps) if anneal_steps else 0.0
    return rule_weight * (weight + share * (anneal_to - weight))


def hint_branch(
    segment: Segment,
    target: Target,
    hint: Hint,
    chat: Chat,
    weight: float = 1.0,
    distill: Distill = Distill(),  # noqa: B008  (frozen)
) -> Branch:
    """The target as it is read with the hint before it. Only tokens the model sampled are distilled. The branches of
    one rollout compete for the places that `distill` has."""
    message = segment.messages[target.message]
    span = message.body, message.body + sum(segment.sampled[message.body : message.end])
    block = hint_block(chat, hint)
    return Branch(message.start, block, (span,), weight, distill, target_key(target), contest=target.rollout)


def anchor_sample(sample: Sample, branch: Branch, weight: float, distill: Distill) -> Sample:
    """The hinted context as a sample of its own, to be read as the teacher of `distill` reads it, who is the run's
    start: a teacher that is the student can only teach as long as the student heeds hints."""
    ids = [*sample.ids[: branch.insert], *branch.inserted, *sample.ids[branch.insert : branch.end]]
    by = len(branch.inserted)
    spans = tuple((start + by, end + by) for start, end in branch.spans)
    held = Branch(branch.insert + by, [], spans, weight, distill)
    return Sample(ids, branches=[held], temperature=sample.temperature)
