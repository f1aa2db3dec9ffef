"""Configuration: composed left to right, refused with the nearest key, one sentence for whatever is wrong."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from offbook.cli.defaults import suited
from offbook.config import Config, ConfigError, JudgeConfig, load_config, with_new_keys

DOCS = Path(__file__).parent.parent / "docs"
RECIPES = sorted((Path(__file__).parent.parent / "recipes").glob("*.toml"))


def test_later_files_win_and_overrides_win_over_files(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("seed = 1\n[train]\nsteps = 5\ngroups = 2\n")
    (tmp_path / "b.toml").write_text("[train]\nsteps = 6\n")
    config = load_config([tmp_path / "a.toml", tmp_path / "b.toml"], {"train.group_size": "3", "model": "some/model"})
    assert (config.seed, config.train.steps, config.train.groups, config.train.group_size) == (1, 6, 2, 3)
    assert config.model == "some/model"


def test_the_resolved_tree_reads_back_as_itself() -> None:
    config = load_config([], {"feedback.weight": "0.25", "out": "runs/a b"})
    assert Config.model_validate(tomllib.loads(config.to_toml())) == config


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
    with pytest.raises(ConfigError, match=f"unknown configuration key {key}; did you mean {suggestion}"):
        load_config([], {key: "1"})


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ({"feedback.weight": "x"}, "feedback.weight = 'x'"),
        ({"train.steps": "0"}, "train.steps = 0"),
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
        ("weight = inf", "feedback.weight = inf: input should be a finite number"),
        ("gate = nan", "feedback.gate = nan: input should be a finite number"),
        ("rule_weights = {unknown_tool = -3}", "feedback.rule_weights.unknown_tool = -3"),
        ("rule_weights = {unknown_tool = nan}", "feedback.rule_weights.unknown_tool = nan"),
        (
            "weight = 0\nanneal_steps = 9\nanneal_to = 5",
            "feedback.weight is 0, so hints are off and feedback.anneal_to",
        ),
        ("anneal_to = 5", "feedback.anneal_steps is 0, so the weight never gets to feedback.anneal_to"),
        ("max_candidates = 2", "feedback.max_candidates is 2, so feedback.max_targets = 3 cannot be reached"),
        ('judge = {url = "http://h/v1", rate = 0.5}', "feedback.judge.name is empty"),
        ('judge = {url = "http://h/v1", name = "m"}', "feedback.judge.rate is 0"),
        ('judge = {url = "local"}', "feedback.judge.rate is 0"),
        ("judge = {rate = 0.5}", "feedback.judge.url is empty"),
        ("judge = {rate = 2}", "feedback.judge.rate = 2"),
        ("judge = {model = 2}", "unknown configuration key feedback.judge.model"),
    ],
)
def test_feedback_that_would_do_nothing_or_harm_is_refused(given: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(f"[feedback]\n{given}\n")
    with pytest.raises(ConfigError) as caught:
        load_config([tmp_path / "a.toml"], {})
    assert str(caught.value).startswith(sentence)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "given",
    [
        "weight = 0\njudge = {url = 'http://h/v1'}",  # a recipe with a judge, run as RL alone
        "max_targets = 9\ngate = 0",
        "max_targets = 9\ncontrol = 'donor'",
        "anneal_steps = 9",
        "rule_weights = {unknown_tool = 0}",
        "judge = {url = 'local', rate = 0.5}",
    ],
)
def test_feedback_that_does_something_is_taken(given: str, tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(f"[feedback]\n{given}\n")
    load_config([tmp_path / "a.toml"], {})


def test_a_judge_of_monitors_that_would_read_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^monitors\.judge\.rate is 0"):
        load_config([], {"monitors.judge.url": "http://h/v1", "monitors.judge.name": "m"})
    load_config([], {"monitors.judge.url": "http://h/v1", "monitors.on": "false"})


def test_keys_of_before_are_read_as_those_of_today(tmp_path: Path) -> None:
    """Runs that were written before go on, and what they were configured with is the same."""
    old = '[feedback]\nmodel_url = "local"\nmodel_name = ""\nmodel_rate = 0.5\n'
    (tmp_path / "old.toml").write_text(old + '[monitors]\nmodel_url = ""\nmodel_name = "m"\nmodel_rate = 0.0\n')
    config = load_config([tmp_path / "old.toml"], {"monitors.model_url": "http://h/v1", "monitors.judge.rate": "0.25"})
    assert config.feedback.judge == JudgeConfig(url="local", rate=0.5)
    assert config.monitors.judge == JudgeConfig(url="http://h/v1", name="m", rate=0.25)
    assert with_new_keys(tomllib.loads(config.to_toml())) == tomllib.loads(config.to_toml())


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "broken.toml").write_text("steps = = 3")
    with pytest.raises(ConfigError, match=r"broken\.toml is not valid TOML"):
        load_config([tmp_path / "broken.toml"], {})
    with pytest.raises(ConfigError, match=r"cannot read .*absent\.toml"):
        load_config([tmp_path / "absent.toml"], {})


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_resolves(recipe: Path) -> None:
    load_config([recipe], {})


def test_there_are_recipes() -> None:
    assert RECIPES


def test_a_model_gets_the_harness_that_suits_it(tmp_path: Path) -> None:
    windows = {
        model: load_config([], {}, suited(model)).harness
        for model in ("pocket", "Qwen/Qwen3-0.6B", "smollm2-135m", "https://host/v1", str(tmp_path))
    }
    assert [harness.profile for harness in windows.values()] == ["pocket", "standard", "worked", "standard", "standard"]
    assert windows["Qwen/Qwen3-0.6B"].context > 8 * windows["pocket"].context
    (tmp_path / "config.json").write_text('{"offbook_profile": "pocket"}')
    assert suited(str(tmp_path)) == {}


def test_a_retired_key_is_dropped_where_it_did_nothing_and_refused_where_it_did(tmp_path: Path) -> None:
    """Configurations that runs kept from before still open."""
    old = tmp_path / "config.toml"
    old.write_text("[feedback]\nentry_cap = 0.0\nweight = 2.0\n")
    assert load_config([old], {}).feedback.weight == 2.0
    with pytest.raises(ConfigError, match=r"feedback.entry_cap is gone: .*; cap tokens instead"):
        load_config([old], {"feedback.entry_cap": "0.06"})


def test_the_reference_is_that_of_the_tree() -> None:
    made = subprocess.run([sys.executable, DOCS / "config_reference.py"], capture_output=True, text=True, check=True)
    assert made.stdout == (DOCS / "config.md").read_text(), "`make docs` makes it anew"
