"""What a hint does to the message that it corrects: measured, sampled, and learned from.

`measure` reads each faulty message with and without the hint. `HintProbe` asks, before hints teach, whether a model
with the hint breaks the rule less often: messages are sampled both ways where the rule was broken, and the rule itself
judges each; a sandbox that is brought to that point answers the tool calls. Where it cannot be restored, few messages
were drawn or the rule is hardly broken there any more, what remains is how much less likely the hint makes the faulty
message. `correct` samples faulty messages again with the hint; of each, the first one that keeps the rule is learned,
if the agent that goes on from it, without the hint, passes the tests.
"""

from __future__ import annotations

import asyncio
import copy
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from offbook.agent.chat import Chat, is_in, written_again
from offbook.agent.harness.again import Before, NotRestored
from offbook.agent.harness.agent import RolloutCheckpoint, run_agent
from offbook.core.shares import rise, wilson
from offbook.engine import Session
from offbook.rl.collector import Collector
from offbook.rl.train_step import TrainContext, recall_probes
from offbook.sandbox import Sandbox
from offbook.signals.feedback import Rule, read_all
from offbook.signals.feedback.coach import Found, grouped, spread_out
from offbook.signals.feedback.hints import stand_in
from offbook.signals.feedback.rules import RULES
from offbook.signals.trajectory import Trajectory, spoken, with_siblings
from offbook.train.algorithms import correction_sample, hint_block, hint_branch, target_key
from offbook.train.forward import Decoder, measure_branches
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
PROBE_SAMPLES = 8  # messages sampled at each fault, without and with the hint
TARGETS = 4  # faulty messages probed per rule
BOXES = 8  # sandboxes open at once
ENOUGH = 16  # sampled messages to judge a rule by
CORRECTION_SAMPLES = 2  # messages sampled for a faulty one; the first to pass is learned
NATS = 1.0  # that a hint has to take from a faulty message, where sampling cannot tell

Drawn = tuple[list[Completion], list[Completion]]  # messages without and with the hint


@dataclass(frozen=True, slots=True)
class Effect:
    """Of the hints of one rule. `log_odds` is how much likelier the hint makes a faulty message: below 0 is good.

    A hint with no more effect than another rule's in its place is not about this rule.
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
    others = _measured_by_rule(donors)
    found = []
    for rule, items in _measured_by_rule(feedback).items():
        nats = [value for item in items for value in item.divergence]
        effect = Effect(
            rule,
            targets=len(items),
            tokens=len(nats),
            kl=sum(nats) / len(nats),
            largest=max(nats),
            log_odds=_log_odds(items),
            donor_log_odds=_log_odds(others[rule]) if rule in others else None,
        )
        found.append(effect)
    return sorted(found, key=lambda effect: -effect.kl)


def _measured_by_rule(feedback: Iterable[Feedback]) -> dict[str, list[Feedback]]:
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
    reason; a target with several hints counts once.

    Rollouts whose ids are another tokenizer's are encoded again in the model's own chat: `written again` counts those
    targets, whose figures say what this model makes of another agent's words.
    """
    reasons: dict[str, set[tuple[int, int, int]]] = defaultdict(set)  # rollout, segment, message
    model = decoder.model
    window = model.config.to_dict().get("max_position_embeddings") or 1 << 30
    prepared: dict[tuple[int, int], tuple[Segment, Sample]] = {}  # a sample per segment with targets
    for number, (rollout, item) in enumerate(pairs):
        place = id(rollout), item.target.segment
        stored = rollout.segments[item.target.segment]
        if place not in prepared:
            segment = stored if is_in(stored, chat, model.config.vocab_size) else written_again(stored, chat)
            prepared[place] = segment, Sample(segment.ids, temperature=temperature)
        segment, sample = prepared[place]
        branch = hint_branch(segment, item.target, item.hint, chat)
        branch.key = str(number)
        key = (*place, item.target.message)
        if not branch.num_targets:
            reasons["nothing in the message was sampled"].add(key)
        elif branch.end + len(branch.inserted) > window:
            reasons["beyond the model's context"].add(key)
        else:
            if segment is not stored:
                reasons["written again"].add(key)
            item.pieces = chat.pieces(segment.ids[slice(*branch.spans[0])])
            sample.branches.append(branch)
    samples = [sample for _, sample in prepared.values() if sample.branches]
    samples = [replace(one, ids=one.ids[: max(branch.end for branch in one.branches)]) for one in samples]
    total = sum(len(sample.branches) for sample in samples)
    done = 0
    for measured in measure_branches(decoder, samples, MICRO_TOKENS):
        for name, values in measured.items():
            item = pairs[int(name)][1]
            item.student, item.teacher, item.divergence = values.student, values.teacher, values.divergence
        done += len(measured)
        progress(done / total)
    return Counter({reason: len(targets) for reason, targets in reasons.items()})


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
    targets: int  # faulty messages that were probed
    samples: int = 0  # messages that the rule judged without the hint, and as many with it; 0: it could not
    faults: int = 0
    hinted_faults: int = 0
    nats: float | None = None  # that the hint adds to the log-probability of a faulty message, a mean; below 0 is good
    unjudged: str = ""  # why no sampled message was judged

    @property
    def why_not(self) -> str:
        """Why the hint is not to be taught; empty if it helps or nothing is known against it."""
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


