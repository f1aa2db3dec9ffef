"""What the page of `offbook view` says of runs: what was done, what came out, and a hint at work."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, get_args

import pytest
from viewdata import CONFIG, HELD_OUT, TASKS, make_feedback, make_rollout, make_run, metrics

from offbook.cli.view import _folders, outcome
from offbook.core.runfolder import RunFolder
from offbook.evals.metrics import measure, row_of
from offbook.signals.monitors.rules import KINDS
from offbook.types import Feedback, OffbookError, StopReason
from offbook.view import index
from offbook.view.index import RunIndex
from offbook.view.scales import smooth, thin
from offbook.view.server import SCRIPTS, answer, asset


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "REFRESH_S", 0.0)


def about(*runs: RunIndex) -> dict[str, Any]:
    return answer([*runs], "api/runs", outcome)


def said(run: RunIndex) -> str:
    return str(about(run)["runs"][0]["sentence"])


# What was done


def test_several_runs_are_told_in_one_sentence_if_they_agree(tmp_path: Path) -> None:
    runs = [RunIndex(name, make_run(tmp_path, name, hinted=name == "rl_hints")) for name in ("rl", "rl_hints")]
    trained = "The model pocket was trained for 4 steps on 2 tasks"
    trained += ", and measured on 48 held-out tasks of pocket"
    assert about(*runs)["sentence"] == f"{trained}."
    config = runs[0].folder.config_file
    config.write_text(config.read_text().replace('model = "pocket"', 'model = "other"'))
    other = trained.replace("pocket was", "other was")
    assert about(*runs)["sentence"] == f"rl: {other}. rl_hints: {trained}."


ON_TRAINING = {"tasks": 2, "suites": ["shop-tasks/train"], "contamination": {"same_task": 2, "contained": 2}}
IN_PART = {"tasks": 5, "suites": ["a", "b"], "contamination": {"same_task": 2, "contained": 3}}
UNCHECKED = {"tasks": 1, "suites": ["pocket"], "contamination": None}


@pytest.mark.parametrize(
    ("result", "heading", "on", "alike"),
    [
        (ON_TRAINING, "Measured on training tasks", "2 training tasks of shop-tasks/train", ""),
        (HELD_OUT, "Measured on held-out tasks", "48 held-out tasks of pocket", "13 of them share words or code"),
        (IN_PART, "Measured", "5 tasks of a, b, 2 of them trained on", "3 of them share words or code"),
        (UNCHECKED, "Measured", "1 task of pocket", ""),
        ({"tasks": 7}, "Measured", "7 tasks", ""),
        ({"solved": 0.5}, "Measured", "", ""),  # as older files are
    ],
)
def test_what_was_measured_on_is_what_the_evaluation_says(
    tmp_path: Path, result: dict[str, Any], heading: str, on: str, alike: str
) -> None:
    """The settings have tasks.num_heldout = 48, which are the pocket's and of no other suite."""
    run = RunIndex("own", make_run(tmp_path, "own"))
    (run.root / "eval" / "final.json").write_text(json.dumps(result))
    found = about(run)["runs"][0]["evals"]["final"]
    assert (found["heading"], found["on"]) == (heading, on)
    assert found["overlap"] == (f"{alike} with training tasks." if alike else "")
    measured = f", and measured on {on}" if on else ""
    assert said(run) == f"The model pocket was trained for 4 steps on 2 tasks{measured}."
    (run.root / "data.json").write_text('{"verb": "sft", "sources": ["logs"]}')
    assert "held-out" not in json.dumps(about(run)["runs"][0]["evals"]), "it learned from logs: nothing was held out"
    assert not any(b"held-out" in asset(name) for name in SCRIPTS), "the page has no such words of its own"


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ('"verb": "distill", "sources": ["runs/rl"]', "Hints were distilled into the model pocket for 2 of 4 steps, on "
         "recorded conversations of runs/rl."),
        ('"verb": "sft", "sources": ["a", "b", "c", "d"], "steps": 2', "The model pocket was trained for 2 steps to "
         "imitate conversations of a, b, c and 1 more."),
        ('"verb": "pretrain", "sources": ["x"]', "The model pocket was pretrained for 2 steps on code of x."),
        ('"verb": "mtp", "sources": ["pocket:60"]', "A draft head for the model pocket was trained for 2 of 8 steps on "
         "text of pocket:60."),
        ('"verb": "mtp"', "A draft head for the model pocket was trained for 2 of 8 steps on text of unnamed data."),
        ('"sources": ["12 sessions"]', "The model pocket was trained for 2 steps on 12 sessions."),
    ],
)  # fmt: skip
def test_a_run_without_tasks_says_what_it_is(tmp_path: Path, data: str, sentence: str) -> None:
    folder = RunFolder(tmp_path / "run")
    for step in (1, 2):
        folder.append_metrics({"step": step, "mtp/loss_1": 1.0, "mtp/kept_1": 0.1 * step})
    folder.config_file.write_text(CONFIG.format(name="run", weight=0.0, steps=4) + "[mtp]\nsteps = 8\n")
    folder.data_file.write_text(f"{{{data}}}")
    run = RunIndex("run", folder.path)
    assert said(run) == sentence
    trained = RunIndex("rl", make_run(tmp_path, "rl"))
    assert about(run, trained)["sentence"] == f"run: {sentence} rl: {said(trained)}"
    assert about(run, trained)["runs"][0]["evals"] == {}


