"""Effects of hints on the messages that they correct, measured and sampled.

`measure` reads each faulty message with and without the hint. `HintProbe` asks, before hints teach, whether a model
with the hint breaks the rule less often: messages are sampled both ways where the rule was broken, a sandbox restored
to that point answers their tool calls, and the rule itself judges them. Where that says too little, the change in
likelihood of the faulty message decides.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from offbook.agent.chat import Chat, is_in, written_again
from offbook.agent.harness.agent import Before, NotRestored
from offbook.core.shares import rise
from offbook.engine import Session
from offbook.rl.collector import Collector
from offbook.rl.train_step import TrainContext, recall_probes
from offbook.sandbox import Sandbox
from offbook.signals.feedback import Rule, read_all
from offbook.signals.feedback.coach import Found, spread_out
from offbook.signals.trajectory import Trajectory, spoken, with_siblings
from offbook.train.algorithms import hint_block, hint_branch, target_key
from offbook.train.forward import Decoder, measure_branches
from offbook.types import (
    Completion,
    Feedback,
    Message,
    OffbookError,
    Prompt,
    PromptTooLong,
    Rollout,
    Sample,
    Segment,
    Task,
)

MICRO_TOKENS = 8192  # in one forward
PROBE_SAMPLES = 8  # messages sampled at each fault, without and with the hint
TARGETS = 4  # faulty messages probed per rule
BOXES = 8  # sandboxes open at once
ENOUGH = 16  # sampled messages to judge a rule by
NATS = 1.0  # by which a hint has to make a faulty message less likely, where sampling cannot tell


@dataclass(frozen=True, slots=True)
class Effect:
    """The hints of one rule: `log_odds` is how much likelier they make a faulty message; below 0 is good."""

    rule: str
    targets: int
    tokens: int
    kl: float  # nats per token, a mean over tokens
    largest: float  # nats at one token
    log_odds: float  # nats per message: teacher's minus student's log-probability of what was sampled, a mean


def effects_of(feedback: Iterable[Feedback]) -> list[Effect]:
    """By rule, of measured feedback; the hints that move most come first."""
    by_rule: dict[str, list[Feedback]] = defaultdict(list)
    for item in feedback:
        if item.divergence:
            by_rule[item.target.rule].append(item)
    found = []
    for rule, items in by_rule.items():
        nats = [value for item in items for value in item.divergence]
        found.append(Effect(rule, len(items), len(nats), sum(nats) / len(nats), max(nats), _log_odds(items)))
    return sorted(found, key=lambda effect: -effect.kl)


def _log_odds(items: Sequence[Feedback]) -> float:
    return sum(sum(item.teacher) - sum(item.student) for item in items) / len(items)


def measure(
    pairs: Sequence[tuple[Rollout, Feedback]],
    decoder: Decoder,
    chat: Chat,
    temperature: float = 1.0,
    progress: Callable[[float], None] = lambda share: None,
) -> Counter[str]:
    """Fill in what each hint does to each token of its message. Returns the targets that could not be measured, by
    reason, and how many were `written again`: encoded in the model's chat, as their ids are another tokenizer's."""
    reasons: Counter[str] = Counter()
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
        if not branch.num_targets:
            reasons["nothing in the message was sampled"] += 1
        elif branch.end + len(branch.inserted) > window:
            reasons["beyond the model's context"] += 1
        else:
            if segment is not stored:
                reasons["written again"] += 1
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
    return reasons


class NoHintHelps(OffbookError):
    """There is nothing that a teacher knows better."""

    def __init__(self, rules: str):
        super().__init__(
            f"no hint helps this model ({rules}), so there is nothing to teach; `offbook sft` with `sft.reminders` "
            "makes one that follows hints, another model may do so already, and feedback.look = false teaches anyway"
        )


@dataclass(frozen=True, slots=True)
class ProbedHint:
    """The effect of one rule's hint."""

    rule: str
    targets: int  # faulty messages that were probed
    samples: int = 0  # messages that the rule judged without the hint, and as many with it
    faults: int = 0
    hinted_faults: int = 0
    nats: float | None = None  # that the hint adds to the log-probability of a faulty message, a mean; below 0 is good
    unjudged: str = ""  # why a sampled message was not judged

    @property
    def why_not(self) -> str:
        """Why the hint is not to be taught; empty if it helps or nothing is known against it."""
        if self.samples >= ENOUGH:
            if rise(self.faults, self.hinted_faults, self.samples)[1] < 0:
                return ""
            if rise(self.faults, 0, self.samples)[1] < 0:  # enough faults to see fewer
                return "no fewer faults with it, as far as can be told"
        if self.nats is None or self.nats <= -NATS:
            return ""
        return f"it moves the faulty message by {self.nats:+.1f} nats"

    def row(self) -> dict[str, Any]:
        return {**asdict(self), "why_not": self.why_not}


