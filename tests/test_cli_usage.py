"""What a user types wrong: one sentence and status 2, for every verb."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

import offbook
from offbook.cli import app, main
from offbook.core.config import Config
from offbook.core.config.files import _paths, keys_read


def _verbs(command: Any, *path: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, inner in command.commands.items():
        if hasattr(inner, "commands"):
            yield from _verbs(inner, *path, name)
        else:
            yield (*path, name), inner


VERBS = dict(_verbs(get_command(app)))
NEEDY = [verb for verb, command in VERBS.items() if any(param.required for param in command.params)]
BOUNDS = [
    (verb, param.opts[-1], bound)
    for verb, command in VERBS.items()
    for param in command.params
    for bound in (param.min is not None and param.min - 1, param.max is not None and param.max + 1)
    if bound is not False
]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Any:
    """The status and what is said, by the process's own border."""

    def run(*arguments: str) -> tuple[Any, str]:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["offbook", *arguments])
        with pytest.raises(SystemExit) as stopped:
            main()
        assert not list(tmp_path.iterdir()), "nothing is done"
        return stopped.value.code, capsys.readouterr().err

    return run


def is_sentence(said: str) -> bool:
    return said.startswith("offbook: ") and said.count("\n") == 1 and said.endswith("\n")


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_an_unknown_option(told: Any, verb: tuple[str, ...]) -> None:
    status, said = told(*verb, "--nope")
    assert (status, is_sentence(said)) == (2, True), said
    assert "--nope" in said


@pytest.mark.parametrize("verb", NEEDY, ids=" ".join)
def test_a_missing_argument(told: Any, verb: tuple[str, ...]) -> None:
    status, said = told(*verb)
    assert (status, is_sentence(said)) == (2, True), said
    assert said.startswith("offbook: Missing ")
    assert f"(see `offbook {' '.join(verb)} --help`)" in said


@pytest.mark.parametrize("verb", [("compare",), ("eval",), ("tasks", "make")], ids=" ".join)
def test_too_few_arguments(told: Any, verb: tuple[str, ...]) -> None:
    status, said = told(*verb)
    assert (bool(status), is_sentence(said)) == (True, True), said
    assert said.startswith("offbook: give ")
    assert f", as in: offbook {' '.join(verb)} " in said


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_the_example_of_a_verb_is_a_call_of_it(verb: tuple[str, ...]) -> None:
    example = f"{VERBS[verb].help} {VERBS[verb].epilog}".partition("For example: ")[2].replace(" None", "").split()
    assert tuple(example[: len(verb) + 1]) == ("offbook", *verb)
    VERBS[verb].make_context("offbook", example[len(verb) + 1 :])  # raises where an argument is wrong


def test_the_version() -> None:
    done = subprocess.run([sys.executable, "-m", "offbook", "--version"], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, f"offbook {offbook.__version__}\n")


def test_a_configuration_file_without_its_mark(told: Any) -> None:
    status, said = told("train", "my.toml")
    assert (status, is_sentence(said)) == (2, True), said
    assert said.endswith("as in: offbook train @ my.toml\n")


@pytest.mark.parametrize(("verb", "option", "value"), BOUNDS)
def test_a_number_out_of_its_range(told: Any, verb: tuple[str, ...], option: str, value: float) -> None:
    for given in (str(value), "many"):
        status, said = told(*verb, option, given)
        assert (status, is_sentence(said)) == (2, True), said
        assert f"'{option}'" in said


def test_an_unknown_verb(told: Any) -> None:
    for group in ([], ["tasks"]):
        see = f"see `{' '.join(['offbook', *group])} --help`"
        assert told(*group, "nope") == (2, f"offbook: No such command 'nope' ({see})\n")


@pytest.mark.parametrize("verb", ["rollout", "eval"])
def test_configuration_is_no_argument(told: Any, verb: str) -> None:
    status, said = told(verb, "--engine.temperature", "0.5", "pocket")
    assert (status, is_sentence(said)) == (2, True), said
    assert "comes after" in said or "come after" in said


def test_no_verb_shows_the_help_and_a_process_says_the_same(told: Any) -> None:
    assert told() == (2, "")
    assert told("tasks") == (2, "")
    command = [sys.executable, "-m", "offbook", "coach", "--limit", "0", "x", "--debug"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, is_sentence(done.stderr), done.stdout) == (2, True, "")


