"""Reminders of rules before messages, so that a model fine-tuned on narrow data keeps following instructions.

A reminder is inserted exactly as a hint is in training (hint_block) and states a rule that the message keeps and could
have broken: a valid call, an edit that applies, a final message that names the change. Faulty messages stay, some after
a reminder of a rule they do not break: otherwise any reminder would announce a right message, whatever its content.

Left out: a user's own rules, because it is unknown which messages could break them; rules about a repository's style
without the repository.
"""

from __future__ import annotations

import random
import tomllib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from offbook.agent.chat import Chat
from offbook.core.config import SftConfig
from offbook.signals.feedback import Rule, unneeded, write_hint
from offbook.signals.trajectory import At, ToolUse, Trajectory, spoken
from offbook.train.algorithms import hint_block, sft_sample
from offbook.types import Hint, Rollout, Sample, Segment, ToolSpec, is_test_file

# Rephrased hints per rule, so that a model learns the rule and not its wording.
WORDINGS: dict[str, list[str]] = tomllib.loads((Path(__file__).parent / "wordings.toml").read_text())
OWN_WORDS = 0.3  # share of reminders in the hint's own wording; the others are rephrased
CODE = (".py", ".pyi", ".js", ".ts", ".go", ".rs", ".java", ".c", ".h", ".cpp", ".rb", ".sh")


@dataclass
class Reading:
    """Which rules the messages of a rollout keep or break."""

    kept: dict[At, tuple[str, ...]]  # right ones, with the rules that they keep and could have broken
    broken: dict[At, str]  # faulty ones, with the first rule that they broke
    spared: dict[At, tuple[str, ...]]  # faulty ones, with rules of the kept ones that they did not break


def read(
    rollout: Rollout, tools: Collection[ToolSpec], rules: Mapping[str, Rule], siblings: Sequence[Rollout] = ()
) -> Reading:
    """`siblings` are the other rollouts of its group."""
    trajectory = Trajectory(rollout, None, siblings)
    own = {at for at, _ in spoken(rollout)}
    broken: dict[At, list[str]] = {}
    for name, rule in rules.items():
        for target in rule.targets(trajectory, own):
            broken.setdefault((target.segment, target.message), []).append(name)
    kept: dict[At, list[str]] = {}
    for at, name in _breakable(trajectory, tools):
        if name in rules and at not in broken and name not in kept.get(at, ()):
            kept.setdefault(at, []).append(name)
    stated = {name for names in kept.values() for name in names}  # all have wordings: a user's own rules are not kept
    spared = {at: tuple(sorted(stated.difference(names))) for at, names in broken.items()}
    return Reading(
        kept={at: tuple(names) for at, names in kept.items()},
        broken={at: names[0] for at, names in broken.items()},
        spared={at: names for at, names in spared.items() if names},
    )


def _breakable(trajectory: Trajectory, tools: Collection[ToolSpec]) -> Iterator[tuple[At, str]]:
    """Messages, each with a rule it could have broken."""
    beyond = {use.at for use, _ in unneeded(trajectory)}
    for use in trajectory.uses:
        is_edit = use.kind == "edit"
        names = list(_of_call(trajectory, use, tools)) if use.ran else []
        if is_edit and use.went_well:
            names.append("finished_without_edit")
            names += ["edit_not_applied"] if any(old for old, _ in use.replacements) else []
            names += [] if is_test_file(use.path) else ["edited_tests"]
            names += ["thinking_in_comments"] if use.path.endswith(CODE) else []
        if use.went_well and (is_edit or (trajectory.siblings and use.at not in beyond)):
            names.append("more_than_needed")
        yield from ((use.at, name) for name in names)
    if trajectory.end is None:
        return
    if not trajectory.changed_nothing:
        yield trajectory.end, "asked_instead"
        yield trajectory.end, "finished_without_edit"
    if any(one.tests for one in trajectory.uses):
        yield trajectory.end, "claimed_success"
    if trajectory.rollout.changed and trajectory.final.strip():
        yield trajectory.end, "final_too_long"
        yield trajectory.end, "final_names_nothing"


def _of_call(trajectory: Trajectory, use: ToolUse, tools: Collection[ToolSpec]) -> Iterator[str]:
    """Calls of other agents have no status: they count as valid if they match the tool's schema."""
    given = set(use.call.arguments)
    is_valid = not trajectory.rollout.foreign
    for tool in tools:
        if tool.name == use.call.name and given.issubset(tool.parameters.get("properties") or ()):
            is_valid |= given.issuperset(tool.parameters.get("required") or ())
    if is_valid:
        yield from ("unknown_tool", "call_not_readable", "malformed_arguments")
    if use.order:
        yield "repeated_call"
    if use.tests:
        yield "whole_suite_again"
    if use.kind == "read" and use.went_well and len(given) > 1:
        yield "whole_file_read"


@dataclass
class Conversation:
    """One context window to imitate, in the model's own ids."""

    key: str  # seeds its random draws
    task: str  # conversations of one task are all for training or all for validation
    segment: Segment
    tools: tuple[str, ...]
    kept: dict[int, tuple[str, ...]] = field(default_factory=dict)
    spared: dict[int, tuple[str, ...]] = field(default_factory=dict)


@dataclass
class Reminders:
    """Draws reminders; deterministic for a seed, epoch and conversation."""

    chat: Chat
    settings: SftConfig
    seed: int
    context: int
    _blocks: dict[str, list[int]] = field(default_factory=dict)

    def sample(self, conversation: Conversation, epoch: int, counts: Counter[str]) -> Sample:
        """The conversation with some reminders. What does not fit into the context is counted."""
        rng = random.Random(f"{self.seed} {epoch} {conversation.key}")
        hints = dict[int, list[int]]()
        room = self.context - len(conversation.segment.ids)
        for index, rules in sorted((conversation.kept | conversation.spared).items()):
            block = self._block(rng, rules, conversation.tools) if rng.random() < self.settings.reminders else []
            counts["without_room"] += len(block) > room
            if block and len(block) <= room:
                hints[index] = block
                room -= len(block)
        counts["reminded"] += len(hints)
        return sft_sample(conversation.segment, hints)

    def _block(self, rng: random.Random, rules: tuple[str, ...], tools: tuple[str, ...]) -> list[int]:
        rule = rng.choice(rules)
        hint = write_hint(rule, tools)
        if rng.random() >= OWN_WORDS:
            hint = Hint(rule, rng.choice(WORDINGS[rule]).replace("{tools}", ", ".join(tools)))
        if hint.text not in self._blocks:
            self._blocks[hint.text] = hint_block(self.chat, hint)
        return self._blocks[hint.text]
