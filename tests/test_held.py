"""A tiny model and task for runs; an engine that is lent."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from conftest import tiny_model
from transformers import PreTrainedTokenizerFast

from offbook.agent.chat import ChatFormat
from offbook.core.config import load_config
from offbook.pocket.tasks import draft_tasks
from offbook.rl.collector import Collector
from offbook.tasks.folder import Contents, places, write_task
from offbook.types import Prompt, Task

SMALL = {
    "train.groups": "1", "train.group_size": "2", "train.steps": "2", "train.learning_rate": "1e-2",
    "harness.profile": "pocket", "harness.turns": "1", "harness.message_tokens": "8", "harness.context": "2048",
    "harness.summarize_at": "0", "sandbox.backend": "process", "monitors.on": "false",
}  # fmt: skip
ODD = '''
def odd(task, rollout):
    """Something that differs between rollouts of a model that writes noise."""
    return float(sum(rollout.segments[0].ids) % 7)
'''


@pytest.fixture
def given(tmp_path: Path, chat: ChatFormat) -> dict[str, str]:
    """A tiny random model, and a task that it does not solve."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=chat.tokenizer)
    tiny_model("llama", vocabulary=len(tokenizer)).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (draft,) = draft_tasks(1, 1, "train")
    folder = tmp_path / "tasks" / "train" / draft.id
    names = {"id": draft.id, "origin": draft.gold.name, "tools": draft.tools, "test_files": draft.gold.test_files}
    task = Task(**places(folder), **names, instruction="x", fail_to_pass=draft.fail_to_pass, pass_to_pass=())
    tests = {path: draft.gold.files[path] for path in draft.gold.test_files}
    write_task(task, Contents(draft.files, {path: draft.gold.files[path] for path in draft.paths}, tests))
    (tmp_path / "odd.py").write_text(ODD)
    rewards = {"rewards.files": f'["{tmp_path / "odd.py"}"]', "rewards.weights.odd": "1"}
    return {
        **SMALL,
        **rewards,
        "feedback.look": "false",
        "model": str(tmp_path / "model"),
        "tasks.source": str(tmp_path / "tasks"),
    }


def test_what_is_read_is_counted_step_by_step(tmp_path: Path, given: dict[str, str]) -> None:
    """And not what an engine read again before it was lent."""
    config = load_config(["standard"], {**given, "engine.kv_tokens": "256", "out": str(tmp_path / "run")})
    first = Collector(config, Path(given["model"]))

    async def step() -> None:
        """Two rollouts of two turns with one place: what each had read is lost to the other."""
        sessions = [first.engine.open(key) for key in "ab"]
        for turn in (1, 2):
            prompts = [Prompt([start] * 20 * turn) for start in (1, 2)]
            await asyncio.gather(*(one.complete(prompt, 4) for one, prompt in zip(sessions, prompts, strict=True)))
        for session in sessions:
            session.close()

    counts, began = [], time.monotonic()
    for _ in range(2):
        asyncio.run(step())
        counts.append(first.metrics())
    assert [count["prefill_tokens"] for count in counts] == [120, 120]
    seconds = [count[name] for count in counts for name in ("engine/read_s", "engine/write_s")]
    assert min(seconds) > 0
    assert sum(seconds) < time.monotonic() - began
    asyncio.run(step())
    second = Collector(config, Path(given["model"]), lent=first.engine)
    assert second.engine is first.engine
    assert second.metrics()["prefill_tokens"] == 0
