"""From scored rollouts to one optimizer step, and the record of what it did."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from offbook.agent.chat import Chat
from offbook.agent.harness.agent import diff_of
from offbook.core.config import Config, FeedbackConfig, TeachersConfig
from offbook.core.runfolder import RunFolder
from offbook.signals.feedback import NEGATIVE, Pairs, Rule, hints_in, read_all, stand_in
from offbook.signals.feedback.leaks import leak
from offbook.signals.judge import Judgement
from offbook.signals.trajectory import Trajectory, with_siblings
from offbook.tasks.check import gold_changes
from offbook.train.algorithms import (
    OTHER,
    hint_branch,
    opd_branches,
    opsd_branches,
    rl_samples,
    sdft_branches,
    sdpo_branches,
)
from offbook.train.forward import Ema, Frozen, Kind, Live
from offbook.train.head import Measured
from offbook.train.schedule import learning_rate_share
from offbook.train.trainer import REFERENCE, NotFinite, StepResult, Trainer, WeightsLost
from offbook.types import Branch, Distill, Feedback, Hint, Likely, OffbookError, Rollout, Sample, Target, Task

log = logging.getLogger(__name__)
TOP_TOKENS = 5  # likeliest tokens recorded where student and teacher differ
TOKEN_CAP = 2.0  # nats that one token may count for


def teachers_of(
    settings: FeedbackConfig, others: TeachersConfig | None = None, reference: bool = False
) -> dict[str, Kind]:
    """The teachers of a configuration, by the names that branches call them. RL alone has none. Another model (opd) is
    not among them: it has to be loaded."""
    kinds: dict[str, Kind] = {"live": Live(), "frozen": Frozen(), "ema": Ema()}
    named: set[str] = {settings.teacher} if settings.weight else set()
    named |= {"frozen"} if others and others.opsd else set()
    named |= {"ema"} if others and others.sdft else set()
    found = {name: kind for name, kind in kinds.items() if name in named}
    if reference:
        found[REFERENCE] = Frozen()
    return found


def distill_of(settings: FeedbackConfig) -> Distill:
    return Distill(
        teacher=settings.teacher,
        part="hint",
        by_policy=settings.balance != "own",
        bound=settings.bound if settings.balance == "bounded" else 0.0,
        direction=settings.direction,
        cap=TOKEN_CAP,
        gate=settings.threshold,
        token_gate=settings.token_threshold,
        places=0 if settings.control == "every_turn" else settings.max_targets,
        top=TOP_TOKENS,
    )


def annotate(
    groups: list[list[Rollout]], context: TrainContext, written: Mapping[str, Pairs], counts: Counter[str]
) -> tuple[list[Sample], list[Feedback]]:
    """`written` are a judge model's pairs by rollout. `counts` gets the number of candidates and of those left out, by
    reason."""
    settings = context.config.feedback
    chat = context.chat
    temperature = context.config.engine.temperature
    samples: list[Sample] = []
    feedback: list[Feedback] = []
    for group in groups:
        baseline = context.baselines.get(group[0].group)
        each = rl_samples(group, temperature, context.config.train.rl_weight, baseline)
        for (rollout, siblings), of_segments in zip(with_siblings(group), each, strict=True):
            samples += of_segments
            if not of_segments:  # machine faults are no targets
                continue
            for number, branch in context.whole.branches(rollout, siblings, counts) if context.whole else ():
                of_segments[number].branches.append(branch)
            if not settings.weight:
                continue
            pairs = candidates(rollout, context, written.get(rollout.id, []), counts, siblings)
            for target, hint, branch in _branches(rollout, pairs, settings, chat):
                sample = of_segments[target.segment]
                if settings.control == "constant_negative":
                    for start, end in branch.spans:
                        sample.advantage[start:end] = [NEGATIVE] * (end - start)
                else:
                    sample.branches.append(branch)
                pieces = chat.pieces([token for span in branch.spans for token in sample.ids[slice(*span)]])
                feedback.append(Feedback(target, hint, pieces))
    return samples, feedback


def candidates(
    rollout: Rollout, context: TrainContext, written: Pairs, counts: Counter[str], siblings: Sequence[Rollout] = ()
) -> Pairs:
    """Faulty messages with their hints, those that rules found first; or what a control has in their place.

    A message is a candidate once, for the first that found it.
    """
    settings = context.config.feedback
    rules = context.rules
    by_rules = read_all(rollout, context.tasks.get(rollout.task), settings.rules, rules, siblings)
    once: dict[tuple[int, int], tuple[Target, Hint]] = {}
    for target, hint in [*((target, rules[target.rule].hint(rollout.tools)) for target in by_rules), *written]:
        place = target.segment, target.message
        if target.rule in context.unhelpful:
            counts["left_out/probe"] += 1
        elif not settings.rule_weights.get(target.rule, 1.0):
            counts["left_out/rule_weights"] += 1
        elif place in once:
            counts["left_out/same_message"] += 1
        else:
            once[place] = target, hint
    pairs = list(once.values())[: settings.max_candidates]
    chosen = pairs
    if settings.control:
        # Not of rules that the run teaches: the hint that one fault needs would come by way of another's.
        donors = [rule for name, rule in rules.items() if name not in settings.rules] or list(rules.values())
        chosen = stand_in(pairs, rollout, settings.control, donors)
    counts["candidates"] += len(pairs)
    counts[f"left_out/{'max_candidates' if settings.threshold else 'max_targets'}"] += len(once) - len(pairs)
    if settings.control == "random_target":
        counts["left_out/random_target"] += len(pairs) - len(chosen)
    return chosen


def _branches(
    rollout: Rollout, pairs: Pairs, settings: FeedbackConfig, chat: Chat
) -> list[tuple[Target, Hint, Branch]]:
    """A hinted reading of each faulty message, or of the whole response under all that was said of it."""
    distill = distill_of(settings)
    if settings.method == "sdpo":
        if not pairs:
            return []
        whole = Hint("sdpo", "\n".join(dict.fromkeys(hint.text for _, hint in pairs)))
        weight = settings.weight * settings.rule_weights.get(whole.rule, 1.0)
        found = sdpo_branches(rollout, whole, chat, weight, replace(distill, places=0))
        return [(target, whole, branch) for target, branch in found]
    branches = []
    for target, hint in pairs:
        weight = settings.weight * settings.rule_weights.get(target.rule, 1.0)
        branch = hint_branch(rollout.segments[target.segment], target, hint, chat, weight, distill)
        branches.append((target, hint, branch))
    return branches


@dataclass(frozen=True)
class WholeResponse:
    """Teachers of all that a rollout says: another model (opd), one that sees the solution (opsd), or one that sees
    another solved rollout of the group (sdft)."""

    settings: TeachersConfig
    chat: Chat
    tasks: Mapping[str, Task]  # by id
    positions: int  # that the model reads

    def branches(
        self, rollout: Rollout, siblings: Sequence[Rollout], counts: Counter[str]
    ) -> Iterator[tuple[int, Branch]]:
        """With the number of the segment that each is of. What cannot be shown, or does not fit, is counted: a teacher
        whose context was cut would have lost the task and kept its answer. So is what gives the solution away."""
        settings = self.settings
        distill = Distill(direction="reverse", cap=TOKEN_CAP)
        if settings.opd:
            yield from opd_branches(rollout, settings.opd, replace(distill, teacher=OTHER, part="opd")).items()
        found: list[tuple[int, Branch]] = []
        if settings.opsd and (solution := self._solution(rollout.task)):
            how = replace(distill, teacher="frozen", part="opsd")
            found += opsd_branches(rollout, solution, self.chat, settings.opsd, how).items()
        elif settings.opsd:
            counts["left_out/no_solution"] += 1
        solved = [one for one in siblings if one.id != rollout.id and one.solved and not one.fault]
        if settings.sdft and solved:
            how = replace(distill, teacher="ema", part="sdft")
            found += sdft_branches(rollout, solved[0], self.chat, settings.sdft, how).items()
        elif settings.sdft:
            counts["left_out/no_demonstration"] += 1
        task = self.tasks.get(rollout.task)
        for number, branch in found:
            if branch.end + len(branch.inserted) > self.positions:
                counts["left_out/teacher_context"] += 1
                continue
            if task and leak(self.chat.decode(branch.inserted), task):
                counts[f"leaks/{branch.distill.part}"] += 1
            yield number, branch

    def _solution(self, id: str) -> str:
        try:
            task = self.tasks[id]
            return diff_of(task, gold_changes(task))
        except (KeyError, OffbookError):  # a folder of others, without one
            return ""


@dataclass(frozen=True)
class TrainContext:
    """What an optimizer step needs, and where it is recorded."""

    config: Config
    folder: RunFolder
    tasks: Mapping[str, Task]  # by id
    rules: Mapping[str, Rule]
    chat: Chat
    trainer: Trainer
    unhelpful: set[str] = field(default_factory=set)  # rules whose hint was probed and is not taught
    baselines: Mapping[str, float] = field(default_factory=dict)  # by group, of those that have no mean of their own
    whole: WholeResponse | None = None  # teachers of all that rollouts say


def train_step(
    step: int,
    groups: list[list[Rollout]],
    judgement: Judgement,
    context: TrainContext,
) -> dict[str, Any]:
    """One optimizer step on scored rollouts. What the hints did goes to the run folder."""
    config, folder, chat = context.config, context.folder, context.chat
    counts: Counter[str] = Counter()
    samples, feedback = annotate(groups, context, hints_in(judgement), counts)
    lr_scale = learning_rate_share(config.train, step)
    try:
        result = context.trainer.step(samples, lr_scale=lr_scale)
    except (NotFinite, WeightsLost) as problem:
        folder.write_feedback(step, feedback)
        kept = f"its samples are in {folder.write_samples(step, samples)}"
        if isinstance(problem, WeightsLost):
            raise WeightsLost(f"{problem}; they are not kept, and {kept}") from None
        what = f"{problem}; nothing was applied, and {kept}"
        if config.train.on_nonfinite == "stop":
            raise NotFinite(what) from None
        result = StepResult({}, skipped=what)
    if result.skipped:
        log.warning("step %d is skipped: %s", step, result.skipped)
    for item in feedback:
        if measured := result.measured.get(item.target.key):
            record(item, measured, chat)
    folder.write_feedback(step, feedback)
    by_rule = Counter(item.target.rule for item in feedback)
    with_gradient = [has_gradient(group, context.baselines.get(group[0].group)) for group in groups]
    judged: dict[str, float] = {}
    if judgement.rollouts:
        judged = {"judge/rollouts": judgement.rollouts, "judge/found": len(judgement.found)}
        judged |= {f"judge/refused/{reason}": count for reason, count in sorted(judgement.refused.items())}
        judged |= {f"judge/unanswered/{reason}": count for reason, count in sorted(judgement.unanswered.items())}
    counts.update(f"left_out/{item.skipped}" for item in feedback if item.skipped)
    return {
        **summarize(groups),
        **result.metrics,
        "learning_rate": config.train.learning_rate * lr_scale,
        "hinted_targets": len(feedback),
        **{f"targets/{rule}": count for rule, count in sorted(by_rule.items())},
        **dict(sorted(counts.items())),
        **judged,
        "groups_with_gradient": sum(with_gradient) / len(groups),
    }


def has_gradient(group: list[Rollout], baseline: float | None = None) -> bool:
    """Whether any of its advantages is not 0, without those of rollouts that the machine ended."""
    rewards = {rollout.reward.total for rollout in group if not rollout.fault}
    return len(rewards | ({baseline} if baseline is not None else set())) > 1


def summarize(groups: list[list[Rollout]]) -> dict[str, float]:
    """Means over all rollouts, but invalid calls per 100 calls, and drift and events as they are: each one counts."""
    rollouts = [rollout for group in groups for rollout in group]
    stops = Counter(rollout.stop for rollout in rollouts)
    events = Counter(event.kind for rollout in rollouts for event in rollout.events)
    flags = Counter(flag.kind for rollout in rollouts for flag in rollout.flags)
    parts = dict.fromkeys(name for rollout in rollouts for name in rollout.reward.parts)

    def mean(value: Callable[[Rollout], float]) -> float:
        return sum(map(value, rollouts)) / len(rollouts)

    return {
        "rollouts": len(rollouts),
        "solved": mean(lambda one: one.solved),
        "reward": mean(lambda one: one.reward.total),
        **{f"reward/{name}": mean(lambda one: one.reward.parts.get(name, 0.0)) for name in parts},  # noqa: B023
        "invalid_per_100": invalid_per_100(rollouts),
        **shares_without(rollouts),
        "turns": mean(lambda one: one.usage.turns),
        "tokens": mean(lambda one: one.usage.sampled_tokens),
        "summaries": mean(lambda one: one.usage.summaries),
        "drift": sum(rollout.usage.drift for rollout in rollouts),
        "machine_faults": mean(lambda one: one.struck),
        "groups_lost": sum(all(rollout.fault for rollout in group) for group in groups),
        **{f"stop/{reason}": number / len(rollouts) for reason, number in sorted(stops.items())},
        **{f"events/{kind}": number for kind, number in sorted(events.items())},
        "flagged": mean(lambda one: bool(one.flags)),
        **{f"flags/{kind}": number for kind, number in sorted(flags.items())},
    }


def invalid_per_100(rollouts: list[Rollout]) -> float:
    calls = sum(rollout.usage.calls for rollout in rollouts)
    return 100 * sum(rollout.usage.invalid_calls for rollout in rollouts) / calls if calls else 0.0


def shares_without(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Shares of rollouts that made no readable call, changed no file, and ran no tests."""
    each = [Trajectory(rollout) for rollout in rollouts]
    counts = {
        "no_call": sum(not any(use.ran for use in one.uses) for one in each),
        "no_edit": sum(one.changed_nothing for one in each),
        "no_test_run": sum(not any(use.runs_tests for use in one.uses) for one in each),
    }
    return {name: count / max(1, len(each)) for name, count in counts.items()}


def record(item: Feedback, measured: Measured, chat: Chat) -> None:
    """What the hint did to its message, for people and for `offbook view`."""

    def as_text(places: list[Likely]) -> list[list[tuple[str, float]]]:
        return [[(chat.decode([token]), round(logprob, 3)) for token, logprob in likely] for likely in places]

    item.student = measured.student
    item.teacher = measured.teacher
    item.divergence = measured.divergence
    item.skipped = measured.skipped
    item.student_top = as_text(measured.student_top)
    item.teacher_top = as_text(measured.teacher_top)
