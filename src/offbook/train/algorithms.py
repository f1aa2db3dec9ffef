"""Annotators: they turn rollouts into samples. A new method is a new annotator, not a new trainer.

RL       outcome RL over the whole rollout, A = R - mean of the group (Composer 2, section 4.1)
targeted a hint right before the faulty message, the hinted model as teacher for that message only
SDPO     self-distillation policy optimisation: the whole response under its feedback
OPD      on-policy distillation (GKD, 2306.13649, with lambda = 1): another model teaches
OPSD     on-policy self-distillation (2601.18734): the same model, shown the reference solution, teaches
SDFT     self-distillation fine-tuning (2601.19897): the same model, shown a demonstration, teaches
SFT      imitation: cross-entropy on what the demonstrator wrote

The middle four distil everything that the model sampled, read behind what the teacher alone sees:

    L = mean over sampled tokens of D(teacher(. | x, shown, y_<t), student(. | x, y_<t)),    y from the student
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from offbook.agent.chat import Chat
from offbook.types import Branch, Distill, Hint, Rollout, Sample, Segment, Target

OTHER = "other"  # what the trainer calls OPD's teacher
SDPO = "sdpo"  # the rule of its targets
SOLUTION = "For reference, a change that solves this:\n"
EXAMPLE = "This is an example of how to do it:\n"
PRIOR = 4.0  # rollouts' worth of weight that the mean of all kinds has


def group_advantage(rewards_G: list[float], baseline: float | None = None) -> list[float]:
    """Left out on purpose: division by the group's standard deviation, which blows up small differences in an all-equal
    group, and division by length, which rewards long failures. Overlong rollouts keep their reward and are not masked.

    What users ask for is asked for once: such a rollout is a group of one, and has a baseline in the place of the mean.
    """
    mean = sum(rewards_G) / max(1, len(rewards_G)) if baseline is None else baseline
    return [reward - mean for reward in rewards_G]


def rl_samples(
    group: list[Rollout], temperature: float = 1.0, weight: float = 1.0, baseline: float | None = None
) -> list[list[Sample]]:
    """For each rollout of one group, a sample a segment: the rollout's advantage on every token it sampled.

    A rollout that the machine ended and not the agent (`Rollout.fault`) is in no mean and has no sample; one that
    crashed has. With a weight of 0 there is no RL, only a place for branches.
    """
    rewards = [rollout.reward.total for rollout in group if not rollout.fault]
    advantages = iter(group_advantage(rewards, baseline))
    found = []
    for rollout in group:
        samples: list[Sample] = []
        found.append(samples)
        if rollout.fault:
            continue
        advantage = next(advantages)
        for segment in rollout.segments:
            sample = Sample(
                ids=segment.ids,
                logprobs=segment.logprobs,
                advantage=[advantage if sampled else 0.0 for sampled in segment.sampled],
                rl_weight=[weight * sampled for sampled in segment.sampled],
                temperature=temperature,
                versions=segment.versions,
                routes=segment.routes,
            )
            samples.append(sample)
    return found


def baselines(rewards_N: Sequence[float], kinds_N: Sequence[str]) -> list[float]:
    """What each rollout without a group is compared with: the mean reward of all others of its kind, drawn towards the
    mean of all kinds while there are few. Its own reward is not in it, so the gradient stays unbiased.

    Left out: a value model. With a few hundred sessions per cycle and a handful of kinds a mean is as good, and its
    error is known.
    """
    counts = Counter(kinds_N)
    sums = dict.fromkeys(kinds_N, 0.0)
    for reward, kind in zip(rewards_N, kinds_N, strict=True):
        sums[kind] += reward
    total = sum(sums.values())
    found = []
    for reward, kind in zip(rewards_N, kinds_N, strict=True):
        overall = (total - reward) / (len(rewards_N) - 1) if len(rewards_N) > 1 else reward  # alone it teaches nothing
        found.append((sums[kind] - reward + PRIOR * overall) / (counts[kind] - 1 + PRIOR))
    return found


def hint_block(chat: Chat, hint: Hint) -> list[int]:
    """A closed message of its own, so that the header of the target follows it exactly as it did without the hint."""
    return chat.block("user", hint.text) if hint.text else []


def hint_branch(
    segment: Segment,
    target: Target,
    hint: Hint,
    chat: Chat,
    weight: float = 1.0,
    distill: Distill = Distill(),  # noqa: B008  (frozen)
) -> Branch:
    """The target as it is read with the hint before it. Only tokens the model sampled are distilled."""
    message = segment.messages[target.message]
    span = message.body, message.body + sum(segment.sampled[message.body : message.end])
    return Branch(message.start, hint_block(chat, hint), (span,), weight, distill, target.key)


def response_branches(rollout: Rollout, inserted: list[int], weight: float, distill: Distill) -> dict[int, Branch]:
    """By segment, of those that have sampled tokens. What is inserted stands before the first sampled message."""
    found = {}
    for number, segment in enumerate(rollout.segments):
        shifted = zip([False, *segment.sampled], [*segment.sampled, False], strict=True)
        edges = [place for place, (before, here) in enumerate(shifted) if before != here]
        if edges:
            start = segment.messages[first_sampled(segment)].start
            spans = tuple(zip(edges[::2], edges[1::2], strict=True))
            found[number] = Branch(start, inserted, spans, weight, distill)
    return found


def first_sampled(segment: Segment) -> int:
    """The number of the first message with sampled tokens. There has to be one."""
    start = segment.sampled.index(True)
    return next(index for index, message in enumerate(segment.messages) if message.end > start)


def sdpo_branches(
    rollout: Rollout, feedback: Hint, chat: Chat, weight: float, distill: Distill
) -> list[tuple[Target, Branch]]:
    """SDPO: one for each segment that has sampled tokens; the target names its first sampled message. Compared with
    targeted hints the teacher says something about every token, also about those that were right.

    Left out: a successful sibling's solution as feedback, which gives this instance's answer away (that is SDFT without
    data); the failed attempt itself in the teacher's context, which hurts (SDPO, table 6); top-k approximations, since
    the divergence is exact here.
    """
    found = []
    for number, branch in response_branches(rollout, hint_block(chat, feedback), weight, distill).items():
        first = first_sampled(rollout.segments[number])
        target = Target(rollout.id, number, first, SDPO, f"{len(branch.spans)} messages")
        branch.key = target.key
        found.append((target, branch))
    return found


def opd_branches(rollout: Rollout, weight: float, distill: Distill) -> dict[int, Branch]:
    """OPD, by segment. The teacher reads exactly what the student read, and has the student's vocabulary.

    Left out: rollouts of the teacher mixed in (lambda < 1; `offbook sft` imitates those); the log-ratio of the sampled
    token as a reward (it is the same divergence with more noise); teachers with another tokenizer.
    """
    return response_branches(rollout, [], weight, distill)


def opsd_branches(rollout: Rollout, solution: str, chat: Chat, weight: float, distill: Distill) -> dict[int, Branch]:
    """OPSD, by segment; the solution is a diff. By default the teacher's weights are those that the run began with, as
    in the paper.

    Left out: the paper's clipping of single vocabulary entries (a cap per token does it: head.divergence says why); a
    prompt that asks the teacher to restate the solution first, since nothing is sampled from it.
    """
    return response_branches(rollout, reference_block(chat, solution), weight, distill)


def reference_block(chat: Chat, solution: str) -> list[int]:
    return chat.block("user", SOLUTION + solution.strip())


def sdft_branches(
    rollout: Rollout, demonstration: Rollout, chat: Chat, weight: float, distill: Distill
) -> dict[int, Branch]:
    """SDFT, by segment. What is imitated is not the demonstration but what the model itself makes of it, on its own
    rollouts, which is why it forgets less than cross-entropy on the demonstration.

    Left out: tool answers in the demonstration, which are this rollout's own as soon as it acts; masking of the first
    tokens, where a teacher may say that it follows an example: the cap per token bounds what that adds.
    """
    return response_branches(rollout, demonstration_block(chat, demonstration), weight, distill)


def demonstration_block(chat: Chat, demonstration: Rollout) -> list[int]:
    """What its agent wrote, message after message; what it summed up for itself is left out."""
    said = []
    for segment in demonstration.segments:
        for number, message in enumerate(segment.messages):
            if segment.is_own(message) and number != segment.summary:
                said.append(message.text.strip())
    return chat.block("user", EXAMPLE + "\n".join(said))


def sft_sample(segment: Segment, hints: dict[int, list[int]] | None = None, context_weight: float = 0.0) -> Sample:
    """`hints` maps a message's index to the hint block that stands before it, at the place where a hint teaches.

    The loss is on the assistant's own messages. `context_weight` is for a model that starts from nothing: predicting
    what others wrote teaches it to read.
    """
    ids = list(segment.ids)
    weights = [1.0 if sampled else context_weight for sampled in segment.sampled]
    for index, block in sorted((hints or {}).items(), reverse=True):
        start = segment.messages[index].start
        ids[start:start] = block
        weights[start:start] = [context_weight] * len(block)
    return Sample(ids, ce_weight=weights)
