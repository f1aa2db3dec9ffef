"""Which hints may teach: the gate, the limit, controls, anchors."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from itertools import accumulate, pairwise
from statistics import mean

import pytest
import torch
from conftest import TEACHERS, distilled, random_ids, tiny_model
from hypothesis import given
from hypothesis import strategies as st
from test_branches import gradients, places_of, reencoded, sample_with_branches

from offbook.core.config import TrainConfig
from offbook.train import head as gate
from offbook.train.batches import _chunks
from offbook.train.forward import Frozen, Live
from offbook.train.head import VERDICTS, Shift, TargetScores, divergence
from offbook.train.trainer import StepResult, Trainer
from offbook.types import Branch, Sample


def verdicts(shift: list[float], gain: list[float], samples: list[int], limit: int, nats: float) -> list[str]:
    moved = Shift(*(torch.tensor(values) for values in (shift, gain, shift, gain)))
    found = gate.verdicts(moved, nats, limit, torch.tensor(samples))
    return [VERDICTS[verdict] for verdict in found.tolist()]


def test_a_hint_must_move_its_message_and_away_from_it() -> None:
    assert verdicts([1.0, 0.01, 1.0], [0.5, 0.5, -0.5], [0, 0, 0], 3, nats=0.1) == ["", "no_shift", "towards_mistake"]


def test_those_that_move_most_come_first_and_samples_do_not_take_from_each_other() -> None:
    found = verdicts([1.0, 3.0, 2.0, 0.5], [1.0] * 4, [0, 0, 0, 1], 2, nats=0.1)
    assert found == ["over_limit", "", "", ""]
    refused_first = verdicts([9.0, 1.0, 0.5], [-1.0, 1.0, 1.0], [0, 0, 0], 1, nats=0.1)
    assert refused_first == ["towards_mistake", "", "over_limit"], "a refused one takes no place"


@given(
    st.lists(
        st.tuples(st.floats(0, 5, width=32), st.floats(-5, 5, width=32), st.integers(0, 3)), min_size=1, max_size=12
    ),
    st.data(),
)
def test_never_more_than_the_limit(branches: list[tuple[float, float, int]], data: st.DataObject) -> None:
    limit = data.draw(st.integers(1, 4))
    nats = data.draw(st.sampled_from([0.0, 0.5]))
    shift, gain, samples = (list(column) for column in zip(*branches, strict=True))
    found = verdicts(shift, gain, samples, limit, nats)
    for number in range(4):
        mine = [(verdict, s, g) for verdict, s, g, n in zip(found, shift, gain, samples, strict=True) if n == number]
        able = [s for _, s, g in mine if not nats or (s >= nats and g > 0)]
        taught = [s for verdict, s, _ in mine if verdict == ""]
        assert len(taught) == min(len(able), limit)
        assert sorted(taught, reverse=True) == sorted(able, reverse=True)[: len(taught)]


def sample_of(rng: random.Random, branches: list[Branch]) -> Sample:
    return Sample(random_ids(rng, 40), branches=branches)


def step_of(samples: list[Sample], micro_tokens: int = 8192, **how: object) -> tuple[StepResult, Trainer]:
    settings = TrainConfig(learning_rate=1e-2, micro_tokens=micro_tokens)
    trainer = Trainer(tiny_model(), settings, {"live": Live(), "start": Frozen()})
    return trainer.step(distilled(samples, **how) if how else samples), trainer


def moved(trainer: Trainer) -> float:
    before = tiny_model().state_dict()
    return max(float((value - before[name]).abs().max()) for name, value in trainer.model.state_dict().items())


def test_what_the_gate_refuses_moves_nothing() -> None:
    """One branch whose hint is empty: the live teacher says what the student says."""
    branch = Branch(10, [], ((12, 20),), 1.0, key="same")
    refused, trainer = step_of([sample_of(random.Random(1), [branch])], gate=0.05)
    assert refused.measured["same"].skipped == "no_shift"
    assert refused.metrics["distill/no_shift"] == 1.0
    assert moved(trainer) == 0.0
    hinted = replace(branch, inserted=random_ids(random.Random(2), 6))
    let_through, trainer = step_of([sample_of(random.Random(1), [hinted])], gate=0.0)
    assert let_through.measured["same"].skipped == ""
    assert moved(trainer) > 0.0


def test_the_gate_and_the_record_agree() -> None:
    """Verdicts follow from the recorded log-probabilities and divergences, whatever the random model says."""
    rng = random.Random(3)
    branches = [Branch(5 * n, random_ids(rng, 5), ((5 * n + 2, 5 * n + 5),), 1.0, key=str(n)) for n in range(7)]
    for direction in ("forward", "reverse", "jsd"):
        result, _ = step_of([sample_of(rng, branches)], gate=0.007, direction=direction)
        reasons = set()
        for measured in result.measured.values():
            towards = sum(measured.teacher) >= sum(measured.student)
            expected = "no_shift" if mean(measured.divergence) < 0.007 else "towards_mistake" if towards else ""
            assert measured.skipped == expected
            reasons.add(expected)
        if direction == "forward":
            assert reasons >= {"", "towards_mistake"}, "both kinds occur, or this shows nothing"


def drifted(teacher: str) -> Trainer:
    """A student that has gone away from its teacher's weights."""
    trainer = Trainer(tiny_model(), TrainConfig(learning_rate=1e-2), TEACHERS[teacher])
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.mul_(1.2)
    return trainer


