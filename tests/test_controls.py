"""From rollouts to samples: hints on targets, what controls put in their place, what anchors add."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from annotating import annotate
from conftest import tiny_model
from test_summaries import TOOLS, Forgetful
from toolbench import small_tree

from offbook.agent.chat import ChatFormat, render_call
from offbook.agent.harness import Harness, run_agent
from offbook.core.config import FeedbackConfig, TrainConfig
from offbook.rl.train_step import teachers_of
from offbook.sandbox import open_sandbox
from offbook.signals.feedback import RULES, Pairs, read_rollout, rules_of, write_hint
from offbook.signals.feedback.hints import stand_in
from offbook.signals.trajectory import At, spoken
from offbook.train.trainer import Trainer
from offbook.types import Feedback, Limits, OffbookError, Rollout, Sample, Target, Task

FOUR = ["unknown_tool", "malformed_arguments", "repeated_call", "edited_tests"]


@pytest.fixture
def faulty(tmp_path: Path, chat: ChatFormat) -> Rollout:
    """Six messages: an unknown tool, a look, the same look again, wrong arguments, another look, the end."""
    tree = small_tree(tmp_path)
    read = render_call("read_file", {"path": "README.md"})
    lines = [
        render_call("grep_all", {"pattern": "two"}),
        read,
        read,
        render_call("read_file", {"file": "README.md"}),
        render_call("read_file", {"path": "pkg/calc.py"}),
    ]
    task = Task("t", tree, "Count to three.", tree, tree, (), (), (), TOOLS, "test")
    limits = Limits(turns=9, tokens=30_000, context=30_000, message_tokens=400, command_s=5)

    async def run() -> Rollout:
        async with await open_sandbox(tree) as sandbox:
            policy = Forgetful(chat, *lines)
            return await run_agent(task, sandbox, policy, chat, Harness(limits, profile="pocket"), "r", "g")

    return asyncio.run(run())


def annotated(rollout: Rollout, chat: ChatFormat, **feedback: object) -> tuple[list[Sample], list[Feedback]]:
    settings = FeedbackConfig(rules=FOUR, **feedback)  # type: ignore[arg-type]
    return annotate([[rollout]], settings, chat)


def counted(rollout: Rollout, chat: ChatFormat, written: Pairs = (), **feedback: object) -> dict[str, int]:  # type: ignore[assignment]
    """What was counted and is not 0."""
    counts: Counter[str] = Counter()
    settings = FeedbackConfig(**{"rules": FOUR, **feedback})  # type: ignore[arg-type]
    annotate([[rollout]], settings, chat, written={"r": list(written)}, counts=counts)
    return dict(+counts)


def own_messages(rollout: Rollout) -> list[At]:
    return [at for at, _ in spoken(rollout)]


def hinted(sample: Sample, chat: ChatFormat) -> dict[str, str]:
    """What each branch has in front of which message."""
    return {
        chat.decode(sample.ids[slice(*branch.spans[0])]): chat.decode(branch.inserted) for branch in sample.branches
    }


def text_of(rule: str) -> str:
    return write_hint(rule, TOOLS).text


def test_each_target_has_the_hint_of_its_rule(faulty: Rollout, chat: ChatFormat) -> None:
    (sample,), feedback = annotated(faulty, chat)
    assert [item.target.rule for item in feedback] == ["unknown_tool", "repeated_call", "malformed_arguments"]
    found = list(hinted(sample, chat).items())
    assert len(found) == 3
    for (message, hint), item in zip(found, feedback, strict=True):
        assert text_of(item.target.rule) in hint
        assert message == "".join(item.pieces)
    assert "grep_all" in found[0][0]


def test_a_gate_is_given_more_candidates_than_may_teach(faulty: Rollout, chat: ChatFormat) -> None:
    (sample,), feedback = annotated(faulty, chat, max_targets=2)
    assert (len(sample.branches), len(feedback)) == (3, 3)
    assert {branch.distill.places for branch in sample.branches} == {2}
    (sample,), feedback = annotated(faulty, chat, max_targets=2, gate=0.0)
    assert (len(sample.branches), len(feedback)) == (2, 2), "without one the first are taken"


def test_none_is_the_same_target_without_a_hint(faulty: Rollout, chat: ChatFormat) -> None:
    (plain,), _ = annotated(faulty, chat)
    (sample,), _ = annotated(faulty, chat, control="none")
    assert [branch.inserted for branch in sample.branches] == [[], [], []]
    assert [branch.key for branch in sample.branches] == [branch.key for branch in plain.branches]


def test_a_donor_hint_is_about_a_rule_that_the_run_does_not_teach(faulty: Rollout, chat: ChatFormat) -> None:
    (plain,), _ = annotated(faulty, chat)
    (sample,), feedback = annotated(faulty, chat, control="donor")
    assert [branch.key for branch in sample.branches] == [branch.key for branch in plain.branches]
    for mine, other, item in zip(plain.branches, sample.branches, feedback, strict=True):
        assert mine.inserted != other.inserted
        assert item.hint.rule not in FOUR
        assert item.hint.text in chat.decode(other.inserted)


def test_a_donor_hint_says_something_else(faulty: Rollout) -> None:
    """A rule of one's own may say what another one says."""
    (target,) = read_rollout(faulty, 1, rules=["unknown_tool"])
    said = replace(write_hint("unknown_tool", faulty.tools), rule="a_rule_of_mine")
    rules = [RULES["unknown_tool"], RULES["repeated_call"]]
    found = [stand_in([(target, said)], replace(faulty, id=str(number)), "donor", rules) for number in range(20)]
    assert {hint.rule for ((_, hint),) in found} == {"repeated_call"}


