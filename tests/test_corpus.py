"""Which repositories are learned from: those that are held out come under many names, and licences under many words."""

from __future__ import annotations

import warnings

import pytest
from test_pretrain import MIT, module

from offbook.core.config import PretrainConfig
from offbook.stages.corpus import Corpus, licences_in

SPELLINGS = ["Toolz==1.0", "pypi:toolz", "pytoolz/toolz", "https://github.com/pytoolz/toolz.git", "toolz-1.0.tar.gz"]


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
def test_a_held_out_repository_is_known_however_it_comes(folder: str, files: dict[str, bytes]) -> None:
    corpus = Corpus(PretrainConfig(licences=["any"], hold_out=["toolz"]))
    assert corpus.select(folder, {"b.py": module(10).encode(), **files}) is None
    assert [line.split(" (")[0] for line in corpus.about_held_out()] == [f"held out: {folder}"]


@pytest.mark.parametrize("spelled", SPELLINGS)
def test_hold_out_takes_a_name_a_version_an_archive_or_a_url(spelled: str) -> None:
    corpus = Corpus(PretrainConfig(licences=["any"], hold_out=[spelled]))
    assert corpus.select("toolz-main", {"b.py": module(10).encode()}) is None
    other = Corpus(PretrainConfig(licences=["any"], hold_out=["tools"]))
    assert other.select("toolz-main", {"b.py": module(10).encode()}) is not None
    assert list(other.about_held_out()) == ["pretrain.hold_out: nothing that was read is tools"]


APACHE = b"Apache License\nVersion 2.0\n\nTERMS AND CONDITIONS FOR USE, REPRODUCTION, AND DISTRIBUTION\n"
BSD = b"Redistribution and use in source and binary forms"


@pytest.mark.parametrize(
    ("text", "licence"),
    [
        (b"Business Source License 1.1\nChange License: Apache License, Version 2.0", "a restricted licence"),
        (b'"Commons Clause" License Condition v1.0\n' + APACHE, "a restricted licence"),
        (APACHE + b'"Commons Clause" License Condition v1.0\n', "a restricted licence"),
        (b"Creative Commons Attribution-NonCommercial 4.0\nSee also its Apache License.", "a restricted licence"),
        (b"Attribution-NoDerivatives 4.0 International. Code: " + MIT, "a restricted licence"),
        (BSD + b", for non-commercial purposes only, are permitted", "a restricted licence"),
        (MIT + b"\nCommercial use is prohibited.", "a restricted licence"),
        (MIT + b"\nThe Software shall be used for Good, not Evil.", "a restricted licence"),
        (b"Hippocratic License 3\n" + MIT, "a restricted licence"),
        (b"This software is proprietary to Acme.\nThird parties: " + MIT, "a restricted licence"),
        (b"Copyright Acme. All rights reserved. Contains parts under the Apache License.", "an unknown licence"),
        (APACHE, "Apache-2.0"),
        (b"Copyright Acme. All rights reserved.\n" + BSD, "BSD"),
        (b"This is free and unencumbered software, for any purpose, commercial or non-commercial", "Unlicense"),
        (b"GNU GENERAL PUBLIC LICENSE\nproprietary programs; only for noncommercial distribution", "GPL"),
    ],
)
def test_a_text_that_mentions_a_permissive_licence_is_not_yet_one(text: bytes, licence: str) -> None:
    assert licences_in({"LICENSE": text})["."] == licence


@pytest.mark.parametrize(
    ("told", "licence"),
    [
        ("MIT", "MIT"),
        ("MIT License", "MIT"),
        ("Mitre", "Mitre"),
        ("Mitre proprietary", "a restricted licence"),
        ("MIT with Commons Clause", "a restricted licence"),
        ("Apache 2.0, non-commercial", "a restricted licence"),
        ("Apache-2.0 WITH LLVM-exception", "Apache-2.0"),
        ("BUSL-1.1", "a restricted licence"),
        ("CC-BY-NC-4.0", "a restricted licence"),
        ("CC0-1.0", "CC0-1.0"),
        ("UNLICENSED", "UNLICENSED"),
        ("GPLv3", "GPL"),
    ],
)
def test_a_licence_is_named_by_a_whole_word(told: str, licence: str) -> None:
    assert licences_in({"PKG-INFO": f"Name: x\nLicense: {told}\n".encode()})["."] == licence


@pytest.mark.parametrize(
    ("path", "text", "is_taken"),
    [
        ("old.py", "print 'Python 2'\n", False),
        ("template.py", "import {{ package }}\n", False),
        ("stub.pyi", "def half(", False),
        ("deep.py", "x = " + "(\n" * 50_000 + "1" + ")\n" * 50_000, False),  # neither parser has room for it
        ("signs.py", "x = " + "- \\\n" * 20_000 + "1\n", False),
        ("sum.py", "x = (" + "1 +\n" * 20_000 + "1)\n", False),
        ("marked.py", "\ufeffx = 1\n", True),
        ("warned.py", "x = '\\d'\nassert (x is 1, x)\n", True),
        ("code.js", "let x = {\n", True),
        ("notes.md", "def half(\n", True),
    ],
)
def test_python_that_does_not_parse_is_counted_and_left_out(path: str, text: str, is_taken: bool) -> None:
    corpus = Corpus(PretrainConfig(licences=["any"]))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        taken = corpus.select("one", {path: text.encode(), "README.md": b"Other words.\n"})
    assert taken is not None
    assert (path in {file.path for file in taken.files}) == is_taken
    assert corpus.left_out == ({} if is_taken else {"Python files that do not parse": 1})
    assert not said, "what others' code is warned of is nobody's business here"
