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
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

from offbook.agent.chat import Chat, is_in, written_again
from offbook.agent.harness.agent import Before, NotRestored
from offbook.core.shares import rise
from offbook.engine import Session
from offbook.rl.collector import Collector
from offbook.rl.train_step import TrainContext
from offbook.sandbox import Sandbox
from offbook.signals.feedback import Rule, read_all
from offbook.signals.feedback.coach import Found, spread_out
from offbook.signals.trajectory import Trajectory, spoken, with_siblings
from offbook.train.algorithms import hint_block, hint_branch
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
    Task,
)

MICRO_TOKENS = 8192  # in one forward
PROBE_SAMPLES = 8  # messages sampled at each fault, without and with the hint
TARGETS = 4  # faulty messages probed per rule
BOXES = 8  # sandboxes open at once
ENOUGH = 16  # sampled messages to judge a rule by
NATS = 1.0  # by which a hint has to make a faulty message less likely, where sampling cannot tell


@dataclass(frozen=True)
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
        log_odds = sum(sum(item.teacher) - sum(item.student) for item in items) / len(items)
        found.append(Effect(rule, len(items), len(nats), sum(nats) / len(nats), max(nats), log_odds))
    return sorted(found, key=lambda effect: -effect.kl)


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
    samples = []
    model = decoder.model
    window = model.config.to_dict().get("max_position_embeddings") or 1 << 30
    for number, (rollout, item) in enumerate(pairs):
        stored = rollout.segments[item.target.segment]
        segment = stored if is_in(stored, chat, model.config.vocab_size) else written_again(stored, chat)
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
            samples.append(Sample(segment.ids[: branch.end], branches=[branch], temperature=temperature))
    done = 0
    for measured in measure_branches(decoder, samples, MICRO_TOKENS):
        for name, values in measured.items():
            item = pairs[int(name)][1]
            item.student, item.teacher, item.divergence = values.student, values.teacher, values.divergence
        done += len(measured)
        progress(done / len(samples))
    return reasons


class NoHintHelps(OffbookError):
    """There is nothing that a teacher knows better."""


@dataclass
class ProbedHint:
    """The effect of one rule's hint."""

    rule: str
    targets: int = 0  # faulty messages that were probed
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
        plain = hinted = "not judged"
        verdict = f"no: {one.why_not}" if one.why_not else "yes"
        if one.samples:
            plain = f"{one.faults}/{one.samples}"
            hinted = f"{one.hinted_faults}/{one.samples}"
        elif one.unjudged:
            verdict += f" ({one.unjudged})"
        if one.hinted_faults > one.faults and not one.why_not:
            verdict = "yes, though not fewer faults: too few messages to tell"
        nats = "" if one.nats is None else f"{one.nats:+.2f}"
        lines.append(f"{one.rule:<22}{one.targets:>9}{plain:>12}{hinted:>12}{nats:>8}  {verdict}")
    return lines