def test_a_single_rule_has_donors_too(faulty: Rollout, chat: ChatFormat) -> None:
    settings = FeedbackConfig(rules=["unknown_tool"], control="donor")
    (sample,), (item,) = annotate([[faulty]], settings, chat)
    assert item.hint.rule != "unknown_tool"
    assert item.hint.text in chat.decode(sample.branches[0].inserted)


def test_random_targets_are_other_messages_of_the_same_count(faulty: Rollout, chat: ChatFormat) -> None:
    (plain,), _ = annotated(faulty, chat)
    (sample,), feedback = annotated(faulty, chat, control="random_target")
    assert len(sample.branches) == len(plain.branches)
    assert not {branch.insert for branch in sample.branches} & {branch.insert for branch in plain.branches}
    for item in feedback:
        assert faulty.segments[0].messages[item.target.message].role == "assistant"
    assert annotated(faulty, chat, control="random_target")[1] == feedback, "the RNG is seeded by the rollout"


def test_every_turn_of_a_faulty_rollout(faulty: Rollout, chat: ChatFormat) -> None:
    (sample,), _ = annotated(faulty, chat, control="every_turn")
    assert len(sample.branches) == len(own_messages(faulty)) == 6
    assert {branch.distill.places for branch in sample.branches} == {0}, "none is left out"
    good = Rollout("good", "t", "g", TOOLS, [faulty.segments[0]])
    good.segments[0].messages[:] = [message for message in good.segments[0].messages if message.role != "tool"]
    (sample,), _ = annotated(good, chat, control="every_turn")
    assert sample.branches == [], "a rollout without a fault is left alone"


def test_every_turn_has_the_hint_of_the_next_fault_whoever_found_it(faulty: Rollout) -> None:
    """What a model found comes behind what rules found, also where it lies before."""
    first, second, third, *_, last = own_messages(faulty)
    pairs: Pairs = [
        (Target("r", *place, rule, ""), write_hint(rule, TOOLS))
        for place, rule in ((third, "repeated_call"), (first, "edited_tests"))
    ]
    found = {(target.segment, target.message): hint.rule for target, hint in stand_in(pairs, faulty, "every_turn", [])}
    assert (found[first], found[second], found[third], found[last]) == (
        "edited_tests",
        "repeated_call",
        "repeated_call",
        "repeated_call",
    )


def test_a_constant_negative_needs_no_teacher(faulty: Rollout, chat: ChatFormat) -> None:
    (plain,), _ = annotated(faulty, chat)
    (sample,), feedback = annotated(faulty, chat, control="constant_negative")
    assert sample.branches == []
    assert len(feedback) == 3
    punished = {place for place, value in enumerate(sample.advantage) if value == -1.0}
    assert punished == {p for branch in plain.branches for span in branch.spans for p in range(*span)}


def test_what_a_model_wrote_comes_after_the_rules_and_not_on_the_same_message(
    faulty: Rollout, chat: ChatFormat
) -> None:
    """Rules are precise by construction, so they have the first word."""
    (first, *_) = read_rollout(faulty, 9, None, tuple(FOUR))
    last = own_messages(faulty)[-1]
    written: Pairs = [
        (first, write_hint("edited_tests", TOOLS)),
        (Target("r", *last, "edited_tests", "it stopped"), write_hint("edited_tests", TOOLS)),
    ]
    settings = FeedbackConfig(rules=FOUR)
    (sample,), feedback = annotate([[faulty]], settings, chat, written={"r": written})
    assert [item.target.rule for item in feedback] == [
        "unknown_tool",
        "repeated_call",
        "malformed_arguments",
        "edited_tests",
    ]
    assert len(sample.branches) == 4


