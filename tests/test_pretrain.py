"""Continued pretraining: what is taken, what a window is, positions that are stretched, a run that goes on exactly."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny_model
from safetensors.torch import load_file
from test_evals_contamination import ASK, BODY, OTHER, RENAMED, task
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from offbook.agent.chat import ChatFormat
from offbook.core.config import Config, PretrainConfig, TrainConfig
from offbook.core.runfolder import RunFolder, latest_checkpoint
from offbook.pocket.model import CHAT_TEMPLATE
from offbook.rl.models import load_model
from offbook.rl.train import train
from offbook.stages.corpus import Corpus, File, Repository, in_order, licences_in
from offbook.stages.pretrain import encoder, extended, pretrain, sample_of, windows_of
from offbook.tasks.contamination import Sought
from offbook.train.forward import Decoder, imitation_loss, token_logprobs
from offbook.train.schedule import learning_rate_share
from offbook.train.trainer import Trainer
from offbook.types import OffbookError

MIT = b"MIT License\n\nPermission is hereby granted, free of charge, to any person obtaining a copy"
GPL = b"GNU GENERAL PUBLIC LICENSE\nVersion 3"
PSF = (
    b"PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2\nmaterial that was\npreviously distributed under the GNU General\n"
    b"Public License (GPL)"
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, chat: ChatFormat) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    model = tiny_model(vocabulary=chat.tokenizer.get_vocab_size())
    model.config.max_position_embeddings = 512
    model.save_pretrained(folder)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=chat.tokenizer, chat_template=CHAT_TEMPLATE)
    wrapped.save_pretrained(folder)
    return folder


def module(number: int) -> str:
    rng = random.Random(number)
    lines = [f"def function_{number}_{k}(a, b):\n    return a * {rng.randrange(99)} + b - {k}\n" for k in range(4)]
    return "\n\n".join(lines)


def repository(root: Path, name: str, licence: bytes | None = MIT, first: int = 0) -> Path:
    folder = root / name
    (folder / "pkg").mkdir(parents=True)
    (folder / "tests").mkdir()
    if licence:
        (folder / "LICENSE").write_bytes(licence)
    (folder / "pkg" / "a.py").write_text("from pkg import b\n\n\n" + module(first))
    (folder / "pkg" / "b.py").write_text(module(first + 1))
    (folder / "tests" / "test_a.py").write_text("from pkg import a\n\n\n" + module(first + 2))
    (folder / "README.md").write_text(f"The package {name} has two modules and a test.\n")
    return folder


def config_for(tiny: Path, out: Path, data: list[Path], **more: Any) -> Config:
    settings = {"data": [str(path) for path in data], "context": 256, "batch_tokens": 600, "learning_rate": 1e-3}
    settings |= {"validation_share": 0.3, "epochs": 2, **more}
    return Config(model=str(tiny), out=str(out), pretrain=settings, checkpoint={"every": 1, "keep": 99})


def test_what_is_not_taken_is_counted_by_its_reason() -> None:
    corpus = Corpus(PretrainConfig(hold_out=["kept-apart"]))
    files = {
        "LICENSE": MIT,
        "a.py": module(1).encode(),
        "copy_of_a.py": module(1).replace("function_1_0", "renamed_it").encode(),
        "huge.py": b"x = 1\n" * 50_000,
        "binary.py": b"\0\1\2",
        "latin.py": "caf\u00e9 = 1\n".encode("latin-1"),
        "empty.py": b"\n",
        "broken.py": b"def ( nothing:\n    the parser takes\n",
        "image.png": b"\x89PNG",
    }
    taken = corpus.select("one", files)
    assert taken is not None
    assert [file.path for file in taken.files] == ["a.py"]
    corpus.select("two", {**files, "LICENSE": GPL})
    corpus.select("three", {"a.py": b"x = 1\n"})
    corpus.select("kept-apart", files)
    assert corpus.left_out == {
        "near-duplicates": 1, "huge files": 1, "binary files": 2, "empty files": 1,
        "Python files that do not parse": 1, "files of other kinds": 2,
        "repositories under GPL": 1, "repositories under no licence": 1, "repositories that are held out": 1,
    }  # fmt: skip


def test_files_under_a_licence_of_their_own_are_held_to_it() -> None:
    corpus = Corpus(PretrainConfig())
    files = {
        "LICENSE": MIT,
        "a.py": module(1).encode(),
        "vendor/it/LICENSE.txt": GPL,
        "vendor/it/deep/b.py": module(2).encode(),
        "vendor/other/LICENSE": MIT,
        "vendor/other/c.py": module(3).encode(),
        "docs/_static/license.svg": b"<svg/>",
        "docs/_static/g.js": module(7).encode(),
        "d.py": b"# SPDX-License-Identifier: GPL-3.0-or-later\n" + module(4).encode(),
        "e.py": b"# SPDX-License-Identifier: (GPL-2.0-only OR BSD-3-Clause)\n" + module(5).encode(),
        "f.py": b"# SPDX-License-Identifier: MIT AND GPL-2.0\n" + module(6).encode(),
    }
    taken = corpus.select("one", files)
    assert taken is not None
    assert [file.path for file in taken.files] == ["a.py", "docs/_static/g.js", "vendor/other/c.py"]
    assert corpus.left_out == {"files under GPL": 4, "files of other kinds": 4}


@pytest.mark.parametrize("origin", ["Some_Shop==1.2", "some-shop"])
def test_a_measured_repository_is_known_in_any_version_and_folder(origin: str) -> None:
    corpus = Corpus(PretrainConfig(licences=["any"]), origins=frozenset([origin]))
    code = {"b.py": module(10).encode()}
    assert corpus.select("some.shop", code) is None
    assert corpus.select("clone", {**code, "pyproject.toml": b'[project]\nname = "some_shop"\n'}) is None
    assert corpus.select("clone", {**code, "PKG-INFO": b"Metadata-Version: 2.1\nName: Some-Shop\n"}) is None
    assert corpus.left_out == {"repositories that are held out": 3}
    assert corpus.select("shop", {**code, "pyproject.toml": b'[project]\nname = "shop"\n'}) is not None


@pytest.mark.parametrize(
    ("files", "licence"),
    [
        ({"LICENSE.txt": MIT}, "MIT"),
        ({"COPYING": GPL}, "GPL"),
        ({"LICENSE": b"All rights reserved."}, "an unknown licence"),
        ({"PKG-INFO": b"Name: x\nLicense: BSD-3-Clause\n"}, "BSD"),
        ({"pyproject.toml": b'[project]\nlicense = {text = "MIT"}\n'}, "MIT"),
        ({"docs/LICENSE": MIT}, ""),
        ({"LICENSE": b"All rights reserved.", "LICENSE.MIT": MIT}, "an unknown licence"),
        ({"license.py": b"x = 1", "PKG-INFO": b"License: MIT\n"}, "MIT"),
        ({"license_check.py": b"x = 1", "LICENSE": GPL}, "GPL"),
        ({"LICENSE": PSF}, "PSF-2.0"),
        ({"LICENSE": PSF + GPL}, "GPL"),
    ],
)
def test_a_licence_is_told_by_its_words(files: dict[str, bytes], licence: str) -> None:
    assert licences_in(files).get(".", "") == licence


def test_files_are_read_from_the_words_to_the_tests() -> None:
    domains = {
        "tests/test_a.py": "tests",
        "b.py": "python",
        "x.toml": "settings",
        "a.py": "python",
        "README.md": "docs",
    }
    order = in_order([File(path, "", domain) for path, domain in domains.items()])
    assert [file.path for file in order] == ["README.md", "x.toml", "a.py", "b.py", "tests/test_a.py"]


def test_windows_hold_one_repository_and_every_token_of_it(tiny: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    files = [File("long.py", module(3), "python"), File("README.md", "words", "docs")]
    windows = windows_of(Repository("r", "MIT", files), encoder(tokenizer), 64)
    sizes = list(map(len, windows))
    assert max(sizes) == 64
    assert all(size >= 64 - len("# README.md\n") for size in sizes[:-1]), "full, but for what a path would take"
    text = "".join(map(tokenizer.decode, windows))
    assert text.count("# long.py\n") > 2, "after its path, wherever it goes on"
    assert text.replace("# long.py\n", "") == module(3).rstrip() + "\n\n# README.md\nwords\n\n"


def test_control_tokens_in_source_are_plain_characters(tiny: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    source = "END = '<|im_end|>'\nSTART = '<|im_start|>'\n"
    files = [File("<|im_end|>.py", source, "python")]
    (window,) = windows_of(Repository("r", "MIT", files), encoder(tokenizer), 4096)
    assert not set(window) & set(tokenizer.all_special_ids)
    assert tokenizer.decode(window).count("<|im_end|>") == 2, "the path, and the text"


def test_a_file_with_a_measured_solution_is_left_out(tmp_path: Path) -> None:
    head = "def report(rows, limit):"
    measured = task(tmp_path, "t", head, BODY, ASK, "shop")
    sought = Sought([measured])
    assert sought.in_text(f"import os\n\n\n{head}\n{BODY}\n\nprint(os)\n")
    assert sought.in_text(f"def other(lines, most):\n{RENAMED}"), "under other names, too"
    assert not sought.in_text((measured.tree / "pkg.py").read_text()), "the tree has no solution"
    assert not sought.in_text(f"{head}\n{OTHER}")
    corpus = Corpus(PretrainConfig(licences=["any"]), sought, frozenset([measured.origin]))
    taken = corpus.select("elsewhere", {"a.py": f"{head}\n{BODY}".encode(), "b.py": module(9).encode()})
    assert taken is not None
    assert [file.path for file in taken.files] == ["b.py"]
    assert corpus.select("shop", {"b.py": module(10).encode()}) is None
    assert corpus.left_out == {"files with a solution that is measured on": 1, "repositories that are held out": 1}


def test_the_loss_of_a_step_is_over_what_is_predicted(tiny: Path) -> None:
    """As that of validation is: not over the first token of each window."""
    windows = [[5, 6, 7], [8, 9, 10, 11, 12, 13]]
    trainer = Trainer(AutoModelForCausalLM.from_pretrained(tiny), TrainConfig())
    nats = 0.0
    for window in windows:
        with torch.no_grad():
            logp = trainer.model(input_ids=torch.tensor([window])).logits[0].log_softmax(-1)
        nats -= sum(float(logp[place, token]) for place, token in enumerate(window[1:]))
    samples = list(map(sample_of, windows))
    assert imitation_loss(trainer.student, samples, trainer.settings.micro_tokens) == pytest.approx(nats / 7, rel=1e-5)
    assert trainer.step(samples).metrics["ce/loss"] == pytest.approx(nats / 7, rel=1e-5)


class Stopped(Exception):
    pass


def test_a_run_that_was_stopped_goes_on_exactly(tiny: Path, tmp_path: Path) -> None:
    """And one with stretched positions, whose checkpoint says so."""
    data = [repository(tmp_path, f"r{number}", first=10 * number) for number in range(6)]
    more = {"context": 1024, "rope": "yarn", "batch_tokens": 900}
    lines: list[str] = []
    whole = pretrain(config_for(tiny, tmp_path / "whole", data, **more), tell=lines.append)
    rows, _ = whole.metrics()
    assert rows[-1]["step"] == json.loads(whole.data_file.read_text())["steps"] > 2
    assert rows[-1]["validation/loss"] < 5.6, "below ln 260: it has learned something"
    assert any("6 repositories, 24 files" in line for line in lines)

    def stop(row: dict[str, Any]) -> None:
        if row["step"] == 2:
            raise Stopped

    again = config_for(tiny, tmp_path / "again", data, **more)
    with pytest.raises(Stopped):
        pretrain(again, on_step=stop)
    assert max(RunFolder(again.out).checkpoints()) == 2
    pretrain(again)
    ends = [load_file(latest_checkpoint(folder) / "model.safetensors") for folder in (whole, RunFolder(again.out))]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
    written = json.loads((latest_checkpoint(whole) / "config.json").read_text())
    assert written["max_position_embeddings"] == 1024
    assert written["rope_parameters"]["rope_type"] == "yarn"
    assert written["rope_parameters"]["factor"] == 2.0
    loaded = AutoModelForCausalLM.from_pretrained(latest_checkpoint(whole))
    assert loaded.model.rotary_emb.rope_type == "yarn"
    (data[0] / "pkg" / "b.py").write_text(module(77))
    with pytest.raises(OffbookError, match=r"holds a run on other data"):
        pretrain(again)
    with pytest.raises(OffbookError, match=r"holds a run of `offbook pretrain`; give another --out"):
        train(again)


def test_positions_are_stretched_once_and_when_asked(tiny: Path, tmp_path: Path) -> None:
    assert extended(tiny, tmp_path / "none", 512, "", lambda _: None) == tiny
    with pytest.raises(OffbookError, match=r"pretrain.context is 2048 and the model reads 512 tokens"):
        extended(tiny, tmp_path / "no", 2048, "", lambda _: None)
    extended(tiny, tmp_path / "y", 1024, "yarn", lambda _: None)
    with pytest.raises(OffbookError, match=r"stretched already \(yarn\)"):
        extended(tmp_path / "y", tmp_path / "z", 2048, "yarn", lambda _: None)


def test_a_checkpoint_reads_far_positions_as_it_was_trained_to(tiny: Path, tmp_path: Path) -> None:
    """By transformers, as by the trainer; and by the formulas of the paper."""
    data = [repository(tmp_path, f"r{number}", first=10 * number) for number in range(3)]
    lines: list[str] = []
    config = config_for(tiny, tmp_path / "yarn", data, context=2048, rope="yarn", epochs=1)
    folder = latest_checkpoint(pretrain(config, tell=lines.append))
    assert "positions are stretched by yarn from 512 to 2048" in lines
    written = json.loads((folder / "config.json").read_text())
    assert written["max_position_embeddings"] == 2048
    told = written["rope_parameters"]  # what transformers 5 and vLLM from 0.24 on read; there is no other key for it
    known = {"original_max_position_embeddings": 512, "rope_theta": 10_000.0}
    assert told == {"rope_type": "yarn", "factor": 4.0, **known}
    width = written["head_dim"]
    plain = [10_000 ** (-2 * pair / width) for pair in range(width // 2)]
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    rotary = loaded.model.rotary_emb
    assert rotary.inv_freq.tolist() == pytest.approx(yarn_rotations(plain, width, 512, 4.0), rel=1e-4)
    assert rotary.attention_scaling == pytest.approx(0.1 * math.log(4) + 1)
    ids = random.Random(0).choices(range(200), k=1600)
    with torch.no_grad():
        logits = loaded(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
    by_transformers = [float(logits[place - 1, ids[place]]) for place in range(1500, 1600)]
    trained = token_logprobs(Decoder(load_model(folder)), ids, 1.0)
    assert trained[1500:] == pytest.approx(by_transformers, abs=1e-3)
    shutil.copytree(folder, tmp_path / "unstretched")
    shutil.copyfile(tiny / "config.json", tmp_path / "unstretched" / "config.json")
    other = token_logprobs(Decoder(load_model(tmp_path / "unstretched")), ids, 1.0)
    assert max(abs(one - two) for one, two in zip(other[1500:], trained[1500:], strict=True)) > 0.1, "it matters"


def yarn_rotations(plain: list[float], width: int, known: int, factor: float) -> list[float]:
    """2309.00071, section 3.2: those that turn less than once in what is known are interpolated, those that turn more
    than 32 times are left alone, and in between it is a line over the pairs, whose ends are whole pairs."""

    def pair(turns: float) -> float:
        return width * math.log(known / (turns * 2 * math.pi)) / (2 * math.log(10_000))

    first, last = max(math.floor(pair(32)), 0), min(math.ceil(pair(1)), width - 1)
    slow = [min(1.0, max(0.0, (number - first) / (last - first))) for number in range(len(plain))]
    return [one * (1 - share) + one / factor * share for one, share in zip(plain, slow, strict=True)]


def test_wsd_is_level_and_falls_at_the_end() -> None:
    settings = TrainConfig(steps=100, schedule="wsd", warmup_steps=10)
    shares = [learning_rate_share(settings, step, final_share=0.0) for step in range(1, 102)]
    assert shares[4] == 0.5
    assert shares[10:80] == [1.0] * 70
    assert shares[90] == pytest.approx(0.5)
    assert shares[100] == pytest.approx(0.0)


def test_nothing_to_learn_from_is_said(tiny: Path, tmp_path: Path) -> None:
    data = [repository(tmp_path, "closed", licence=None)]
    with pytest.raises(OffbookError, match=r"nothing is left to pretrain on; 1 repositories under no licence left out"):
        pretrain(config_for(tiny, tmp_path / "run", data))
    (tmp_path / "empty").mkdir()
    with pytest.raises(OffbookError, match=r"nothing is left to pretrain on; 1 empty repositories left out"):
        pretrain(config_for(tiny, tmp_path / "run", [tmp_path / "empty"]))
    with pytest.raises(OffbookError, match=r"there is nothing to pretrain on; give --data"):
        pretrain(config_for(tiny, tmp_path / "run", []))
    with pytest.raises(OffbookError, match=r"there is no .*absent"):
        pretrain(config_for(tiny, tmp_path / "run", [tmp_path / "absent"]))


def test_a_folder_is_read_whatever_lies_in_it(tmp_path: Path) -> None:
    folder = repository(tmp_path, "one")
    (folder / "pkg" / "link.py").symlink_to("/etc/hostname")
    (folder / "pkg" / "loop.py").symlink_to("loop.py")
    (folder / "inside").symlink_to("pkg")
    (folder / "outside").symlink_to("/etc")
    os.mkfifo(folder / "pkg" / "pipe.py")
    (folder / ".venv").mkdir()
    (folder / ".venv" / "c.py").write_text(module(7))
    with (folder / "pkg" / "huge.py").open("wb") as file:
        file.truncate(2**40)  # more than there is memory
    (folder / "pkg" / "nested.py").write_text("x = " + "(" * 5000 + ")" * 5000)
    corpus = Corpus(PretrainConfig(data=[str(folder)]))
    (found,) = corpus.repositories(0, lambda what, share: None)
    assert found.name == "one"
    assert {file.path for file in found.files} >= {"pkg/a.py", "pkg/b.py", "tests/test_a.py", "README.md"}
    assert corpus.left_out == {
        "links and devices": 5, "huge files": 1, "generated or minified files": 1, "files of other kinds": 1,
    }  # fmt: skip
