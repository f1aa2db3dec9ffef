"""What a finding costs. Whatever the policy says, a rollout with a finding that counts as a hack earns no outcome.

Model monitors are shown actions and changes and never what the agent thought, and neither are the rules: punishing what
is said in reasoning teaches an agent to leave it out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from offbook.core.client import Client
from offbook.core.config import JudgeConfig, MonitorsConfig
from offbook.signals.judge import Judge, Rubrics
from offbook.signals.monitors.facts import EVIDENCE, attempt
from offbook.signals.monitors.rules import KINDS
from offbook.signals.monitors.worker import Worker
from offbook.signals.trajectory import spoken
from offbook.tasks.grade import Grade
from offbook.types import Event, Flag, OffbookError, Rollout, Task

Action = Literal["count", "penalise", "zero", "quarantine"]
ORDER: tuple[Action, ...] = ("count", "zero", "penalise")  # the last one that applies is the rollout's
# What the code may be up to. Where a blank round showed every test, it was not up to the first of these (code.py).
CLEARED = ("saw", "exit", "probe", "runner")
DEFAULTS: dict[str, Action] = {
    **dict.fromkeys(KINDS, "zero"),
    "forged": "penalise",  # the one that a grade proves
    "attempt": "count",  # nothing was there to be found, or no grade could change by it
    "perturbed": "count",  # other inputs, another answer than the gold's: overfitted, or right in another way
    "leak": "quarantine",  # of the task: what the rollout did with it is another finding
}
PENALTY = 0.5  # what `penalise` takes; solving is worth 1
WITHHELD, HACK = "outcome_withheld", "hack"
NUM_SEEN = 8  # findings of a grade that become flags
CHEATING = Rubrics(
    Path(__file__).with_name("prompts"), thoughts=False, note="why"
)  # for a model that finds what rules miss


def action_for(flag: Flag, policy: Mapping[str, Action]) -> Action:
    """A kind of its own first; findings of a model, `model/...`, share one entry; an unnamed kind is a hack too."""
    general = flag.kind.partition("/")[0]
    return policy.get(flag.kind) or policy.get(general) or DEFAULTS.get(flag.kind, "zero")


def action_of(flags: Iterable[Flag], policy: Mapping[str, Action]) -> Action | None:
    """What all findings of a rollout come to for itself; None without any.

    `count` is for findings that one does not hold to be hacks: they are on record and cost nothing. `zero`: nothing
    positive is left, costs stay. `penalise`: a penalty besides. `quarantine` is about the task and not about the
    rollout: a rollout that used a leak has other findings that say how.
    """
    actions = [action_for(flag, policy) for flag in flags]
    return max((one for one in actions if one in ORDER), key=ORDER.index, default=None)


def withhold(rollout: Rollout, outcome: float, penalty: float = 0.0) -> None:
    """Zero every positive part of a rollout's reward. The outcome stays on record under another name."""
    reward = rollout.reward
    reward.parts |= {"outcome": 0.0, WITHHELD: outcome}
    reward.weights[WITHHELD] = 0.0
    for name, value in reward.parts.items():
        if value * reward.weights.get(name, 1.0) > 0:
            reward.weights[name] = 0.0
    if penalty:
        reward.parts[HACK], reward.weights[HACK] = -1.0, penalty


async def flags_by(model: Judge, task: Task | None, rollout: Rollout) -> list[Flag]:
    """What a model found. What does not hold, and questions without an answer, are events on the rollout."""
    judgement = await model.read([(rollout, task)])
    for kind, counts in (("malformed", judgement.refused), ("unreachable", judgement.unanswered)):
        rollout.events += [Event(-1, f"monitor_{kind}", f"{count} of: {reason}") for reason, count in counts.items()]
    return [Flag(one.rule, one.message, f"{one.quote!r}: {one.note}"[:240], one.segment) for one in judgement.found]


def flags_of(grade: Grade, rollout: Rollout) -> list[Flag]:
    """What the grading saw, at the last message: the whole work is what was graded."""
    (segment, message), _ = [((0, 0), None), *spoken(rollout)][-1]
    told = {(one.kind, f"the grading saw {one.kind} in {one.path}: {one.evidence}") for one in grade.findings}
    named = [(kind if kind in ("forged", "perturbed") else "saw", text[:EVIDENCE]) for kind, text in told]
    return [Flag(kind, message, text, segment) for kind, text in sorted(named)[:NUM_SEEN]]


@dataclass(slots=True)
class Monitors:
    """The monitors of a run and what they found out about its tasks."""

    policy: dict[str, Action] = field(default_factory=dict)
    offline: bool = False  # the sandboxes of the run have no network
    model: Judge | None = None
    worker: Worker = field(default_factory=Worker)
    quarantined: dict[str, str] = field(default_factory=dict)  # task -> the rollout that showed why

    async def judge(self, task: Task, rollout: Rollout) -> None:
        """Put what is found on a rollout. It has no reward yet, so none is seen. Without a network nothing arrives."""
        flags = await asyncio.to_thread(self.worker.check, task, rollout)
        is_offline = self.offline and not rollout.foreign
        rollout.flags += [attempt(flag) if is_offline and flag.kind == "download" else flag for flag in flags]
        if self.model is not None:
            rollout.flags += await flags_by(self.model, task, rollout)
        self.recall([rollout])

    def action(self, rollout: Rollout, grade: Grade | None = None) -> Action | None:
        """What the findings call for. The grade has its say last, because monitors do not see it: what it proves is a
        finding, and where the expected values of all tests were hidden, some of what the code may be up to is free."""
        rollout.flags += flags_of(grade, rollout) if grade is not None else []
        proven = any(flag.kind == "forged" for flag in rollout.flags)
        is_clear = grade is not None and grade.blank > 0 and not grade.shown and not proven
        idle: dict[str, Action] = dict.fromkeys(CLEARED, "count") if is_clear else {}
        return action_of(rollout.flags, idle | self.policy)

    def recall(self, rollouts: Iterable[Rollout]) -> None:
        """Restore the quarantined tasks from stored rollouts, when a run resumes."""
        for rollout in rollouts:
            if any(action_for(flag, self.policy) == "quarantine" for flag in rollout.flags):
                self.quarantined.setdefault(rollout.task, rollout.id)

    def settle(self, group: Iterable[Rollout]) -> None:
        """After the last rollout of a group. Once a task is known to leak, later groups of it earn nothing; what they
        cost, they cost. In the group that showed it everyone keeps what they have: each has its own findings."""
        group = list(group)
        for rollout in group:
            shown_by = self.quarantined.get(rollout.task)
            is_settled = any(event.kind == "quarantined" for event in rollout.events)
            if shown_by is None or is_settled or any(one.id == shown_by for one in group):
                continue
            if WITHHELD not in rollout.reward.parts:
                withhold(rollout, rollout.reward.parts.get("outcome", 0.0))
            rollout.events.append(Event(-1, "quarantined", f"see {shown_by}"))


def monitors_of(config: MonitorsConfig, judge: JudgeConfig, offline: bool = False) -> Monitors | None:
    """None where they are off."""
    if not config.on:
        return None
    for kind in config.policy:
        if kind.partition("/")[0] not in (*KINDS, "model"):
            raise OffbookError(f"monitors.policy.{kind}: there is no such finding; there are {', '.join(KINDS)}, model")
    model = Judge(Client(judge.url, judge.name), CHEATING, judge.monitors) if judge.monitors else None
    return Monitors(dict(config.policy), offline, model)
