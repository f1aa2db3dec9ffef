"""How far a hint moves the message that it is about: one pass without gradients, by the trainer's own branches.

The student is the model as it is, the teacher the same model with the hint right before the message. Rollouts whose ids
are another tokenizer's, or that have none, are written down again in the model's own chat; then the figures say what
this model makes of another agent's words.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel

from offbook.agent.chat import Chat, is_in, written_again
from offbook.signals.feedback.hints import stand_in
from offbook.signals.feedback.rules import RULES
from offbook.train.algorithms import hint_branch
from offbook.train.forward import Decoder
from offbook.train.measure import measure_branches
from offbook.types import Feedback, Rollout, Sample, Segment

MICRO_TOKENS = 8192  # in one forward

Reasons = dict[str, set[tuple[int, int, int]]]  # targets by the reason: rollout, segment, message


@dataclass(frozen=True, slots=True)
class Effect:
    """Of the hints of one rule. `log_odds` is how much likelier the hint makes a faulty message: below 0 is good.

    A hint that does no more than another rule's in its place is not about this rule, whatever it does.
    """

    rule: str
    targets: int
    tokens: int
    kl: float  # nats per token, a mean over tokens
    largest: float  # nats at one token
    log_odds: float  # nats per message: teacher's minus student's log-probability of what was sampled, a mean
    donor_log_odds: float | None = None  # the same of another rule's hint before the same messages


def effects_of(feedback: Iterable[Feedback], donors: Iterable[Feedback] = ()) -> list[Effect]:
    """By rule, of what has been measured; the hints that move most come first."""
    others = _by_rule(donors)
    found = []
    for rule, items in _by_rule(feedback).items():
        nats = [value for item in items for value in item.divergence]
        effect = Effect(rule, len(items), len(nats), sum(nats) / len(nats), max(nats), _log_odds(items))
        found.append(dataclasses.replace(effect, donor_log_odds=_log_odds(others[rule])) if rule in others else effect)
    return sorted(found, key=lambda effect: -effect.kl)


def _by_rule(feedback: Iterable[Feedback]) -> dict[str, list[Feedback]]:
    by_rule: dict[str, list[Feedback]] = defaultdict(list)
    for item in feedback:
        if item.divergence:
            by_rule[item.target.rule].append(item)
    return by_rule


def _log_odds(items: Sequence[Feedback]) -> float:
    return sum(sum(item.teacher) - sum(item.student) for item in items) / len(items)


def with_donor_hints(pairs: Sequence[tuple[Rollout, Feedback]]) -> list[tuple[Rollout, Feedback]]:
    """The same targets, each with the hint of another rule; where no tools are known, of one that names none."""
    changed = []
    for rollout, item in pairs:
        rules = [rule for name, rule in RULES.items() if rollout.tools or name != "unknown_tool"]
        ((_, hint),) = stand_in([(item.target, item.hint)], rollout, "donor", rules)
        changed.append((rollout, Feedback(item.target, hint)))
    return changed


def measure(
    pairs: Sequence[tuple[Rollout, Feedback]],
    decoder: Decoder,
    chat: Chat,
    temperature: float = 1.0,
    progress: Callable[[float], None] = lambda share: None,
) -> Counter[str]:
    """Fill in what each hint does to each token of its message. Returns the targets that could not be measured, by
    reason; one that is there with several hints counts once.

    Under `written again` it counts targets that were measured, on ids that are not the ones of the rollout.
    """
    reasons: Reasons = defaultdict(set)
    samples = _samples(pairs, decoder.model, chat, temperature, reasons)
    total, done = sum(len(sample.branches) for sample in samples), 0
    for measured in measure_branches(decoder, samples, MICRO_TOKENS):
        for key, values in measured.items():
            item = pairs[int(key)][1]
            item.student, item.teacher, item.divergence = values.student, values.teacher, values.divergence
        done += len(measured)
        progress(done / total)
    return Counter({reason: len(targets) for reason, targets in reasons.items()})


def _samples(
    pairs: Sequence[tuple[Rollout, Feedback]],
    model: PreTrainedModel,
    chat: Chat,
    temperature: float,
    reasons: Reasons,
) -> list[Sample]:
    """One for each segment that has targets, up to the last of them. Branches are named by their number in `pairs`."""
    window = model.config.to_dict().get("max_position_embeddings") or 1 << 30
    laid: dict[tuple[int, int], tuple[Segment, Sample]] = {}
    for number, (rollout, item) in enumerate(pairs):
        place = id(rollout), item.target.segment
        told = rollout.segments[item.target.segment]
        if place not in laid:
            segment = told if is_in(told, chat, model.config.vocab_size) else written_again(told, chat)
            laid[place] = segment, Sample(segment.ids, temperature=temperature)
        segment, sample = laid[place]
        branch = hint_branch(segment, item.target, item.hint, chat)
        branch.key = str(number)
        key = (*place, item.target.message)
        if not branch.num_targets:
            reasons["nothing in the message was sampled"].add(key)
        elif branch.end + len(branch.inserted) > window:
            reasons["beyond the model's context"].add(key)
        else:
            if segment is not told:
                reasons["written again"].add(key)
            item.pieces = chat.pieces(segment.ids[slice(*branch.spans[0])])
            sample.branches.append(branch)
    found = [sample for _, sample in laid.values() if sample.branches]
    return [dataclasses.replace(one, ids=one.ids[: max(branch.end for branch in one.branches)]) for one in found]