WITHOUT_EFFECT = {
    "distill logs.jsonl --model pocket --train.steps": "leave it out",
    "distill logs.jsonl --model pocket --feedback.look": "which reads train, checkpoint, ",
    "sft --model pocket --data pocket:2 --train.learning_rate": "leave it out",
    "pretrain --model pocket --train.steps": "leave it out",
    "mtp pocket --train.steps": "leave it out",
    "train --model pocket --sft.epochs": "which reads engine, harness, ",
    "train --model pocket --mtp.steps": "leave it out",
    "eval pocket --train.steps": "which reads engine, harness, ",
    "rollout pocket --feedback.weight": "leave it out",
    "rollout pocket --tasks.source": "leave it out",
    "serve --eval.samples": "leave it out",
    "live --once --train.steps": "leave it out",
    "agent . hello --sft.epochs": "leave it out",
    "stages --model pocket --live.sessions": "leave it out",
}


@pytest.mark.parametrize("line", WITHOUT_EFFECT, ids=lambda line: f"{line.split()[0]} {line.split()[-1]}")
def test_an_option_that_a_verb_does_not_read_is_refused(told: Any, line: str) -> None:
    """Recipes and files may set more."""
    values = {"--feedback.look": "true", "--tasks.source": "tasks"}
    status, said = told(*line.split(), values.get(line.split()[-1], "2"))
    assert (status, is_sentence(said)) == (2, True), said
    assert f"{line.split('--')[-1]} has no effect on `offbook {line.split()[0]}`" in said
    assert WITHOUT_EFFECT[line] in said


def test_every_verb_says_which_keys_it_reads() -> None:
    configured = {verb[-1] for verb, command in VERBS.items() if command.context_settings.get("ignore_unknown_options")}
    assert {*keys_read(), "plan", "fit"} == configured
    keys = _paths(Config)
    places = [place.lstrip("!") for read in keys_read().values() for place in read]
    for place in places:
        assert any(f"{key}.".startswith(f"{place}.") for key in keys), place


NO_MODEL = "there is no model folder nosuch; give `pocket`"
WITHOUT_TORCH = [
    ("train --model pocket --tasks.source my-tasks", "there is no task folder my-tasks"),
    ("train --model nosuch", NO_MODEL),
    ("train --model pocket --tools.add nope", "there is no tool nope; did you mean "),
    ("eval pocket --tasks.source my-tasks", "there is no task folder my-tasks"),
    ("eval nosuch", NO_MODEL),
    ("rollout my-tasks", "there is no task folder my-tasks"),
    ("rollout pocket --model nosuch", NO_MODEL),
    ("sft --model nosuch --data pocket:2", NO_MODEL),
    ("distill logs.jsonl --model nosuch", NO_MODEL),
    ("mtp nosuch", NO_MODEL),
    ("mtp --model nosuch", NO_MODEL),
    ("serve --model nosuch", NO_MODEL),
    ("agent . hello --model nosuch", NO_MODEL),
    ("agent nowhere hello", "nowhere is not a folder"),
    ("agent --say hello", "runs/live has no session of yours"),
    ("agent --thumb up", "runs/live has no session of yours"),
    ("agent --forget one", "runs/live has no session one of yours"),
]
ONE_BY_ONE = """
import sys
from offbook.cli import main
for line in sys.argv[1:]:
    sys.argv = ["offbook", *line.split()]
    try:
        main()
    except SystemExit as stopped:
        print(f"{stopped.code} {'torch' in sys.modules}", file=sys.stderr)
"""


def test_what_needs_no_model_is_said_before_torch_is_imported(tmp_path: Path) -> None:
    """All in one fresh interpreter."""
    lines = [line for line, _ in WITHOUT_TORCH]
    done = subprocess.run(
        [sys.executable, "-c", ONE_BY_ONE, *lines], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    said = done.stderr.splitlines()
    assert len(said) == 2 * len(lines), done.stderr
    for (line, sentence), told, ended in zip(WITHOUT_TORCH, said[::2], said[1::2], strict=True):
        assert told.startswith(f"offbook: {sentence}"), line
        assert ended == "1 False", line