def table(probed: Iterable[ProbedHint]) -> list[str]:
    """A line per rule, for people."""
    lines = [f"{'rule':<22}{'messages':>9}{'faulty':>12}{'hinted':>12}{'nats':>8}  taught"]
    for one in probed:
        plain, hinted = f"{one.faults}/{one.samples}", f"{one.hinted_faults}/{one.samples}"
        if not one.samples:
            plain = hinted = "not judged"
        nats = "" if one.nats is None else f"{one.nats:+.2f}"
        verdict = f"no: {one.why_not}" if one.why_not else "yes"
        if one.hinted_faults > one.faults and not one.why_not:
            verdict = "yes, though not fewer faults: too few messages to tell"
        why = f" ({one.unjudged})" if one.unjudged and not one.samples else ""
        lines.append(f"{one.rule:<22}{one.targets:>9}{plain:>12}{hinted:>12}{nats:>8}  {verdict}{why}")
    return lines


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
        drawn = await self._draw(chosen, name)
        sandboxes = asyncio.Semaphore(BOXES)
        verdicts = await asyncio.gather(*(self._judge(one, *drawn[id(one)], sandboxes) for one in chosen))
        probed: dict[str, ProbedHint] = {}
        for one, (samples, faults, hinted_faults, unjudged) in zip(chosen, verdicts, strict=True):
            rule = one.feedback.target.rule
            before = probed.get(rule, ProbedHint(rule, 0))
            probed[rule] = ProbedHint(
                rule,
                before.targets + 1,
                before.samples + samples,
                before.faults + faults,
                before.hinted_faults + hinted_faults,
                unjudged=before.unjudged or unjudged,
            )
        return probed

    def measured(self, probed: Mapping[str, ProbedHint], found: Sequence[Found], decoder: Decoder) -> list[ProbedHint]:
        """With what the hint does to the faulty messages themselves, as `decoder` reads them."""
        chosen = spread_out([one for one in found if one.feedback.target.rule in probed], TARGETS)
        pairs = [(one.rollout, Feedback(one.feedback.target, one.feedback.hint)) for one in chosen]
        measure(pairs, decoder, self.collector.chat, self.collector.config.engine.temperature)
        odds = {effect.rule: effect.log_odds for effect in effects_of(item for _, item in pairs)}
        return [replace(one, nats=odds.get(rule)) for rule, one in probed.items()]

    async def _draw(self, chosen: Sequence[Found], name: str) -> dict[int, tuple[list[Completion], list[Completion]]]:
        """Messages without and with the hint at each fault, by the fault's id."""
        limits = self.collector.harness.limits

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
            for hinted in (False, True):
                for number in range(self.samples):
                    key = f"{name}/{target_key(one.feedback.target)}/{'hinted' if hinted else 'plain'}/{number}"
                    asked.append((one, hinted, self.collector.engine.open(key)))
        answers = await asyncio.gather(*(one_message(*each) for each in asked))
        drawn: dict[int, tuple[list[Completion], list[Completion]]] = {id(one): ([], []) for one in chosen}
        for (one, hinted, _), answer in zip(asked, answers, strict=True):
            if answer is not None:
                drawn[id(one)][hinted].append(answer)
        return drawn

    def _prompt(self, one: Found, hinted: bool) -> Prompt:
        """The rollout up to the faulty message, with the hint where a branch has it."""
        target, hint = one.feedback.target, one.feedback.hint
        segment = one.rollout.segments[target.segment]
        message = segment.messages[target.message]
        block = hint_block(self.collector.chat, hint) if hinted else []
        shown = [Message("user", hint.text, 0, 0, 0, 0)] if hinted else []
        ids = [*segment.ids[: message.start], *block, *segment.ids[message.start : message.body]]
        specs = self.collector.harness.toolset(self.tasks[one.rollout.task]).specs()
        return Prompt(ids, (*segment.messages[: target.message], *shown), specs)

    async def _breaks_rule(self, one: Found, message: Completion, place: Before, sandbox: Sandbox | None) -> bool:
        """Whether the sampled message breaks the rule; a fork of the sandbox answers its calls."""
        if sandbox is None:
            rollout = await place.with_message(message, None)
        else:
            async with await sandbox.fork() as fork:
                rollout = await place.with_message(message, fork)
        trajectory = Trajectory(rollout, place.task, one.siblings)
        targets = self.rules[one.feedback.target.rule].targets(trajectory, {at for at, _ in spoken(rollout)})
        return any((target.segment, target.message) == place.at for target in targets)

    async def _judge(
        self, one: Found, plain: list[Completion], hinted: list[Completion], sandboxes: asyncio.Semaphore
    ) -> tuple[int, int, int, str]:
        """How many messages were judged on each side, how many of each break the rule, or why none was judged."""
        samples = min(len(plain), len(hinted))
        if one.rollout.task not in self.tasks:
            return 0, 0, 0, "the task is not at hand"
        if not samples:
            return 0, 0, 0, "the hint does not fit the context"
        at = one.feedback.target.segment, one.feedback.target.message
        harness = self.collector.harness
        place = Before(one.rollout, at, self.tasks[one.rollout.task], harness, self.collector.chat)
        messages = {tuple(message.ids): message for message in (*plain, *hinted)}  # duplicates are tried once
        broken = {}
        try:
            async with sandboxes:
                if self.rules[one.feedback.target.rule].by_call:
                    for key, message in messages.items():
                        broken[key] = await self._breaks_rule(one, message, place, None)
                else:
                    async with place.sandbox(self.collector.sandbox) as sandbox:
                        for key, message in messages.items():
                            broken[key] = await self._breaks_rule(one, message, place, sandbox)
        except (NotRestored, OSError) as error:
            return 0, 0, 0, f"its sandbox could not be brought back: {error}"
        faults, hinted_faults = (sum(broken[tuple(one.ids)] for one in side[:samples]) for side in (plain, hinted))
        return samples, faults, hinted_faults, ""


