"""Optimizers and checkpoints."""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import TEACHERS, in_bfloat16, saved, tiny_model
from safetensors.torch import load_file
from test_branches import sample_with_branches
from transformers import AutoModelForCausalLM, PreTrainedModel

from offbook.core.config import CheckpointConfig, Precision, TrainConfig
from offbook.rl.plan import free_host_memory
from offbook.train import checkpoint as writing
from offbook.train.checkpoint import Checkpoints, checkpoint_path, finished_steps, load_training_state
from offbook.train.forward import Ema, Frozen, Kind, Live
from offbook.train.schedule import learning_rate_share
from offbook.train.trainer import NotFinite, Trainer, WeightsLost
from offbook.types import Sample


@pytest.mark.parametrize(
    ("precision", "teacher"), [*[("float32", one) for one in (Live(), Ema(), Frozen())], ("bfloat16", Ema())]
)
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_restored_trainer_goes_on_bit_for_bit(
    tmp_path: Path, optimizer: str, precision: Precision, teacher: Kind
) -> None:
    settings = TrainConfig(optimizer=optimizer, precision=precision)
    teachers = {"live": teacher, "start": Frozen()}  # the name of a teacher is whatever branches call it
    samples = [[sample_with_branches(random.Random(number))] for number in range(4)]
    make = tiny_model if precision == "float32" else lambda: in_bfloat16(tiny_model())
    straight = Trainer(make(), settings, teachers)
    for batch in samples[:2]:
        straight.step(batch)
    with Checkpoints(straight, tmp_path, tmp_path) as checkpoints:
        checkpoints.save(2)
        for batch in samples[2:]:  # while it is being written
            straight.step(batch)

    resumed = Trainer(make(), settings, teachers)
    path = checkpoint_path(tmp_path, 2)
    stored = AutoModelForCausalLM.from_pretrained(path)
    assert stored.dtype == resumed.model.dtype
    resumed.model.load_state_dict(stored.state_dict())
    load_training_state(resumed, path)
    for batch in samples[2:]:
        resumed.step(batch)
    for (name, ours), theirs in zip(straight.model.named_parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    for name, master in straight.masters.named.items():
        assert torch.equal(master, resumed.masters.named[name]), name


def test_only_finished_checkpoints_count_and_old_ones_go(tmp_path: Path) -> None:
    trainer = Trainer(tiny_model(), TrainConfig())
    with Checkpoints(trainer, tmp_path, tmp_path, CheckpointConfig(keep=2)) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step)
    assert finished_steps(tmp_path) == [2, 3]
    (checkpoint_path(tmp_path, 3) / "DONE").unlink()
    assert finished_steps(tmp_path) == [2]
    assert free_host_memory() > 10**8


def test_tied_weights_are_snapped_and_written_once(tmp_path: Path) -> None:
    tied, untied = (saved(Trainer(tiny_model(kind), TrainConfig()), tmp_path / kind) for kind in ("qwen3", "llama"))
    assert "lm_head.weight" not in load_file(tied / "model.safetensors")
    assert "lm_head.weight" in load_file(untied / "model.safetensors")


