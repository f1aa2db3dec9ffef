"""offbook eval over a real socket: it measures, goes on where it stopped, and says what training had of it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from starting import run
from test_remote import KEY, Answer, Server, reply, serving

from offbook.cli.evaluate import _files
from offbook.core.config import Config, EvalConfig
from offbook.core.runfolder import RunFolder, only_writer
from offbook.evals.run import Subject, load_suites, run_eval
from offbook.rl.evaluate import roll_out
from offbook.rl.resume import RolloutFiles
from offbook.tasks.folder import Contents, places, write_task
from offbook.types import OffbookError, ServerLost, Task

FIX = {"path": "pkg.py", "old": 'raise NotImplementedError("one")', "new": "return 1"}
SOLVING = [reply("So.", ("edit_file", json.dumps(FIX))), reply(None, ("finish", "{}"))]
GIVING_UP = [reply("Shall I go on?")]


def write(folder: Path, id: str, difficulty: str = "normal") -> None:
    test = "from pkg import one\n\n\ndef test_one():\n    assert one() == 1\n\n\ndef test_other():\n    assert True\n"
    contents = Contents(
        tree={"pkg.py": 'def one():\n    raise NotImplementedError("one")\n'},
        gold={"pkg.py": "def one():\n    return 1\n"},
        hidden_tests={"test_pkg.py": test},
    )
    new = Task(
        **places(folder / id),
        instruction=f"Bring back one in pkg.py, which is what the task called {id} asks of whoever happens to read it.",
        test_files=("test_pkg.py",),
        id=id,
        origin="test",
        difficulty=difficulty,
        tools=("read_file", "edit_file", "run_command", "finish"),
        fail_to_pass=("test_pkg.py::test_one",),
        pass_to_pass=("test_pkg.py::test_other",),
    )
    write_task(new, contents)


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    for number, difficulty in enumerate(("normal", "normal", "hard")):
        write(tmp_path / "suite", f"task-{number}", difficulty)
    return tmp_path / "suite"


def offbook(cwd: Path, *arguments: str, fresh: bool = False) -> subprocess.CompletedProcess[str]:
    environment = {"OPENAI_API_KEY": KEY, "PATH": "/usr/bin:/bin", "HOME": str(cwd)}
    return run(*arguments, cwd=cwd, env=environment, fresh=fresh)


def evaluate(cwd: Path, server: Server, *more: str, fresh: bool = False) -> subprocess.CompletedProcess[str]:
    url = f"http://127.0.0.1:{server.server_port}/v1"
    common = ["--model", url, "--name", "scripted", "--suite", "suite", "--out", "out", "--parallel", "1"]
    once = [] if "-n" in more else ["-n", "1"]
    return offbook(cwd, "eval", *common, *once, *more, fresh=fresh)


def numbers(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


PRICES = ("--harness.prices.input", "2", "--harness.prices.output", "10")


def test_a_model_behind_a_url_is_measured(suite: Path, tmp_path: Path) -> None:
    with serving(*SOLVING, *GIVING_UP) as server:
        done = evaluate(tmp_path, server, "--json", *PRICES, "--train", "suite", fresh=True)
    result = numbers(done)
    assert (result["rollouts"], result["solved"], result["edit_rate"]) == (3, 1 / 3, 1 / 3)
    assert result["question_rate"] == pytest.approx(2 / 3)
    assert result["intervals"]["solved"] == [0.0, 1.0]
    assert result["cost"] == pytest.approx(4 * (11 * 2 + 5 * 10) / 1e6 / 3), "by the server's own count"
    assert result["by_difficulty"]["hard"]["tasks"] == 1
    assert result["contamination"]["same_task"] == result["contamination"]["contained"] == 3
    assert "rows" not in result
    stored = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [row["numbers"]["solved"] for row in stored["rows"]] == [1.0, 0.0, 0.0]
    assert len(RunFolder.open(tmp_path / "out").rollouts(0)[0]) == 3, "an evaluation is a run folder"
    assert "3 of 3, 33% solved" in done.stderr
    assert KEY not in done.stderr + (tmp_path / "out" / "results.json").read_text()


def test_a_killed_evaluation_goes_on_where_it_stopped(suite: Path, tmp_path: Path) -> None:
    with serving(*SOLVING, *GIVING_UP) as server:
        first = numbers(evaluate(tmp_path, server, "--json"))
        asked = len(server.asked)
        file = tmp_path / "out" / "rollouts" / "step_00000.jsonl"
        lines = file.read_bytes().splitlines(keepends=True)
        file.write_bytes(lines[0] + lines[1] + lines[2][:50])  # kill -9 in the middle of a write
        (tmp_path / "out" / "results.json").unlink()
        again = numbers(evaluate(tmp_path, server, "--json"))
        assert len(server.asked) == asked + 1, "only what was missing"
        assert (again["resumed"], again["unreadable"]) == (2, 1)
        for result in (first, again):
            del result["intervals"]["seconds_each"]  # the clock's
        assert [again[key] for key in ("solved", "tokens", "intervals")] == [
            first[key] for key in ("solved", "tokens", "intervals")
        ]
        table = evaluate(tmp_path, server)
        assert len(server.asked) == asked + 1, "all of it is there"
        assert "3 rollouts were there from before" in table.stdout
        assert "contamination: not checked" in table.stdout
        assert "invalid calls per 100" in table.stdout
        assert table.stdout.splitlines()[-1] == "out/results.json"
        other = evaluate(tmp_path, server, "-n", "2")
        assert other.returncode == 1
        assert "holds another evaluation (another eval)" in other.stderr
        (suite / "task-1" / "instruction.md").write_text("Something else.\n")
        assert "another tasks" in evaluate(tmp_path, server).stderr


def test_a_server_that_is_lost_is_not_measured(suite: Path, tmp_path: Path) -> None:
    files = RolloutFiles.folder(tmp_path / "out")
    with serving(Answer({"error": {"message": "no such model"}}, 404)) as server:
        config = Config(model=f"http://127.0.0.1:{server.server_port}/v1", eval=EvalConfig(samples=1))
        suites = load_suites([str(suite)], config)
        with pytest.raises(ServerLost, match="answered 404: no such model"):
            run_eval(Subject("m", config, None, "mistyped"), suites, files, parallel=1)  # none is still being asked
        assert not files.results.exists()
        server.asked.clear()
        server.answers = (*GIVING_UP, Answer({}, 503, {"Retry-After": "0.01"}))
        right = Subject("m", config, None, "right")  # and nothing is there that would be refused
        with pytest.raises(ServerLost, match="answered 503"):
            run_eval(right, suites, files, parallel=1)
        server.answers = tuple(GIVING_UP)
        result = run_eval(right, suites, files)
        assert (result["rollouts"], result["crashed"], result["resumed"]) == (3, 0, 1)


def test_a_quick_look_is_in_nobody_s_way(tmp_path: Path) -> None:
    names = [_files(None, tmp_path, "m", suite, limit).results.name for suite in (None, ["pocket"]) for limit in (0, 2)]
    assert names == ["final.json", "first-2.json", "pocket.json", "pocket-first-2.json"]
    assert _files(None, None, "pocket", None, 2).results == Path("runs/eval-pocket-first-2/results.json")


def test_a_run_s_evaluation_gives_way_to_that_of_another_checkpoint_alone(suite: Path, tmp_path: Path) -> None:
    files = RolloutFiles.in_run(tmp_path / "run", "final")
    with serving(*GIVING_UP) as server:
        config = Config(model=f"http://127.0.0.1:{server.server_port}/v1", eval=EvalConfig(samples=1))
        all_tasks, one_task = (load_suites([str(suite)], config, limit) for limit in (0, 1))
        first = Subject("m", config, None, "step 1")
        run_eval(first, all_tasks, files)
        fingerprint = files.results.with_suffix(".fingerprint.json")
        stored = {path: path.read_bytes() for path in (files.results, files.rollouts, fingerprint)}
        twice = config.model_copy(update={"eval": EvalConfig(samples=2)})
        for subject, suites, what in (
            (first, one_task, "another tasks"),
            (Subject("m", twice, None, "step 1"), all_tasks, "another eval"),
            (Subject("m", twice, None, "step 2"), all_tasks, "another model, eval"),
        ):
            with pytest.raises(OffbookError, match=rf"final\.json holds another evaluation \({what}\)"):
                run_eval(subject, suites, files)
        fingerprint.unlink()
        with pytest.raises(OffbookError, match="of what, it does not say"):
            run_eval(first, one_task, files)
        fingerprint.write_bytes(stored[fingerprint])
        assert {path: path.read_bytes() for path in stored} == stored
        assert run_eval(first, all_tasks, files)["resumed"] == 3
        later = run_eval(Subject("m", config, None, "step 2"), all_tasks, files)
        assert (later["rollouts"], later["resumed"]) == (3, 0)


def test_a_folder_that_is_being_written_is_refused(suite: Path, tmp_path: Path) -> None:
    with serving(*GIVING_UP) as server:
        config = Config(
            model=f"http://127.0.0.1:{server.server_port}/v1", out=str(tmp_path / "run"), eval=EvalConfig(samples=1)
        )
        suites = load_suites([str(suite)], config)
        with only_writer(tmp_path / "run"):
            for files in (RolloutFiles.in_run(tmp_path / "run", "final"), RolloutFiles.folder(tmp_path / "run")):
                with pytest.raises(OffbookError, match="run is being written by process"):
                    run_eval(Subject("m", config, None, "m"), suites, files)
            with pytest.raises(OffbookError, match="run is being written by process"):
                roll_out(config, suites.tasks, 1, lambda rollout, over: None, "m")
        assert not server.asked
    assert not (tmp_path / "run").exists()


def test_a_training_run_is_not_written_over(suite: Path, tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "out")
    run.append_metrics({"step": 1})
    run.config_file.write_text("seed = 3\n")
    with serving(*GIVING_UP) as server:
        done = evaluate(tmp_path, server)
    assert done.returncode == 1
    assert "holds a run and no evaluation" in done.stderr
    assert run.config_file.read_text() == "seed = 3\n"


def test_an_interruption_reaches_the_model(tmp_path: Path) -> None:
    write(tmp_path / "suite", "task")
    settings = tmp_path / "suite" / "task" / "task.toml"
    settings.write_text(settings.read_text() + '\n[offbook.interrupt]\nafter_turns = 1\ntext = "Rather two."\n')
    answers: list[Answer] = [reply("Looking.", ("read_file", '{"path": "pkg.py"}')), *GIVING_UP]
    with serving(*answers) as server:
        numbers(evaluate(tmp_path, server, "--json"))
    said = [message["content"] for message in server.asked[-1][2]["messages"] if message["role"] == "user"]
    assert said[-1] == "Rather two."
    assert len(said) == 2


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "give one model"),
        (["http://127.0.0.1:9/v1"], "say which with --name"),
        (["http://me:secret@127.0.0.1:9/v1", "--name", "x"], "has a password in it"),
        (["http://127.0.0.1:9/v1", "--name", "x", "--suite", "nowhere"], "there is no suite nowhere"),
        (["http://127.0.0.1:9/v1", "--name", "x", "--suite", "suite", "--train", "gone"], "there is no folder gone"),
        (["http://127.0.0.1:9/v1", "--name", "x", "--suite", "suite", "--suite", "suite"], "has one of that name"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_sentence(
    suite: Path, tmp_path: Path, arguments: list[str], sentence: str
) -> None:
    done = offbook(tmp_path, "eval", *arguments)
    assert done.returncode == 1
    assert sentence in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert "secret" not in done.stderr
    assert not (tmp_path / "runs").exists()