def test_tasks_of_a_folder_are_counted_and_not_taken_from_the_settings(tmp_path: Path) -> None:
    run = RunIndex("own", make_run(tmp_path, "own"))
    ids = [*TASKS, *(f"t{number}" for number in range(5))]
    lines = [{"id": id, "split": "train"} for id in ids] + [{"id": "held", "split": "heldout"}]
    (run.root / "tasks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert " on 7 tasks" in said(run)


def test_a_run_that_was_not_measured_is_not_said_to_be(tmp_path: Path) -> None:
    run = RunIndex("going", make_run(tmp_path, "going", steps=1))
    (run.root / "eval" / "final.json").unlink()
    assert said(run) == "The model pocket was trained for 1 of 4 steps on 2 tasks."


def test_a_folder_without_training_is_not_said_to_have_been_trained(tmp_path: Path) -> None:
    """`offbook rollout` leaves a step 0 in the metrics, `offbook eval --out` its results beside the configuration."""
    rollouts = [make_rollout(f"r/{task}/{n}", task, task, solved=False) for task in TASKS for n in range(2)]
    for name in ("rollout", "eval"):
        folder = RunFolder(tmp_path / name)
        folder.write_rollouts(0, rollouts)
        folder.config_file.write_text(CONFIG.format(name=name, weight=0.0, steps=30))
        (folder.path / "fingerprint.json").write_text("{}")
    RunFolder(tmp_path / "rollout").append_metrics({"step": 0, "solved": 0.0})
    result = {"model": "runs/rl", "solved": 0.25, "rows": [{"task": "t"}]}
    (tmp_path / "eval" / "results.json").write_text(json.dumps(result))
    for name, model in (("eval", "runs/rl"), ("rollout", "pocket")):  # the settings name what that run began with
        run = RunIndex(name, tmp_path / name)
        assert said(run) == f"The model {model} worked on 2 tasks in 4 rollouts, without training."
        assert about(run)["runs"][0]["wanted"] is None
    [measured] = about(RunIndex("eval", tmp_path / "eval"))["runs"][0]["evals"].values()
    assert measured == {"solved": 0.25, "heading": "Measured", "on": "", "overlap": ""}


def test_an_empty_run_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("")
    run = RunIndex("new", tmp_path)
    assert said(run) == "A model was trained for 0 steps."
    assert answer([run], "api/run/0/example") == {}


# What came out


def measured(root: Path, name: str, solved: int, invalid: int, tasks: int = 12) -> RunIndex:
    """One rollout a task, each with ten calls."""
    path = make_run(root, name, steps=1)
    rollouts = [make_rollout(f"{name}/{n}", f"t{n}", f"t{n}", solved=n < solved) for n in range(tasks)]
    for rollout in rollouts:
        rollout.usage.calls, rollout.usage.invalid_calls = 10, invalid
    rows = [row_of(rollout, None) for rollout in rollouts]
    RunFolder(path).write_eval("final", {**measure(rows), "rows": [asdict(row) for row in rows]}, rollouts)
    return RunIndex(name, path)


def test_the_outcome_tells_a_difference_from_chance(tmp_path: Path) -> None:
    runs = [measured(tmp_path, "rl", solved=6, invalid=4), measured(tmp_path, "rl_hints", solved=7, invalid=1)]
    assert about(*runs)["outcome"] == (
        "rl_hints makes 10.0 invalid calls per 100, rl 40.0 (p < 0.001). "
        "They solve 58.3% and 50.0%: no difference shown (p = 1). Paired over 12 tasks."
    )


def test_what_cannot_be_compared_has_no_outcome(tmp_path: Path) -> None:
    one, other = measured(tmp_path, "rl", 6, 4), measured(tmp_path, "other", 6, 4)
    assert about(one)["outcome"] == ""
    (other.root / "eval" / "final.json").write_text("{")
    assert about(one, other)["outcome"] == ""
    (other.root / "eval" / "final.json").unlink()
    assert about(one, other)["outcome"] == ""


def test_what_was_measured_before_stands_beside_the_runs(tmp_path: Path) -> None:
    root = tmp_path / "quickstart-0"
    for name in ("rl", "rl_hints"):
        make_run(root, name, steps=1)
    RunFolder(root).write_eval("before", {"solved": 0.25}, [make_rollout("before/0", TASKS[0], "b", solved=False)])
    folders = _folders([root])
    assert folders == {"rl": root / "rl", "rl_hints": root / "rl_hints", "before": root}
    before = about(*(RunIndex(name, path) for name, path in folders.items()))["runs"][2]
    assert (before["evals"]["before"]["solved"], before["trains"], before["rollouts"]) == (0.25, False, 1)
    assert list(_folders([root / "rl"])) == ["rl"]
    with pytest.raises(OffbookError, match="not a run folder"):
        _folders([root / "eval"])


# A hint at work


def test_the_example_has_a_likely_faulty_token_that_became_unlikely(tmp_path: Path) -> None:
    """Of those that taught: a large fall, then an early step, then a short message."""
    folder = RunFolder(make_run(tmp_path, "rl_hints", steps=0))
    kinds = ("unlikely", "elsewhere", "small", "long", "clear", "skipped", "late")
    found: dict[str, Feedback] = {name: make_feedback(name) for name in kinds}
    found["unlikely"].student[2] = math.log(0.04)  # as `done` was, which the model hardly ever wrote
    found["unlikely"].divergence[2] = 9.0
    found["elsewhere"].target = replace(found["elsewhere"].target, evidence="done")
    found["small"].teacher[2] = math.log(0.5)
    for side in ("pieces", "student", "teacher", "divergence"):
        setattr(found["long"], side, getattr(found["long"], side) * 3)
    found["skipped"].skipped = "gate"
    gone = make_feedback("of a rollout that is not stored", peak=9.0)
    unscored = make_feedback("clear")
    unscored.pieces, unscored.student, unscored.teacher, unscored.divergence = [], [], [], []

    def shown(*names: str) -> dict[str, Any]:
        for step, chosen in ((2, [name for name in names if name != "late"]), (3, ["late"])):
            folder.write_rollouts(step, [make_rollout(name, TASKS[0], "g", solved=False) for name in chosen])
            folder.write_feedback(step, [gone, unscored, *(found[name] for name in chosen)])
        return answer([RunIndex("rl_hints", folder.path)], "api/run/0/example")

    example = shown(*kinds)
    assert (example["source"], example["number"], example["task"], example["group"]) == ("step_00002", 4, TASKS[0], "g")
    assert (example["hint"]["target"]["rollout"], example["clear"]) == ("clear", True)
    assert len(example["hint"]["pieces"]) == 7
    assert shown("unlikely", "elsewhere", "small", "skipped", "late")["hint"]["target"]["rollout"] == "late"
    found["late"].student[2] = math.log(0.4)
    example = shown("unlikely", "elsewhere", "skipped", "late")
    assert (example["hint"]["target"]["rollout"], example["clear"]) == ("unlikely", False), "said to be no clear one"


def test_every_flag_has_words() -> None:
    words = asset("dom.js").decode().partition("const FLAGS = {")[2].partition("};")[0]
    assert [kind for kind in KINDS if f" {kind}: " not in words] == []


def test_a_number_that_never_changes_is_constant(tmp_path: Path) -> None:
    """And not where a step lacks it, or after one step alone."""
    run = RunIndex("rl", make_run(tmp_path, "rl"))
    RunFolder(run.root).append_metrics({**metrics(5, hinted=True), "once": 1.0})
    series = answer([run], "api/run/0/curves")["series"]
    constant = {key: one["constant"] for key, one in series.items() if one["constant"] is not None}
    assert constant["staleness"] == 0.5
    assert not {"solved", "once", "reward"} & constant.keys()
    alone = RunIndex("alone", make_run(tmp_path, "alone", steps=1))
    assert {one["constant"] for one in answer([alone], "api/run/0/curves")["series"].values()} == {None}


def test_every_way_to_end_has_words() -> None:
    words = asset("conversation.js").decode().partition("const ENDED = {")[2].partition("};")[0]
    assert all(f" {stop}: " in words for stop in get_args(StopReason))


def test_smoothing_keeps_a_constant_and_thinning_keeps_the_mean() -> None:
    points = [(float(step), 2.0) for step in range(1000)]
    assert all(math.isclose(value, 2.0) for _, value in smooth(points[:30]))
    line = thin([(float(step), float(step)) for step in range(1000)], 100)
    assert len(line) == 100
    assert math.isclose(sum(value for _, value in line) / 100, 499.5)
