"""Targeted feedback: a hint right before the faulty message, the hinted model as teacher for that message only."""

from __future__ import annotations

from offbook.tokens import Chat
from offbook.types import Branch, Hint, Sample, Segment, Target


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


def add_branch(sample: Sample, segment: Segment, target: Target, hint: Hint, chat: Chat, weight: float) -> Branch:
    """Hang a hinted reading of the target on its segment's sample. Only tokens the model sampled are distilled."""
    message = segment.messages[target.message]
    target_end = message.body + sum(segment.sampled[message.body : message.end])
    branch = Branch(message.start, hint_block(chat, hint), message.body, target_end, weight, target_key(target))
    sample.branches.append(branch)
    return branch


def anchor_sample(sample: Sample, branch: Branch, weight: float) -> Sample:
    """The hinted context as a sample of its own, to be read as the run's start reads it: a teacher that is the student
    can only teach as long as the student heeds hints."""
    ids = [*sample.ids[: branch.insert], *branch.hint_ids, *sample.ids[branch.insert : branch.target_end]]
    by = len(branch.hint_ids)
    held = Branch(
        branch.insert + by, [], branch.target_start + by, branch.target_end + by, weight, branch.key, anchor=True
    )
    nothing = [0.0] * len(ids)
    return Sample(ids, nothing, nothing, nothing, nothing, [held])
