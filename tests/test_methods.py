"""The annotators beside targeted hints: each loss against a naive re-encoding, and what cannot be shown."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from annotating import annotate
from conftest import tiny_model
from torch import Tensor
from transformers import PreTrainedModel

from offbook.agent.chat import ChatFormat, Transcript, render_call
from offbook.api import configure
from offbook.core.config import Config, FeedbackConfig, TeachersConfig, TrainConfig
from offbook.rl.models import load_model, quiet
from offbook.rl.ranks import make_trainer
from offbook.rl.tasks import task_sets
from offbook.rl.train import train
from offbook.rl.train_step import WholeResponse, teachers_of
from offbook.tasks.check import gold_changes
from offbook.train.algorithms import (
    OTHER,
    demonstration_block,
    opd_branches,
    opsd_branches,
    reference_block,
    rl_samples,
    sdft_branches,
)
from offbook.train.batches import Batch
from offbook.train.forward import Frozen, Other
from offbook.train.head import Counts, Ledger, divergence
from offbook.train.trainer import Trainer
from offbook.types import Completion, Distill, OffbookError, Reward, Rollout, Sample, Task

DIFF = "--- a/m.py\n+++ b/m.py\n@@ -1 +1 @@\n-a = 1\n+a = 2\n"


def completion(chat: ChatFormat, text: str) -> Completion:
    ids = [*chat.encode(text), chat.end_id]
    return Completion(ids, [-0.5] * len(ids), [0] * len(ids))


def rollout_of(chat: ChatFormat, *said: str, id: str = "r", solved: bool = False) -> Rollout:
    transcript = Transcript(chat)
    transcript.add("system", "Work.")
    transcript.add("user", "Fix a.")
    for text in said:
        transcript.add_sampled(completion(chat, text))
        transcript.add("tool", f"answer to {text}", "unknown_tool" if "grep_all" in text else "ok")
    rollout = Rollout(id, "t", "g", ("read_file",), [transcript.segment])
    rollout.reward = Reward({"outcome": float(solved)})
    return rollout


@pytest.fixture
def student(chat: ChatFormat) -> PreTrainedModel:
    return tiny_model(vocabulary=chat.tokenizer.get_vocab_size())


def own_logp(model: PreTrainedModel, before: list[int], sample: Sample, inserted: list[int], at: int) -> Tensor:
    """From scratch: log-probabilities at every sampled token, behind what is inserted."""
    ids = [*sample.ids[:at], *inserted, *sample.ids[at:]]
    logits = model(input_ids=torch.tensor([ids])).logits[0]
    by = len(inserted)
    return torch.log_softmax(logits[[place + by - 1 for place in before]], -1)


METHODS = ("opd", "opsd", "sdft")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_each_loss_is_that_of_a_naive_reencoding(
    chat: ChatFormat, student: PreTrainedModel, method: str, direction: Any
) -> None:
    """The value and the gradient of every weight, with the student away from its teacher."""
    rollout = rollout_of(chat, "one", "two words", id="r")
    shown = rollout_of(chat, "an example", id="other", solved=True)
    how = Distill(teacher=OTHER if method == "opd" else "start", part=method, direction=direction)
    blocks = {"opd": [], "opsd": reference_block(chat, DIFF), "sdft": demonstration_block(chat, shown)}
    found = {
        "opd": lambda: opd_branches(rollout, 1.0, how),
        "opsd": lambda: opsd_branches(rollout, DIFF, chat, 1.0, how),
        "sdft": lambda: sdft_branches(rollout, shown, chat, 1.0, how),
    }[method]()
    ((sample,),) = rl_samples([rollout], weight=0.0)
    sample.branches.append(found[0])
    larger = tiny_model("llama", vocabulary=student.config.vocab_size, seed=3)
    trainer = Trainer(student, TrainConfig(), {OTHER: Other(larger), "start": Frozen()})
    teacher = larger if method == "opd" else trainer.teachers["start"].decoder.model
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.mul_(1.2)
    before = [place for place, sampled in enumerate(rollout.segments[0].sampled) if sampled]
    with torch.no_grad():
        wanted = own_logp(teacher, before, sample, blocks[method], found[0].insert)
    plain = divergence(own_logp(student, before, sample, [], 0), wanted, direction).mean()
    nats = float(plain.detach())
    naive = torch.autograd.grad(plain, list(student.parameters()))
    trainer.loss(Batch.collate([sample], torch.device("cpu")), Ledger(Counts.of([sample]))).backward()
    for parameter, expected in zip(student.parameters(), naive, strict=True):
        assert (parameter.grad - expected).abs().max() < 1e-4 * max(1.0, expected.abs().max())
    student.zero_grad()
    metrics = trainer.step([sample]).metrics
    assert metrics[f"{method}/kl"] == pytest.approx(nats, rel=1e-4)
    assert nats > 0.05, "the two have to differ, or nothing is shown"
    assert "rl/loss" not in metrics, "a weight of 0 is no RL"


def test_what_a_teacher_sees_stands_before_the_first_message(chat: ChatFormat) -> None:
    rollout = rollout_of(chat, "one", "two words")
    shown = rollout_of(chat, "look", "edit", id="other")
    (branch,) = sdft_branches(rollout, shown, chat, 1.0, Distill()).values()
    said = chat.decode(branch.inserted)
    assert "look\nedit" in said, "what was written, message after message"
    assert "answer to" not in said, "without what tools answered"
    assert chat.decode(rollout.segments[0].ids[branch.insert :]).startswith("<|im_start|>assistant\none")
    assert [chat.decode(rollout.segments[0].ids[start : end - 1]) for start, end in branch.spans] == [
        "one",
        "two words",
    ]
    (branch,) = opsd_branches(rollout, DIFF, chat, 1.0, Distill()).values()
    assert DIFF.strip() in chat.decode(branch.inserted)


def test_a_teacher_of_another_vocabulary_is_refused(student: PreTrainedModel) -> None:
    with pytest.raises(OffbookError, match=r"vocabulary has \d+ entries and its teacher's 77: .* the same family"):
        Trainer(student, TrainConfig(), {OTHER: Other(tiny_model(vocabulary=77))})


def test_a_teacher_of_another_tokenizer_is_refused(model: Path, tmp_path: Path) -> None:
    """Its vocabulary is as large as the student's."""
    other = tmp_path / "other"
    shutil.copytree(model, other)
    stored = json.loads((other / "tokenizer.json").read_text())
    first, second = list(stored["model"]["vocab"])[100:102]
    numbers = stored["model"]["vocab"]
    numbers[first], numbers[second] = numbers[second], numbers[first]
    (other / "tokenizer.json").write_text(json.dumps(stored))
    teachers = {"weights": {"opd": 1.0}, "model": str(other)}
    config = configure("pocket", model=str(model), out=str(tmp_path / "run"), teachers=teachers)
    with pytest.raises(OffbookError, match=r"tokens 2 are others to its teacher .*other: .* the same family"):
        make_trainer(config, load_model(model), model, quiet, None)
    (other / "tokenizer.json").unlink()
    with pytest.raises(OffbookError, match=r"other has no tokenizer\.json"):
        make_trainer(config, load_model(model), model, quiet, None)


