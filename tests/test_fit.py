"""Whether a model's calls can be read: asked of a pocket model, and of models that write what they are told to."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest
from test_harness import tree
from test_look import ByHint, task_at
from typer.testing import CliRunner

from offbook.agent.chat import byte_chat, render_call
from offbook.agent.chat.dialects import BASH, JSON, XML
from offbook.cli import app
from offbook.core.config import Config, load_config
from offbook.rl.collector import Collector
from offbook.rl.fit import Candidate, FirstMessages, best, first_messages, next_step, recipe_of, refuse_unreadable
from offbook.types import OffbookError

__all__ = ["tree"]
READ = {"path": "pkg/calc.py"}
HERMES_CALL, JSON_CALL = render_call("read_file", READ), "I look.\n" + JSON.render("read_file", READ)


def asked(tree: Path, *lines: str) -> tuple[Collector, FirstMessages]:
    """Four messages of a model that says these lines in turn."""
    collector = Collector(Config(model="http://127.0.0.1:9/v1"), None, "m")
    collector.engine = ByHint(byte_chat(), list(lines), [])  # type: ignore[assignment]
    return collector, asyncio.run(first_messages(collector, [task_at(tree)], 4, "fit"))


def test_first_messages_are_counted_by_how_they_are_read(tree: Path) -> None:
    _, found = asked(tree, HERMES_CALL, render_call("no_such_tool", {}), "I am done.", "<tool_call>{")
    assert (found.total, found.readable, found.others, found.share) == (4, 2, {}, 0.5)
    assert found.problem == "2 of 4 messages have no call, or a malformed one"
    _, found = asked(tree, JSON_CALL, JSON_CALL, JSON_CALL, HERMES_CALL)
    assert (found.readable, found.others) == (1, {"json": 3})
    assert found.problem == (
        "3 of 4 messages write calls as JSON in a code block, or alone, which --harness.dialect json reads"
    )
    _, found = asked(tree, BASH.render("bash", {"command": "ls"}))
    assert found.problem.endswith("as commands in a bash block, which --harness.profile bash reads")
    _, found = asked(tree, XML.render("read_file", READ))
    assert found.others == {"xml": 4}


def test_training_does_not_begin_with_a_model_whose_calls_cannot_be_read(tree: Path) -> None:
    tasks = [replace(task_at(tree), id=str(number)) for number in range(8)]
    collector, _ = asked(tree, JSON_CALL)
    with pytest.raises(OffbookError, match=r"^0 of the model's 16 first .*--harness.dialect json reads.*offbook fit "):
        asyncio.run(refuse_unreadable(collector, tasks))
    collector, _ = asked(tree, "Done.", "Done.", "Done.", HERMES_CALL)
    asyncio.run(refuse_unreadable(collector, tasks))


def test_the_best_writes_most_readable_calls_and_is_the_first_of_equals() -> None:
    def candidate(dialect: str, readable: int) -> Candidate:
        return Candidate("standard", dialect, FirstMessages(32, readable, {"json": 20}, 0))

    found = [candidate("hermes", 0), candidate("xml", 30), candidate("json", 30)]
    assert best(found).dialect == "xml"
    config = Config(model="m", tasks={"source": "my-tasks"})
    assert next_step(found, config, "f.toml")[1] == "offbook train @ f.toml"
    sentence, command = next_step(found[:1], config, "f.toml")
    assert "fits none: 20 of 32" in sentence
    idle, works = replace(found[2], rollouts=8, read=8), replace(found[1], rollouts=8, read=8, edited=1)
    assert best([idle, works]) is works, "what a rollout comes to counts before messages"
    assert "no rollout changed a file" in next_step([idle], config, "f.toml")[0]
    assert command == "offbook sft @ f.toml --sft.data demos:my-tasks"


def test_the_recipe_of_a_profile_with_its_own_dialect_names_none(tmp_path: Path) -> None:
    found = [Candidate("bash", "auto", FirstMessages(4, 4, {}, 0))]
    (tmp_path / "fit.toml").write_text(recipe_of(found, Config(model="m", tasks={"source": "my-tasks"})))
    config = load_config([tmp_path / "fit.toml"], {})
    assert (config.model, config.tasks.source, config.harness.profile) == ("m", "my-tasks", "bash")
    assert config.harness.dialect == "auto"


def test_the_pocket_model_fits_what_it_was_made_with(
    cache: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OFFBOOK_CACHE", str(cache))
    recipe = tmp_path / "fit.toml"
    sizes = ["--tasks.num_train", "4", "--tasks.num_heldout", "2", "--harness.turns", "4"]
    command = ["fit", str(model), "--out", str(recipe), "--limit", "4", "-n", "4", "--rollouts", "4"]
    done = CliRunner().invoke(app, [*command, *sizes, "--json"], catch_exceptions=False)
    told = json.loads(done.stdout)
    assert (told["profile"], told["dialect"], told["fits"]) == ("pocket", "hermes", True)
    by_dialect = {one["dialect"]: one for one in told["candidates"]}
    for other in ("xml", "json"):
        assert by_dialect[other]["first"]["others"]["hermes"] >= 4, "it writes what it was made to write"
    config = load_config([recipe], {})
    assert (config.model, config.harness.profile, config.harness.dialect) == (str(model), "pocket", "hermes")
    assert config.harness.turns == load_config([], {"model": str(model)}).harness.turns, "the rest is its recipe's"
    whole = by_dialect["hermes"]
    assert whole["rollouts"] == 4
    assert by_dialect["json"]["rollouts"] == 0, "whose calls are not read"


def test_train_asks_first_and_can_be_told_not_to(
    cache: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pocket model that is shown tools in words that it has never seen."""
    monkeypatch.setenv("OFFBOOK_CACHE", str(cache))
    sizes = ["--tasks.num_train", "4", "--tasks.num_heldout", "2", "--train.groups", "1", "--train.group_size", "2"]
    sizes += ["--harness.turns", "2", "--train.steps", "1", "--feedback.look", "false", "--harness.dialect", "xml"]
    command = ["train", "--model", str(model), "--out", str(tmp_path / "run"), *sizes]
    command += ["--harness.profile", "worked"]
    with pytest.raises(OffbookError, match="first messages have a call that can be read"):
        CliRunner().invoke(app, command, catch_exceptions=False)
    assert CliRunner().invoke(app, [*command, "--no-fit-check"], catch_exceptions=False).exit_code == 0
