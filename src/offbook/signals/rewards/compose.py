"""Parts put together: the outcome with weight 1, effort, behaviours and a user's own, each under its name.

A part that breaks stops the run with a sentence that names it. A run that went on with a guess in its place would train
on another reward than the one it was asked for; one that stopped goes on from its last checkpoint when it is mended.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from offbook.core.client import Client
from offbook.core.config import EFFORT_KINDS, JUDGED, HarnessConfig, JudgeConfig, RewardsConfig
from offbook.core.plugins import functions_in, said
from offbook.signals.judge import Assessor
from offbook.signals.rewards.behaviour import PARTS
from offbook.signals.rewards.effort import Effort
from offbook.types import Event, OffbookError, Rollout, Task

RewardFunction = Callable[[Task, Rollout], float]
TAKEN = {  # names that have a place of their own in the configuration
    "outcome": "the outcome has the weight 1",
    "effort": "effort has its weight in rewards.effort.bound",
}
PROMPTS = Path(__file__).with_name("prompts")
NO_JUDGE = JudgeConfig()


@dataclass(frozen=True, slots=True)
class Part:
    """A reward function under its name; `place` says where it comes from when it breaks."""

    name: str
    weight: float
    function: RewardFunction
    place: str = "offbook"


@dataclass(frozen=True, slots=True)
class Rewards:
    """What a graded rollout earns in addition to the outcome. No parts: the outcome alone."""

    parts: tuple[Part, ...] = ()
    judged: dict[str, float] = field(default_factory=dict)  # name -> weight
    assessor: Assessor | None = None

    async def assess(self, task: Task, rollout: Rollout) -> None:
        """What a model says, within bounds: the weight is the most that it can cost. A record that leaves the model
        without a word costs all of it, else confusing the judge would pay; a server that is lost ends the run."""
        if self.assessor is None:
            return
        for name, weight in self.judged.items():
            share = await self.assessor.assess(name, rollout, task)
            if share is None:
                rollout.events.append(Event(-1, "judge_silent", f"no {name} within the judge's budget"))
            rollout.reward.parts[name] = (share or 0.0) - 1.0
            rollout.reward.weights[name] = weight

    def score(self, task: Task, rollout: Rollout) -> None:
        for part in self.parts:
            where = f"the reward {part.name} of {part.place}"
            try:
                value = part.function(task, rollout)
            except Exception as error:  # the border to a user's code
                raise OffbookError(f"{where} broke on rollout {rollout.id}: {said(error)}") from error
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise OffbookError(f"{where} gave {value!r} for rollout {rollout.id}; a part is a finite number")
            rollout.reward.parts[part.name] = value + 0.0  # no minus zero in reports
            rollout.reward.weights[part.name] = part.weight


def compose(rewards: RewardsConfig, harness: HarnessConfig, judge: JudgeConfig = NO_JUDGE) -> Rewards:
    """The parts that a configuration turns on. Whatever is wrong with them is said before the first rollout."""
    known = {name: Part(name, 0.0, function) for name, function in PARTS.items()}
    for file in rewards.files:
        found = functions_in(Path(file), "rewards.files", "rewards", {*known, *JUDGED, *TAKEN})
        if found.keys().isdisjoint(rewards.weights):
            has = ", ".join(found) or "no functions"
            raise OffbookError(f"{file} has {has}; give one of them a weight with --rewards.weights.NAME")
        known |= {name: Part(name, 0.0, function, file) for name, function in found.items()}
    names = [*known, *JUDGED]
    parts: list[Part] = []
    if rewards.effort.bound:
        weights = {**EFFORT_KINDS, **rewards.effort.weights}
        parts.append(Part("effort", rewards.effort.bound, Effort(harness.tokens, harness.turns, weights)))
    for name, weight in rewards.weights.items():
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
            suggestion = f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}"
            raise OffbookError(TAKEN.get(name, f"there is no reward {name}; {suggestion}"))
        if weight < 0 and name in (*PARTS, *JUDGED):
            raise OffbookError(f"rewards.weights.{name} is {weight:g}; it must not be negative")
        if weight and name in known:
            parts.append(replace(known[name], weight=weight))
    bounded = sum(weight for name, weight in rewards.weights.items() if name in (*PARTS, *JUDGED))
    if bounded >= 1:
        raise OffbookError(
            f"the behaviours in rewards.weights add up to {bounded:g}; they must stay below 1, what solving is worth"
        )
    judged = {name: weight for name, weight in rewards.weights.items() if name in JUDGED and weight}
    return Rewards(tuple(parts), judged, Assessor(Client(judge.url, judge.name), PROMPTS) if judged else None)
