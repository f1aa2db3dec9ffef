"""Look before hints teach: does a model that is told of a rule break it less often?

At places where it was broken, messages are sampled without the hint and with it, and the rule itself judges each. What
a tool would have answered is found out in a sandbox that is brought to that place. Where that cannot be done, where
few messages were drawn and where the rule is hardly broken at these places any more, what is left is how much less
likely the hint makes the faulty message.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from transformers import PreTrainedModel

from offbook.agent.chat import Chat, is_in, written_again
from offbook.agent.harness.again import Before, NotRestored
from offbook.agent.harness.agent import Midway, run_agent
from offbook.core.config import CorrectionsConfig
from offbook.core.shares import rise, wilson
from offbook.engine import Session
from offbook.rl.collector import Collector
from offbook.rl.train_step import TrainContext
from offbook.sandbox import Sandbox
from offbook.signals.feedback import Rule, read_all
from offbook.signals.feedback.coach import Found, grouped, spread_out
from offbook.signals.feedback.hints import stand_in
from offbook.signals.feedback.rules import RULES
from offbook.signals.trajectory import Trajectory, spoken, with_siblings
from offbook.train.algorithms import correction_sample, hint_block, hint_branch, target_key
from offbook.train.forward import Decoder
from offbook.train.measure import measure_branches
from offbook.types import (
    Completion,
    Feedback,
    Message,
    OffbookError,
    Prompt,
    PromptTooLong,
    Reward,
    Rollout,
    Sample,
    Segment,
    Task,
    Usage,
)

MICRO_TOKENS = 8192  # in one forward
CORRECTION_SAMPLES = 2  # messages written for a faulty one; the first to pass is learned

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


@dataclass(frozen=True, slots=True)
class Corrections:
    """`look` samples and judges messages, and has the tasks."""

    look: HintProbe
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
        sessions = [engine.open(f"{name}/{target_key(one.feedback.target)}/on") for one, _ in pairs]
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

    async def _gone_on(self, one: Found, message: Completion, session: Session, counts: Counter[str]) -> Rollout | None:
        """The rollout with this message in it, if that is learned."""
        place, collector = self._place(one), self.look.collector
        try:
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
            session.close()


async def correct(
    step: int, groups: Sequence[Sequence[Rollout]], by: TrainContext, collector: Collector, counts: Counter[str]
) -> list[Sample]:
    """Of each rollout the first faults, as many as hints may teach."""
    settings, taken, chosen = by.config.feedback, Counter[str](), list[Found]()
    for one in faults_in(groups, by):
        if one.feedback.target.rule not in by.unhelpful and taken[one.rollout.id] < settings.max_targets:
            taken[one.rollout.id] += 1
            chosen.append(one)
    look = HintProbe(collector, by.tasks, by.rules, CORRECTION_SAMPLES)
    return await Corrections(look, settings.corrections).samples(chosen, f"correct{step}", counts)


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
class ProbedHint:
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


def table(looked: Iterable[ProbedHint]) -> list[str]:
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


def faults_in(groups: Sequence[Sequence[Rollout]], by: TrainContext) -> list[Found]:
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
class HintProbe:
    """Rollouts' faults under hints. `samples` messages are drawn at each of them, without and with."""

    collector: Collector
    tasks: Mapping[str, Task]
    rules: Mapping[str, Rule]
    samples: int

    async def sampled(self, found: Sequence[Found], name: str) -> dict[str, ProbedHint]:
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
            looked[rule] = ProbedHint(rule, len(of_rule), samples, faults, hinted, unjudged=unjudged)
        return looked

    def measured(self, looked: Mapping[str, ProbedHint], found: Sequence[Found], decoder: Decoder) -> list[ProbedHint]:
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
