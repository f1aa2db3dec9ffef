"""What a model knows before it is an agent: questions whose answers a program can check, and bits a byte."""

from __future__ import annotations

import json
import math
import random
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from offbook.cli import app
from offbook.evals.base import Asked, Question, api_question, cells, needle_question, state_question


def applied(text: str) -> dict[str, str]:
    """The file of a question, with its diffs put into it line by line."""
    file, *diffs = text.partition("\n\n# settings.py now")[0].split("\n\n")
    values = dict(line.split(" = ") for line in file.splitlines()[1:])
    for diff in diffs:
        before, after = (line[1:].split(" = ") for line in diff.splitlines()[2:])
        assert values[before[0]] == before[1], "a diff fits what is there"
        values[after[0]] = after[1]
    return values


@given(st.integers(0, 10**6), st.sampled_from([2, 4, 8]))
def test_the_right_answer_is_what_the_diffs_come_to(seed: int, diffs: int) -> None:
    question = state_question(random.Random(seed), diffs)
    assert question.text.count("+++ b/") == diffs
    asked = question.text.rpartition("\n")[2].removesuffix(" = ")
    assert question.answers[0] == applied(question.text)[asked] + "\n"
    assert len(set(question.answers)) == 4


@given(st.integers(0, 10**6))
def test_one_answer_is_the_functions_own(seed: int) -> None:
    question = api_question(random.Random(seed))
    asked = re.search(r"# the signature of (\w+)\ndef \1\($", question.text)
    assert asked
    takes = dict(re.findall(r"^def (\w+)\((.+)\):$", question.text, re.MULTILINE))
    assert takes[asked[1]] == question.answers[0]
    assert len(question.answers) == 4


@given(st.integers(0, 10**6), st.sampled_from([120, 700]))
def test_a_needle_is_in_there_once(seed: int, tokens: int) -> None:
    question = needle_question(random.Random(seed), tokens, len)
    name = question.text.rpartition("\n")[2]
    assert question.text.count(f"{name}{question.answers[0]}") == 1
    assert all(answer not in question.text for answer in question.answers[1:])
    assert tokens - 80 <= len(question.text) <= tokens + 12


def test_bits_and_answers_are_those_of_a_plain_forward(model: Path) -> None:
    asked, plain = Asked(model), AutoModelForCausalLM.from_pretrained(model)
    text = "def one(value):\n    return value + 1\n"
    ids = asked.ids(text)
    with torch.no_grad():
        logp = plain(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
    nats = -sum(float(logp[place - 1, ids[place]]) for place in range(1, len(ids)))
    found = asked.bits_per_byte([text])
    assert found["bits_per_byte"] == pytest.approx(nats / math.log(2) / found["bytes"], rel=1e-4)
    whole = asked.tokenizer.decode(ids[1:]).encode()
    assert found["bytes"] == len(whole)
    likely = asked.tokenizer.decode([int(logp[-1].argmax())])
    assert asked.is_right(Question(text, (likely, "zzzz", "qqqq", "@@@@")))
    assert not asked.is_right(Question(text, ("zzzz", likely, "qqqq", "@@@@")))


def test_a_base_is_measured_by_one_command(
    model: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OFFBOOK_CACHE", str(cache))
    monkeypatch.chdir(tmp_path)
    options = ["--tasks.num_train", "1", "--tasks.num_heldout", "2", "--harness.context", "400"]
    shown = CliRunner().invoke(app, ["eval", str(model), "--suite", "base", "--limit", "3", "--plain", *options])
    assert shown.exit_code == 0, shown.output
    (file,) = (tmp_path / "runs").glob("eval-*-base-first-3.json")
    result = json.loads(file.read_text())
    assert 0 < result["code"]["bits_per_byte"] < 8
    assert {"state/2", "state/4", "state/8", "api", "needle/50", "needle/200", "needle/380"} <= set(result)
    assert all(result[name]["of"] + result[name]["too_long"] == 3 for name in result if "/" in name)
    assert len(cells(result)) == 9
    both = CliRunner().invoke(app, ["eval", str(model), "--suite", "base", "--suite", "pocket"])
    assert "give it alone" in str(both.exception)
