"""Rollouts to samples: the group's advantage on all sampled tokens, a hint branch on each target."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping

from offbook.algo import add_branch, anchor_sample, hint_weight, rl_samples
from offbook.config import FeedbackConfig
from offbook.feedback import NEGATIVE, RULES, Pairs, read_all, stand_in, write_hint
from offbook.tokens import Chat
from offbook.types import Feedback, Hint, Rollout, Sample, Target, Task


def annotate(
    groups: list[list[Rollout]],
    settings: FeedbackConfig,
    chat: Chat,
    step: int,
    tasks: Mapping[str, Task] | None = None,
    written: Mapping[str, Pairs] | None = None,
    counts: Counter[str] | None = None,
) -> tuple[list[Sample], list[Feedback]]:
    """`tasks` by id, for readers that look at the repository; `written` are a judge model's pairs by rollout.

    `counts` is told how many candidates there are and how many were left out, by what left them out.
    """
    counts = Counter() if counts is None else counts
    samples: list[Sample] = []
    feedback: list[Feedback] = []
    for group in groups:
        for rollout, of_segments in zip(group, rl_samples(group), strict=True):
            samples += of_segments
            if settings.weight:
                task, by_model = (tasks or {}).get(rollout.task), (written or {}).get(rollout.id, [])
                pairs = candidates(rollout, settings, task, by_model, counts)
                anchors, items = _hang(rollout, of_segments, pairs, settings, chat, step, counts)
                samples += anchors
                feedback += items
    return samples, feedback


def candidates(
    rollout: Rollout, settings: FeedbackConfig, task: Task | None, written: Pairs, counts: Counter[str]
) -> Pairs:
    """Faulty messages with their hints, those that rules found first; or what a control has in their place.

    A message is a candidate once, for the first that found it.
    """
    by_rules = read_all(rollout, task, settings.rules)
    found = [*((target, write_hint(target.rule, rollout.tools)) for target in by_rules), *written]
    weighed = [pair for pair in found if settings.rule_weights.get(pair[0].rule, 1.0)]
    once: dict[tuple[int, int], tuple[Target, Hint]] = {}
    for target, hint in weighed:
        once.setdefault((target.segment, target.message), (target, hint))
    limit = "max_candidates" if settings.threshold else "max_targets"
    pairs = list(once.values())[: getattr(settings, limit)]
    donors = settings.rules if len(settings.rules) > 1 else list(RULES)
    chosen = stand_in(pairs, rollout, settings.control, donors)
    counts["candidates"] += len(pairs)
    counts["left_out/rule_weights"] += len(found) - len(weighed)
    counts["left_out/same_message"] += len(weighed) - len(once)
    counts[f"left_out/{limit}"] += len(once) - len(pairs)
    if settings.control == "random_target":
        counts["left_out/random_target"] += len(pairs) - len(chosen)
    return chosen


def _hang(
    rollout: Rollout,
    of_segments: list[Sample],
    pairs: Pairs,
    settings: FeedbackConfig,
    chat: Chat,
    step: int,
    counts: Counter[str],
) -> tuple[list[Sample], list[Feedback]]:
    anchors: list[Sample] = []
    feedback: list[Feedback] = []
    for target, hint in pairs:
        segment, sample = rollout.segments[target.segment], of_segments[target.segment]
        of_rule = settings.rule_weights.get(target.rule, 1.0)
        weight = hint_weight(settings.weight, step, settings.anneal_steps, settings.anneal_to, of_rule)
        branch = add_branch(sample, segment, target, hint, chat, weight)
        feedback.append(Feedback(target, hint, chat.pieces(segment.ids[branch.target_start : branch.target_end])))
        if settings.control == "constant_negative":
            count = branch.target_end - branch.target_start
            sample.advantage[branch.target_start : branch.target_end] = [NEGATIVE] * count
            sample.branches.remove(branch)
        elif random.Random(f"anchor {branch.key}").random() < settings.anchor_share:
            if branch.target_end + len(branch.hint_ids) <= settings.anchor_tokens:
                anchors.append(anchor_sample(sample, branch, settings.anchor_weight))
            else:
                counts["left_out/anchor_tokens"] += 1
    if settings.control != "every_turn":
        _share_lessons(of_segments, settings.max_targets)
    return anchors, feedback


def _share_lessons(of_segments: list[Sample], max_targets: int) -> None:
    """At most `max_targets` of a rollout teach; where several segments have some, they take turns."""
    lessons: Counter[int] = Counter()
    for _ in range(max_targets):
        open_ones = [place for place, sample in enumerate(of_segments) if lessons[place] < len(sample.branches)]
        if open_ones:
            lessons[min(open_ones, key=lambda place: lessons[place])] += 1
    for place, sample in enumerate(of_segments):
        sample.lessons = lessons[place]
