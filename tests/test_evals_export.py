"""Rollouts in other tools' formats, and read back."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest
from test_harness import LIMITS, Says, edit

import offbook.api
from offbook.agent.chat import ChatFormat, render_call
from offbook.agent.harness import Harness, run_agent
from offbook.core.config import Config
from offbook.core.runfolder import RunFolder, write_atomic
from offbook.evals.export import export, records
from offbook.sandbox import SandboxSpec, open_sandbox
from offbook.signals.trajectory.formats import read_trajectories
from offbook.types import Feedback, Hint, OffbookError, Rollout, Target, Task


@pytest.fixture
def run(tmp_path: Path, chat: ChatFormat) -> RunFolder:
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "calc.py").write_text("def one():\n    return 0\n")
    task = Task("t", tree, "Make one return 1.", tree, tree, (), (), (), ("read_file", "edit_file", "finish"), "test")
    policy = Says(chat, "I look." + render_call("read_file", {"path": "calc.py"}), edit("calc.py", "0", "1"))

    async def roll() -> Rollout:
        async with await open_sandbox(tree, SandboxSpec(backend="process")) as sandbox:
            return await run_agent(task, sandbox, policy, chat, Harness(LIMITS), "step1/t/0", "g")

    rollout = asyncio.run(roll())
    rollout.reward.parts["outcome"] = 1.0
    folder = RunFolder(tmp_path / "run")
    write_atomic(folder.config_file, Config().to_toml())
    folder.write_rollouts(1, [rollout])
    target = Target("step1/t/0", 0, 2, "reread", "again")
    folder.write_feedback(
        1, [Feedback(target, Hint("reread", "h"), ["a", "b"], [-1.0, -2.0], [-2.0, -2.0], [0.5, 0.1])]
    )
    folder.write_eval("final", {"solved": 1.0}, [rollout])
    with open(folder.path / "rollouts" / "step_00001.jsonl", "ab") as file:
        file.write(b"{half\n")
    return folder


@pytest.mark.parametrize("to", ["atif", "openai"])
def test_what_is_exported_is_read_back(run: RunFolder, tmp_path: Path, to: str) -> None:
    written = export(run, to, tmp_path / "out.jsonl")
    assert written == (2, 1), "the step's, and the one kept with the evaluation"
    loaded = read_trajectories(tmp_path / "out.jsonl")
    assert (len(loaded.rollouts), loaded.unreadable) == (2, 0)
    assert all(rollout.foreign for rollout in loaded.rollouts)
    original = run.rollouts(1)[0][0].segments[0].messages
    again = loaded.rollouts[0].segments[0].messages
    assert [message.role for message in again] == [message.role for message in original]
    assert [call.arguments for m in again for call in m.calls] == [call.arguments for m in original for call in m.calls]
    assert again[2].text == "I look."
    assert [m.text for m in again if m.role == "tool"] == [m.text for m in original if m.role == "tool"]


def test_atif_carries_the_sampled_ids(run: RunFolder, tmp_path: Path) -> None:
    export(run, "atif", tmp_path / "out.jsonl")
    first = json.loads((tmp_path / "out.jsonl").read_text().splitlines()[0])
    steps = [step for step in first["steps"] if step["source"] == "agent"]
    segment = run.rollouts(1)[0][0].segments[0]
    sampled = [id for step in steps for id in step["metrics"]["completion_token_ids"]]
    assert sampled == [id for id, own in zip(segment.ids, segment.sampled, strict=True) if own]
    assert [step["step_id"] for step in first["steps"]] == list(range(1, len(first["steps"]) + 1))
    answered = steps[0]["observation"]["results"][0]
    assert answered["source_call_id"] == steps[0]["tool_calls"][0]["tool_call_id"]


def test_records_have_a_row_a_rollout_and_a_target(run: RunFolder) -> None:
    found = records(run)
    assert [row["where"] for row in found.rollouts] == ["1", "eval/final"]
    assert (found.rollouts[0]["solved"], found.rollouts[0]["reward/outcome"], found.unreadable) == (1.0, 1.0, 1)
    (target,) = found.targets
    assert (target["rule"], target["student"], target["teacher"], target["peak"]) == ("reread", -3.0, -4.0, 0.5)


def test_frames(run: RunFolder) -> None:
    pandas = pytest.importorskip("pandas")
    made = offbook.api.frames(run.path)
    assert isinstance(made.rollouts, pandas.DataFrame)
    assert (len(made.rollouts), len(made.targets), made.unreadable) == (2, 1, 1)
    assert made.rollouts["solved"].sum() == 2


def test_what_is_not_installed_is_said_in_a_sentence(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(OffbookError, match=r"pip install 'offbook\[frames\]'"):
        offbook.api.frames(run.path)


def test_the_verb(run: RunFolder, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "offbook", "export", str(run.path), "--to", "openai", "--out", "o.jsonl"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "o.jsonl: 2 rollouts as openai; 1 unreadable lines were skipped\n"