@pytest.mark.parametrize("judged", [False, True])
@pytest.mark.parametrize("teacher", ["live", "frozen", "ema"])
def test_what_the_hint_does_to_its_teacher_equals_reencoding(teacher: str, judged: bool) -> None:
    """The teacher's own reading with and without the hint; also where branches compete and are scored before."""
    sample = sample_with_branches(random.Random(11))
    trainer = drifted(teacher)
    (of_trainer,) = trainer.teachers.values()
    student = copy.deepcopy(trainer.model)
    model = copy.deepcopy(of_trainer.decoder.model) if of_trainer else student
    found = trainer.step(distilled([sample], gate=1e-9, places=2 * judged)).measured
    for branch in sample.branches:
        ids, measured = torch.tensor(sample.ids)[places_of(branch)], found[branch.key]
        with torch.no_grad():
            hinted, bare = (reencoded(model, sample, one) for one in (branch, replace(branch, inserted=[])))
            own = reencoded(student, sample, replace(branch, inserted=[]))
        for ours, theirs in ((measured.plain, bare), (measured.teacher, hinted), (measured.student, own)):
            assert ours == pytest.approx(theirs.gather(1, ids[:, None])[:, 0].tolist(), abs=1e-3)
        assert measured.moved == pytest.approx(divergence(bare, hinted, "forward").tolist(), abs=1e-3)
        assert measured.divergence == pytest.approx(divergence(own, hinted, "forward").tolist(), abs=1e-3)
        if teacher in ("frozen", "ema"):
            assert abs(sum(measured.moved) - sum(measured.divergence)) > 0.01, "or the student has not drifted"


def test_a_drifted_student_is_not_the_hints_doing() -> None:
    """A frozen teacher is far from it, hint or no hint. Nothing is inserted, so nothing is taught."""
    same = Branch(10, [], ((12, 20),), 1.0, key="same")
    result = drifted("frozen").step(distilled([sample_of(random.Random(1), [same])], gate=0.002))
    measured = result.measured["same"]
    assert mean(measured.divergence) > 0.1
    assert measured.skipped == "no_shift"
    assert result.metrics["distill/shift"] == pytest.approx(0.0, abs=1e-5)


