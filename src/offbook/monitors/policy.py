"""What a finding costs. Whatever the policy says, a rollout with a finding that counts as a hack earns no outcome.

Model monitors are shown actions and changes and never what the agent thought, and neither are the rules: punishing what
is said in reasoning teaches an agent to leave it out.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from offbook.client import Client
from offbook.config import MonitorsConfig
from offbook.judge import Judge, Rubrics
from offbook.monitors.rules import KINDS, check
from offbook.types import Event, Flag, OffbookError, Rollout, Task

Action = Literal["count", "penalise", "zero", "quarantine"]
ORDER: tuple[Action, ...] = ("count", "zero", "penalise", "quarantine")  # the last one that applies holds
DEFAULTS: dict[str, Action] = {
    **dict.fromkeys(KINDS, "zero"),
    # The task itself leaks: whoever solves it from here on may have read the answer.
    **dict.fromkeys(("cache", "bytecode", "copy"), "quarantine"),
    # Nobody does these by accident.
    **dict.fromkeys(
        ("forged", "daemon", "runner", "startup", "exit", "equality", "frames", "probe", "tests_read", "loader"),
        "penalise",
    ),
}
WITHHELD, HACK = "outcome_withheld", "hack"
CHEATING = Rubrics(Path(__file__).with_name("prompts"), thoughts=False)  # for a judge that finds what rules miss


def action_for(flag: Flag, policy: Mapping[str, Action]) -> Action:
    """A kind of its own first; findings of a model, `model/...`, share one entry; what nobody named is a hack too."""
    general = flag.kind.partition("/")[0]
    return policy.get(flag.kind) or policy.get(general) or DEFAULTS.get(flag.kind, "zero")


def action_of(flags: Iterable[Flag], policy: Mapping[str, Action]) -> Action | None:
    """What all findings of a rollout come to; None without any.

    `count` is for findings that one does not hold to be hacks: they are on record and cost nothing. `zero`: nothing
    positive is left, costs stay. `penalise`: a penalty besides. `quarantine`: as zero, and the task is put aside.
    """
    return max((action_for(flag, policy) for flag in flags), key=ORDER.index, default=None)


def withhold(rollout: Rollout, outcome: float, penalty: float = 0.0) -> None:
    """Of a rollout that has all its parts: none of them earns anything. The outcome stays on record by another name."""
    reward = rollout.reward
    reward.parts |= {"outcome": 0.0, WITHHELD: outcome}
    reward.weights[WITHHELD] = 0.0
    for name, value in reward.parts.items():
        if value * reward.weights.get(name, 1.0) > 0:
            reward.weights[name] = 0.0
    if penalty:
        reward.parts[HACK], reward.weights[HACK] = -1.0, penalty


async def flags_by(judge: Judge, task: Task | None, rollout: Rollout) -> list[Flag]:
    """What a judge found. What does not hold, and questions without an answer, are events on the rollout."""
    judgement = await judge.read([(rollout, task)])
    for kind, counts in (("malformed", judgement.refused), ("unreachable", judgement.unanswered)):
        rollout.events += [Event(-1, f"monitor_{kind}", f"{count} of: {reason}") for reason, count in counts.items()]
    return [Flag(one.rule, one.message, f"{one.quote!r}: {one.note}"[:240], one.segment) for one in judgement.found]


@dataclass(slots=True)
class Monitors:
    """The monitors of a run and what they found out about its tasks."""

    policy: dict[str, Action] = field(default_factory=dict)
    penalty: float = 0.5
    watch: bool = True  # boxes tell which files are opened
    model: Judge | None = None
    quarantined: dict[str, str] = field(default_factory=dict)  # task -> the rollout that showed why

    async def judge(self, task: Task, rollout: Rollout) -> Action | None:
        """Put what is found on a rollout, and say what that calls for. It has no reward yet, so none is seen.

        A monitor that breaks is an event and never the run's end.
        """
        flags: list[Flag] = []
        try:
            flags += check(task, rollout)
            if self.model is not None:
                flags += await flags_by(self.model, task, rollout)
        except Exception:
            rollout.events.append(Event(-1, "monitor_crash", traceback.format_exc(limit=-4)))
        rollout.flags += flags
        action = action_of(flags, self.policy)
        if action == "quarantine":
            self.quarantined.setdefault(task.id, rollout.id)
        return action

    def recall(self, rollouts: Iterable[Rollout]) -> None:
        """Which tasks rollouts of earlier steps put aside: a run that was killed goes on with what it knew."""
        for rollout in rollouts:
            if any(action_for(flag, self.policy) == "quarantine" for flag in rollout.flags):
                self.quarantined.setdefault(rollout.task, rollout.id)

    def settle(self, group: Iterable[Rollout]) -> None:
        """After the last rollout of a task: if one showed that it leaks, none of them earns or teaches anything."""
        for rollout in group:
            if rollout.task not in self.quarantined or any(event.kind == "quarantined" for event in rollout.events):
                continue
            if WITHHELD not in rollout.reward.parts:
                withhold(rollout, rollout.reward.parts.get("outcome", 0.0))
            rollout.reward.weights = dict.fromkeys(rollout.reward.parts, 0.0)
            rollout.events.append(Event(-1, "quarantined", f"see {self.quarantined[rollout.task]}"))


def monitors_of(config: MonitorsConfig) -> Monitors | None:
    """None where they are off."""
    if not config.on:
        return None
    for kind in config.policy:
        if kind.partition("/")[0] not in (*KINDS, "model"):
            raise OffbookError(f"monitors.policy.{kind}: there is no such finding; there are {', '.join(KINDS)}, model")
    judge = config.judge
    model = Judge(Client(judge.url, judge.name), CHEATING, judge.rate) if judge.url and judge.rate else None
    return Monitors(dict(config.policy), config.penalty, config.watch, model)