def table(probed: Iterable[ProbedHint]) -> list[str]:
    """For people: a line per rule."""

    def share(hits: int, trials: int) -> str:
        if not trials:
            return "not judged"
        low, high = wilson(hits, trials)
        return f"{hits}/{trials} ({100 * low:.0f} to {100 * high:.0f}%)"

    lines = [f"{'rule':<22}{'messages':>9}{'faulty':>22}{'with the hint':>22}{'nats':>8}  taught"]
    for one in probed:
        plain, hinted = share(one.faults, one.samples), share(one.hinted_faults, one.samples)
        nats = "" if one.nats is None else f"{one.nats:+.2f}"
        verdict = f"no: {one.why_not}" if one.why_not else "yes"
        if one.hinted_faults > one.faults and not one.why_not:
            verdict = "yes, though not fewer faults: too few messages to tell"
        said = f"{verdict} ({one.unjudged})" if one.unjudged else verdict
        lines.append(f"{one.rule:<22}{one.targets:>9}{plain:>22}{hinted:>22}{nats:>8}  {said}")
    return lines


def faults_in(groups: Sequence[Sequence[Rollout]], context: TrainContext) -> list[Found]:
    """Faulty messages with the hints of their rules, but of rollouts that a machine fault ended."""
    settings = context.config.feedback
    rollouts = [rollout for group in groups for rollout in group if not rollout.fault]
    return [
        Found(rollout, Feedback(target, context.rules[target.rule].hint(rollout.tools)), "", siblings)
        for rollout, siblings in with_siblings(rollouts)
        for target in read_all(rollout, context.tasks.get(rollout.task), settings.rules, context.rules, siblings)
        if settings.rule_weights.get(target.rule, 1.0)
    ]