async def probe_hints(
    step: int,
    groups: Sequence[Sequence[Rollout]],
    context: TrainContext,
    collector: Collector,
    in_thread: Callable[..., Awaitable[list[ProbedHint]]],
) -> list[str]:
    """Find out whether hints help on the faults of this step, before any of them teaches. Returns lines for people.
    `in_thread` runs in the trainer's thread."""
    settings = context.config.feedback
    found = []
    for rollout, siblings in with_siblings([rollout for group in groups for rollout in group if not rollout.fault]):
        task = context.tasks.get(rollout.task)
        for target in read_all(rollout, task, settings.rules, context.rules, siblings):
            if settings.rule_weights.get(target.rule, 1.0):
                hint = context.rules[target.rule].hint(rollout.tools)
                found.append(Found(rollout, Feedback(target, hint), "", siblings))
    probe = HintProbe(collector, context.tasks, context.rules, PROBE_SAMPLES)
    sampled = await probe.sampled(found, f"look{step}")  # the name seeds the random numbers
    collector.engine.pause()  # the trainer reads next
    own = context.trainer.teachers[settings.teacher]
    decoder = own.decoder if own else context.trainer.student
    probed = await in_thread("hints to be probed", probe.measured, sampled, found, decoder)
    rows = [one.row() for one in probed]
    context.folder.write_look(step, rows)
    recall_probes(context, rows)
    if probed and all(one.why_not for one in probed):
        raise NoHintHelps(", ".join(f"{one.rule}: {one.why_not}" for one in probed))
    return table(probed) if probed else ["no rule was broken, so there was no hint to probe"]
