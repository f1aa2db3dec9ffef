"""What the page of `offbook view` says of runs: what was done, what came out, and a hint at work."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from viewdata import CONFIG, TASKS, make_feedback, make_rollout, make_run

from offbook.cli.view import _folders, outcome
from offbook.runfolder import RunFolder
from offbook.types import Feedback, OffbookError, StopReason
from offbook.view import index
from offbook.view.index import RunIndex
from offbook.view.scales import smooth, thin
from offbook.view.server import answer, asset


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "REFRESH_S", 0.0)


def about(*runs: RunIndex) -> dict[str, Any]:
    return answer([*runs], "api/runs", outcome)


def said(run: RunIndex) -> str:
    return str(about(run)["runs"][0]["sentence"])


# What was done


def test_several_runs_are_told_in_one_sentence_as_far_as_they_agree(tmp_path: Path) -> None:
    runs = [RunIndex(name, make_run(tmp_path, name, hinted=name == "rl_hints")) for name in ("rl", "rl_hints")]
    trained = "The model pocket was trained for 4 steps of 6 rollouts on 2 tasks, and measured on 48 others"
    assert about(*runs)["sentence"] == f"{trained} (seed 3)."
    config = runs[0].folder.config_file
    config.write_text(config.read_text().replace("seed = 3", "seed = 4"))
    assert about(*runs)["sentence"] == f"{trained}."
    assert said(runs[0]) == f"{trained} (seed 4)."


def test_tasks_of_a_folder_are_counted_and_not_taken_from_the_settings(tmp_path: Path) -> None:
    run = RunIndex("own", make_run(tmp_path, "own"))
    ids = [*TASKS, *(f"t{number}" for number in range(5))]
    lines = [{"id": id, "split": "train"} for id in ids] + [{"id": "held", "split": "heldout"}]
    (run.root / "tasks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert " on 7 tasks" in said(run)


def test_a_run_that_was_not_measured_is_not_said_to_be(tmp_path: Path) -> None:
    run = RunIndex("going", make_run(tmp_path, "going", steps=1))
    (run.root / "eval" / "final.json").unlink()
    assert said(run) == "The model pocket was trained for 1 of 4 steps of 6 rollouts on 2 tasks (seed 3)."


def test_a_folder_without_training_is_not_said_to_have_been_trained(tmp_path: Path) -> None:
    """`offbook rollout` leaves a step 0 in the metrics, `offbook eval --out` its results beside the configuration."""
    rollouts = [make_rollout(f"r/{task}/{n}", task, task, solved=False) for task in TASKS for n in range(2)]
    for name in ("rollout", "eval"):
        folder = RunFolder(tmp_path / name)
        folder.write_rollouts(0, rollouts)
        folder.config_file.write_text(CONFIG.format(name=name, weight=0.0, steps=30))
        (folder.path / "claim.json").write_text("{}")
    RunFolder(tmp_path / "rollout").append_metrics({"step": 0, "solved": 0.0})
    (tmp_path / "eval" / "results.json").write_text(json.dumps({"solved": 0.25, "rows": [{"task": "t"}]}))
    (tmp_path / "old").mkdir()  # before there were claims
    for part in ("config.toml", "metrics.jsonl", "rollouts"):
        (tmp_path / "rollout" / part).rename(tmp_path / "old" / part)
    for name in ("eval", "old"):
        run = RunIndex(name, tmp_path / name)
        assert said(run) == "The model pocket worked on 2 tasks in 4 rollouts, without training."
        assert about(run)["runs"][0]["wanted"] is None
    assert about(RunIndex("eval", tmp_path / "eval"))["runs"][0]["evals"] == {"final": {"solved": 0.25}}


def test_a_claim_is_no_measurement(tmp_path: Path) -> None:
    run = RunIndex("rl", make_run(tmp_path, "rl", steps=1))
    (run.root / "eval" / "final.claim.json").write_text('{"model": "pocket"}')
    assert list(about(run)["runs"][0]["evals"]) == ["final"]
    assert about(run)["runs"][0]["unreadable"] == {}


def test_an_empty_run_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("")
    run = RunIndex("new", tmp_path)
    assert said(run) == "A model was trained for 0 steps."
    assert answer([run], "api/run/0/example") == {}


# What came out


def measured(root: Path, name: str, solved: int, invalid: int, tasks: int = 12) -> RunIndex:
    """One rollout a task, each with ten calls; in older evaluations the rollouts are all there is."""
    path = make_run(root, name, steps=1)
    rollouts = [make_rollout(f"{name}/{n}", f"t{n}", f"t{n}", solved=n < solved) for n in range(tasks)]
    for rollout in rollouts:
        rollout.usage.calls, rollout.usage.invalid_calls = 10, invalid
    RunFolder(path).write_eval("final", {"solved": solved / tasks}, rollouts)
    return RunIndex(name, path)


def test_the_outcome_tells_a_difference_from_chance(tmp_path: Path) -> None:
    runs = [measured(tmp_path, "rl", solved=6, invalid=4), measured(tmp_path, "rl_hints", solved=7, invalid=1)]
    assert about(*runs)["outcome"] == (
        "rl_hints makes 10.0 invalid calls per 100, rl 40.0 (p < 0.001). "
        "They solve 58.3% and 50.0%: not different (p = 1). Paired over 12 tasks."
    )


def test_the_outcome_follows_a_measurement_that_is_done_again(tmp_path: Path) -> None:
    runs = [measured(tmp_path, "rl", solved=6, invalid=4), measured(tmp_path, "rl_hints", solved=7, invalid=1)]
    assert "rl_hints makes 10.0" in about(*runs)["outcome"]
    again = measured(tmp_path / "again", "rl_hints", solved=7, invalid=2)
    for file in ("final.json", "final.rollouts.jsonl"):
        (again.root / "eval" / file).replace(runs[1].root / "eval" / file)
    assert "rl_hints makes 20.0" in about(*runs)["outcome"]


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
    assert (before["evals"], before["trains"], before["rollouts"]) == ({"before": {"solved": 0.25}}, False, 1)
    assert list(_folders([root / "rl"])) == ["rl"]
    with pytest.raises(OffbookError, match="not a run folder"):
        _folders([root / "eval"])


# A hint at work


def test_the_example_is_clear(tmp_path: Path) -> None:
    """Of the commonest rule, where a token of the fault became unlikely, in the shortest message; and it taught."""
    folder = RunFolder(make_run(tmp_path, "rl_hints", steps=0))
    kinds = ("unclear", "long", "clear", "skipped", "rare")
    folder.write_rollouts(2, [make_rollout(name, TASKS[0], "g", solved=False) for name in kinds])
    found: dict[str, Feedback] = {name: make_feedback(name) for name in kinds}
    found["unclear"].teacher = [math.log(0.6)] * 7  # the hint moved something else
    for name in ("pieces", "student", "teacher", "divergence"):
        setattr(found["long"], name, getattr(found["long"], name) * 3)
    found["skipped"].skipped = "gate"
    for name in ("skipped", "rare"):
        for side in ("pieces", "student", "teacher", "divergence"):
            setattr(found[name], side, getattr(found[name], side)[:4])
    found["rare"].target = replace(found["rare"].target, rule="edited_tests")
    gone = make_feedback("of a rollout that is not stored", peak=9.0)
    unscored = make_feedback("clear")
    unscored.pieces, unscored.student, unscored.teacher, unscored.divergence = [], [], [], []
    folder.write_feedback(2, [gone, unscored, *found.values()])
    example = answer([RunIndex("rl_hints", folder.path)], "api/run/0/example")
    assert (example["source"], example["number"], example["task"], example["group"]) == ("step_00002", 2, TASKS[0], "g")
    assert example["hint"]["target"]["rollout"] == "clear"
    assert len(example["hint"]["pieces"]) == 7
    for name in ("unclear", "long", "clear", "skipped"):
        for side in ("pieces", "student", "teacher", "divergence"):
            setattr(found[name], side, getattr(found[name], side) * 10)
    folder.write_feedback(2, list(found.values()))
    again = answer([RunIndex("rl_hints", folder.path)], "api/run/0/example")
    assert again["hint"]["target"]["rollout"] == "rare", "nobody reads 70 tokens at a glance"


def test_every_way_to_end_has_words() -> None:
    words = asset("conversation.js").decode().partition("const ENDED = {")[2].partition("};")[0]
    assert all(f" {stop}: " in words for stop in get_args(StopReason))


def test_smoothing_keeps_a_constant_and_thinning_keeps_the_mean() -> None:
    points = [(float(step), 2.0) for step in range(1000)]
    assert all(math.isclose(value, 2.0) for _, value in smooth(points[:30]))
    line = thin([(float(step), float(step)) for step in range(1000)], 100)
    assert len(line) == 100
    assert math.isclose(sum(value for _, value in line) / 100, 499.5)