@dataclass(frozen=True)
class HintProbe:
    """Samples `samples` messages at each fault, with and without the hint, and judges them by the rules."""

    collector: Collector
    tasks: Mapping[str, Task]
    rules: Mapping[str, Rule]
    samples: int

    async def sampled(self, found: Sequence[Found], name: str) -> dict[str, ProbedHint]:
        """By rule. `name` seeds the random numbers of this probe."""
        chosen = list(spread_out([one for one in found if one.feedback.target.rule in self.rules], TARGETS))
        asked = []  # all sessions are opened before the first one asks: they decode together
        for one in chosen:
            if one.rollout.task not in self.tasks:  # nothing can judge it
                continue
            for side in ("plain", "hinted"):
                for number in range(self.samples):
                    key = f"{name}/{one.feedback.target.key}/{side}/{number}"
                    asked.append((one, side, self.collector.engine.open(key)))
        answers = await asyncio.gather(*(self._message(*each) for each in asked))
        drawn: dict[tuple[int, str], list[Completion]] = defaultdict(list)
        for (one, side, _), answer in zip(asked, answers, strict=True):
            if answer is not None:
                drawn[id(one), side].append(answer)
        probed = {one.feedback.target.rule: ProbedHint(one.feedback.target.rule) for one in chosen}
        sandboxes = asyncio.Semaphore(BOXES)

        async def judge(one: Found) -> None:
            async with sandboxes:
                about = probed[one.feedback.target.rule]
                await self._judge(one, drawn[id(one), "plain"], drawn[id(one), "hinted"], about)

        await asyncio.gather(*map(judge, chosen))
        return probed

    def measured(self, probed: Mapping[str, ProbedHint], found: Sequence[Found], decoder: Decoder) -> list[ProbedHint]:
        """With what the hint does to the faulty messages themselves, as `decoder` reads them."""
        chosen = spread_out([one for one in found if one.feedback.target.rule in probed], TARGETS)
        pairs = [(one.rollout, Feedback(one.feedback.target, one.feedback.hint)) for one in chosen]
        measure(pairs, decoder, self.collector.chat, self.collector.config.engine.temperature)
        for effect in effects_of(item for _, item in pairs):
            probed[effect.rule].nats = effect.log_odds
        return [*probed.values()]

    async def _message(self, one: Found, side: str, session: Session) -> Completion | None:
        """A message after the rollout up to the faulty one, with the hint where a branch has it."""
        harness = self.collector.harness
        target = one.feedback.target
        hint = one.feedback.hint
        segment = one.rollout.segments[target.segment]
        message = segment.messages[target.message]
        shown = list(segment.messages[: target.message])
        ids = segment.ids[: message.start]
        if side == "hinted":
            shown.append(Message("user", hint.text, 0, 0, 0, 0))
            ids = [*ids, *hint_block(self.collector.chat, hint)]
        ids = [*ids, *segment.ids[message.start : message.body]]
        prompt = Prompt(ids, tuple(shown), harness.toolset(self.tasks[one.rollout.task]).specs())
        try:
            most = min(harness.limits.message_tokens, harness.limits.context - len(ids))
            return await session.complete(prompt, max(1, most))
        except PromptTooLong:
            return None
        finally:
            session.close()

    async def _judge(self, one: Found, plain: list[Completion], hinted: list[Completion], probed: ProbedHint) -> None:
        """Add how many messages were judged on each side and how many break the rule, or why none was judged."""
        probed.targets += 1
        samples = min(len(plain), len(hinted))
        task = self.tasks.get(one.rollout.task)
        if task is None or not samples:
            reason = "the hint does not fit the context" if task else "the task is not at hand"
            probed.unjudged = probed.unjudged or reason
            return
        target = one.feedback.target
        rule = self.rules[target.rule]
        place = Before(one.rollout, (target.segment, target.message), task, self.collector.harness, self.collector.chat)

        async def breaks_rule(message: Completion, sandbox: Sandbox | None) -> bool:
            """A fork of the sandbox answers the message's calls."""
            async with await sandbox.fork() if sandbox else nullcontext() as fork:
                rollout = await place.with_message(message, fork)
            targets = rule.targets(Trajectory(rollout, task, one.siblings), {at for at, _ in spoken(rollout)})
            return any((found.segment, found.message) == place.at for found in targets)

        broken = {}
        try:
            async with nullcontext() if rule.by_call else place.sandbox(self.collector.sandbox) as sandbox:
                for message in (*plain, *hinted):
                    if (key := tuple(message.ids)) not in broken:  # duplicates are tried once
                        broken[key] = await breaks_rule(message, sandbox)
        except (NotRestored, OSError) as error:
            probed.unjudged = probed.unjudged or f"its sandbox could not be brought back: {error}"
            return
        probed.samples += samples
        probed.faults += sum(broken[tuple(message.ids)] for message in plain[:samples])
        probed.hinted_faults += sum(broken[tuple(message.ids)] for message in hinted[:samples])


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
    context.folder.write_look(step, [one.row() for one in probed])
    context.unhelpful.update(one.rule for one in probed if one.why_not)
    if probed and all(one.why_not for one in probed):
        rules = ", ".join(f"{one.rule}: {one.why_not}" for one in probed)
        raise NoHintHelps(
            f"no hint helps this model ({rules}), so there is nothing to teach; `offbook sft` with `sft.reminders` "
            "makes one that follows hints, another model may do so already, and feedback.look = false teaches anyway"
        )
    return table(probed) if probed else ["no rule was broken, so there was no hint to probe"]
