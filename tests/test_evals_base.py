"""Bits per byte of held-out code: `eval --suite base`."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from offbook.cli import app
from offbook.evals.base import TextModel, held_out_code
from offbook.pocket.tasks import make_pocket_tasks
from offbook.tasks import load_tasks
from offbook.types import OffbookError


def test_held_out_code_is_each_file_once_with_its_solution(cache: Path, tmp_path: Path) -> None:
    asyncio.run(make_pocket_tasks(tmp_path / "tasks", 0, 1, 3, lambda share: None))
    tasks = load_tasks(tmp_path / "tasks" / "heldout")
    code = list(held_out_code(tasks))
    texts = [text for files in code for _, text in files]
    assert len(set(texts)) == len(texts)
    assert not any("NotImplementedError" in text for text in texts), "solutions are in place"


def test_bits_are_those_of_a_plain_forward(model: Path) -> None:
    asked, plain = TextModel(model), AutoModelForCausalLM.from_pretrained(model)
    text = "def one(value):\n    return value + 1\n"
    ids = asked.ids(text)
    with torch.no_grad():
        logp = plain(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
    nats = -sum(float(logp[place - 1, ids[place]]) for place in range(1, len(ids)))
    found = asked.bits_per_byte([text])
    assert found["bits_per_byte"] == pytest.approx(nats / math.log(2) / found["bytes"], rel=1e-4)
    whole = asked.tokenizer.decode(ids[1:]).encode()
    assert found["bytes"] == len(whole)


def test_control_tokens_in_what_is_asked_are_plain_characters(model: Path) -> None:
    asked = TextModel(model)
    text = "END = '<|im_end|>'\n"
    assert {asked.tokenizer.convert_tokens_to_ids("<|im_end|>")}.isdisjoint(asked.ids(text))
    assert asked.tokenizer.decode(asked.ids(text)) == text


def test_it_is_asked_in_the_precision_of_the_engine(model: Path) -> None:
    exact, rounded = TextModel(model), TextModel(model, "bfloat16")
    assert rounded.decoder.model.dtype == torch.bfloat16
    text = "def one(value):\n    return value + 1\n"
    found = [asked.bits_per_byte([text])["bits_per_byte"] for asked in (exact, rounded)]
    assert found[1] == pytest.approx(found[0], rel=0.02)
    assert found[1] != found[0]


def test_a_base_is_measured_by_one_command(
    model: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OFFBOOK_CACHE", str(cache))
    monkeypatch.chdir(tmp_path)
    options = ["--tasks.num_train", "1", "--tasks.num_heldout", "2", "--harness.context", "400"]
    shown = CliRunner().invoke(app, ["eval", str(model), "--suite", "base", "--limit", "3", *options])
    assert shown.exit_code == 0, shown.output
    (file,) = (tmp_path / "runs").glob("eval-*-base-first-3.json")
    result = json.loads(file.read_text())
    assert 0 < result["code"]["bits_per_byte"] < 8
    assert f"{result['code']['bits_per_byte']:.3f} bits per byte" in shown.output
    both = CliRunner().invoke(app, ["eval", str(model), "--suite", "base", "--suite", "pocket"])
    assert "give it alone" in str(both.exception)


def test_a_folder_without_a_model_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(OffbookError, match=r"has no config\.json"):
        TextModel(tmp_path)
