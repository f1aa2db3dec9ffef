"""Reminders before messages that keep a rule, so that a model which imitates narrow data still heeds what it is told.

A reminder is put before a message exactly as a hint is in training (algo.hint_block), and it states a rule that the
message keeps and could have broken: a call that is valid, an edit that applies, an end that names what was changed.
Faulty messages stay as the data has them, some of them behind a reminder of another rule: if reminders stood before
right messages alone, any of them would announce one, whatever it says. Where the data also has a right message for the
same place, the two are a pair: the fault without a reminder, and what is right after one.

Left out: a user's own rules, since nobody says which messages could break them; and, where the repository is not at
hand, rules about its style.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from offbook.agent.chat import Chat
from offbook.core.config import SftConfig
from offbook.signals.feedback import Rule, unneeded, write_hint
from offbook.signals.trajectory import At, ToolUse, Trajectory, spoken
from offbook.stages.wordings import WORDINGS
from offbook.train.algorithms import first_sampled, hint_block, in_place, sft_sample
from offbook.types import Hint, Rollout, Sample, Segment, ToolSpec, is_test_file

OWN_WORDS = 0.3  # of the reminders, that are the hint which training gives; the others say the same otherwise
CODE = (".py", ".pyi", ".js", ".ts", ".go", ".rs", ".java", ".c", ".h", ".cpp", ".rb", ".sh")
# Faults that change nothing: what the agent did next it could have done in their place.
WITHOUT_EFFECT = ("unknown_tool", "malformed_arguments", "repeated_call", "edit_not_applied", "whole_suite_again")


@dataclass(frozen=True, slots=True)
class Reading:
    """The messages of a rollout by what rules make of them."""

    kept: dict[At, tuple[str, ...]]  # right ones, with the rules that they keep and could have broken
    broken: dict[At, str]  # faulty ones, with the first rule that they broke
    spared: dict[At, tuple[str, ...]]  # faulty ones, with rules of the kept ones that they did not break


def read(
    rollout: Rollout, tools: Collection[ToolSpec], rules: Mapping[str, Rule], siblings: Sequence[Rollout] = ()
) -> Reading:
    """`siblings` are the other rollouts of its group."""
    trajectory, own = Trajectory(rollout, None, siblings), {at for at, _ in spoken(rollout)}
    broken: dict[At, list[str]] = {}
    for name, rule in rules.items():
        for target in rule.targets(trajectory, own):
            broken.setdefault((target.segment, target.message), []).append(name)
    kept: dict[At, dict[str, None]] = {}
    for at, name in _breakable(trajectory, tools):
        if name in rules and at not in broken:
            kept.setdefault(at, {})[name] = None
    stated = {name for names in kept.values() for name in names}
    return Reading(
        kept={at: tuple(names) for at, names in kept.items()},
        broken={at: names[0] for at, names in broken.items()},
        spared={at: tuple(sorted(stated - {*names})) for at, names in broken.items() if stated - {*names}},
    )


def _breakable(trajectory: Trajectory, tools: Collection[ToolSpec]) -> Iterator[tuple[At, str]]:
    """Messages and rules that they could have broken."""
    beyond = {use.at for use, _ in unneeded(trajectory)}
    for use in trajectory.uses:
        names = list(_of_call(trajectory, use, tools)) if use.ran else []
        if use.kind == "edit" and use.went_well:
            names += _of_edit(use)
        if use.kind == "edit" or (trajectory.siblings and use.at not in beyond):
            names += ["more_than_needed"] if use.went_well else []
        yield from ((use.at, name) for name in names)
    if trajectory.end is None:
        return
    names = [] if trajectory.changed_nothing else ["asked_instead", "finished_without_edit"]
    names += ["claimed_success"] if any(one.tests for one in trajectory.uses) else []
    names += (
        ["final_too_long", "final_names_nothing"] if trajectory.rollout.changed and trajectory.final.strip() else []
    )
    yield from ((trajectory.end, name) for name in names)


def _of_call(trajectory: Trajectory, use: ToolUse, tools: Collection[ToolSpec]) -> Iterator[str]:
    """Of other agents nobody has said how a call went: there the schema of its tool has to say that it is one."""
    if not trajectory.rollout.foreign or any(_takes(tool, use) for tool in tools):
        yield from ("unknown_tool", "malformed_arguments")
    if use.order:
        yield "repeated_call"
    if use.tests:
        yield "whole_suite_again"
    if use.kind == "read" and use.went_well and len(use.call.arguments) > 1:
        yield "whole_file_read"


def _takes(tool: ToolSpec, use: ToolUse) -> bool:
    given, known = use.call.arguments, tool.parameters.get("properties") or {}
    required = tool.parameters.get("required") or ()
    return tool.name == use.call.name and set(required) <= set(given) <= set(known)


def _of_edit(use: ToolUse) -> Iterator[str]:
    yield "finished_without_edit"
    if any(old for old, _ in use.replacements):
        yield "edit_not_applied"
    if not is_test_file(use.path):
        yield "edited_tests"
    if use.path.endswith(CODE):
        yield "thinking_in_comments"


@dataclass(frozen=True, slots=True)
class Pair:
    """A faulty message, the rule it broke, and the right one for its place, in the segment that has it."""

    message: int
    rule: str
    other: Segment
    right: int


@dataclass(slots=True)
class Conversation:
    """One context window to imitate, in the model's own ids."""

    key: str  # of all that is drawn for it
    task: str  # conversations of one task are all learned from, or all for validation
    segment: Segment
    tools: tuple[str, ...]
    kept: dict[int, tuple[str, ...]] = field(default_factory=dict)
    broken: dict[int, str] = field(default_factory=dict)
    spared: dict[int, tuple[str, ...]] = field(default_factory=dict)
    pairs: list[Pair] = field(default_factory=list)
    shown: dict[str, list[int]] = field(default_factory=dict)  # what teachers of whole responses would see, by method


