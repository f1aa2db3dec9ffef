"""Hints that no rule gives: those of a judge, which have to hold for other tasks too, and stand-ins for control runs.

A stand-in replaces the hint, one for each way in which a gain might have nothing to do with it:

none               the same targets and the same divergence, and no hint: is it only being held to the teacher?
donor              a hint about another rule: would any words do?
random_target      the same hint before another message of the rollout: does it matter which message is taught?
every_turn         the hint before every message of a faulty rollout: what is the gain from picking one?
constant_negative  no teacher, an advantage of -1 on the target's tokens: would saying "no" be enough?
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from offbook.signals.feedback.leaks import leak
from offbook.signals.judge import Judgement, Rubrics
from offbook.signals.trajectory import At, spoken
from offbook.types import Hint, Rollout, Target, Task

if TYPE_CHECKING:
    from offbook.signals.feedback.rules import Rule

MAX_WORDS = 60  # of a hint


def _refusal(hint: str, task: Task | None) -> str | None:
    """Whether a hint leaks is unknown without the task."""
    if not hint:
        return "empty hint"
    if len(hint.split()) > MAX_WORDS:
        return f"hint of more than {MAX_WORDS} words"
    leaked = leak(hint, task) if task is not None else None
    return f"leaks {leaked}" if leaked else None


MISTAKES = Rubrics(Path(__file__).with_name("prompts"), thoughts=True, refusal=_refusal)


def hints_in(judgement: Judgement) -> dict[str, Pairs]:
    """Targets and their hints by rollout."""
    pairs: dict[str, Pairs] = {}
    for one in judgement.found:
        target = Target(one.rollout.id, one.segment, one.message, one.rule, one.quote)
        pairs.setdefault(target.rollout, []).append((target, Hint(one.rule, one.note)))
    return pairs


Pairs = list[tuple[Target, Hint]]
NEGATIVE = -1.0  # the advantage of a failure where all others of its group succeeded


def stand_in(pairs: Pairs, rollout: Rollout, control: str, rules: Sequence[Rule]) -> Pairs:
    """The pairs of one rollout as the control has them. Random draws come from the rollout's id."""
    rng = random.Random(f"{control} {rollout.id}")
    places = [at for at, _ in spoken(rollout)]
    found: Pairs = []
    if control == "none":
        return [(target, Hint(hint.rule, "")) for target, hint in pairs]
    if control == "donor":
        known = [rule.hint(rollout.tools) for rule in rules]
        for target, hint in pairs:
            others = [one for one in known if one.rule != hint.rule and one.text != hint.text]
            found.append((target, rng.choice(others)))
        return found
    if control == "random_target":  # each a message that is no target; the last have none where there are too few
        taken = [(target.segment, target.message) for target, _ in pairs]
        free = [at for at in places if at not in taken]
        rng.shuffle(free)
        return [(_moved(target, at), hint) for (target, hint), at in zip(pairs, free, strict=False)]
    if control == "every_turn":  # the hint of the next target; after the last target the last one's
        pairs = sorted(pairs, key=lambda pair: (pair[0].segment, pair[0].message))
        for at in places if pairs else ():
            later = [pair for pair in pairs if (pair[0].segment, pair[0].message) >= at]
            target, hint = (later or pairs[-1:])[0]
            found.append((_moved(target, at), hint))
        return found
    return pairs


def _moved(target: Target, at: At) -> Target:
    return replace(target, segment=at[0], message=at[1])
