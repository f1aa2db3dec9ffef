"""The circle with the real pocket model, scaled down: it trains, it survives kill -9, it says what is wrong."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from starting import Started, run
from test_remote import reply, serving

from offbook.core.config import Config, FeedbackConfig, TasksConfig, load_config
from offbook.core.runfolder import RunFolder, load_lines, only_writer
from offbook.pocket.model import Recipe, make_pocket
from offbook.rl.scheduler import Shuffled
from offbook.rl.tasks import task_sets
from offbook.rl.train import SILENT_STEPS
from offbook.rl.train import train as run_training
from offbook.types import OffbookError, Sample, Task

SMALL = ["--tasks.num_train", "4", "--tasks.num_heldout", "2", "--train.groups", "2", "--train.group_size", "3"]
SMALL += ["--feedback.look", "false"]  # a model that is half made does not follow hints
POCKET = ["--model", "pocket"]
DRY = ["train", *POCKET, "--dry-run"]


def environment(cache: Path) -> dict[str, str]:
    return {**os.environ, "OFFBOOK_CACHE": str(cache), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}


def offbook(cache: Path, *arguments: str, cwd: Path, fresh: bool = False) -> subprocess.CompletedProcess[str]:
    return run(*arguments, cwd=cwd, env=environment(cache), fresh=fresh)


def training(model: Path, out: Path, *more: str) -> list[str]:
    return ["train", "--model", str(model), "--out", str(out), *SMALL, *more]


def train(cache: Path, model: Path, out: Path, *more: str, fresh: bool = False) -> subprocess.CompletedProcess[str]:
    return offbook(cache, *training(model, out, *more), cwd=out.parent, fresh=fresh)


def start_training(cache: Path, model: Path, out: Path, *more: str) -> Started:
    return Started(training(model, out, *more), out.parent, environment(cache))


@pytest.fixture(scope="session")
def uninterrupted(cache: Path, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "straight"
    process = train(cache, model, out, "--train.steps", "4", "--checkpoint.keep", "9", fresh=True)
    assert process.returncode == 0, process.stderr
    return out


def weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    """Of all files: ranks write some each."""
    files = (run / "ckpt" / f"step_{step:05d}").glob("model*.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def test_a_run_leaves_what_the_contract_says(uninterrupted: Path) -> None:
    folder = RunFolder.open(uninterrupted)
    rows, unreadable = folder.metrics()
    assert [(row["step"], row["epoch"], row["skipped_steps"]) for row in rows] == [
        (1, 1, 0), (2, 1, 0), (3, 2, 0), (4, 2, 0)
    ]  # fmt: skip
    assert unreadable == 0
    for row in rows:
        rollouts, _ = folder.rollouts(row["step"])
        assert len(rollouts) == 6
        assert all(set(r.segments[0].versions) <= {-1, row["step"] - 1} for r in rollouts)
        assert row["rl/mismatch"] < 1e-4
    feedback = [item for step in folder.steps() for item in folder.feedback(step)[0]]
    assert feedback, "a half-made model makes mistakes"
    for item in feedback:
        assert len(item.pieces) == len(item.student) == len(item.teacher) == len(item.divergence) > 0
        assert item.hint.text.startswith("Reminder")
    first, last = (weights(uninterrupted, step) for step in (1, 4))
    assert any(not torch.equal(first[name], last[name]) for name in first)


def test_a_judge_model_adds_to_what_rules_find(cache: Path, model: Path, tmp_path: Path) -> None:
    """Its hint is spliced in before the message it names, and taught like any other."""
    mistake = {"message": 2, "rule": "unverified", "hint": "Reminder: look first.", "quote": '{"name": "'}
    with serving(reply(json.dumps({**mistake, "holds": True}))) as server:
        url = f"http://127.0.0.1:{server.server_port}/v1"
        options = ["--judge.url", url, "--judge.name", "coach", "--judge.feedback", "0.5"]
        more = ["--feedback.rules", '["edited_tests"]', "--feedback.gate", "0", "--train.steps", "1"]
        process = train(cache, model, tmp_path / "run", *options, *more)
    assert process.returncode == 0, process.stderr
    folder = RunFolder(tmp_path / "run")
    (row,) = folder.metrics()[0]
    assert 0 < row["judge/rollouts"] < row["rollouts"], "a share of them"
    assert row["judge/refused/unknown rule"] > 0, "the server gives one answer to every question"
    found = [item for item in folder.feedback(1)[0] if item.target.rule == "model/unverified"]
    assert len(found) == row["judge/found"] == row["targets/model/unverified"] > 0
    assert all(item.hint.text == "Reminder: look first." and item.divergence for item in found)


def test_a_judge_that_does_not_answer_stops_the_run(cache: Path, model: Path, tmp_path: Path) -> None:
    """Before the first step where it never did, and with a warning per step where it stops answering later."""
    judge = ["--judge.name", "coach", "--judge.feedback", "1", "--judge.url"]
    process = train(cache, model, tmp_path / "none", *judge, "http://127.0.0.1:9/v1")
    assert (process.returncode, process.stderr.count("\n")) == (1, 1)
    assert "the judge does not answer: the model server 127.0.0.1 cannot be reached" in process.stderr
    assert not (tmp_path / "none" / "metrics.jsonl").exists()
    refusal = reply("no")
    refusal.status = 400
    with serving(reply("yes"), refusal) as server:
        process = train(cache, model, tmp_path / "run", *judge, f"http://127.0.0.1:{server.server_port}/v1")
    assert process.returncode == 1
    for step in range(1, SILENT_STEPS + 1):
        assert f"step {step}: the judge left 42 of 42 questions unanswered (not asked" in process.stderr
    assert f"and all of the {SILENT_STEPS - 1} steps before; give the same command again" in process.stderr
    assert [row["step"] for row in RunFolder(tmp_path / "run").metrics()[0]] == [1, 2]


def test_a_second_run_in_a_folder_names_the_mistake_first_and_few_keys(tmp_path: Path) -> None:
    RunFolder(tmp_path).config_file.write_text(Config(out=str(tmp_path), model="pocket").to_toml())
    (tmp_path / "ckpt" / "step_00001").mkdir(parents=True)
    (tmp_path / "ckpt" / "step_00001" / "DONE").touch()
    other = FeedbackConfig(weight=0.5, gate=0.1, direction="reverse", max_targets=4, look=False)
    for options, sentence in (
        ({"model": "nosuch"}, "there is no model folder nosuch"),
        ({"model": "pocket", "tasks": TasksConfig(source="my-tasks")}, "there is no task folder my-tasks"),
        (
            {"model": "pocket", "seed": 3},
            r"configuration \(seed is 3 now and 0 there; feedback\.weight .*; and 3 more\); ",
        ),
    ):
        with pytest.raises(OffbookError, match=sentence):
            run_training(Config(out=str(tmp_path), feedback=other, **options))


def test_a_checkpoint_loads_with_from_pretrained(uninterrupted: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = uninterrupted / "ckpt" / "step_00004"
    network = AutoModelForCausalLM.from_pretrained(path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "Hello."}], tokenize=False)
    assert prompt == "<|im_start|>user\nHello.<|im_end|>\n"
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    assert network(ids).logits.shape[-1] == network.config.vocab_size


SLOW = pytest.mark.slow


@pytest.mark.parametrize("delay_s", [pytest.param(0.0, marks=SLOW), 0.9, pytest.param(1.7, marks=SLOW)])
def test_a_killed_run_ends_at_the_same_weights(
    cache: Path, model: Path, uninterrupted: Path, tmp_path: Path, delay_s: float
) -> None:
    """kill -9 some time after the first step, wherever that is; the same command goes on."""
    out = tmp_path / "killed"
    process = start_training(cache, model, out, "--train.steps", "4", "--checkpoint.keep", "9")
    deadline = time.monotonic() + 120
    while not (out / "ckpt" / "step_00001" / "DONE").exists() and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    time.sleep(delay_s)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    again = train(cache, model, out, "--train.steps", "4", "--checkpoint.keep", "9")
    assert again.returncode == 0, again.stderr
    for step in (2, 4):
        ours, theirs = weights(out, step), weights(uninterrupted, step)
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    rows, expected = (
        [
            {
                key: value
                for key, value in row.items()
                if key not in ("grades", "prefill_tokens", "restarts") and key[-2:] != "_s"
            }
            for row in RunFolder(run).metrics()[0]
        ]
        for run in (out, uninterrupted)
    )
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    for row, other in zip(rows, expected, strict=True):
        assert {key: (row.get(key), other.get(key)) for key in {*row, *other} if row.get(key) != other.get(key)} == {}


def test_a_run_with_few_checkpoints_is_killed_and_ends_at_the_same_weights(
    cache: Path, model: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    """In its fourth step, after a checkpoint of the second: the third is done again, from what is stored of it too."""
    out = tmp_path / "killed"
    more = ["--train.steps", "4", "--checkpoint.keep", "9", "--checkpoint.every", "2"]
    process = start_training(cache, model, out, *more)
    deadline = time.monotonic() + 120
    while len(RunFolder(out).metrics()[0]) < 3 and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert list(RunFolder(out).checkpoints()) == [2]
    assert RunFolder(out).steps()[:3] == [1, 2, 3]
    again = train(cache, model, out, *more)
    assert again.returncode == 0, again.stderr
    assert "resuming at step 3" in again.stderr
    assert sorted(RunFolder(out).checkpoints()) == [2, 4]
    ours, theirs = weights(out, 4), weights(uninterrupted, 4)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert [row["step"] for row in RunFolder(out).metrics()[0]] == [1, 2, 3, 4]


def test_ctrl_c_keeps_the_run_and_says_how_to_go_on(cache: Path, model: Path, tmp_path: Path) -> None:
    """Also the steps since the last checkpoint."""
    out = tmp_path / "stopped"
    process = start_training(cache, model, out, "--train.steps", "50", "--checkpoint.every", "50")
    deadline = time.monotonic() + 120
    while not RunFolder(out).metrics()[0]:
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)
    time.sleep(0.3)  # into the rollouts of a step
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "the same command resumes" in stderr
    assert "Traceback" not in stderr
    assert max(RunFolder.open(out).checkpoints()) >= 1


def test_two_trainings_do_not_write_into_one_folder(cache: Path, model: Path, tmp_path: Path) -> None:
    with only_writer(tmp_path / "run"):
        process = train(cache, model, tmp_path / "run")
    assert process.returncode == 1
    assert f"run is being written by process {os.getpid()} on" in process.stderr
    assert process.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_run_that_was_moved_goes_on(cache: Path, model: Path, uninterrupted: Path, tmp_path: Path) -> None:
    shutil.copytree(uninterrupted, tmp_path / "moved")
    arguments = ["--model", os.path.relpath(model, tmp_path), "--checkpoint.keep", "9", "--train.steps", "5"]
    process = offbook(cache, "train", *arguments, "--out", "./moved/", *SMALL, cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    assert max(RunFolder(tmp_path / "moved").checkpoints()) == 5


def test_eval_of_a_run_is_kept_with_it(cache: Path, uninterrupted: Path, tmp_path: Path) -> None:
    first, second = (offbook(cache, "eval", str(uninterrupted), "--json", cwd=uninterrupted.parent) for _ in range(2))
    assert first.returncode == 0, first.stderr
    result = json.loads(first.stdout)
    assert result["rollouts"] == 4
    stored = RunFolder(uninterrupted).read_eval("final")
    same = ("solved", "invalid_per_100", "turns", "tokens")
    again = json.loads(second.stdout)
    assert {key: result[key] for key in same} == {key: again[key] for key in same} == {key: stored[key] for key in same}
    assert (result["resumed"], again["resumed"]) == (0, 4)
    shutil.copytree(uninterrupted, tmp_path / "copy")
    RunFolder(tmp_path / "copy").data_file.write_text('{"verb": "sft"}')
    for spelled, cwd in ((f"{uninterrupted.name}/", uninterrupted.parent), ("./copy", tmp_path)):
        elsewhere = offbook(cache, "eval", spelled, "--json", cwd=cwd)
        assert json.loads(elsewhere.stdout)["resumed"] == 4, "not measured again"
    assert result["contamination"]["same_task"] == 0
    assert json.loads(elsewhere.stdout)["contamination"] is None, "a run from data has no training tasks"
    less = offbook(cache, "eval", str(uninterrupted), "--limit", "1", cwd=uninterrupted.parent)
    assert less.returncode == 0, less.stderr
    assert [RunFolder(uninterrupted).read_eval(name)["rollouts"] for name in ("final", "first-1")] == [4, 2]


def test_a_run_is_a_model_to_start_from(cache: Path, uninterrupted: Path, tmp_path: Path) -> None:
    shown = offbook(cache, "train", "--model", str(uninterrupted), "--dry-run", "--json", cwd=tmp_path)
    config = json.loads(shown.stdout)
    assert config["model"] == str(uninterrupted / "ckpt" / "step_00004"), "pinned: the run may go on"
    assert config["harness"]["profile"] == "pocket", "what suits a pocket model suits what it became"
    arguments = ["--model", str(uninterrupted), "--limit", "1", "--out", "run", *SMALL[:4]]
    done = offbook(cache, "rollout", "pocket", *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("run: 1 rollouts")


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["train", "--feedback.wieght", "1"], 2, "did you mean feedback.weight"),
        (["train", "@", "absent.toml"], 2, "cannot read absent.toml"),
        (["train", "@", "absent"], 2, "recipes are full, pocket, qwen3-0.6b, "),
        (["train"], 2, "`--model pocket`, `--model smollm2-135m` or `--model Qwen/Qwen3-0.6B`"),
        (["train", "--dry-run", "@", "small"], 2, "there is no model to train"),
        (
            ["train", "--model", "http://127.0.0.1:9/v1", *SMALL],
            1,
            "a model behind a URL can be measured and not trained",
        ),
        (["train", "--model", "./absent"], 1, "there is no model folder ./absent"),
        (["train", "--model", "nobody/nothing", *SMALL], 1, "there is no folder nobody/nothing, and the hub"),
        (["train", *POCKET, "--tasks.source", "absent"], 1, "there is no task folder absent"),
        (["eval", "./absent"], 1, "there is no model folder ./absent"),
        (["view", "absent"], 1, "absent is not a folder"),
        (["view", "."], 1, "has no config.toml"),
        (["train", "--seed"], 2, "--seed needs a value"),
        (["train", *POCKET, "--out", "a-file"], 1, "a-file is a file; --out is the folder of a run"),
        ([*DRY, "--tasks.source", "absent"], 1, "there is no task folder absent"),
        ([*DRY, "--tasks.source", "."], 1, "train holds no task folders"),
        ([*DRY, "--feedback.rules", '["unknown_tol"]'], 1, "there is no rule unknown_tol"),
        ([*DRY, "--monitors.policy.tsts", "zero"], 1, "monitors.policy.tsts: there is no such finding"),
        ([*DRY, "--rewards.weights.nope", "1"], 1, "there is no reward nope"),
        ([*DRY, "--rewards.files", '["absent.py"]'], 1, "there is no file absent.py with rewards"),
        (["train", "--dry-rum", "1"], 2, "there is no option --dry-rum; did you mean --dry-run?"),
        (["eval", "pocket", "--limt", "2"], 2, "there is no option --limt; did you mean --limit?"),
        (["view", ".", "--port", "99999"], 2, "'--port'"),
        (["eval", "pocket", "--out", "a-file"], 1, "a-file is a file; --out is the folder of a run"),
        (["agent", "--say", "no", *POCKET], 1, "has no session of yours"),
        (["mtp", "./absent"], 1, "there is no model folder ./absent"),
    ],
)
def test_bad_input_gets_one_sentence(
    cache: Path, tmp_path: Path, arguments: list[str], code: int, sentence: str
) -> None:
    (tmp_path / "a-file").touch()
    process = offbook(cache, *arguments, cwd=tmp_path)
    assert process.returncode == code
    assert sentence in process.stderr
    assert "Traceback" not in process.stderr
    assert process.stderr.strip().count("\n") == 0


def test_debug_shows_the_traceback(cache: Path, tmp_path: Path) -> None:
    assert "Traceback" in offbook(cache, "view", "absent", "--debug", cwd=tmp_path).stderr


def test_a_full_disk_is_one_sentence(cache: Path, tmp_path: Path) -> None:
    no_room = "ulimit -f 0"  # no file may grow
    process = subprocess.run(
        ["sh", "-c", f"{no_room}; exec {shlex.quote(sys.executable)} -m offbook train @ pocket --out run"],
        env={**os.environ, "OFFBOOK_CACHE": str(cache)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert process.returncode == 1
    assert "free some space or choose another folder" in process.stderr
    assert "Traceback" not in process.stderr


def test_help_needs_no_torch(tmp_path: Path) -> None:
    code = "import sys, offbook.cli; assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_doctor_reports_and_fails_without_a_cache(cache: Path, tmp_path: Path) -> None:
    good = offbook(cache, "doctor", "--json", cwd=tmp_path)
    assert good.returncode == 0
    assert {finding["name"] for finding in json.loads(good.stdout)} >= {"python", "torch", "cache", "sandbox"}
    (tmp_path / "file").touch()
    bad = offbook(tmp_path / "file" / "cache", "doctor", "--json", cwd=tmp_path)
    assert bad.returncode == 1
    assert "set OFFBOOK_CACHE" in bad.stdout


def test_no_task_comes_twice_before_all_have_come(tmp_path: Path) -> None:
    tasks = [Task(str(n), tmp_path, "", tmp_path, tmp_path, (), (), (), (), "") for n in range(10)]
    order = Shuffled(tasks, 3)
    drawn = [task.id for step in range(1, 6) for task in order.tasks_of(step, groups=4)]
    assert sorted(drawn[:10]) == sorted(drawn[10:]) == sorted(str(n) for n in range(10))
    assert drawn[:10] != drawn[10:]


def test_tasks_that_come_again_are_said_once_and_can_be_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tasks = [Task(str(n), tmp_path, "", tmp_path, tmp_path, (), (), (), (), "") for n in range(10)]
    order, said = Shuffled(tasks, 3), []
    for step in range(1, 7):
        order.tasks_of(step, groups=4)
        said.append(len(caplog.records))
    assert said == [0, 0, 1, 1, 1, 1], "in the middle of the third step"
    assert caplog.messages == ["all 10 tasks have been trained on once; they come again"]
    assert [order.epoch(step, groups=4) for step in range(1, 7)] == [1, 1, 2, 2, 2, 3]


BROKEN = """
def harmless(task, rollout):
    step = rollout.id.split("/")[0]
    if step == "step2":
        rollout.segments[0].logprobs[:] = [-float("inf")] * len(rollout.segments[0].ids)
    if step == "step3":
        rollout.segments.clear()
    return 0.0