@dataclass(frozen=True, slots=True)
class HintProbe:
    """Samples `samples` messages at each fault, with and without the hint, and judges them by the rules."""

    collector: Collector
    tasks: Mapping[str, Task]
    rules: Mapping[str, Rule]
    samples: int

    async def sampled(self, found: Sequence[Found], name: str) -> dict[str, ProbedHint]:
        """By rule. `name` seeds the random numbers of this probe."""
        chosen = list(spread_out([one for one in found if one.feedback.target.rule in self.rules], TARGETS))
        drawn = await self.draw(chosen, name)
        sandboxes = asyncio.Semaphore(BOXES)
        verdicts = await asyncio.gather(*(self._judge(one, drawn[id(one)], sandboxes) for one in chosen))
        probed = {}
        for rule in grouped(chosen):
            of_rule = [
                verdict for one, verdict in zip(chosen, verdicts, strict=True) if one.feedback.target.rule == rule
            ]
            counted = [verdict for verdict in of_rule if not isinstance(verdict, str)]
            probed[rule] = ProbedHint(
                rule,
                targets=len(of_rule),
                samples=sum(samples for samples, _, _ in counted),
                faults=sum(faults for _, faults, _ in counted),
                hinted_faults=sum(faults for _, _, faults in counted),
                unjudged="" if counted else str(of_rule[0]),
            )
        return probed

    def measured(self, probed: Mapping[str, ProbedHint], found: Sequence[Found], decoder: Decoder) -> list[ProbedHint]:
        """With what the hint does to the faulty messages themselves, as `decoder` reads them."""
        chosen = spread_out([one for one in found if one.feedback.target.rule in probed], TARGETS)
        pairs = [(one.rollout, Feedback(one.feedback.target, one.feedback.hint)) for one in chosen]
        measure(pairs, decoder, self.collector.chat, self.collector.config.engine.temperature)
        complete = []
        for rule, of_rule in probed.items():
            read = [item for _, item in pairs if item.target.rule == rule and item.divergence]
            complete.append(replace(of_rule, nats=_log_odds(read) if read else None))
        return complete

    async def draw(
        self, chosen: Sequence[Found], name: str, sides: tuple[bool, ...] = (False, True)
    ) -> dict[int, Drawn]:
        """Messages at each fault, by the fault's id."""
        limits = self.collector.harness.limits
        drawn: dict[int, Drawn] = {id(one): ([], []) for one in chosen}

        async def one_message(one: Found, hinted: bool, session: Session) -> Completion | None:
            prompt = self._prompt(one, hinted)
            try:
                most = max(1, min(limits.message_tokens, limits.context - len(prompt.ids)))
                return await session.complete(prompt, most)
            except PromptTooLong:
                return None
            finally:
                session.close()

        asked = []  # all sessions are opened before the first one asks: they decode together
        for one in chosen:
            if one.rollout.task not in self.tasks:  # nothing can judge it
                continue
            for hinted in sides:
                for number in range(self.samples):
                    key = f"{name}/{target_key(one.feedback.target)}/{'hinted' if hinted else 'plain'}/{number}"
                    asked.append((one, hinted, self.collector.engine.open(key)))
        answers = await asyncio.gather(*(one_message(*each) for each in asked))
        for (one, hinted, _), answer in zip(asked, answers, strict=True):
            if answer is not None:
                drawn[id(one)][hinted].append(answer)
        return drawn

    def _prompt(self, one: Found, hinted: bool) -> Prompt:
        """What the rollout's message continued, with the hint where a branch has it."""
        target, hint = one.feedback.target, one.feedback.hint
        segment = one.rollout.segments[target.segment]
        message = segment.messages[target.message]
        block = hint_block(self.collector.chat, hint) if hinted else []
        shown = [Message("user", hint.text, 0, 0, 0, 0)] if hinted else []
        ids = [*segment.ids[: message.start], *block, *segment.ids[message.start : message.body]]
        task = self.tasks.get(one.rollout.task)
        specs = self.collector.harness.toolset(task).specs() if task else ()
        return Prompt(ids, (*segment.messages[: target.message], *shown), specs)

    def place(self, one: Found) -> Before:
        """The point in the rollout before the faulty message."""
        target, collector = one.feedback.target, self.collector
        task = self.tasks[one.rollout.task]
        return Before(one.rollout, (target.segment, target.message), task, collector.harness, collector.chat)

    async def breaks_rule(self, one: Found, message: Completion, place: Before, sandbox: Sandbox | None) -> bool:
        """Whether the sampled message breaks the rule; a fork of the sandbox answers its calls."""
        if sandbox is None:
            rollout = await place.with_message(message, None)
        else:
            async with await sandbox.fork() as fork:
                rollout = await place.with_message(message, fork)
        trajectory = Trajectory(rollout, place.task, one.siblings)
        targets = self.rules[one.feedback.target.rule].targets(trajectory, {at for at, _ in spoken(rollout)})
        return any((target.segment, target.message) == place.at for target in targets)

    async def _judge(self, one: Found, drawn: Drawn, sandboxes: asyncio.Semaphore) -> tuple[int, int, int] | str:
        """How many messages were judged per side, and how many of each side break the rule; or why none was judged."""
        samples = min(map(len, drawn))
        if one.rollout.task not in self.tasks:
            return "the task is not at hand"
        if not samples:
            return "the hint does not fit the context"
        place = self.place(one)
        known: dict[tuple[int, ...], bool] = {}  # duplicates are tried once

        async def try_all(sandbox: Sandbox | None) -> None:
            for message in (*drawn[0], *drawn[1]):
                if (key := tuple(message.ids)) not in known:
                    known[key] = await self.breaks_rule(one, message, place, sandbox)

        try:
            async with sandboxes:
                if self.rules[one.feedback.target.rule].by_call:
                    await try_all(None)
                else:
                    async with place.sandbox(self.collector.sandbox) as sandbox:
                        await try_all(sandbox)
        except (NotRestored, OSError) as error:
            return f"its sandbox could not be brought back: {error}"
        plain, hinted = (sum(known[tuple(message.ids)] for message in side[:samples]) for side in drawn)
        return samples, plain, hinted


