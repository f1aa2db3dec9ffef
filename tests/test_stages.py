"""All stages in one command, each from the model of the one before."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from conftest import tiny_model
from test_pretrain import repository
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from offbook.agent.chat import ChatFormat
from offbook.cli import app
from offbook.core.config import load_config
from offbook.core.runfolder import RunFolder, latest_checkpoint
from offbook.pocket.model import CHAT_TEMPLATE, Recipe, make_pocket
from offbook.rl.models import positions, quiet
from offbook.stages.pipeline import of_stage
from offbook.stages.pretrain import make_lessons


def test_long_is_pretraining_with_other_keys() -> None:
    config = load_config(["full"], {})
    long, short = (of_stage(config, name, Path("out"), "before") for name in ("long", "pretrain"))
    assert (long.model, long.out) == ("before", "out")
    assert (short.pretrain.context, short.pretrain.rope) == (1024, "")
    assert (long.pretrain.context, long.pretrain.rope) == (4096, "yarn")
    assert long.pretrain.guard == short.pretrain.guard == ["pocket"], "what is not named stays"


def test_the_long_stage_of_the_full_recipe_has_longer_windows_than_pocket_read(tmp_path: Path) -> None:
    pocket = make_pocket(tmp_path, 0, lambda what, share: None, Recipe(episodes=8))
    config = of_stage(load_config(["full"], {}), "long", tmp_path / "out", str(pocket))
    config = config.model_copy(update={"pretrain": config.pretrain.model_copy(update={"guard": []})})  # it makes tasks
    lengths = list(map(len, make_lessons(config, pocket, quiet, lambda line: None).learned))
    assert sum(length > 1.5 * positions(pocket) for length in lengths) >= len(lengths) / 3
    assert max(lengths) > 0.95 * config.pretrain.context


def test_each_stage_begins_where_the_last_ended(chat: ChatFormat, tmp_path: Path) -> None:
    """And the same command finds all of them done."""
    model = tiny_model(vocabulary=chat.tokenizer.get_vocab_size())
    model.config.max_position_embeddings = 256
    model.save_pretrained(tmp_path / "tiny")
    wrapped = PreTrainedTokenizerFast(tokenizer_object=chat.tokenizer, chat_template=CHAT_TEMPLATE)
    wrapped.save_pretrained(tmp_path / "tiny")
    data = [str(repository(tmp_path, f"r{number}", first=10 * number)) for number in range(3)]
    (tmp_path / "r0" / "pkg" / "broken.py").write_text("def half(")
    data.append(str(repository(tmp_path, "apart", first=40)))
    said = {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "It is 4."}]}
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(said) + "\n" for _ in range(4)) + "half a line\n")
    command = ["stages", "--model", str(tmp_path / "tiny"), "--out", str(tmp_path / "run"), "--json"]
    options = {
        "stages.order": '["pretrain", "long", "sft"]',
        "stages.long": '{context = 512, rope = "yarn"}',
        "pretrain.data": json.dumps(data),
        "pretrain.hold_out": '["apart"]',
        "pretrain.context": "256",
        "pretrain.batch_tokens": "1000",
        "sft.data": json.dumps([str(tmp_path / "chat.jsonl")]),
        "harness.context": "256",
    }
    command += [word for key, value in options.items() for word in (f"--{key}", value)]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    rows = json.loads((tmp_path / "run" / "stages.json").read_text())
    assert [row["stage"] for row in rows] == ["pretrain", "long", "sft"]
    assert all(row["train_tokens"] > 0 for row in rows)
    left = {"Python files that do not parse": 1, "files of other kinds": 3, "repositories that are held out": 1}
    assert [row["left_out"] for row in rows] == [left, left, {"could not be read": 1}]
    kept = json.loads((tmp_path / "run" / "1-pretrain" / "data.json").read_text())
    assert (kept["repositories"], kept["files"], kept["licences"]) == (3, 12, {"MIT": 3})
    assert (kept["held_out"], kept["left_out"]) == (["apart"], left)
    runs = [RunFolder.open(Path(row["run"])) for row in rows]
    for before, after in pairwise(runs):
        assert load_config([after.config_file], {}).model == str(latest_checkpoint(before))
    reads = [json.loads((latest_checkpoint(run) / "config.json").read_text()) for run in runs]
    assert [one["max_position_embeddings"] for one in reads] == [256, 512, 512], "imitation keeps what was stretched"
    written = {path: path.stat().st_mtime for run in runs for path in run.path.glob("ckpt/*/model.safetensors")}
    again = CliRunner().invoke(app, [word for word in command if word != "--json"])
    assert again.exit_code == 0, again.output
    assert written == {path: path.stat().st_mtime for path in written}
    said = "1 Python files that do not parse, 3 files of other kinds, 1 repositories that are held out"
    assert f"pretrain left out: {said}\n" in again.stdout


@pytest.mark.slow
def test_the_full_recipe_runs_to_its_end(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["stages", "@", "full", "--out", str(tmp_path / "full"), "--json"])
    assert done.exit_code == 0, done.output
    rows = json.loads((tmp_path / "full" / "stages.json").read_text())
    assert [row["stage"] for row in rows] == ["pretrain", "long", "sft", "train"]
    assert rows[0]["ce/loss"][1] < rows[0]["ce/loss"][0]