"""


def test_what_is_no_number_ends_the_run_or_the_step(cache: Path, model: Path, tmp_path: Path) -> None:
    """And a step whose rollouts have nothing to learn from is left out."""
    (tmp_path / "own.py").write_text(BROKEN)
    more = ["--rewards.files", '["own.py"]', "--rewards.weights.harmless", "1", "--train.steps", "4"]
    more += ["--checkpoint.keep", "9"]
    stopped = train(cache, model, tmp_path / "run", *more)
    assert stopped.returncode == 1
    (sentence,) = (line for line in stopped.stderr.splitlines() if line.startswith("offbook: "))
    assert "step 2: a sampled token's log-probability" in sentence
    assert "run/aside/step_00002.samples.jsonl; the last checkpoint is of step 1" in sentence
    assert "Traceback" not in stopped.stderr
    folder = RunFolder(tmp_path / "run")
    assert (list(folder.checkpoints()), folder.steps()) == ([1], [1, 2])
    assert [folder.feedback(2)[1], len(folder.rollouts(2)[0]), folder.rollouts(2)[1]] == [0, 6, 0]
    samples, unreadable = load_lines(tmp_path / "run" / "aside" / "step_00002.samples.jsonl", Sample)
    assert unreadable == 0
    assert all(math.isinf(sample.logprobs[-1]) for sample in samples)
    went_on = train(cache, model, tmp_path / "run", *more, "--train.on_nonfinite", "skip")
    assert went_on.returncode == 0, went_on.stderr
    assert "step 2 is skipped: a sampled token" in went_on.stderr
    assert "step 3 is skipped: no tokens were sampled" in went_on.stderr
    rows = folder.metrics()[0]
    assert [row["skipped_steps"] for row in rows] == [0, 1, 2, 2]
    assert ["gradient_norm" in row for row in rows] == [True, False, False, True]
    first, second, third, last = (weights(tmp_path / "run", step) for step in (1, 2, 3, 4))
    for name, value in first.items():
        assert torch.equal(value, second[name])
        assert torch.equal(value, third[name])
        assert last[name].isfinite().all()
    lost = train(
        cache,
        model,
        tmp_path / "lost",
        "--train.steps",
        "3",
        "--train.learning_rate",
        "3e38",
        "--train.on_nonfinite",
        "skip",
    )
    assert (lost.returncode, list(RunFolder(tmp_path / "lost").checkpoints())) == (1, [])
    (sentence,) = (line for line in lost.stderr.splitlines() if line.startswith("offbook: "))
    assert "step 1: the norm of the weights is inf after it" in sentence
    assert sentence.endswith("samples.jsonl; there is no checkpoint yet; try a lower train.learning_rate")
    assert any(not torch.equal(value, last[name]) for name, value in first.items())
    resumed = train(cache, model, tmp_path / "run", *more, "--train.steps", "5")
    assert resumed.returncode == 0, resumed.stderr
    assert folder.metrics()[0][-1]["skipped_steps"] == 2, "also after a restart"


def test_the_pocket_model_is_the_same_for_the_same_seed(tmp_path: Path) -> None:
    """However many threads torch has."""
    made, threads = [], torch.get_num_threads()
    for count in (1, 3):
        torch.set_num_threads(count)
        made.append(make_pocket(tmp_path / str(count), 0, lambda what, share: None, Recipe(episodes=30)))
    torch.set_num_threads(threads)
    ours, theirs = (load_file(folder / "model.safetensors") for folder in made)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    one, other = ((folder / "tokenizer.json").read_text() for folder in made)
    assert one == other
    parameters = sum(tensor.numel() for tensor in ours.values())
    assert 500_000 <= parameters <= 3_000_000


def test_quickstart_scaled_down(cache: Path, model: Path, tmp_path: Path) -> None:
    """The whole of it with a half-made model: two arms, two measurements, table, summary and report."""
    arguments = ["--model", str(model), "--train.steps", "2", *SMALL]
    process = offbook(cache, "quickstart", "--out", "q", "--json", *arguments, cwd=tmp_path, fresh=True)
    assert process.returncode == 0, process.stderr
    summary = json.loads((tmp_path / "q" / "summary.json").read_text())
    assert set(summary) == {"before", "rl", "rl_hints", "seconds"}
    assert set(summary["rl"]) == {"solved", "invalid_per_100", "turns", "tokens"}
    assert json.loads(process.stdout)["rl_hints"] == summary["rl_hints"]
    assert "<html" in (tmp_path / "q" / "report.html").read_text()
    hinted, plain = (RunFolder(tmp_path / "q" / arm).metrics()[0] for arm in ("rl_hints", "rl"))
    assert sum(row["hinted_targets"] for row in hinted) > 0 == sum(row["hinted_targets"] for row in plain)
    assert hinted[0]["solved"] == plain[0]["solved"], "both arms start from the same weights and the same rng"


def test_the_example_runs_and_stays_short(cache: Path, model: Path, tmp_path: Path) -> None:
    example = Path(__file__).parent.parent / "examples" / "targeted_feedback.py"
    assert len(example.read_text().splitlines()) < 200
    process = subprocess.run(
        [sys.executable, str(example), str(model), "1"],
        env={**os.environ, "OFFBOOK_CACHE": str(cache)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    assert "step  1" in process.stdout
    assert "student  teacher  divergence" in process.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_example_with_a_real_model_goes_through_all_stages(cache: Path, model: Path, tmp_path: Path) -> None:
    example = Path(__file__).parent.parent / "examples" / "real_model.py"
    command = [sys.executable, str(example), "--tiny", "--model", str(model), "--out", "out"]
    environment = {**os.environ, "OFFBOOK_CACHE": str(cache)}
    process = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    assert re.search(r"with the hint \d+/\d+, [-+]\d", process.stdout), "the look"
    rows = [line[:12].strip() for line in process.stdout.partition("=== 4.")[2].splitlines()[2:]]
    hinted = [] if "no hint helps" in process.stdout else ["RL + hints"]  # a model of 300 episodes: either may be
    assert rows == ["before", *hinted, "RL"]


def test_task_sets_are_made_once(cache: Path, uninterrupted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFBOOK_CACHE", str(cache))
    config = load_config([uninterrupted / "config.toml"], {})
    seen: list[str] = []
    sets = task_sets(config, lambda what, share: seen.append(what))
    assert (len(sets.train), len(sets.heldout), seen) == (4, 2, [])