@pytest.mark.parametrize(
    ("settings", "bytes_", "told", "due"),
    [
        (CheckpointConfig(), 10**6, "checkpoints of 1 MB: every step, and at the end", [1, 2, 3, 4]),
        (CheckpointConfig(), 2 * 10**9, "checkpoints of 2.0 GB: every 30 minutes, and at the end", [3]),
        (CheckpointConfig(every=2), 2 * 10**9, "checkpoints of 2.0 GB: every 2 steps, and at the end", [2, 4]),
    ],
)
def test_when_a_checkpoint_is_due(
    settings: CheckpointConfig, bytes_: int, told: str, due: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of twelve minutes."""
    monkeypatch.setattr(writing, "checkpoint_size", lambda trainer: bytes_)
    checkpoints, found = Checkpoints(Trainer(tiny_model(), TrainConfig()), tmp_path, tmp_path, settings), []
    assert str(checkpoints).startswith(told)
    start = time.monotonic()
    for step in (1, 2, 3, 4):
        monkeypatch.setattr(writing.time, "monotonic", lambda step=step: start + 12 * 60 * step)
        if checkpoints.is_due(step):
            found.append(step)
            checkpoints.save(step)
            checkpoints.wait()
    assert found == due
    assert checkpoints.size == bytes_


def test_what_ends_the_writing_ends_the_run(tmp_path: Path) -> None:
    """A disk that takes no more: a limit on the size of files, which is how the kernel says it without one."""
    code = (
        "import resource, signal, sys; sys.path.insert(0, sys.argv[2])\n"
        "from pathlib import Path; from conftest import tiny_model\n"
        "from offbook.core.config import TrainConfig; from offbook.train.trainer import Trainer\n"
        "from offbook.train.checkpoint import Checkpoints\n"
        "trainer, root = Trainer(tiny_model(), TrainConfig()), Path(sys.argv[1])\n"
        "with Checkpoints(trainer, root, root) as checkpoints: checkpoints.save(1)\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))\n"
        "with Checkpoints(trainer, root, root) as checkpoints:\n"
        "    checkpoints.save(2)\n"
        "    while True: checkpoints.check()\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path, Path(__file__).parent],
        capture_output=True, text=True, env=environment, timeout=120,
    )  # fmt: skip
    assert "OffbookError: cannot write the checkpoint" in done.stderr, done.stderr
    assert "the last finished one, of step 1, is kept" in done.stderr
    assert finished_steps(tmp_path) == [1]


def test_a_checkpoint_holds_no_pickle(tmp_path: Path) -> None:
    trainer = Trainer(tiny_model(), TrainConfig(), TEACHERS["ema"])
    trainer.step([sample_with_branches(random.Random(0))])
    path = saved(trainer, tmp_path)
    assert {file.suffix for file in path.rglob("*")} <= {".json", ".safetensors", ""}
    assert [file.name for file in path.glob("*.safetensors")] == ["model.safetensors"]  # vLLM loads all of these


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        ("advantage", math.nan, r"the gradient is nan \(rl/loss"),
        ("logprobs", math.nan, "a sampled token's log-probability under the policy that sampled it is not finite"),
        ("logprobs", -math.inf, "a sampled token's log-probability under the policy that sampled it is not finite"),
    ],
)
def test_a_step_that_is_no_number_changes_nothing(place: str, value: float, said: str) -> None:
    trainer = Trainer(tiny_model(), TrainConfig(), TEACHERS["ema"])
    good = sample_with_branches(random.Random(0))
    trainer.step([good])
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    slow = [value.clone() for value in trainer.teachers["live"].decoder.model.parameters()]
    bad = replace(good, **{place: [value] * 60})
    with pytest.raises(NotFinite, match=said):
        trainer.step([good, bad])
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(value, before[name]), name
    for value, was in zip(trainer.teachers["live"].decoder.model.parameters(), slow, strict=True):
        assert torch.equal(value, was)
    assert trainer.step([good]).metrics["gradient_norm"] > 0, "and it goes on"


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_weights_that_are_no_numbers_are_told(precision: str) -> None:
    model = tiny_model() if precision == "float32" else in_bfloat16(tiny_model())
    trainer = Trainer(model, TrainConfig(precision=precision, learning_rate=3e38), TEACHERS["live"])
    with pytest.raises(WeightsLost, match=r"the norm of the weights is (inf|nan) after it, of the gradient \d"):
        trainer.step([sample_with_branches(random.Random(0))])


def test_a_step_without_sampled_tokens_changes_nothing_and_says_so() -> None:
    trainer = Trainer(tiny_model(), TrainConfig(), TEACHERS["ema"])
    good = sample_with_branches(random.Random(0))
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    crashed = Sample(good.ids, logprobs=[0.0] * 60, advantage=[0.0] * 60, rl_weight=[0.0] * 60)
    for samples in ([], [crashed], [Sample([])]):
        result = trainer.step(samples)
        assert (result.skipped, result.metrics["train_tokens"], trainer.steps) == ("no tokens were sampled", 0, 0)
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert trainer.step([good, crashed]).skipped == ""


def test_k1_to_the_start_comes_off_the_advantage() -> None:
    """By hand: the gradient of a token of advantage A is that of A - beta * log(pi / start), taken as a number."""
    sample = replace(sample_with_branches(random.Random(1)), branches=[])
    beta, settings = 0.3, TrainConfig(ratio_cap=1.0)
    held = Trainer(tiny_model(), settings.model_copy(update={"reference_kl": beta}), {"start": Frozen()})
    with torch.no_grad():
        for parameter in held.model.parameters():
            parameter.mul_(1.05)

        def logp(model: PreTrainedModel) -> torch.Tensor:
            ids = torch.tensor(sample.ids)
            logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
            return torch.cat([torch.zeros(1), logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]])

        behaviour = logp(held.model)
        kl = behaviour - logp(tiny_model())
    sample = replace(sample, logprobs=behaviour.tolist())
    plain = Trainer(tiny_model(), settings)
    plain.model.load_state_dict(held.model.state_dict())
    moved = [advantage - beta * float(value) for advantage, value in zip(sample.advantage, kl, strict=True)]
    expected = plain.step([replace(sample, advantage=moved)])
    found = held.step([sample])
    assert found.metrics["gradient_norm"] == pytest.approx(expected.metrics["gradient_norm"], rel=1e-4)
    chosen = [float(value) for value, weight in zip(kl, sample.rl_weight, strict=True) if weight]
    assert found.metrics["rl/reference_kl"] == pytest.approx(sum(chosen) / len(chosen), rel=1e-3)
    for ours, theirs in zip(held.model.parameters(), plain.model.parameters(), strict=True):
        assert (ours - theirs).abs().max() < 1e-4


def test_the_learning_rate_rises_and_falls() -> None:
    """By hand."""

    def shares(final_share: float = 0.1, **how: object) -> list[float]:
        settings = TrainConfig(steps=4, **how)
        return [round(learning_rate_share(settings, step, final_share), 4) for step in (1, 2, 3, 4, 5, 9)]

    assert shares() == [0.3333, 0.6667, 1, 1, 1, 1]
    assert shares(warmup_steps=0) == [1] * 6
    assert shares(warmup_steps=0, schedule="linear", final_share=0.2) == [1, 0.8, 0.6, 0.4, 0.2, 0.2]
    assert shares(warmup_steps=2, schedule="linear", final_share=0) == [0.5, 0.75, 0.5, 0.25, 0, 0]
    assert shares(warmup_steps=0, schedule="cosine", final_share=0) == [1, 0.8536, 0.5, 0.1464, 0, 0]
    assert shares(warmup_steps=0, schedule="cosine", final_share=1) == [1] * 6


def test_the_rate_of_imitation_is_what_it_was() -> None:
    """Bit for bit: the pocket model of a seed stays the same."""
    settings = TrainConfig(schedule="cosine", steps=1500, warmup_steps=20)
    for step in range(1500):
        was = min(1.0, (step + 1) / 20) * 0.5 * (1 + math.cos(math.pi * step / 1500))
        assert learning_rate_share(settings, step + 1, final_share=0.0) == was


def test_how_far_trainer_and_engine_are_apart_is_told() -> None:
    """By tokens whose engine's log-probability is the trainer's, shifted by a known amount."""
    trainer = Trainer(tiny_model(), TrainConfig(learning_rate=1e-12, ratio_cap=2.0))
    plain = replace(sample_with_branches(random.Random(0)), branches=[], rl_weight=[0.0, *[1.0] * 59])
    with torch.no_grad():
        logp = trainer.model(torch.tensor([plain.ids])).logits[0, :-1].log_softmax(-1)
    exact = [0.0, *logp.gather(1, torch.tensor(plain.ids)[1:, None])[:, 0].tolist()]
    shifts = [0.1] * 60
    shifts[7], shifts[9] = 0.8, -3.0
    metrics = trainer.step([replace(plain, logprobs=[a - b for a, b in zip(exact, shifts, strict=True)])]).metrics
    assert metrics["rl/mismatch"] == pytest.approx((57 * 0.1 + 0.8 + 3.0) / 59, rel=1e-4)
    assert metrics["rl/truncated"] == pytest.approx(1 / 59), "the ratio is above 2 once"
