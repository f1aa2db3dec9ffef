"""Look before hints teach: does a model that is told of a rule break it less often?

At places where it was broken, messages are sampled without the hint and with it, and the rule itself judges each. What
a tool would have answered is found out in a sandbox that is brought to that place. Where that cannot be done, where
few messages were drawn and where the rule is hardly broken at these places any more, what is left is how much less
likely the hint makes the faulty message.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from offbook.agent.harness.again import Before, NotRestored
from offbook.core.shares import rise, wilson
from offbook.rl.collector import Collector
from offbook.rl.effect import measure
from offbook.rl.train_step import Lessons
from offbook.sandbox import Sandbox
from offbook.signals.feedback import Rule, read_all
from offbook.signals.feedback.coach import Found, grouped, spread_out
from offbook.signals.trajectory import Trajectory, spoken, with_siblings
from offbook.train.algorithms import hint_block, target_key
from offbook.train.forward import Decoder
from offbook.types import Completion, Feedback, Message, OffbookError, Prompt, PromptTooLong, Rollout, Task

TARGETS = 4  # faulty messages of a rule that are looked at
BOXES = 8  # open at once
ENOUGH = 16  # sampled messages to judge a rule by
NATS = 1.0  # that a hint has to take from a faulty message, where sampling cannot tell


class NoHintHelps(OffbookError):
    """There is nothing that a teacher knows better."""

    def __init__(self, rules: str):
        super().__init__(
            f"no hint helps this model ({rules}), so there is nothing to teach; `offbook sft` with `sft.reminders` "
            "makes one that follows hints, another model may do so already, and feedback.look = false teaches anyway"
        )


@dataclass(frozen=True, slots=True)
class Looked:
    """What the hint of one rule does."""

    rule: str
    targets: int  # faulty messages that were looked at
    samples: int = 0  # messages that the rule judged without the hint, and as many with it; 0: it could not
    faults: int = 0
    hinted_faults: int = 0
    nats: float | None = None  # that the hint adds to the log-probability of a faulty message, a mean; below 0 is good
    unjudged: str = ""  # why no sampled message was judged

    @property
    def why_not(self) -> str:
        """Why the hint is not to be taught; empty: it helps, or nothing is known against it."""
        if self.samples >= ENOUGH:
            if rise(self.faults, self.hinted_faults, self.samples)[1] < 0:
                return ""
            if rise(self.faults, 0, self.samples)[1] < 0:  # so many faults that it would have been seen
                return "no fewer faults with it, as far as can be told"
        if self.nats is None or self.nats <= -NATS:
            return ""
        return f"it moves the faulty message by {self.nats:+.1f} nats"

    def row(self) -> dict[str, Any]:
        return {**asdict(self), "why_not": self.why_not}


def table(looked: Iterable[Looked]) -> list[str]:
    """For people: a line per rule."""
    lines = [f"{'rule':<22}{'messages':>9}{'faulty':>22}{'with the hint':>22}{'nats':>8}  taught"]
    for one in looked:
        shares = [_share(hits, one.samples) for hits in (one.faults, one.hinted_faults)]
        nats = "" if one.nats is None else f"{one.nats:+.2f}"
        verdict = f"no: {one.why_not}" if one.why_not else "yes"
        if one.hinted_faults > one.faults and not one.why_not:
            verdict = "yes, though not fewer faults: too few messages to tell"
        said = f"{verdict} ({one.unjudged})" if one.unjudged else verdict
        lines.append(f"{one.rule:<22}{one.targets:>9}{shares[0]:>22}{shares[1]:>22}{nats:>8}  {said}")
    return lines


def _share(hits: int, trials: int) -> str:
    if not trials:
        return "not judged"
    low, high = wilson(hits, trials)
    return f"{hits}/{trials} ({100 * low:.0f} to {100 * high:.0f}%)"


def faults_in(groups: Sequence[Sequence[Rollout]], by: Lessons) -> list[Found]:
    """Faulty messages with the hints of their rules. What the machine ended has none."""
    settings = by.config.feedback
    rollouts = [rollout for group in groups for rollout in group if not rollout.fault]
    return [
        Found(rollout, Feedback(target, by.rules[target.rule].hint(rollout.tools)), "", siblings)
        for rollout, siblings in with_siblings(rollouts)
        for target in read_all(rollout, by.tasks.get(rollout.task), settings.rules, by.rules, siblings)
        if settings.rule_weights.get(target.rule, 1.0)
    ]


@dataclass(frozen=True, slots=True)
class Look:
    """Rollouts' faults under hints. `samples` messages are drawn at each of them, without and with."""

    collector: Collector
    tasks: Mapping[str, Task]
    rules: Mapping[str, Rule]
    samples: int

    async def sampled(self, found: Sequence[Found], name: str) -> dict[str, Looked]:
        """By rule. `name` makes the random numbers of this look its own."""
        chosen = list(spread_out([one for one in found if one.feedback.target.rule in self.rules], TARGETS))
        drawn = await self.draw(chosen, name)
        sandboxes = asyncio.Semaphore(BOXES)
        verdicts = await asyncio.gather(*(self._judge(one, drawn[id(one)], sandboxes) for one in chosen))
        looked = {}
        for rule in grouped(chosen):
            of_rule = [
                verdict for one, verdict in zip(chosen, verdicts, strict=True) if one.feedback.target.rule == rule
            ]
            told = [verdict for verdict in of_rule if not isinstance(verdict, str)]
            samples, faults, hinted = (sum(counts[place] for counts in told) for place in range(3))
            unjudged = "" if told else str(of_rule[0])
            looked[rule] = Looked(rule, len(of_rule), samples, faults, hinted, unjudged=unjudged)
        return looked

    def measured(self, looked: Mapping[str, Looked], found: Sequence[Found], decoder: Decoder) -> list[Looked]:
        """With what the hint does to the faulty messages themselves, as `decoder` reads them."""
        chosen = spread_out([one for one in found if one.feedback.target.rule in looked], TARGETS)
        pairs = [(one.rollout, Feedback(one.feedback.target, one.feedback.hint)) for one in chosen]
        measure(pairs, decoder, self.collector.chat, self.collector.config.engine.temperature)
        complete = []
        for rule, of_rule in looked.items():
            read = [item for _, item in pairs if item.target.rule == rule and item.divergence]
            nats = sum(sum(item.teacher) - sum(item.student) for item in read) / len(read) if read else None
            complete.append(replace(of_rule, nats=nats))
        return complete

    async def draw(
        self, chosen: Sequence[Found], name: str, sides: tuple[bool, ...] = (False, True)
    ) -> dict[int, tuple[list[Completion], list[Completion]]]:
        """At each place, without and with the hint."""
        engine = self.collector.engine
        asked = [
            (
                one,
                hinted,
                engine.open(f"{name}/{target_key(one.feedback.target)}/{'hinted' if hinted else 'plain'}/{k}"),
            )
            for one in chosen
            if one.rollout.task in self.tasks  # else nothing can judge it
            for hinted in sides
            for k in range(self.samples)
        ]  # all are opened before the first asks: they decode together

        async def one_message(one: Found, hinted: bool, session: Any) -> Completion | None:
            try:
                return await session.complete(self._prompt(one, hinted), self._room(one, hinted))
            except PromptTooLong:
                return None
            finally:
                session.close()

        answers = await asyncio.gather(*(one_message(*each) for each in asked))
        drawn: dict[int, tuple[list[Completion], list[Completion]]] = {id(one): ([], []) for one in chosen}
        for (one, hinted, _), answer in zip(asked, answers, strict=True):
            if answer is not None:
                drawn[id(one)][hinted].append(answer)
        return drawn

    def _prompt(self, one: Found, hinted: bool) -> Prompt:
        """What the rollout's message continued, with the hint where a branch has it."""
        segment, target = one.rollout.segments[one.feedback.target.segment], one.feedback.target
        message, said = segment.messages[target.message], segment.messages[: target.message]
        block = hint_block(self.collector.chat, one.feedback.hint) if hinted else []
        told = [Message("user", one.feedback.hint.text, 0, 0, 0, 0)] if hinted else []
        ids = [*segment.ids[: message.start], *block, *segment.ids[message.start : message.body]]
        task = self.tasks.get(one.rollout.task)
        return Prompt(ids, (*said, *told), self.collector.harness.toolset(task).specs() if task else ())

    def _room(self, one: Found, hinted: bool) -> int:
        limits = self.collector.harness.limits
        return max(1, min(limits.message_tokens, limits.context - len(self._prompt(one, hinted).ids)))

    async def _judge(
        self, one: Found, drawn: tuple[list[Completion], list[Completion]], sandboxes: asyncio.Semaphore
    ) -> tuple[int, int, int] | str:
        """How many messages were judged a side, and how many break the rule; or why none could be."""
        target, task = one.feedback.target, self.tasks.get(one.rollout.task)
        samples = min(map(len, drawn))
        if task is None:
            return "the task is not at hand"
        if not samples:
            return "the hint does not fit the context"
        collector, rule = self.collector, self.rules[target.rule]
        place = Before(one.rollout, (target.segment, target.message), task, collector.harness, collector.chat)
        try:
            async with sandboxes:
                if rule.by_call:
                    faulty = await _faults(place, rule, one.siblings, drawn, None)
                else:
                    async with place.sandbox(collector.sandbox) as sandbox:
                        faulty = await _faults(place, rule, one.siblings, drawn, sandbox)
        except (NotRestored, OSError) as error:
            return f"its sandbox could not be brought back: {error}"
        return samples, sum(faulty[0][:samples]), sum(faulty[1][:samples])


async def _faults(
    place: Before,
    rule: Rule,
    siblings: Sequence[Rollout],
    drawn: tuple[list[Completion], list[Completion]],
    sandbox: Sandbox | None,
) -> tuple[list[bool], list[bool]]:
    """Whether each message breaks the rule. What was drawn several times is tried once."""
    known: dict[tuple[int, ...], bool] = {}
    for sampled in (*drawn[0], *drawn[1]):
        key = tuple(sampled.ids)
        if key not in known:
            trajectory = Trajectory(await answered(place, sampled, sandbox), place.task, siblings)
            known[key] = breaks(rule, place, trajectory)
    plain, hinted = ([known[tuple(one.ids)] for one in side] for side in drawn)
    return plain, hinted


async def answered(place: Before, sampled: Completion, sandbox: Sandbox | None) -> Rollout:
    if sandbox is None:
        return await place.with_message(sampled, None)
    async with await sandbox.fork() as fork:
        return await place.with_message(sampled, fork)


def breaks(rule: Rule, place: Before, trajectory: Trajectory) -> bool:
    targets = rule.targets(trajectory, {at for at, _ in spoken(trajectory.rollout)})
    return any((target.segment, target.message) == place.at for target in targets)