class Solved(WholeResponse):
    def _solution(self, id: str) -> str:
        return DIFF if id == "t" else ""


def whole(chat: ChatFormat, positions: int = 4000, **of: Any) -> WholeResponse:
    return Solved(TeachersConfig(**of), chat, {}, positions)


def test_all_methods_mix_with_rl_and_with_hints(chat: ChatFormat, student: PreTrainedModel) -> None:
    """One sample, one step: five parts, and what each weighs is its own."""
    unknown = render_call("grep_all", {"pattern": "a"})
    group = [rollout_of(chat, unknown, id="bad"), rollout_of(chat, "fine", id="good", solved=True)]
    settings = FeedbackConfig(gate=0.0, rules=["unknown_tool"])
    three = {"weights": dict.fromkeys(METHODS, 1.0), "model": "x"}
    teachers = whole(chat, **three)
    counts: Counter[str] = Counter()
    samples, _ = annotate([group], settings, chat, counts=counts, whole=teachers)
    assert [[branch.distill.part for branch in sample.branches] for sample in samples] == [
        ["opd", "opsd", "sdft", "hint"], ["opd", "opsd"]
    ]  # fmt: skip
    assert counts["left_out/no_demonstration"] == 1, "nobody else of the group solved it"
    kinds = teachers_of(settings, others=teachers.settings)
    assert set(kinds) == {"frozen", "ema"}
    kinds[OTHER] = Other(tiny_model(vocabulary=student.config.vocab_size))
    found = Trainer(student, TrainConfig(), kinds).step(samples).metrics
    assert {"rl/loss", "opd/kl", "opsd/kl", "sdft/kl", "hint/kl"} <= set(found)


