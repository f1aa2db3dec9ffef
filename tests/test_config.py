"""Configuration: composed left to right, refused with the nearest key, one sentence for whatever is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from offbook.cli import app
from offbook.core.config import (
    Config,
    ConfigError,
    load_config,
    recipe_for,
    recipes,
    shipped_models,
)

DOCS = Path(__file__).parent.parent / "docs"


def test_later_files_win_and_overrides_win_over_files(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("seed = 1\n[train]\nsteps = 5\ngroups = 2\n")
    (tmp_path / "b.toml").write_text("[train]\nsteps = 6\n")
    config = load_config([tmp_path / "a.toml", tmp_path / "b.toml"], {"train.group_size": "3", "model": "some/model"})
    assert (config.seed, config.train.steps, config.train.groups, config.train.group_size) == (1, 6, 2, 3)
    assert config.model == "some/model"


@pytest.mark.parametrize(
    ("key", "suggestion"),
    [
        ("feedback.wieght", "feedback.weight"),
        ("weight", "feedback.weight"),
        ("sed", "seed"),
        ("train.learning_rat", "train.learning_rate"),
        ("optim.learning_rate", "train.learning_rate"),
    ],
)
def test_an_unknown_key_is_named_and_the_nearest_suggested(key: str, suggestion: str) -> None:
    with pytest.raises(
        ConfigError, match=f"unknown configuration key {key}; did you mean {suggestion}, as in: --{suggestion} "
    ):
        load_config([], {key: "1"})
    with pytest.raises(
        ConfigError, match="unknown configuration key zzz; `offbook train --model pocket --dry-run` prints"
    ):
        load_config([], {"zzz": "1"})


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ({"feedback.weight": "x"}, "feedback.weight = 'x'"),
        ({"train.steps": "0"}, "train.steps = 0"),
        ({"train.steps": "x"}, f", as in: --train.steps {Config().train.steps}"),
        ({"feedback.teacher": "wise"}, ", as in: --feedback.teacher frozen"),
        ({"feedback.teacher": "wise"}, "feedback.teacher = 'wise'"),
        ({"train": "3"}, "train = 3"),
    ],
)
def test_a_bad_value_is_one_sentence(overrides: dict[str, str], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config([], overrides)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"url": "http://h/v1", "feedback": "0.5"}, "so there is no model for judge.feedback; give both"),
        ({"monitors": "0.5"}, "judge.url or judge.name is empty, so there is no model for judge.monitors"),
        ({"feedback": "2"}, "judge.feedback = 2"),
        ({"model": "2"}, "unknown configuration key judge.model"),
    ],
)
def test_a_judge_that_would_read_nothing_or_cannot_is_refused(given: dict[str, str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        load_config([], {f"judge.{name}": value for name, value in given.items()})


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "broken.toml").write_text("steps = = 3")
    with pytest.raises(ConfigError, match=r"broken\.toml is not valid TOML"):
        load_config([tmp_path / "broken.toml"], {})
    with pytest.raises(ConfigError, match=r"cannot read .*absent\.toml"):
        load_config([tmp_path / "absent.toml"], {})


FITTING = {
    "pocket": "pocket",
    "Qwen/Qwen3-0.6B": "qwen3-0.6b",
    "Qwen/Qwen2.5-Coder-3B-Instruct": "qwen3-4b",
    "Qwen/Qwen3-Coder-30B-A3B-Instruct": "qwen3-8b-lora",
    "HuggingFaceTB/SmolLM2-135M-Instruct": "small",
    "some/model": "standard",
    "smollm2-135m": "small",
    "https://host/v1": "remote",
    "": "standard",
}


@pytest.mark.parametrize("recipe", recipes())
def test_every_recipe_is_dry_run(recipe: str) -> None:
    """By its name and by its path, as `offbook train --dry-run` does."""
    path = Path(__file__).parent.parent / "recipes" / f"{recipe}.toml"
    config = load_config([recipe], {"model": "some/model"})
    assert load_config([path], {"model": "some/model"}) == config
    for given in (recipe, str(path)):
        shown = CliRunner().invoke(app, ["train", "@", given, "--model", "some/model", "--dry-run"])
        assert (shown.exit_code, shown.stdout) == (0, config.to_toml()), "Python gets the same as the command line"
    is_for_any = recipe == "repository"
    assert recipe in FITTING.values() or load_config([recipe], {}).model or is_for_any, "it fits a model, or names one"


@pytest.mark.parametrize(("model", "recipe"), FITTING.items())
def test_a_model_gets_the_recipe_that_fits_it(model: str, recipe: str, tmp_path: Path) -> None:
    assert recipe_for(model) == recipe
    assert load_config([], {"model": model}) == load_config([recipe], {"model": model})
    (tmp_path / "a.toml").write_text("[harness]\nturns = 77\n")
    config = load_config([tmp_path / "a.toml"], {"model": model})
    assert (config.harness.turns, config.harness.profile) == (77, load_config([recipe], {}).harness.profile)


def test_a_folder_gets_the_recipe_of_its_size(tmp_path: Path) -> None:
    """By its config.json, whatever it is called; an adapter by its base."""
    for name, recipe in (("Qwen/Qwen3-0.6B", "qwen3-0.6b"), ("Qwen/Qwen3-Coder-30B-A3B-Instruct", "qwen3-8b-lora")):
        (tmp_path / "a-70b-model").mkdir(exist_ok=True)
        (tmp_path / "a-70b-model" / "config.json").write_text(json.dumps(shipped_models()[name]))
        assert recipe_for(str(tmp_path / "a-70b-model")) == recipe
    (tmp_path / "a-70b-model" / "config.json").write_text("{}")
    assert recipe_for(str(tmp_path / "a-70b-model")) == "standard"
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "Qwen/Qwen3-8B"}')
    assert recipe_for(str(tmp_path)) == "qwen3-8b-lora"


def test_what_came_of_a_pocket_model_is_one(tmp_path: Path) -> None:
    for folder in (tmp_path / "run" / "ckpt" / "step_00002", tmp_path / "model"):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text('{"offbook_profile": "pocket"}')
    assert [recipe_for(str(tmp_path / name)) for name in ("run", "model", "other")] == ["pocket", "pocket", "standard"]


def test_a_verb_s_defaults_lose_against_files(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('model = "some/model"\n')
    config = load_config([tmp_path / "a.toml"], {}, {"model": "pocket", "out": "runs/x"})
    assert (config.model, config.out, config.harness.profile) == ("some/model", "runs/x", "standard")


def test_the_reference_is_that_of_the_tree() -> None:
    made = subprocess.run([sys.executable, DOCS / "config_reference.py"], capture_output=True, text=True, check=True)
    assert made.stdout == (DOCS / "config.md").read_text(), "`make docs` makes it anew"


@pytest.mark.parametrize(
    "given", ["unknown_tool,edited_tests", " unknown_tool, edited_tests,", '"unknown_tool,edited_tests"']
)
def test_a_list_may_be_given_with_commas(given: str) -> None:
    as_toml = load_config([], {"feedback.rules": '["unknown_tool", "edited_tests"]'})
    assert load_config([], {"feedback.rules": given}) == as_toml
    assert as_toml.feedback.rules == ["unknown_tool", "edited_tests"]


def test_an_engine_is_as_exact_as_the_trainer_unless_told() -> None:
    assert load_config([], {"train.precision": "bfloat16"}).engine.precision == "bfloat16"
    assert load_config([], {"train.precision": "bfloat16", "engine.precision": "float32"}).engine.precision == "float32"
    assert load_config([], {}).engine.precision == "float32"
    with pytest.raises(ConfigError, match=r"train\.precision"):
        load_config([], {"train.precision": "fp8"})
