"""What makes a run pleasant: it says what it does, and others' dashboards follow it without being able to end it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from test_loop import offbook, train

from offbook.core.config import Config
from offbook.core.runfolder import RunFolder
from offbook.rl.trackers import PACKAGES, Tracker

LATER = """
class Run:
    def log(self, numbers, step=None):
        if step > 1:
            raise ConnectionError("the server is gone\\nand more lines")

    def finish(self):
        raise ConnectionError("still gone")

def init(**how):
    print("welcome")
    return Run()
"""


def scalars(run: Path, name: str) -> list[tuple[int, float]]:
    """As tensorboard's own reader has them, of all event files together."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = []
    for file in sorted((run / "tensorboard").glob("events.*")):
        events = reader.EventAccumulator(str(file)).Reload()
        if name in events.Tags()["scalars"]:
            found += [(event.step, event.value) for event in events.Scalars(name)]
    return sorted(found)


def test_a_run_says_what_it_does_and_where_it_goes_on(cache: Path, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    first = train(cache, model, out, "--train.steps", "1", "--log", "tensorboard")
    assert first.returncode == 0, first.stderr
    opening, _, rest = first.stderr.partition("\nstep 1: ")
    assert f"model {model}, loaded from {model}\ntasks pocket: 4 to train on, 2 held out\n" in opening
    assert f"1 steps of 2 tasks x 3 rollouts, kept in {out}\n" in opening
    assert rest
    assert "resuming" not in first.stderr
    second = train(cache, model, out, "--train.steps", "2", "--log", "tensorboard")
    assert second.returncode == 0, second.stderr
    assert "\nresuming at step 2\n" in second.stderr.partition("\nstep 2: ")[0]
    solved = [(row["step"], pytest.approx(row["solved"])) for row in RunFolder(out).metrics()[0]]
    assert scalars(out, "solved") == solved
    assert len(solved) == 2


def logged(out: Path, steps: Iterable[int]) -> None:
    """Rows as a run writes them, each followed as it comes."""
    tracker, folder = Tracker("tensorboard", Config(out=str(out))), RunFolder(out)
    for step in steps:
        folder.append_metrics({"step": step, "solved": step / 10, "rules": {"a": 1}})
        tracker.follow()
    tracker.close()


def test_steps_that_are_done_again_are_not_logged_again(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    logged(tmp_path, range(1, 4))
    RunFolder(tmp_path).truncate_metrics(1)  # as a run does whose last checkpoint is of step 1
    logged(tmp_path, range(2, 6))
    assert [step for step, _ in scalars(tmp_path, "solved")] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("kind", ["trackio", "wandb"])
def test_a_tracker_that_fails_is_one_warning_and_is_caught_up_with_later(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capsys: Any
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, kind, raising=False)
    (tmp_path / f"{kind}.py").write_text(LATER)
    out = RunFolder(tmp_path / "run")
    tracker = Tracker(kind, Config(out=str(out.path)))  # type: ignore[arg-type]
    for step in (1, 2, 3):
        out.append_metrics({"step": step, "solved": 0.5})
        tracker.follow()
    tracker.close()
    (said,) = caplog.messages
    assert capsys.readouterr().out == "", "what is printed there may be JSON"
    assert said.startswith(f"{kind} failed (the server is gone); metrics.jsonl has all steps")
    assert '"step": 1' in (out.path / "trackers.json").read_text(), "the next run sends step 2 again"


@pytest.mark.parametrize("kind", PACKAGES)
def test_a_package_that_is_missing_is_named(
    kind: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"{kind}.py").write_text("raise ImportError('not here')")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    process = offbook(cache, "train", "--model", "pocket", "--log", kind, cwd=tmp_path)
    assert process.returncode == 1
    said = f"offbook: --log {kind} needs a package: pip install {kind}, or 'offbook[trackers]'\n"
    assert process.stderr == said