def test_what_cannot_be_shown_is_counted(chat: ChatFormat) -> None:
    rollout, counts = rollout_of(chat, "one"), Counter[str]()
    other = replace(rollout, task="elsewhere")
    assert not list(whole(chat, weights={"opsd": 1.0}).branches(other, [], counts))
    assert not list(whole(chat, positions=60, weights={"opsd": 1.0}).branches(rollout, [], counts))
    assert not list(whole(chat, weights={"sdft": 1.0}).branches(rollout, [], counts))
    assert counts == {"left_out/no_solution": 1, "left_out/teacher_context": 1, "left_out/no_demonstration": 1}


@pytest.fixture(scope="module")
def pocket_task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OFFBOOK_CACHE", str(tmp_path_factory.mktemp("cache")))
        config = Config(model="pocket", tasks={"num_train": 1, "num_heldout": 1})
        return task_sets(config).train[0]


def test_teachers_that_see_the_answer_are_counted(pocket_task: Task, chat: ChatFormat) -> None:
    """What a demonstration says counts, and not that it is one."""
    counts, rollout = Counter[str](), replace(rollout_of(chat, "one"), task=pocket_task.id)
    code = "\n".join(gold_changes(pocket_task).values())
    for said in ("I read the file.", code):
        settings = TeachersConfig(weights={"opsd": 1.0, "sdft": 1.0})
        teachers = WholeResponse(settings, chat, {pocket_task.id: pocket_task}, 99_999)
        sibling = replace(rollout_of(chat, said, id="other", solved=True), task=pocket_task.id)
        assert len(list(teachers.branches(rollout, [sibling], counts))) == 2
    assert counts == {"leaks/opsd": 2, "leaks/sdft": 1}


def test_a_run_has_all_of_them_at_once(
    model: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On pocket, with real sandboxes; then without RL, where what teaches is all there is."""
    monkeypatch.setenv("OFFBOOK_CACHE", str(cache))
    sections: dict[str, Any] = {
        "tasks": {"num_train": 4, "num_heldout": 2},
        "train": {"steps": 1, "groups": 2, "group_size": 2},
        "feedback": {"look": False, "gate": 0.0},
        "teachers": {"weights": dict.fromkeys(METHODS, 1.0), "model": str(model)},
    }
    run = train(configure("pocket", model=str(model), out=str(tmp_path / "all"), **sections))
    (row,), _ = run.metrics()
    assert {"rl/loss", "hint/kl", "opd/kl", "opsd/kl"} <= set(row)
    assert row["opd/kl"] == pytest.approx(0.0, abs=1e-4), "its teacher is the same model, and reads the same"
    assert row["opsd/kl"] > 0.001, "the solution changes what the model would say"
    assert row.get("left_out/no_demonstration", 0) > 0 or "sdft/kl" in row
    sections["train"] |= {"rl_weight": 0.0}
    run = train(configure("pocket", model=str(model), out=str(tmp_path / "alone"), **sections))
    (row,), _ = run.metrics()
    assert "rl/loss" not in row
    assert row["opsd/kl"] > 0.001
