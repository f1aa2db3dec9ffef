"""Somebody else's agent in the sandbox: what it asks goes through a socket and is recorded, what it leaves is
graded."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections import Counter
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from annotating import context_of
from conftest import made_once
from scripted import Scripted, sampled_runs
from test_rollout import task  # noqa: F401

from offbook.agent.chat import byte_chat, render_call
from offbook.agent.harness import make_toolset
from offbook.core.config import Config, ConfigError, load_config
from offbook.rl.collector import Collector
from offbook.rl.train import train
from offbook.rl.train_step import candidates
from offbook.tasks import load_task
from offbook.train.algorithms import rl_samples
from offbook.types import ModelLost, OffbookError, Rollout

AGENT = """
import json, os, subprocess, sys, urllib.request

TOOL = {"name": "bash", "parameters": {"type": "object", "properties": {"command": {}}, "required": ["command"]}}
asked, tools = os.environ["OFFBOOK_INSTRUCTION"], [{"type": "function", "function": TOOL}]
messages = [{"role": "system", "content": "You fix code."}, {"role": "user", "content": asked}]
while True:
    body = {"model": os.environ["OFFBOOK_MODEL"], "messages": messages, "tools": tools}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode())
    request.add_header("Authorization", "Bearer " + os.environ["OPENAI_API_KEY"])
    with urllib.request.urlopen(request) as response:
        message = json.load(response)["choices"][0]["message"]
    messages.append(message)
    if not message.get("tool_calls"):
        print(message["content"])
        break
    for call in message["tool_calls"]:
        command = json.loads(call["function"]["arguments"]).get("command", "false")
        done = subprocess.run(command, shell=True, capture_output=True, text=True)
        answer = done.stdout + done.stderr
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": answer})
"""
CHOSEN = {"harness.command": "x"}
MEND = "printf 'def one():\\n    return 1\\n' > pkg.py"


def bash(command: str) -> str:
    return render_call("bash", {"command": command})


def rolled(
    folder: Path, answers: list[Any], size: int = 1, command: str = "python3 /agent/agent.py", **settings: Any
) -> tuple[list[Rollout], Scripted]:
    agent = folder / "agent"
    agent.mkdir(exist_ok=True)
    (agent / "agent.py").write_text(AGENT)
    harness = {"command": command, "mounts": {"/agent": str(agent)}, "wall_s": 30}
    config = Config.model_validate(
        {
            "model": "http://nowhere",
            "engine": {"kind": "continuous"},
            **settings,
            "harness": {**harness, **settings.get("harness", {})},
        }
    )

    async def main() -> tuple[list[Rollout], Scripted]:
        engine = Scripted(byte_chat(), answers)
        async with aclosing(Collector(config, None, "m", lent=engine)) as collector:  # type: ignore[arg-type]
            (group,) = await collector.groups([load_task(folder / "tasks" / "one")], size, "step1")
        assert sorted(engine.opened) == sorted(engine.closed)
        assert all(run in engine.log for rollout in group for run in sampled_runs(rollout.segments))
        return group, engine

    return asyncio.run(main())


def test_an_agent_solves_a_task_and_is_graded_as_always(task: Path) -> None:  # noqa: F811
    folder = task.parent
    answers = [f"Let me look.\n{bash('cat pkg.py')}", bash(MEND), "It is done."]
    (rollout,), engine = rolled(folder, answers)
    assert (rollout.solved, rollout.stop, rollout.changed) == (True, "finish", {"pkg.py": "def one():\n    return 1\n"})
    (segment,) = rollout.segments
    assert [message.role for message in segment.messages][2:] == ["assistant", "tool", "assistant", "tool", "assistant"]
    assert "NotImplementedError" in segment.messages[3].text
    assert "Bring back one in pkg.py." in segment.messages[1].text
    assert (rollout.tools, rollout.usage.turns, rollout.usage.calls) == (("bash",), 3, 2)
    assert rollout.usage.seconds > rollout.usage.model_seconds > 0
    ((sample,),) = rl_samples([rollout])
    assert sum(map(bool, sample.rl_weight)) == sum(len(ids) for _, ids in engine.log)
    assert not rollout.flags


def test_several_at_once_are_told_apart(task: Path) -> None:  # noqa: F811
    group, engine = rolled(task.parent, [*["done"] * 4], size=4)
    assert [rollout.stop for rollout in group] == ["finish"] * 4
    assert len(engine.log) == 4
    assert len({rollout.id for rollout in group}) == 4


def test_invalid_calls_are_counted_and_can_be_hinted(task: Path) -> None:  # noqa: F811
    answers = [render_call("bash", {"cmd": "ls"}), render_call("shell", {"command": "ls"}), "<tool_call>{", "done"]
    (rollout,), _ = rolled(task.parent, answers[:3])
    assert (rollout.usage.calls, rollout.usage.invalid_calls) == (3, 3)
    pairs = candidates(rollout, context_of(Config().feedback), [], Counter())
    assert [(target.rule, target.message) for target, _ in pairs][:3] == [
        ("malformed_arguments", 2), ("unknown_tool", 4), ("malformed_arguments", 6)
    ]  # fmt: skip
    assert pairs[1][1].text == "Reminder: available tools are bash."


@pytest.mark.parametrize(
    ("command", "stop", "said"),
    [
        ("python3 /agent/agent.py", "turns", ""),
        ("sleep 60", "wall", ""),
        ("echo no such agent; exit 3", "crash", "ended with 3 and has asked nothing"),
        ("true", "crash", "asked nothing"),
    ],
)
def test_how_it_ends(task: Path, command: str, stop: str, said: str) -> None:  # noqa: F811
    harness = {"turns": 2, "wall_s": 3 if stop == "wall" else 30}
    (rollout,), _ = rolled(task.parent, [bash(MEND), bash("ls"), "never"], command=command, harness=harness)
    assert rollout.stop == stop
    assert rollout.solved == (stop == "turns"), "what it had done by then counts"
    assert said in rollout.cause


def test_the_sandbox_reaches_the_model_and_nothing_else(task: Path) -> None:  # noqa: F811
    outside = "import urllib.request as u; u.urlopen('http://127.0.0.1:8630/sessions', b'{}')"
    command = (
        "python3 /agent/agent.py; grep -vc lo: /proc/net/dev > net; ls /door > door; touch /agent/x /door/x;"
        f' python3 -c "{outside}" 2> sessions'
    )
    (rollout,), _ = rolled(task.parent, ["done"], command=command)
    assert rollout.changed["net"] == "2\n", "two lines of headings and no device but loopback"
    assert rollout.changed["door"] == "model\n"
    assert "401" in (rollout.changed["sessions"] or "")
    assert not (task.parent / "agent" / "x").exists()


def test_a_lost_model_ends_the_run(task: Path) -> None:  # noqa: F811
    with pytest.raises(ModelLost, match="out of memory"):
        rolled(task.parent, [ModelLost("out of memory")])


def test_settings_that_cannot_be(tmp_path: Path) -> None:
    for overrides, said in (
        ({**CHOSEN, "feedback.look": "true"}, "own tools"),
        (CHOSEN, "engine.kind continuous"),
        (
            {
                "harness.command": "x",
                "engine.kind": "continuous",
                "sandbox.backend": "container",
            },
            "containers",
        ),
    ):
        with pytest.raises(ConfigError, match=said):
            load_config([], overrides)
    mounts = {"harness": {"command": "x", "mounts": {"/agent": str(tmp_path / "none")}}}
    with pytest.raises(OffbookError, match="give a folder"):
        Collector(Config.model_validate({"model": "http://x", "engine": {"kind": "continuous"}, **mounts}), None, "m")


MINI_PACKAGES = ("mini-swe-agent==2.4.6", "mcp")  # litellm imports the second and does not say so


@pytest.fixture(scope="session")
def mini(shared: Path) -> Path:
    """The real package with all that it needs, in a folder of its own."""
    there = os.environ.get("OFFBOOK_MINI")
    if there:
        return Path(there)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    return made_once(
        shared / "mini", lambda folder: subprocess.run([*pip, "--target", folder, *MINI_PACKAGES], check=True)
    )


MINI = (
    "env MSWEA_CONFIGURED=true MSWEA_SILENT_STARTUP=1 MSWEA_COST_TRACKING=ignore_errors"
    " LITELLM_LOCAL_MODEL_COST_MAP=True PYTHONPATH=/mini"
    " python3 -m minisweagent.run.mini --agent-class default --output /tmp/trajectory.json"
    ' --model "openai/$OFFBOOK_MODEL" --task "$OFFBOOK_INSTRUCTION"'
)


@pytest.mark.slow
def test_mini_swe_agent(task: Path, mini: Path) -> None:  # noqa: F811
    answers = [
        f"I look first.\n{bash('cat pkg.py')}",
        "I forget to call anything.",  # which it leaves out of its history
        f"Now I mend it, and see.\n{bash(MEND)}{bash('cat pkg.py')}",
        bash("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
    ]
    harness = {"mounts": {"/mini": str(mini)}, "wall_s": 120}
    (rollout,), engine = rolled(task.parent, answers, command=MINI, harness=harness)
    assert (rollout.solved, rollout.stop, rollout.usage.turns) == (True, "finish", 4), rollout.events
    first, second = rollout.segments
    assert [message.role for message in first.messages] == ["system", "user", "assistant", "tool", "assistant"]
    said = [message.role for message in second.messages]
    assert said == ["system", "user", "assistant", "tool", "user", "assistant", "tool", "tool", "assistant"]
    assert [second.is_own(message) for message in second.messages if message.role == "assistant"] == [False, True, True]
    assert second.ids[: first.messages[3].end] == first.ids[: first.messages[3].end]
    assert len(engine.log) == 4
    assert not rollout.flags


EXAMPLE = Path(__file__).parent.parent / "examples" / "own_agent"
TOOLS = ("read_file", "edit_file", "run_command", "finish")


def test_an_agent_of_one_s_own_is_trained(
    model: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its calls are text to the endpoint, which it reads itself: the pocket model knows them from its system prompt."""
    monkeypatch.setenv("OFFBOOK_CACHE", str(cache))
    monkeypatch.chdir(EXAMPLE.parents[1])  # where its mounts are named from
    assert (EXAMPLE / "system.txt").read_text() == make_toolset(TOOLS, "pocket").system_prompt() + "\n"
    given = {
        "model": str(model),
        "out": str(tmp_path / "run"),
        "tasks.num_train": "2",
        "tasks.num_heldout": "1",
        "train.steps": "2",
        "train.groups": "2",
        "train.group_size": "2",
    }
    folder = train(load_config([EXAMPLE / "agent.toml"], given))
    rows, _ = folder.metrics()
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["drift"] == 0 and "stop/crash" not in row for row in rows), rows
    for step in (1, 2):
        rollouts, _ = folder.rollouts(step)
        assert len(rollouts) == 4
        for rollout in rollouts:
            versions = {version for segment in rollout.segments for version in segment.versions} - {-1}
            assert versions == {step - 1}, "each step is sampled by the weights that the one before left"
            assert rollout.usage.calls, "what the agent reads as calls, rules and monitors read too"