async def probe_hints(
    step: int,
    groups: Sequence[Sequence[Rollout]],
    context: TrainContext,
    collector: Collector,
    in_thread: Callable[..., Awaitable[list[ProbedHint]]],
    tell: Callable[[str], None],
) -> None:
    """Whether hints help on the faults of this step, before any of them teaches. `in_thread` is the trainer's, with
    what it does for the watchdog."""
    found = faults_in(groups, context)
    probe = HintProbe(collector, context.tasks, context.rules, PROBE_SAMPLES)
    sampled = await probe.sampled(found, f"look{step}")  # the name seeds the random numbers
    collector.engine.pause()  # the trainer reads next
    own = context.trainer.teachers[context.config.feedback.teacher]
    decoder = own.decoder if own else context.trainer.student
    probed = await in_thread("hints to be probed", probe.measured, sampled, found, decoder)
    rows = [one.row() for one in probed]
    context.folder.write_look(step, rows)
    for line in table(probed) if probed else ["no rule was broken, so there was no hint to probe"]:
        tell(line)
    recall_probes(context, rows)
    if step == 1 and probed and all(one.why_not for one in probed):
        raise NoHintHelps(", ".join(one.rule for one in probed))


async def correct(
    step: int,
    groups: Sequence[Sequence[Rollout]],
    context: TrainContext,
    collector: Collector,
    counts: Counter[str],
) -> list[Sample]:
    """Samples of corrected messages: of each rollout the first faults, as many as hints may teach."""
    settings = context.config.feedback
    taken = Counter[str]()
    chosen = []
    for one in faults_in(groups, context):
        if one.feedback.target.rule not in context.unhelpful and taken[one.rollout.id] < settings.max_targets:
            taken[one.rollout.id] += 1
            chosen.append(one)
    probe = HintProbe(collector, context.tasks, context.rules, CORRECTION_SAMPLES)
    corrections = Corrections(probe, settings.corrections.weight)
    return await corrections.samples(chosen, f"correct{step}", counts)


@dataclass(frozen=True, slots=True)
class Corrections:
    """Faulty messages sampled again with the hint, and continued by the agent, which has to pass the tests."""

    probe: HintProbe
    weight: float

    async def samples(self, found: Sequence[Found], name: str, counts: Counter[str]) -> list[Sample]:
        """`name` seeds the random numbers."""
        found = [one for one in found if one.rollout.task in self.probe.tasks]
        drawn = await self.probe.draw(found, name, sides=(True,))
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

    async def _keeping_rule(
        self, one: Found, drawn: Sequence[Completion], sandboxes: asyncio.Semaphore
    ) -> Completion | None:
        """The first message that does not break the rule."""
        place = self.probe.place(one)
        try:
            async with sandboxes, place.sandbox(self.probe.collector.sandbox) as sandbox:
                for message in drawn:
                    if not await self.probe.breaks_rule(one, message, place, sandbox):
                        return message
        except (NotRestored, OSError):  # nothing is known of it then
            return None
        return None

    async def _wave(self, pairs: Sequence[tuple[Found, Completion]], name: str, counts: Counter[str]) -> list[Sample]:
        """All sessions are opened before the first one asks: they decode together."""
        collector = self.probe.collector
        sessions = [collector.engine.open(f"{name}/{target_key(one.feedback.target)}/on") for one, _ in pairs]
        rollouts = await asyncio.gather(*(
            self._continued(one, message, session, counts)
            for (one, message), session in zip(pairs, sessions, strict=True)
        ))  # fmt: skip
        samples = []
        for (one, _), rollout in zip(pairs, rollouts, strict=True):
            if rollout is not None:
                target = one.feedback.target
                segment = rollout.segments[target.segment]
                temperature = collector.config.engine.temperature
                samples.append(correction_sample(segment, target.message, self.weight, temperature))
        return samples

    async def _continued(
        self, one: Found, message: Completion, session: Session, counts: Counter[str]
    ) -> Rollout | None:
        """The rollout with this message in it, if that is learned."""
        place, collector = self.probe.place(one), self.probe.collector
        try:
            async with place.sandbox(collector.sandbox) as sandbox:
                again = copy.deepcopy(await place.with_message(message, sandbox))
                turns = sum(at <= place.at for at, _ in spoken(again))
                before = sum(sampled for segment in again.segments for sampled in segment.sampled)
                stop = again.stop if again.stop != "turns" else None
                again = replace(again, id=f"{again.id}/again", usage=Usage(turns=turns), reward=Reward(), flags=[])
                rollout = await run_agent(
                    place.task, sandbox, session, collector.chat, collector.harness, again.id, again.group,
                    checkpoint=RolloutCheckpoint(again, stop=stop),
                )  # fmt: skip
            counts["corrections/tokens"] += rollout.usage.sampled_tokens - before
            await collector.scored(place.task, rollout)
            return rollout if rollout.solved and not rollout.fault else None
        except (NotRestored, OSError):
            return None
        finally:
            session.close()
