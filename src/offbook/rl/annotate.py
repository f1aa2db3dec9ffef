"""Rollouts to samples: the group's advantage on all sampled tokens, and the branches that hints make."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from offbook.agent.chat import Chat
from offbook.core.config import FeedbackConfig, TeachersConfig
from offbook.rl.teachers import WholeResponse
from offbook.signals.feedback import NEGATIVE, RULES, Pairs, Rule, read_all, stand_in
from offbook.signals.trajectory import with_siblings
from offbook.train.algorithms import anchor_sample, hint_branch, hint_weight, rl_samples, sdpo_branches
from offbook.train.teachers import Ema, Frozen, Kind, Live, Mix
from offbook.train.trainer import REFERENCE
from offbook.types import Branch, Distill, Feedback, Hint, Rollout, Sample, Target, Task


def teachers_of(
    settings: FeedbackConfig, reference: bool = False, others: TeachersConfig | None = None
) -> dict[str, Kind]:
    """By the names that branches call them. RL alone has none, unless it is held to a reference. Not another model,
    which has to be loaded."""
    kinds: dict[str, Kind] = {
        "live": Live(),
        "frozen": Frozen(settings.refresh_steps),
        "ema": Ema(settings.ema_decay),
        "trust_region": Mix(Frozen(), settings.trust_mix),
    }
    named = [settings.teacher] if settings.weight else []
    named += [one.teacher for one in (others.opsd, others.sdft) if one.weight] if others else []
    start: dict[str, Kind] = {REFERENCE: Frozen()}
    is_held = reference or (settings.weight and settings.anchor_share)
    return {**{name: kinds[name] for name in named}, **(start if is_held else {})}


def distill_of(settings: FeedbackConfig) -> Distill:
    return Distill(
        teacher=settings.teacher,
        part="hint",
        by_policy=settings.balance != "own",
        bound=settings.bound if settings.balance == "bounded" else 0.0,
        direction=settings.direction,
        cap=settings.token_cap,
        importance_cap=settings.importance_cap,
        gate=settings.threshold,
        token_gate=settings.token_threshold,
        places=0 if settings.control == "every_turn" else settings.max_targets,
        top=settings.top,
    )


def annotate(
    groups: list[list[Rollout]],
    settings: FeedbackConfig,
    chat: Chat,
    step: int,
    tasks: Mapping[str, Task] | None = None,
    written: Mapping[str, Pairs] | None = None,
    counts: Counter[str] | None = None,
    temperature: float = 1.0,
    rules: Mapping[str, Rule] = RULES,
    unhelpful: Collection[str] = (),
    baselines: Mapping[str, float] | None = None,
    rl_weight: float = 1.0,
    whole: WholeResponse | None = None,
) -> tuple[list[Sample], list[Feedback]]:
    """`tasks` by id, for rules that look at the repository; `written` are a judge model's pairs by rollout; `unhelpful`
    are rules whose hint is not to be taught; `baselines` are what rollouts are compared with whose group, by this name,
    has no mean of its own; `whole` are teachers of all that a rollout says.

    `counts` is told how many candidates there are and how many were left out, by what left them out.
    """
    counts = Counter() if counts is None else counts
    samples: list[Sample] = []
    feedback: list[Feedback] = []
    for group in groups:
        each = rl_samples(group, temperature, rl_weight, (baselines or {}).get(group[0].group))
        for (rollout, siblings), of_segments in zip(with_siblings(group), each, strict=True):
            samples += of_segments
            for number, branch in whole.branches(rollout, siblings, counts) if whole and of_segments else ():
                of_segments[number].branches.append(branch)
            if settings.weight and of_segments:  # the machine's faults are nobody's targets
                task, by_model = (tasks or {}).get(rollout.task), (written or {}).get(rollout.id, [])
                pairs = candidates(rollout, settings, task, by_model, counts, rules, unhelpful, siblings)
                for target, hint, branch in _branches(rollout, pairs, settings, chat, step):
                    sample = of_segments[target.segment]
                    samples += _hang(sample, branch, settings, counts)
                    pieces = chat.pieces([token for span in branch.spans for token in sample.ids[slice(*span)]])
                    feedback.append(Feedback(target, hint, pieces))
    return samples, feedback


def candidates(
    rollout: Rollout,
    settings: FeedbackConfig,
    task: Task | None,
    written: Pairs,
    counts: Counter[str],
    rules: Mapping[str, Rule],
    unhelpful: Collection[str] = (),
    siblings: Sequence[Rollout] = (),
) -> Pairs:
    """Faulty messages with their hints, those that rules found first; or what a control has in their place.

    A message is a candidate once, for the first that found it.
    """
    by_rules = read_all(rollout, task, settings.rules, rules, siblings)
    found = [*((target, rules[target.rule].hint(rollout.tools)) for target in by_rules), *written]
    helpful = [pair for pair in found if pair[0].rule not in unhelpful]
    weighed = [pair for pair in helpful if settings.rule_weights.get(pair[0].rule, 1.0)]
    once: dict[tuple[int, int], tuple[Target, Hint]] = {}
    for target, hint in weighed:
        once.setdefault((target.segment, target.message), (target, hint))
    limit, most = (
        ("max_candidates", settings.max_candidates) if settings.threshold else ("max_targets", settings.max_targets)
    )
    pairs = list(once.values())[:most]
    # Not of rules that the run teaches: the hint that one fault needs would come by way of another's.
    donors = [rule for name, rule in rules.items() if name not in settings.rules] or list(rules.values())
    chosen = stand_in(pairs, rollout, settings.control, donors)
    counts["candidates"] += len(pairs)
    counts["left_out/look"] += len(found) - len(helpful)
    counts["left_out/rule_weights"] += len(helpful) - len(weighed)
    counts["left_out/same_message"] += len(weighed) - len(once)
    counts[f"left_out/{limit}"] += len(once) - len(pairs)
    if settings.control == "random_target":
        counts["left_out/random_target"] += len(pairs) - len(chosen)
    return chosen


def _branches(
    rollout: Rollout, pairs: Pairs, settings: FeedbackConfig, chat: Chat, step: int
) -> list[tuple[Target, Hint, Branch]]:
    """A hinted reading of each faulty message, or of the whole response under all that was said of it."""
    distill = distill_of(settings)

    def weight(rule: str) -> float:
        of_rule = settings.rule_weights.get(rule, 1.0)
        return hint_weight(settings.weight, step, settings.anneal_steps, settings.anneal_to, of_rule)

    if settings.method == "sdpo":
        texts = dict.fromkeys(hint.text for _, hint in pairs)
        whole = Hint("sdpo", "\n".join(texts))
        found = sdpo_branches(rollout, whole, chat, weight(whole.rule), replace(distill, places=0)) if texts else []
        return [(target, whole, branch) for target, branch in found]
    return [
        (target, hint, hint_branch(rollout.segments[target.segment], target, hint, chat, weight(target.rule), distill))
        for target, hint in pairs
    ]


def _hang(sample: Sample, branch: Branch, settings: FeedbackConfig, counts: Counter[str]) -> list[Sample]:
    """Put the branch, or what a control has in its place, on its sample. Returns the anchor it is given, if any."""
    if settings.control == "constant_negative":
        for start, end in branch.spans:
            sample.advantage[start:end] = [NEGATIVE] * (end - start)
        return []
    sample.branches.append(branch)
    if random.Random(f"anchor {branch.key}").random() >= settings.anchor_share:
        return []
    if branch.end + len(branch.inserted) > settings.anchor_tokens:
        counts["left_out/anchor_tokens"] += 1
        return []
    distill = branch.distill
    held = Distill(
        REFERENCE, "anchor", direction=distill.direction, cap=distill.cap, importance_cap=distill.importance_cap
    )
    return [anchor_sample(sample, branch, settings.anchor_weight, held)]
