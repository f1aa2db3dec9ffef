"""offbook from Python, and the examples of docs/api.md."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_loop import SMALL

from offbook.api import configure, evaluate, rollouts, train

DOCS = Path(__file__).parent.parent / "docs"


def test_sections_are_tables_and_later_ones_win(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("seed = 3\n[train]\nsteps = 7\ngroups = 2\n")
    rules = ["unknown_tool", "edited_tests"]
    config = configure("pocket", tmp_path / "mine.toml", train={"steps": 9}, feedback={"rules": rules, "weight": 0.5})
    assert (config.seed, config.train.steps, config.train.groups, config.model) == (3, 9, 2, "pocket")
    assert (config.feedback.rules, config.feedback.weight) == (rules, 0.5)
    assert configure(model="Qwen/Qwen3-0.6B").harness.profile == "standard"


def test_importing_it_loads_no_torch() -> None:
    code = "import sys, offbook.api; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_run_from_start_to_numbers(cache: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFBOOK_CACHE", str(cache))
    small = {key.removeprefix("--"): value for key, value in zip(SMALL[::2], SMALL[1::2], strict=True)}
    sections: dict[str, dict[str, str]] = {}
    for key, value in {**small, "train.steps": "1"}.items():
        section, name = key.split(".")
        sections.setdefault(section, {})[name] = value
    config = configure("pocket", model=str(model), out=str(tmp_path / "run"), **sections)
    seen: list[int] = []
    run = train(config, lambda row: seen.append(row["step"]))
    assert seen == [1]
    measured = evaluate(config, run.path)
    assert measured["tasks"] == 2
    assert 0 <= measured["intervals"]["solved"][0] <= measured["solved"] <= measured["intervals"]["solved"][1] <= 1
    found, (at_start, *_) = rollouts(config, samples=2, model=run.path), rollouts(config)
    assert found[0].segments[0].logprobs != at_start.segments[0].logprobs, "the run's weights, not the start's"
    assert [rollout.id.rpartition("/")[2] for rollout in found] == ["0", "1", "0", "1"]
    assert all("outcome" in rollout.reward.parts for rollout in found)


def test_the_example_of_a_method_runs(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"(?:^    .*\n|^\n)+", (DOCS / "api.md").read_text(), re.MULTILINE)
    (code,) = (re.sub(r"^    ", "", block, flags=re.MULTILINE) for block in blocks if "Trainer(" in block)
    exec(code.replace('model_folder("pocket", seed=0)', f"model_folder({str(model)!r}, seed=0)"), {})
    assert "[" in capsys.readouterr().out


def test_what_is_given_is_kept_as_it_is(tmp_path: Path) -> None:
    config = configure("pocket", out="true", rewards={"files": [tmp_path / "a.py"], "weights": {"x": 0.5}})
    assert (config.out, config.rewards.files, config.rewards.weights) == ("true", [str(tmp_path / "a.py")], {"x": 0.5})


def test_it_works_where_an_event_loop_runs(cache: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFBOOK_CACHE", str(cache))
    config = configure("pocket", model=str(model), tasks={"num_train": 4, "num_heldout": 2})

    async def cell() -> int:
        return len(rollouts(config))

    assert asyncio.run(cell()) == 2


def test_a_script_without_a_guard_makes_the_pocket_model(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from pathlib import Path\nfrom offbook.pocket.model import Recipe, make_pocket\n"
        f"print(make_pocket(Path({str(tmp_path)!r}), 0, lambda what, share: None, Recipe(episodes=8)))\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout.count("\n")) == (0, 1), done.stderr