@dataclass(slots=True)
class Reminders:
    """Draws them. The same for the same seed, epoch and conversation."""

    chat: Chat
    settings: SftConfig
    seed: int
    context: int
    _blocks: dict[str, list[int]] = field(default_factory=dict)

    def samples(self, conversation: Conversation, epoch: int, counts: Counter[str]) -> list[Sample]:
        """The conversation with some reminders, and the right half of at most one pair. What the context has no room
        for is counted."""
        rng = random.Random(f"{self.seed} {epoch} {conversation.key}")
        segment, hints = conversation.segment, dict[int, list[int]]()
        room = self.context - len(segment.ids)
        for name in ("opsd", "sdft"):
            share = self.settings.teachers.get(name, 0.0)
            block = conversation.shown.get(name, []) if not hints and share and rng.random() < share else []
            counts["without_room"] += len(block) > room
            if block and len(block) <= room and any(segment.sampled):
                hints[first_sampled(segment)] = block
                room -= len(block)
        is_shown, reminded = len(hints), 0
        for index, rules in sorted((conversation.kept | conversation.spared).items()):
            block = self._block(rng, rules, conversation.tools) if rng.random() < self.settings.reminders else []
            counts["without_room"] += len(block) > room
            if block and len(block) <= room:
                hints[index] = [*hints.get(index, ()), *block]
                room -= len(block)
                reminded += 1
        samples = [sft_sample(segment, hints)]
        drawn = [pair for pair in conversation.pairs if rng.random() < self.settings.pairs]
        for pair in rng.sample(drawn, min(1, len(drawn))):  # all that stands before it is read once more
            block = self._block(rng, (pair.rule,), conversation.tools)
            place = in_place(segment, pair.message, pair.other, pair.right)
            counts["without_room"] += len(place.ids) + len(block) > self.context
            if len(place.ids) + len(block) <= self.context:
                samples.append(sft_sample(place, {pair.message: block}))
        counts.update(shown=is_shown, reminded=reminded, pairs=len(samples) - 1)
        return samples

    def _block(self, rng: random.Random, rules: tuple[str, ...], tools: tuple[str, ...]) -> list[int]:
        rule = rng.choice(rules)
        hint = write_hint(rule, tools)
        if rng.random() >= OWN_WORDS:
            hint = Hint(rule, rng.choice(WORDINGS[rule]).replace("{tools}", ", ".join(tools)))
        if hint.text not in self._blocks:
            self._blocks[hint.text] = hint_block(self.chat, hint)
        return self._blocks[hint.text]
