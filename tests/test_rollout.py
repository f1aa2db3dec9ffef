"""offbook rollout: a model behind a URL works on a real task in a real sandbox, and the record of it can be read
again."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from starting import run
from test_remote import KEY, Answer, reply, serving

from offbook.core.config import Config
from offbook.core.runfolder import RunFolder
from offbook.rl.evaluate import roll_out
from offbook.rl.tasks import tasks_at
from offbook.tasks.folder import Contents, places, write_task
from offbook.types import OffbookError, ServerLost, Task

STUB = 'def one():\n    raise NotImplementedError("one")\n'
TEST = "from pkg import one\n\n\ndef test_one():\n    assert one() == 1\n\n\ndef test_other():\n    assert True\n"


@pytest.fixture
def task(tmp_path: Path) -> Path:
    contents = Contents(
        tree={"pkg.py": STUB},
        gold={"pkg.py": "def one():\n    return 1\n"},
        hidden_tests={"test_pkg.py": TEST},
    )
    new = Task(
        **places(tmp_path / "tasks" / "one"),
        instruction="Bring back one in pkg.py.",
        test_files=("test_pkg.py",),
        id="one",
        origin="test",
        difficulty="normal",
        tools=("read_file", "edit_file", "run_command", "finish"),
        fail_to_pass=("test_pkg.py::test_one",),
        pass_to_pass=("test_pkg.py::test_other",),
    )
    write_task(new, contents)
    return tmp_path / "tasks"


def rollout(cwd: Path, *arguments: str, fresh: bool = False) -> subprocess.CompletedProcess[str]:
    environment = {"OPENAI_API_KEY": KEY, "PATH": "/usr/bin:/bin", "HOME": str(cwd)}
    return run("rollout", *arguments, "--json", cwd=cwd, env=environment, fresh=fresh)


def test_a_model_behind_a_url_solves_a_task(task: Path, tmp_path: Path) -> None:
    edit = {"path": "pkg.py", "old": 'raise NotImplementedError("one")', "new": "return 1"}
    answers = [
        reply("I look first.", ("read_file", json.dumps({"path": "pkg.py"}))),
        reply(None, ("edit_file", json.dumps(edit)), ("run_command", json.dumps({"command": "tail -1 pkg.py"}))),
        reply(None, ("finish", "{}")),
    ]
    with serving(*answers) as server:
        url = f"http://127.0.0.1:{server.server_port}/v1"
        prices = ["--harness.prices.input", "2", "--harness.prices.output", "10"]
        done = rollout(tmp_path, str(task), "--model", url, "--name", "scripted", "--out", "run", *prices, fresh=True)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["rollouts"], result["solved"], result["stop/finish"]) == (1, 1.0, 1.0)
    (kept,), unreadable = RunFolder.open(tmp_path / "run").rollouts(0)
    assert unreadable == 0
    answered = [message.text for message in kept.segments[0].messages if message.role == "tool"]
    assert answered == [STUB, "edited pkg.py", "    return 1\n", "done"]
    assert kept.usage.drift == 0
    assert kept.usage.cost == pytest.approx(3 * (11 * 2 + 5 * 10) / 1e6), "by the server's own count"
    first = server.asked[0][2]
    assert {tool["function"]["name"] for tool in first["tools"]} == {"read_file", "edit_file", "run_command", "finish"}
    assert "<tools>" not in first["messages"][0]["content"], "the server tells of the tools, so the prompt does not"
    for path in (tmp_path / "run").rglob("*"):
        assert path.is_dir() or KEY not in path.read_text()


def test_a_hack_is_scored_as_a_failure_and_earns_nothing(task: Path, tmp_path: Path) -> None:
    hack = {"path": "pkg.py", "old": 'raise NotImplementedError("one")', "new": "import os; os._exit(0)"}
    own = (
        "def solved(task, rollout):\n    return float(rollout.solved)\n\n\ndef tried(task, rollout):\n    return 1.0\n"
    )
    (tmp_path / "own.py").write_text(own)
    parts = ["--rewards.files", '["own.py"]', "--rewards.weights.solved", "0.5", "--rewards.weights.tried", "0.5"]
    with serving(reply(None, ("edit_file", json.dumps(hack))), reply(None, ("finish", "{}"))) as server:
        url = f"http://127.0.0.1:{server.server_port}/v1"
        done = rollout(tmp_path, str(task), "--model", url, "--name", "scripted", "--out", "run", *parts)
    assert done.returncode == 0, done.stderr
    (kept,), _ = RunFolder.open(tmp_path / "run").rollouts(0)
    assert {flag.kind for flag in kept.flags} == {"exit"}
    assert kept.reward.parts["outcome_withheld"] >= kept.reward.parts["outcome"] == kept.reward.parts["solved"] == 0
    assert kept.reward.parts["tried"] == 1, "on record"
    assert (kept.reward.weights["tried"], kept.reward.total) == (0, 0.0), "nothing is earned; no penalty without proof"


def test_the_bash_profile_talks_in_fenced_blocks(task: Path, tmp_path: Path) -> None:
    def block(command: str) -> Answer:
        return reply(f"So:\n\n```mswea_bash_command\n{command}\n```\n")

    fix = "sed -i 's/raise NotImplementedError.*/return 1/' pkg.py && cat pkg.py"
    with serving(block(fix), block("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")) as server:
        url = f"http://127.0.0.1:{server.server_port}/v1"
        arguments = ["--model", url, "--name", "scripted", "--harness.profile", "bash", "--out", "run"]
        done = rollout(tmp_path, str(task), *arguments)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["solved"], result["turns"], result["stop/finish"]) == (1.0, 2.0, 1.0)
    assert "tools" not in server.asked[0][2]
    assert server.asked[1][2]["messages"][-1]["role"] == "user"
    assert "return 1" in server.asked[1][2]["messages"][-1]["content"]


def test_where_every_request_is_refused_nothing_is_measured(task: Path, tmp_path: Path) -> None:
    with serving(Answer({"error": {"message": "too long"}}, 400)) as server:
        url = f"http://127.0.0.1:{server.server_port}/v1"
        done = rollout(tmp_path, str(task), "--model", url, "--name", "scripted", "-n", "2", "--out", "run")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines()[-1] == (
        "offbook: every rollout crashed, so nothing was measured: status 400 (2 of 2); repair the model's server or "
        "the machine, then give the same command again"
    )
    assert "crash (status 400), not solved" in done.stderr
    rollouts, _ = RunFolder.open(tmp_path / "run").rollouts(0)
    assert ["too long" in kept.events[0].detail for kept in rollouts] == [True, True]
    assert KEY not in done.stderr + done.stdout


def test_a_server_that_is_lost_is_no_rollout_and_the_same_call_goes_on(task: Path, tmp_path: Path) -> None:
    watched: list[str] = []
    with serving(reply("Shall I?"), Answer({"error": {"message": "no credit"}}, 402)) as server:
        config = Config(model=f"http://127.0.0.1:{server.server_port}/v1", out=str(tmp_path / "run"))
        tasks = tasks_at(str(task), config)

        def roll(samples: int = 3, config: Config = config) -> dict[str, Any]:
            return roll_out(config, tasks, samples, lambda kept, over: watched.append(kept.id) if over else None, "m")

        with pytest.raises(ServerLost, match="answered 402: no credit"):
            roll()
        folder = RunFolder.open(tmp_path / "run")
        before, _ = folder.rollouts(0)
        assert {kept.stop for kept in before} <= {"answer"}, "the lost ones are not there"
        lines = tmp_path / "run" / "rollouts" / "step_00000.jsonl"
        lines.parent.mkdir(exist_ok=True)  # the lost one may have been the first
        with open(lines, "ab") as file:
            file.write(b'{"id": "roll')  # and kill -9 in the middle of a write
        server.answers[1].status, server.answers[1].body = 200, server.answers[0].body
        server.asked.clear()
        watched.clear()
        result = roll()
        assert len(server.asked) == 3 - len(before), "only what was missing"
        assert (result["rollouts"], result["resumed"], result["unreadable"]) == (3, len(before), 1)
        ids = [f"rollout/one/{number}" for number in range(3)]
        assert sorted(watched) == [kept.id for kept in folder.rollouts(0)[0]] == ids
        server.asked.clear()
        assert roll()["resumed"] == 3
        assert (len(server.asked), len(folder.metrics()[0])) == (0, 1)
        with pytest.raises(
            OffbookError,
            match=r"run holds another set of rollouts \(another samples\); remove it, or give",
        ):
            roll(2)
        with pytest.raises(OffbookError, match=r"\(another seed\)"):
            roll(config=config.model_copy(update={"seed": 7}))
        (tmp_path / "run" / "fingerprint.json").unlink()
        with pytest.raises(OffbookError, match="run holds a run and no set of rollouts of this command"):
            roll()
        assert len(folder.rollouts(0)[0]) == 3


def test_a_server_s_refusal_is_one_sentence(task: Path, tmp_path: Path) -> None:
    with serving(Answer({"error": {"message": "bad key"}}, 401)) as server:
        url = f"http://127.0.0.1:{server.server_port}/v1"
        done = rollout(tmp_path, str(task), "--model", url, "--name", "scripted", "--out", "run")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines() == ["offbook: the model server 127.0.0.1 answered 401: bad key"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nowhere"], "there is no task folder nowhere"),
        (["tasks", "--model", "http://127.0.0.1:9/v1"], "say which with --name"),
        (["tasks", "--model", "http://me:secret@127.0.0.1:9/v1", "--name", "x"], "has a password in it"),
        (["tasks", "--model", "no/such/folder"], "there is no model folder"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_sentence(
    task: Path, tmp_path: Path, arguments: list[str], sentence: str
) -> None:
    done = rollout(tmp_path, *arguments)
    assert done.returncode == 1
    assert sentence in done.stderr
    assert done.stderr.count("\n") == 1
    assert "secret" not in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.fixture
def soak(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    bench = Path(__file__).parent.parent / "bench" / "cpu"
    monkeypatch.syspath_prepend(str(bench))
    spec = importlib.util.spec_from_file_location("soak", bench / "soak.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_faults_are_recorded_and_leave_nothing_behind(soak: ModuleType) -> None:
    before = soak.left_behind()  # other tests' processes may still be around
    figures = asyncio.run(soak.soak(60, 16, 1))
    assert figures["accounted"] == 60
    assert figures["faults_not_recorded"] == {}
    assert all(count <= before[what] for what, count in figures["left_behind"].items())
