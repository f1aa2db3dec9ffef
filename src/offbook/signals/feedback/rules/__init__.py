"""Rules: plain functions from what an agent did to the messages that broke one, precise by construction."""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offbook.core.plugins import functions_in, said
from offbook.signals.feedback.hints import MISTAKES
from offbook.signals.feedback.rules import calls, editing, talking
from offbook.signals.trajectory import At, ToolUse, Trajectory, shown, spoken
from offbook.types import Hint, OffbookError, Rollout, Target, Task

SAID = "said"  # the rule name of what people say about messages
SHOWN = 160  # characters of what shows a fault


@dataclass(frozen=True, slots=True)
class Rule:
    """What finds the faulty messages, each with what shows it, and the hint: a general rule in a sentence that never
    says what the right message would have been."""

    name: str
    find: Callable[[Trajectory], Iterable[tuple[At | ToolUse, str]]]
    text: str
    place: str = "offbook"  # where it comes from, for when it breaks
    by_call: bool = False  # a call alone shows the fault, whatever it would be answered

    def hint(self, tools: tuple[str, ...]) -> Hint:
        return Hint(self.name, self.text.replace("{tools}", ", ".join(tools)))

    def targets(self, trajectory: Trajectory, own: Collection[At]) -> list[Target]:
        """`own` are the messages that the agent wrote: there is nothing to teach about others."""
        where = f"the rule {self.name} of {self.place}"
        found = []
        try:
            for place, evidence in self.find(trajectory):
                at = place.at if isinstance(place, ToolUse) else place
                if at not in own or not isinstance(evidence, str):
                    raise TypeError(f"{(at, evidence)!r} is no message of the agent's with a text")
                found.append(Target(trajectory.rollout.id, *at, self.name, shown(evidence, SHOWN)))
        except Exception as error:  # the border to a user's code
            raise OffbookError(f"{where} broke on rollout {trajectory.rollout.id}: {said(error)}") from error
        return found


BY_CALL = ("unknown_tool", "call_not_readable", "malformed_arguments", "more_than_needed")
FINDERS: dict[str, Any] = {**vars(calls), **vars(editing), **vars(talking)}
HINTS: dict[str, str] = tomllib.loads(Path(__file__).with_name("hints.toml").read_text())
RULES = {name: Rule(name, FINDERS[name], f"Reminder: {text}", by_call=name in BY_CALL) for name, text in HINTS.items()}


def write_hint(rule: str, tools: tuple[str, ...]) -> Hint:
    return RULES[rule].hint(tools)


def read_all(
    rollout: Rollout,
    task: Task | None = None,
    rules: Collection[str] = (),
    known: Mapping[str, Rule] = RULES,
    siblings: Sequence[Rollout] = (),
) -> list[Target]:
    """Every rule that every message broke, in the order of messages; of `rules` only, where any are named. `siblings`
    are the other rollouts of its group."""
    trajectory, own = Trajectory(rollout, task, siblings), {at for at, _ in spoken(rollout)}
    chosen = [rule for name, rule in known.items() if not rules or name in rules]
    found = [target for rule in chosen for target in rule.targets(trajectory, own)]
    return sorted(found, key=lambda target: (target.segment, target.message))  # stable: rules keep their order


def read_rollout(
    rollout: Rollout, max_targets: int, task: Task | None = None, rules: Collection[str] = ()
) -> list[Target]:
    """The first `max_targets` faulty messages, each for one rule: the first of RULES that it broke."""
    by_message: dict[At, Target] = {}
    for target in read_all(rollout, task, rules):
        by_message.setdefault((target.segment, target.message), target)
    return list(by_message.values())[:max_targets]


def rules_of(files: Sequence[str], chosen: Collection[str] = (), weighted: Collection[str] = ()) -> dict[str, Rule]:
    """By name. Whatever is wrong with one is said before the first rollout.

    `chosen` are the rules that a run goes by, all where there are none; what a judge or a person finds can be
    `weighted` too.
    """
    rules = dict(RULES)
    for file in files:
        found = functions_in(Path(file), "feedback.files", "rules", rules)
        if not found:
            raise OffbookError(f"{file} has no functions; each rule is one")
        if chosen and found.keys().isdisjoint(chosen):
            raise OffbookError(
                f"{file} has {', '.join(found)}; feedback.rules has to name one of them, as in --feedback.rules "
                f"{','.join([*chosen, *found])}, or nothing at all, which is all rules: --feedback.rules '[]'"
            )
        for name, function in found.items():
            hint = " ".join((inspect.getdoc(function) or "").split())
            if not hint:
                raise OffbookError(f"the rule {name} of {file} needs a docstring, which is its hint")
            rules[name] = Rule(name, function, hint, file)
    for names, known in ((chosen, [*rules]), (weighted, [*rules, *MISTAKES.rules, SAID])):
        if missing := [name for name in names if name not in known]:
            raise OffbookError(f"there is no rule {missing[0]}; the rules are {', '.join(known)}")
    return rules
