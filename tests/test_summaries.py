"""Self-summarization: one rollout over several windows, its record exact, its reward on every token it sampled."""

from __future__ import annotations

import asyncio
import importlib.util
import random
from collections import Counter
from pathlib import Path

import pytest
import torch
from annotating import annotate
from conftest import tiny_model

from offbook.agent.chat import ChatFormat, render_call
from offbook.agent.harness import Harness, run_agent
from offbook.core.config import FeedbackConfig, TrainConfig
from offbook.pocket.demonstrations import episodes
from offbook.pocket.script import LONG_HABITS
from offbook.pocket.tasks import Level, draft_tasks
from offbook.rl.train_step import teachers_of
from offbook.sandbox import open_sandbox
from offbook.signals.feedback import read_rollout
from offbook.train.algorithms import rl_samples
from offbook.train.trainer import Trainer
from offbook.types import Completion, Limits, Prompt, Rollout, Task

BENCH = Path(__file__).parent.parent / "bench" / "cpu" / "summaries.py"
TOOLS = ("read_file", "edit_file", "run_command", "todo", "finish")
LIMITS = Limits(
    turns=12, tokens=60_000, context=6_000, message_tokens=800, summarize_at=3_500, summary_tokens=300, command_s=5
)


class Forgetful:
    """Works in small steps, sums up when it is asked to, and writes what it was shown into the summary."""

    def __init__(self, chat: ChatFormat, *lines: str):
        self.chat = chat
        self.lines = [*lines, render_call("finish", {})]
        self.summaries = 0

    async def complete(self, prompt: Prompt, max_tokens: int) -> Completion:
        if len(prompt.messages) > 2 and prompt.messages[-1].role == "user":  # nobody else speaks in the middle
            self.summaries += 1
            return self._say(f"<think>hm</think>Summary {self.summaries}: I read the long file.", max_tokens)
        return self._say(self.lines.pop(0), max_tokens)

    def _say(self, text: str, max_tokens: int) -> Completion:
        ids = [*self.chat.encode(text), self.chat.end_id][:max_tokens]
        return Completion(ids, [-0.5] * len(ids), [3] * len(ids))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "long.txt").write_text("many words " * 200)
    return tmp_path


def long_rollout(tree: Path, chat: ChatFormat, limits: Limits = LIMITS) -> Rollout:
    read = render_call("read_file", {"path": "long.txt"})
    todo = render_call("todo", {"items": [{"text": "write the parser", "status": "pending"}]})
    look = "head -1 /history/segment_1.md; echo x >> /history/segment_1.md; echo $?"
    history = render_call("run_command", {"command": look})
    policy = Forgetful(chat, todo, read, read, read, read, history, read, read)
    task = Task("t", tree, "Read it all.", tree, tree, (), (), (), TOOLS, "test")

    async def run() -> Rollout:
        async with await open_sandbox(tree) as sandbox:
            return await run_agent(task, sandbox, policy, chat, Harness(limits, profile="pocket"), "r", "g")

    return asyncio.run(run())


def test_a_rollout_of_three_summaries_is_one_chain_of_exact_segments(tree: Path, chat: ChatFormat) -> None:
    rollout = long_rollout(tree, chat)
    assert rollout.stop == "finish"
    assert (rollout.usage.summaries, len(rollout.segments)) == (3, 4)
    assert rollout.usage.drift == 0
    for segment in rollout.segments:
        assert len(segment.ids) <= LIMITS.context
        assert len(segment.ids) == len(segment.sampled) == len(segment.logprobs) == len(segment.versions)
    assert rollout.usage.sampled_tokens == sum(sum(segment.sampled) for segment in rollout.segments)
    for segment in rollout.segments[:-1]:
        assert segment.summary == len(segment.messages) - 1
        assert segment.messages[segment.summary].text.startswith("<think>hm</think>Summary")
    assert rollout.segments[-1].summary is None
    summary = chat.encode("<think>hm</think>Summary 1: I read the long file.")
    assert rollout.usage.summary_tokens == 3 * (len(summary) + 1)


def test_the_next_segment_starts_from_task_summary_todos_and_count(tree: Path, chat: ChatFormat) -> None:
    rollout = long_rollout(tree, chat)
    for number, segment in enumerate(rollout.segments[1:], start=1):
        system, first = segment.messages[:2]
        assert system.text == rollout.segments[0].messages[0].text
        assert "Read it all." in first.text
        assert f"Summary {number}: I read the long file." in first.text
        assert "<think>" not in first.text
        assert "write the parser" in first.text
        assert f"/history/segment_{number}.md" in first.text
        assert str(number) in first.text