@pytest.mark.parametrize("teacher", ["live", "frozen", "ema"])
def test_only_tokens_that_the_hint_moves_teach(teacher: str) -> None:
    """The gradient is that of each context encoded from scratch, at half of the tokens."""
    sample = replace(sample_with_branches(random.Random(12)), rl_weight=[0.0] * 60)
    trainer = drifted(teacher)
    (of_trainer,) = trainer.teachers.values()
    student = copy.deepcopy(trainer.model)
    start = of_trainer.decoder.model if of_trainer else student
    own, moved = [], []
    for branch in sample.branches:
        bare = replace(branch, inserted=[])
        with torch.no_grad():
            hinted, plain = reencoded(start, sample, branch), reencoded(start, sample, bare)
        moved.append(divergence(plain, hinted, "forward"))
        own.append(branch.weight * divergence(reencoded(student, sample, bare), hinted, "forward"))
    ranked = torch.cat(moved).sort().values
    token_gate = float(ranked[len(ranked) // 2 :][:2].mean())  # between two of them
    kept = torch.cat(moved) >= token_gate
    ((torch.cat(own) * kept).sum() / len(kept)).backward()
    asked = distilled([sample], token_gate=token_gate)
    for ours, theirs in zip(gradients(trainer, asked), student.parameters(), strict=True):
        assert torch.allclose(ours, theirs.grad, atol=1e-6)
    assert drifted(teacher).step(asked).metrics["distill/signal_tokens"] == int(kept.sum()) < len(kept)


def test_without_a_hint_no_token_teaches() -> None:
    """However far the student has gone: all tokens of a frozen teacher would pull it back."""
    same = Branch(10, [], ((12, 20),), 1.0, key="same")
    found = [
        drifted("frozen").step(distilled([sample_of(random.Random(1), [same])], token_gate=nats)).metrics
        for nats in (0.0, 1e-6)
    ]
    assert found[0]["gradient_norm"] > 1e-2
    assert found[1]["gradient_norm"] == 0.0
    assert (found[0]["distill/signal_tokens"], found[1]["distill/signal_tokens"]) == (8, 0)


def test_the_gate_is_a_mean_over_the_message() -> None:
    """The same shift at each token opens it or not, however many tokens there are."""
    for tokens in (1, 10, 1000):
        scores = TargetScores(*(torch.full((tokens,), value) for value in (-1.0, -2.0, -1.5, 0.3, 0.2)))
        shift = gate.shift_of(scores, torch.zeros(tokens, dtype=torch.long), 1)
        values = [float(value) for value in shift]
        assert values == pytest.approx([0.3, 1.0, 0.2, 0.5], rel=1e-4)
        for nats, verdict in ((0.19, 0), (0.21, 1)):
            assert int(gate.verdicts(shift, nats, 0, torch.zeros(1, dtype=torch.long))) == verdict


@pytest.mark.parametrize("entries", [300 * 12, 300 * 6, 300 * 4])
def test_chunks_judge_as_the_whole_does(monkeypatch: pytest.MonkeyPatch, entries: int) -> None:
    """Some targets together in a chunk, each in one of its own, each cut in two."""
    rng = random.Random(3)
    branches = [Branch(5 * n, random_ids(rng, 5), ((5 * n + 2, 5 * n + 5),), 1.0, key=str(n)) for n in range(7)]
    sample = sample_of(rng, branches)
    whole, reference = step_of([sample], gate=0.007)
    monkeypatch.setattr("offbook.train.head.CHUNK_ENTRIES", entries)
    found, trainer = step_of([sample], gate=0.007)
    assert {key: one.skipped for key, one in found.measured.items()} == {
        key: one.skipped for key, one in whole.measured.items()
    }
    assert {one.skipped for one in whole.measured.values()} >= {"", "towards_mistake"}
    assert found.metrics["gradient_norm"] == pytest.approx(whole.metrics["gradient_norm"], rel=1e-4)
    assert found.metrics["gradient_norm"] > 0.01
    for ours, theirs in zip(trainer.model.parameters(), reference.model.parameters(), strict=True):
        assert (ours - theirs).abs().mean() < 1e-5, "the first step of AdamW is 0.01 wide"


@given(st.lists(st.integers(1, 12), max_size=6), st.integers(0, 30), st.integers(1, 20))
def test_chunks_begin_with_groups_and_are_small_enough(targets: list[int], others: int, size: int) -> None:
    total, half = sum(targets) + others, -(-size // 2)
    ends = [0, *accumulate(targets)]
    chunks = _chunks([slice(*pair) for pair in pairwise(ends)], total, size)
    assert [place for chunk in chunks for place in range(chunk.start, chunk.stop)] == list(range(total))
    assert {*ends[:-1]} <= {chunk.start for chunk in chunks}
    if total > size:
        assert all(chunk.stop - chunk.start <= (half if chunk.start < sum(targets) else size) for chunk in chunks)


def test_the_likeliest_tokens_are_reported_where_the_two_differ() -> None:
    branch = Branch(10, random_ids(random.Random(5), 6), ((12, 20),), 1.0, key="one")
    result, _ = step_of([sample_of(random.Random(6), [branch])], top=3)
    measured = result.measured["one"]
    told = [place for place, nats in enumerate(measured.divergence) if nats > 0.01]
    assert told
    for place in range(8):
        for likely in (measured.student_top[place], measured.teacher_top[place]):
            logprobs = [logprob for _, logprob in likely]
            assert len(likely) == (3 if place in told else 0)
            assert logprobs == sorted(logprobs, reverse=True)
    ids = sample_of(random.Random(6), [branch]).ids
    for place in told:
        as_sampled = [logprob for token, logprob in measured.teacher_top[place] if token == ids[12 + place]]
        assert as_sampled in ([], [pytest.approx(measured.teacher[place], abs=1e-4)])
