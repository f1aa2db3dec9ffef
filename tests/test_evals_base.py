"""What a model knows before it is an agent: questions whose answers a program can check, and bits a byte."""

from __future__ import annotations

import json
import math
import random
import re
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from offbook.cli import app
from offbook.evals.base import Asked, cells, held_out_code, long_questions
from offbook.evals.questions import (
    Question,
    api_question,
    asked_for,
    definitions,
    needle_question,
    recall_question,
    source,
    state_question,
    without_context,
)
from offbook.pocket.tasks import draft_tasks
from offbook.tasks import load_tasks
from offbook.train.measure import answer_logprobs, token_logprobs
from offbook.types import OffbookError


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


def repositories(count: int) -> list[list[tuple[str, str]]]:
    drafts = {draft.repository: draft.gold.files for draft in draft_tasks(seed=1, count=3 * count, split="heldout")}
    return [[(path, text) for path, text in files.items() if path.endswith(".py")] for files in drafts.values()]


FILES = repositories(8)
SOURCES = [[source(path, text, len) for path, text in files] for files in FILES]


@given(st.integers(0, 10**6), st.sampled_from([2500, 6000, 40_000]))
@example(192, 6000)
def test_one_answer_is_what_a_file_defines_and_the_others_are_of_other_files(seed: int, tokens: int) -> None:
    question = recall_question(random.Random(seed), SOURCES, tokens, len)
    if question is None:
        assert tokens == 2500
        return
    files = re.findall(r"^# (\S+\.py)\n((?:(?!# \S+\.py\n).*\n)*)", question.text, re.MULTILINE)
    asked = re.search(r"# (\w+) of (\S+)\ndef \1\($", question.text)
    assert asked
    name, path = asked.groups()
    body = question.text[: asked.start()]
    assert body.count(f"def {name}(") == 1, "a name stands for one function"
    assert body.count(f"def {name}({question.answers[0]}") == 1
    (file,) = (text for other, text in files if other == path and f"def {name}({question.answers[0]}" in text)
    assert not any(answer in file for answer in question.answers[1:])
    assert all(answer in body for answer in question.answers)
    assert len(set(question.answers)) == 4
    written = len(question.text) + len(question.answers[0])
    assert tokens - 700 <= written <= tokens, "a file of made-up functions is about so long"
    short = without_context(question)
    assert question.text.endswith(short.text)
    assert short.text.count("\n") == 1


def test_definitions_are_of_modules_and_none_of_tests() -> None:
    text = (
        "class A:\n    def inside(self):\n        pass\n\n\n@cached\ndef two(\n    a,\n    b=1,\n) -> int:\n"
        "    return a\n\n\nasync def three():\n    pass\n\n\ndef one_liner(x): return x\n"
    )
    found = {one.name: one.rest for one in definitions("a.py", text)}
    assert found == {"two": "\n    a,\n    b=1,\n) -> int:\n    return a\n", "one_liner": "x): return x\n"}
    assert definitions("tests/test_a.py", text) == []
    assert definitions("a.py", "def (") == []
    long = f"def f(a):\n    return '{'x' * 300}'\n"
    assert definitions("a.py", long) == [], "an answer has a line or two"


def test_lengths_that_nothing_fits_into_have_no_question_about_a_repository() -> None:
    made = long_questions(FILES, [100, 3000, 6000], len, 0, 5, 5)
    assert [len(made[f"recall/{length}"]) for length in (100, 3000, 6000)] == [0, 5, 5]
    assert [len(made[f"needle/{length}"]) for length in (100, 3000, 6000)] == [5, 5, 5]
    assert [one.answers for one in made["recall/none"]] == [one.answers for one in made["recall/6000"]]
    assert made == long_questions(FILES, [100, 3000, 6000], len, 0, 5, 5)
    assert made["recall/6000"] != long_questions(FILES, [6000], len, 1, 5, 5)["recall/6000"]


def test_a_question_is_read_once_and_each_answer_as_if_alone(model: Path) -> None:
    asked = Asked(model)
    before, answers = asked.ids("def one(value):\n    return "), [asked.ids(one) for one in ("value\n", "1\n", "x")]
    found = answer_logprobs(asked.decoder, before, answers)
    for ids, logprobs in zip(answers, found, strict=True):
        alone = token_logprobs(asked.decoder, [*before, *ids], 1.0)[len(before) :]
        assert logprobs == pytest.approx(alone, abs=1e-4)
    asked.decoder.plain = False  # as models are read whose layers are not plain attention
    again = answer_logprobs(asked.decoder, before, answers)
    for one, other in zip(again, found, strict=True):
        assert one == pytest.approx(other, abs=1e-4)


def test_held_out_code_is_each_file_once_with_its_solution(cache: Path, tmp_path: Path) -> None:
    import asyncio

    from offbook.pocket.tasks import make_pocket_tasks

    asyncio.run(make_pocket_tasks(tmp_path / "tasks", 0, 1, 3, lambda share: None))
    tasks = load_tasks(tmp_path / "tasks" / "heldout")
    code = list(held_out_code(tasks))
    texts = [text for files in code for _, text in files]
    assert len(set(texts)) == len(texts)
    assert not any("NotImplementedError" in text for text in texts), "solutions are in place"
    assert any(asked_for(one) for files in code for file in files for one in definitions(*file))


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


def test_control_tokens_in_what_is_asked_are_plain_characters(model: Path) -> None:
    asked = Asked(model)
    text = "END = '<|im_end|>'\n"
    assert {asked.tokenizer.convert_tokens_to_ids("<|im_end|>")}.isdisjoint(asked.ids(text))
    assert asked.tokenizer.decode(asked.ids(text)) == text


def test_it_is_asked_in_the_precision_of_the_engine(model: Path) -> None:
    exact, rounded = Asked(model), Asked(model, "bfloat16")
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
    shown = CliRunner().invoke(app, ["eval", str(model), "--suite", "base", "--limit", "3", "--plain", *options])
    assert shown.exit_code == 0, shown.output
    (file,) = (tmp_path / "runs").glob("eval-*-base-first-3.json")
    result = json.loads(file.read_text())
    assert 0 < result["code"]["bits_per_byte"] < 8
    assert {"state/2", "state/4", "state/8", "api", "needle/50", "needle/200", "needle/380"} <= set(result)
    assert {"recall/50", "recall/200", "recall/380", "recall/none"} <= set(result)
    made = {name: result[name]["of"] + result[name]["too_long"] for name in result if "/" in name}
    assert made.pop("recall/50") == 0, "no four functions fit"
    assert made.pop("recall/200") <= 3
    assert made.pop("recall/380") == made.pop("recall/none") <= 3
    assert set(made.values()) == {3}
    assert len(cells(result)) == 13
    both = CliRunner().invoke(app, ["eval", str(model), "--suite", "base", "--suite", "pocket"])
    assert "give it alone" in str(both.exception)


def test_a_folder_without_a_model_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(OffbookError, match=r"has no config\.json"):
        Asked(tmp_path)
