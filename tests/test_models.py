"""From a model's name to its folder, with hubs that are silent or gone."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conftest import tiny_model
from huggingface_hub import constants
from smollm2 import smollm2

from offbook.agent.chat import ChatFormat, Transcript
from offbook.rl import models
from offbook.rl.models import load_model, model_folder
from offbook.types import OffbookError


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """No hub is in reach unless a test brings one; nothing is kept."""
    if request.node.get_closest_marker("slow"):
        return
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("OFFBOOK_CACHE", str(tmp_path / "offbook"))


@pytest.fixture
def silent_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """It takes calls and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setattr(models, "HUB_S", 0.3)
        yield server


def cached_snapshot(repository: Path) -> Path:
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    return snapshot


def test_a_hub_that_accepts_and_stays_silent_is_given_up(silent_hub: socket.socket) -> None:
    with pytest.raises(OffbookError, match=r"^there is no folder some/model, and the hub does not give it: timed out$"):
        model_folder("some/model", 0)


def test_a_model_in_the_hubs_cache_is_not_looked_up(tmp_path: Path, silent_hub: socket.socket) -> None:
    snapshot = cached_snapshot(tmp_path / "hub" / "models--some--model")
    assert model_folder("some/model", 0) == snapshot
    silent_hub.setblocking(False)
    with pytest.raises(BlockingIOError):  # nobody called
        silent_hub.accept()


def test_smollm2_is_a_name_on_the_hub(tmp_path: Path) -> None:
    snapshot = cached_snapshot(tmp_path / "hub" / "models--HuggingFaceTB--SmolLM2-135M-Instruct")
    assert model_folder("smollm2-135m", 0) == snapshot


@pytest.mark.parametrize("name", ["nowhere", "./nowhere", "/no/where", "~/x", "a/b/c"])
def test_a_name_that_is_no_model_is_refused(name: str) -> None:
    with pytest.raises(OffbookError, match=r"give `pocket`, `smollm2-135m`, a folder or a hub id"):
        model_folder(name, 0)


def test_a_folder_is_itself(tmp_path: Path) -> None:
    assert model_folder(str(tmp_path), 0) == tmp_path
    with pytest.raises(OffbookError, match=r"has no config\.json"):
        load_model(tmp_path)


def test_half_precision_is_widened(tmp_path: Path) -> None:
    tiny_model().to(torch.bfloat16).save_pretrained(tmp_path)
    model = load_model(tmp_path)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert not model.training


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_smollm2_speaks_and_its_chat_is_the_one_it_was_trained_on() -> None:
    """Downloads 93 MB once, into the cache."""
    from transformers import AutoTokenizer

    folder = smollm2()
    chat = ChatFormat.from_folder(folder)
    system, user = "You are a coding agent.", "What does `a + b` do, in 3 words?\n\n  And é?"
    transcript = Transcript(chat)
    transcript.add("system", system)
    transcript.add("user", user)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert transcript.prompt() == tokenizer(expected, add_special_tokens=False)["input_ids"]
    assert chat.decode(transcript.prompt()) == expected

    model = load_model(folder)
    assert "quantization_config" not in model.config.to_dict()
    question = [*chat.block("user", "What is the capital of France?"), *chat.header("assistant")]
    ids = torch.tensor([[*chat.block("system", "You answer in one word."), *question]], device=model.device)
    answer = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :].tolist()
    assert "Paris" in chat.decode(answer)


def test_a_run_folder_stands_for_its_newest_checkpoint(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for name in ("step_00002", "step_00010", "step_00011"):
        (run / "ckpt" / name).mkdir(parents=True)
    assert model_folder(str(run), 0) == run, "no run: it has no configuration"
    (run / "config.toml").write_text("seed = 0\n")
    with pytest.raises(OffbookError, match="has no finished checkpoint yet"):
        model_folder(str(run), 0)
    for name in ("step_00002", "step_00010"):
        (run / "ckpt" / name / "DONE").touch()
    assert model_folder(str(run), 0) == run / "ckpt" / "step_00010"


def test_code_that_a_model_brings_along_is_not_run(tmp_path: Path) -> None:
    """transformers would ask, and take a yes from standard input."""
    ran = tmp_path / "ran"
    (tmp_path / "config.json").write_text('{"model_type": "odd", "auto_map": {"AutoConfig": "brought.Config"}}')
    code = f"open({str(ran)!r}, 'w')\nfrom transformers import PretrainedConfig as Config\n"
    (tmp_path / "brought.py").write_text(code)
    ask = f"from offbook.rl.models import described\ndescribed({str(tmp_path)!r})"
    done = subprocess.run([sys.executable, "-c", ask], input="y\n" * 3, capture_output=True, text=True, timeout=120)
    assert "OffbookError: cannot read what" in done.stderr
    assert not ran.exists()
