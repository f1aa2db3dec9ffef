"""Small real things for the tests: a tokenizer, models of a few thousand parameters, samples."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from hypothesis import settings
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from offbook.agent.chat import ChatFormat, byte_chat
from offbook.train.checkpoint import Checkpoints, checkpoint_path
from offbook.train.forward import Ema, Frozen, Kind, Live
from offbook.train.trainer import Trainer
from offbook.types import Distill, Sample

torch.set_num_threads(1)
settings.register_profile("offbook", deadline=None)  # no test is timed
settings.load_profile("offbook")


@pytest.fixture(scope="session")
def chat() -> ChatFormat:
    """Bytes and the four marks: it spells anything."""
    return byte_chat()


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """The folder that all workers of a run have, for what is costly to make and only read."""
    place = tmp_path_factory.getbasetemp()
    folder = (place if worker_id == "master" else place.parent) / "shared"
    folder.mkdir(exist_ok=True)
    return folder


def made_once(folder: Path, make: Callable[[Path], object]) -> Path:
    """Made by the first worker and the first test file that ask for it."""
    done = Path(f"{folder}.done")
    with FileLock(f"{folder}.lock"):
        if not done.exists():
            make(folder)
            done.touch()
    return folder


@pytest.fixture(scope="session")
def model(shared: Path) -> Path:
    """A pocket model that has seen 300 episodes: it writes calls, most of them wrong."""
    from offbook.pocket.model import Recipe, make_pocket

    (made,) = made_once(
        shared / "model", lambda folder: make_pocket(folder, 0, lambda what, share: None, Recipe(episodes=300))
    ).iterdir()
    return made


def tiny_model(kind: str = "qwen3", vocabulary: int = 300, seed: int = 0, head_width: int = 12) -> PreTrainedModel:
    """Random weights, scaled up so that attention is far from uniform and mistakes in it show."""
    torch.manual_seed(seed)
    shape = {
        "vocab_size": vocabulary,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": head_width,
        "tie_word_embeddings": kind == "qwen3",
    }
    model = Qwen3ForCausalLM(Qwen3Config(**shape)) if kind == "qwen3" else LlamaForCausalLM(LlamaConfig(**shape))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4)
    return model.eval()


def interpreted(check: str) -> None:
    """Triton on a CPU, in a process of its own: whether it interprets is settled when it is imported."""
    pytest.importorskip("triton", reason="Triton's interpreter runs the kernels where there is no GPU")
    environment = {"TRITON_INTERPRET": "1", "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", check], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def in_bfloat16(model: PreTrainedModel) -> PreTrainedModel:
    """As `from_pretrained` would have it: buffers, such as the rotary frequencies, keep their precision."""
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    return model


def random_ids(rng: random.Random, count: int, vocabulary: int = 300) -> list[int]:
    return [rng.randrange(vocabulary) for _ in range(count)]


# Every kind under the name that branches call their teacher by default.
TEACHERS: dict[str, dict[str, Kind]] = {
    name: {Distill().teacher: kind}
    for name, kind in (
        ("live", Live()), ("frozen", Frozen()), ("ema", Ema())
    )
}  # fmt: skip


def distilled(samples: list[Sample], **how: Any) -> list[Sample]:
    """The same samples, all of their branches taught in this way."""
    return [
        replace(sample, branches=[replace(branch, distill=Distill(**how)) for branch in sample.branches])
        for sample in samples
    ]


def saved(trainer: Trainer, root: Path, step: int = 1, tokenizer_from: Path | None = None) -> Path:
    """A checkpoint, on disk."""
    with Checkpoints(trainer, root, tokenizer_from or root) as checkpoints:
        checkpoints.save(step)
    return checkpoint_path(root, step)