def test_a_message_is_a_target_once_whoever_found_it(faulty: Rollout, chat: ChatFormat) -> None:
    last = own_messages(faulty)[-1]
    written = [(Target("r", *last, rule, "it stopped"), write_hint(rule, TOOLS)) for rule in FOUR[:2]]
    (sample,), feedback = annotate([[faulty]], FeedbackConfig(rules=FOUR), chat, written={"r": written})
    assert len({branch.key for branch in sample.branches}) == len(sample.branches) == len(feedback) == 4
    assert counted(faulty, chat, written) == {"candidates": 4, "left_out/same_message": 1}


def test_a_rule_of_weight_0_takes_no_place(faulty: Rollout, chat: ChatFormat) -> None:
    weights = {"unknown_tool": 0.0}
    (sample,), feedback = annotated(faulty, chat, max_targets=1, gate=0.0, rule_weights=weights)
    assert [item.target.rule for item in feedback] == ["repeated_call"]
    assert [branch.weight for branch in sample.branches] == [1.0]
    assert counted(faulty, chat, rule_weights=weights) == {"candidates": 2, "left_out/rule_weights": 1}
    assert counted(faulty, chat, rule_weights=dict.fromkeys(FOUR, 0.0)) == {"left_out/rule_weights": 3}


def test_what_is_left_out_is_counted(faulty: Rollout, chat: ChatFormat) -> None:
    assert counted(faulty, chat) == {"candidates": 3}
    assert counted(faulty, chat, max_targets=1) == {"candidates": 2, "left_out/max_candidates": 1}
    assert counted(faulty, chat, max_targets=1, gate=0.0) == {"candidates": 1, "left_out/max_targets": 2}
    assert counted(faulty, chat, weight=0.0) == {}


def test_random_targets_that_find_no_place_are_counted(faulty: Rollout, chat: ChatFormat) -> None:
    """Six messages, five targets: there is one other message."""
    known = {(target.segment, target.message) for target in read_rollout(faulty, 9, None, tuple(FOUR))}
    free = [place for place in own_messages(faulty) if place not in known][:2]
    written = [(Target("r", *place, "edited_tests", ""), write_hint("edited_tests", TOOLS)) for place in free]
    counts = counted(faulty, chat, written, control="random_target", max_targets=5)
    assert counts == {"candidates": 5, "left_out/random_target": 4}


def test_segments_compete_for_the_places_of_their_rollout(faulty: Rollout, chat: ChatFormat) -> None:
    twice = Rollout("r", "t", "g", TOOLS, [faulty.segments[0], faulty.segments[0]])
    samples, _ = annotated(twice, chat, max_targets=3)
    assert [len(sample.branches) for sample in samples] == [3, 3]
    assert {b.distill.places for sample in samples for b in sample.branches} == {3}


def test_sdpo_teaches_the_whole_response_under_all_that_was_said_of_it(faulty: Rollout, chat: ChatFormat) -> None:
    (sample,), (item,) = annotated(faulty, chat, method="sdpo")
    (branch,) = sample.branches
    (segment,) = faulty.segments
    scored = {place for span in branch.spans for place in range(*span)}
    assert scored == {place for place, sampled in enumerate(segment.sampled) if sampled}
    assert len(branch.spans) == 6, "what tools answered is read and not scored"
    first = next(message for message in segment.messages if message.role == "assistant")
    assert branch.insert == first.start
    said = chat.decode(branch.inserted)
    for rule in ("unknown_tool", "repeated_call", "malformed_arguments"):
        assert said.count(text_of(rule)) == 1
    assert len(item.pieces) == branch.num_targets
    model = tiny_model(vocabulary=chat.tokenizer.get_vocab_size())
    settings = FeedbackConfig(rules=FOUR, method="sdpo", gate=0.0)
    result = Trainer(model, TrainConfig(), teachers_of(settings)).step([sample])
    assert result.metrics["hint/kl"] > 0
    assert len(result.measured[item.target.key].divergence) == branch.num_targets


def test_sdpo_leaves_a_rollout_without_a_fault_alone(faulty: Rollout, chat: ChatFormat) -> None:
    good = Rollout("good", "t", "g", TOOLS, [faulty.segments[0]])
    good.segments[0].messages[:] = [message for message in good.segments[0].messages if message.role != "tool"]
    (sample,), feedback = annotated(good, chat, method="sdpo")
    assert (sample.branches, feedback) == ([], [])


def test_a_rule_that_is_not_there_is_named() -> None:
    assert rules_of((), list(RULES)) == RULES
    with pytest.raises(OffbookError, match=r"there is no rule tidy; the rules are unknown_tool"):
        rules_of((), ["tidy"])
