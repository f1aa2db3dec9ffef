"""Whether a model follows reminders for their content: the change in log-probability of a faulty message after a
reminder of the rule it breaks, and after one of a rule it keeps. Hints can teach the difference between the two.
"""

from __future__ import annotations

from collections.abc import Iterable

from offbook.agent.chat import Chat
from offbook.signals.feedback import write_hint
from offbook.stages.reminders import Conversation
from offbook.train.algorithms import hint_branch
from offbook.train.forward import Decoder, measure_branches
from offbook.types import Sample, Target

MAX_FAULTS = 48
OWN, OTHER = "hint_sensitivity/own", "hint_sensitivity/other"  # nats per message, means
LITTLE = -1.0  # nats; a weaker reaction has little to teach


def hint_sensitivity(
    decoder: Decoder, conversations: Iterable[Conversation], chat: Chat, context: int, micro_tokens: int
) -> dict[str, float]:
    """Empty if no message is faulty."""
    samples: list[Sample] = []
    faults = 0
    for number, conversation in enumerate(conversations):
        sample = Sample(conversation.segment.ids)
        for message, rule in sorted(conversation.broken.items()):
            kept = conversation.spared.get(message)
            if not kept or faults == MAX_FAULTS:
                continue
            target, pair = Target(str(number), 0, message, rule, ""), []
            for key, name in ((OWN, rule), (OTHER, kept[message % len(kept)])):
                branch = hint_branch(conversation.segment, target, write_hint(name, conversation.tools), chat)
                branch.key = f"{key} {number} {message}"
                pair.append(branch)
            if all(branch.num_targets and branch.end + len(branch.inserted) <= context for branch in pair):
                sample.branches += pair
                faults += 1
        if sample.branches:
            sample.ids = sample.ids[: max(branch.end for branch in sample.branches)]
            samples.append(sample)
    nats = dict.fromkeys((OWN, OTHER), 0.0)
    for measured in measure_branches(decoder, samples, micro_tokens):
        for key, values in measured.items():
            nats[key.partition(" ")[0]] += (sum(values.teacher) - sum(values.student)) / faults
    return nats if faults else {}


def verdict(own: float, other: float) -> str:
    first, second = (f"{abs(nats):.1f} nats {'less' if nats < 0 else 'more'} likely" for nats in (own, other))
    effect = f"after a reminder of its rule a faulty message is {first}, after another rule's reminder {second}"
    if own > LITTLE:
        return f"{effect}: hints would teach this model little; imitate longer, or with a higher sft.reminders"
    if own > other + LITTLE:
        return f"{effect}: it reacts to any reminder, not to its content; imitate longer"
    return f"{effect}: it follows the content of hints"
