"""Which repositories are learned from: those that are held out come under many names, and licences under many words."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from test_pretrain import module, repository

from offbook.config import PretrainConfig
from offbook.stages.corpus import Corpus


@pytest.mark.parametrize(
    "spelled",
    ["toolz", "Toolz==1.0", "pypi:toolz", "pytoolz/toolz", "https://github.com/pytoolz/toolz.git", "toolz-1.0.tar.gz"],
)
@pytest.mark.parametrize(
    ("folder", "files"),
    [
        ("toolz-1.0.0", {}),
        ("toolz-main", {}),
        ("toolz-master", {}),
        ("clone", {"pyproject.toml": b"[project]\n  name = 'toolz'\n"}),
        ("clone", {"pyproject.toml": b'[[tool.uv.index]]\nname = "torch"\n[project]\nname = "toolz"\n'}),
        ("clone", {"pyproject.toml": b'[tool.poetry]\nname = "toolz"\n'}),
        ("clone", {"pyproject.toml": b'[project\nname = "toolz"\n'}),
        ("clone", {"setup.cfg": b"[metadata]\nname = toolz\n"}),
        ("clone", {"setup.py": b"from setuptools import setup\nsetup(version='1', name='toolz')\n"}),
        ("clone", {"toolz/__init__.py": b""}),
        ("clone", {"src/toolz/__init__.py": b""}),
        ("monorepo", {"packages/toolz/pyproject.toml": b'[project]\nname = "toolz"\n'}),
        ("app", {"app/__init__.py": b"", "app/_vendor/__init__.py": b"", "app/_vendor/toolz/core.py": b""}),
    ],
)
def test_a_held_out_repository_is_known_however_it_comes(folder: str, files: dict[str, bytes], spelled: str) -> None:
    corpus = Corpus(PretrainConfig(licences=["any"], hold_out=[spelled]))
    assert corpus.taken(folder, {"b.py": module(10).encode(), **files}) is None
    assert [line.split(" (")[0] for line in corpus.about_held_out()] == [f"held out: {folder}"]


def test_an_archive_of_a_held_out_repository_is_held_out(tmp_path: Path) -> None:
    folder = repository(tmp_path, "toolz-main")
    archive = shutil.make_archive(str(folder), "zip", tmp_path, folder.name)
    corpus = Corpus(PretrainConfig(data=[archive], hold_out=["toolz"]))
    assert list(corpus.repositories(0, lambda *of: None)) == []
    assert list(corpus.about_held_out()) == ["held out: toolz-main"]