def test_the_agent_can_read_its_history_and_not_write_it(tree: Path, chat: ChatFormat) -> None:
    rollout = long_rollout(tree, chat)
    (answer,) = [
        message.text
        for segment in rollout.segments
        for message in segment.messages
        if message.role == "tool" and "segment_1.md" in message.text
    ]
    assert answer.startswith("## system\n"), "it was read"
    assert not answer.endswith("\n0\n"), "the write was refused"
    assert rollout.changed == {}, "the history is not part of the work"


def test_the_reward_reaches_every_sampled_token_and_the_chain_counts_once(tree: Path, chat: ChatFormat) -> None:
    chain = long_rollout(tree, chat)
    short = Rollout("s", "t", "g", TOOLS, [chain.segments[-1]], "finish")
    chain.reward.parts["outcome"], short.reward.parts["outcome"] = 1.0, 0.0
    of_chain, of_short = rl_samples([chain, short])
    assert len(of_chain) == 4
    assert {value for sample in of_chain for value in sample.advantage} == {0.0, 0.5}, "mean of two, not of five"
    assert {value for sample in of_short for value in sample.advantage} == {0.0, -0.5}
    for sample, segment in zip(of_chain, chain.segments, strict=True):
        assert [value != 0 for value in sample.advantage] == segment.sampled
    trainer = Trainer(tiny_model(vocabulary=chat.tokenizer.get_vocab_size()), TrainConfig())
    result = trainer.step([*of_chain, *of_short])
    assert result.metrics["train_tokens"] == sum(len(segment.ids) for segment in [*chain.segments, *short.segments])


def test_readers_see_every_segment(tree: Path, chat: ChatFormat) -> None:
    rollout = long_rollout(tree, chat)
    targets = read_rollout(rollout, max_targets=99)
    assert {target.segment for target in targets} > {0}
    assert {target.rule for target in targets} == {"repeated_call"}


@pytest.mark.parametrize("teacher", ["live", "frozen"])
def test_hints_after_a_summary_equal_reencoding(tree: Path, chat: ChatFormat, teacher: str) -> None:
    """Segments of different length in one batch, targets in several of them."""
    rollout = long_rollout(tree, chat)
    settings = FeedbackConfig(max_targets=9, gate=0.0, teacher=teacher)  # type: ignore[arg-type]
    samples, feedback = annotate([[rollout]], settings, chat)
    assert {item.target.segment for item in feedback} > {0}
    vocabulary = chat.tokenizer.get_vocab_size()
    trainer = Trainer(tiny_model(vocabulary=vocabulary), TrainConfig(), teachers_of(settings))
    measured = trainer.step(samples).measured
    model = tiny_model(vocabulary=vocabulary)
    for sample in samples:
        for branch in sample.branches:
            ids = [*sample.ids[: branch.insert], *branch.inserted, *sample.ids[branch.insert : branch.end]]
            target = sample.ids[slice(*branch.spans[0])]
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([ids])).logits[0, -len(target) - 1 : -1]
            expected = logits.log_softmax(-1).gather(1, torch.tensor(target)[:, None])[:, 0].tolist()
            assert measured[branch.key].teacher == pytest.approx(expected, abs=2e-4)


def test_without_a_trigger_the_window_ends_the_rollout(tree: Path, chat: ChatFormat) -> None:
    limits = Limits(turns=12, tokens=60_000, context=6_000, message_tokens=800, command_s=5)
    rollout = long_rollout(tree, chat, limits)
    assert (rollout.stop, rollout.usage.summaries) == ("context", 0)


def test_scripted_episodes_sum_up_what_is_done_and_what_is_left(chat: ChatFormat) -> None:
    """So that a model can learn to; a part is forgotten, and what is said is true."""
    spec = importlib.util.spec_from_file_location("bench_summaries", BENCH)
    assert spec
    assert spec.loader
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    limits = Limits(turns=80, tokens=90_000, context=9_000, message_tokens=900, summarize_at=1_400, summary_tokens=600)
    drafts = list(draft_tasks(seed=3, count=6, split="train", level=Level(3, 3)))

    async def run() -> list[Rollout]:
        played = episodes(chat, drafts, random.Random(2), LONG_HABITS, Harness(limits, profile="pocket"))
        return [rollout async for rollout in played]

    facts: Counter[str] = Counter()
    for draft, rollout in zip(drafts, asyncio.run(run()), strict=True):
        facts += bench.facts_in(rollout, {spot.name for spot in draft.spots})
        assert rollout.stop == "finish"
        assert rollout.usage.summaries == len(rollout.segments) - 1
        assert all(segment.messages[segment.summary].text.startswith("Done: ") for segment in rollout.segments[:-1])
    assert facts["summaries"] >= len(drafts)
    assert facts["wrong"] == facts["made_up"] == 0
    assert 0.6 < facts["kept"] / (facts["kept"] + facts["lost"]) < 0.95
