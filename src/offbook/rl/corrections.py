"""Faulty messages written anew: sampled behind the hint, judged by the rule and, where asked, by the tests.

A message that keeps its rule is put into a sandbox that is brought to its place. From there the agent goes on, without
the hint, and its work is graded like any other. Of each faulty message the first that passes is learned.
"""

from __future__ import annotations

import asyncio
import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from offbook.agent.harness.again import Before, NotRestored
from offbook.agent.harness.agent import Midway, run_agent
from offbook.core.config import CorrectionsConfig
from offbook.engine import Session
from offbook.rl.collector import Collector
from offbook.rl.hint_probe import BOXES, Look, answered, breaks, faults_in
from offbook.rl.train_step import Lessons
from offbook.signals.feedback.coach import Found
from offbook.signals.trajectory import Trajectory, spoken
from offbook.train.algorithms import correction_sample, target_key
from offbook.types import Completion, Reward, Rollout, Sample, Usage


@dataclass(frozen=True, slots=True)
class Corrections:
    """`look` samples and judges messages, and has the tasks."""

    look: Look
    settings: CorrectionsConfig

    async def samples(self, found: Sequence[Found], name: str, counts: Counter[str]) -> list[Sample]:
        """What is learned of these faults. `name` makes the random numbers its own."""
        found = [one for one in found if one.rollout.task in self.look.tasks]
        drawn = await self.look.draw(found, name, sides=(True,))
        sandboxes = asyncio.Semaphore(BOXES)
        kept = await asyncio.gather(*(self._keeping_rule(one, drawn[id(one)][True], sandboxes) for one in found))
        pairs = [(one, message) for one, message in zip(found, kept, strict=True) if message is not None]
        counts["corrections/faults"] += len(found)
        counts["corrections/keep_rule"] += len(pairs)
        counts["corrections/tokens"] += sum(len(message.ids) for one in found for message in drawn[id(one)][True])
        samples = []
        for start in range(0, len(pairs), BOXES):
            samples += await self._wave(pairs[start : start + BOXES], name, counts)
        counts["corrections/learned"] += len(samples)
        return samples

    def _place(self, one: Found) -> Before:
        target, collector = one.feedback.target, self.look.collector
        task = self.look.tasks[one.rollout.task]
        return Before(one.rollout, (target.segment, target.message), task, collector.harness, collector.chat)

    async def _keeping_rule(
        self, one: Found, drawn: Sequence[Completion], sandboxes: asyncio.Semaphore
    ) -> Completion | None:
        """The first of the messages that its rule has nothing against."""
        place, rule = self._place(one), self.look.rules[one.feedback.target.rule]
        try:
            async with sandboxes, place.sandbox(self.look.collector.sandbox) as sandbox:
                for message in drawn:
                    trajectory = Trajectory(await answered(place, message, sandbox), place.task, one.siblings)
                    if not breaks(rule, place, trajectory):
                        return message
        except (NotRestored, OSError):  # nothing is known of it then
            return None
        return None

    async def _wave(self, pairs: Sequence[tuple[Found, Completion]], name: str, counts: Counter[str]) -> list[Sample]:
        """All sessions are opened before the first asks: they decode together."""
        engine = self.look.collector.engine
        sessions = [
            engine.open(f"{name}/{target_key(one.feedback.target)}/on") if self.settings.solve else None
            for one, _ in pairs
        ]
        both = zip(pairs, sessions, strict=True)
        rollouts = await asyncio.gather(
            *(self._gone_on(one, message, session, counts) for (one, message), session in both)
        )
        temperature, weight = self.look.collector.config.engine.temperature, self.settings.weight
        return [
            correction_sample(rollout.segments[target.segment], target.message, weight, temperature)
            for (one, _), rollout in zip(pairs, rollouts, strict=True)
            if rollout is not None and (target := one.feedback.target)
        ]

    async def _gone_on(
        self, one: Found, message: Completion, session: Session | None, counts: Counter[str]
    ) -> Rollout | None:
        """The rollout with this message in it, if that is learned."""
        place, collector = self._place(one), self.look.collector
        try:
            if session is None:
                return await place.with_message(message, None)
            async with place.sandbox(collector.sandbox) as sandbox:
                again = copy.deepcopy(await place.with_message(message, sandbox))
                turns = sum(at <= place.at for at, _ in spoken(again))
                before = [sampled for segment in again.segments for sampled in segment.sampled]
                ended = again.stop if again.stop != "turns" else None
                again = replace(again, id=f"{again.id}/again", usage=Usage(turns=turns), reward=Reward(), flags=[])
                rollout = await run_agent(
                    place.task, sandbox, session, collector.chat, collector.harness, again.id, again.group,
                    midway=Midway(again, stop=ended),
                )  # fmt: skip
            counts["corrections/tokens"] += rollout.usage.sampled_tokens - sum(before)
            await collector.scored(place.task, rollout)
            return rollout if rollout.solved and not rollout.fault else None
        except (NotRestored, OSError):
            return None
        finally:
            if session is not None:
                session.close()


async def correct(
    step: int, groups: Sequence[Sequence[Rollout]], by: Lessons, collector: Collector, counts: Counter[str]
) -> list[Sample]:
    """Of each rollout the first faults, as many as hints may teach."""
    settings, taken, chosen = by.config.feedback, Counter[str](), list[Found]()
    for one in faults_in(groups, by):
        if one.feedback.target.rule not in by.unhelpful and taken[one.rollout.id] < settings.max_targets:
            taken[one.rollout.id] += 1
            chosen.append(one)
    look = Look(collector, by.tasks, by.rules, settings.corrections.samples)
    return await Corrections(look, settings.corrections).samples(chosen, f"correct{step}", counts)
