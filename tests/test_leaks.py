"""The audit: planted leftovers are all found and named, clean trees raise no alarm; scrubbing leaves source alone."""

from __future__ import annotations

import ast
import difflib
import io
import keyword
import random
import re
import shutil
import tokenize
import zipfile
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from leaks.plants import (
    BODY,
    DELETED,
    DOCSTRING,
    MODULE,
    NAME,
    ORIGINAL,
    OTHERS,
    PLANTS,
    SIGNATURE,
    write,
    write_tree,
    zipped,
)
from leaks.plants import run as run_command

from offbook.core import copies
from offbook.tasks.factory.audit import reading
from offbook.tasks.factory.audit.corpus import Corpus, Leak
from offbook.tasks.factory.audit.scrub import scrub
from offbook.tasks.git import single_commit
from offbook.types import OffbookError

KEY = f"{MODULE}::{NAME}"
REMOVED = {KEY: DELETED}
STUB = SIGNATURE + DOCSTRING + f'    raise NotImplementedError("{NAME}")\n'


def audit(places: dict[str, Path], removed: dict[str, str]) -> list[Leak]:
    """Every leak, and as a leak of nothing in particular every file that could not be read."""
    corpus = Corpus(places)
    return corpus.leaks(removed) + corpus.unread_leaks


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A shop without its discounts."""
    folder = tmp_path / "tree"
    write_tree(folder, OTHERS)
    return folder


# --- what is planted is found


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_leak_is_found_and_named(tree: Path, name: str):
    expected = "tree/" + PLANTS[name](tree)
    leaks = audit({"tree": tree}, REMOVED)
    assert [leak.path for leak in leaks if leak.path.startswith(expected)], leaks
    assert all(leak.what == KEY and leak.evidence for leak in leaks)


def test_a_method_of_a_deleted_class_is_found_alone(tree: Path):
    method = "class Shop:\n    x = 1\n\n" + "".join(f"    {line}\n" for line in DELETED.splitlines())
    rest = "".join(f"    def other{n}(self):\n        return [self.x + {n}, {n} * {n}]\n\n" for n in range(20))
    write(tree, "docs/a.md", f"```\n{DELETED}```\n")
    assert [leak.what for leak in audit({"tree": tree}, {"shop/a.py::Shop": method + rest})] == ["shop/a.py::Shop"]


# --- what is no leak


def test_comparisons_beside_markup_do_not_pass_for_tags(tree: Path):
    code = DELETED.replace("0 <= percent <= 100", "0 <percent and 100> percent or 1 <percent and 99> percent")
    code = code.replace("max(total, floor)", "total if floor <total and 0> total or 2 <total and 3> total else floor")
    write(tree, "shop/page.py", f'END = "</b>"\n\n\n{code}')
    assert [(leak.path, leak.how) for leak in audit({"tree": tree}, {KEY: code})] == [("tree/shop/page.py", "text")]


def test_a_clean_tree_has_none(tree: Path):
    assert audit({"tree": tree}, REMOVED) == []


def test_small_code_has_to_be_whole_and_under_its_name(tree: Path):
    small = {"a.py::share_of": "def share_of(self, part):\n    return round(self.total[part] / sum(self.total), 3)\n"}
    write(tree, "shop/a.py", small["a.py::share_of"].replace("share_of", "quota"))
    assert audit({"tree": tree}, small) == []
    write(tree, "docs/b.md", small["a.py::share_of"].replace("3", "4"))
    assert audit({"tree": tree}, small) == []
    write(tree, "shop/c.py", small["a.py::share_of"])
    assert [leak.path for leak in audit({"tree": tree}, small)] == ["tree/shop/c.py"]


def test_tiny_code_is_not_searched_for_and_named(tree: Path):
    tiny = {"a.py::first": "def first(items):\n    return items[0]\n"}
    write(tree, "shop/a.py", tiny["a.py::first"])
    assert copies.wanted_pieces("a.py::first", tiny["a.py::first"]) == []
    assert audit({"tree": tree}, tiny) == []


def test_half_a_function_is_a_leak_in_a_document_and_not_in_source(tree: Path):
    half = SIGNATURE + "".join(BODY.splitlines(keepends=True)[:6])
    write(tree, "shop/other.py", half)
    single_commit(tree)  # the same content as a git object is source too
    assert audit({"tree": tree}, REMOVED) == []
    write(tree, "docs/other.md", half + "\n\nand so on.\n")
    assert [leak.path for leak in audit({"tree": tree}, REMOVED)] == ["tree/docs/other.md"]


def test_scattered_pieces_of_a_function_are_none(tree: Path):
    filler = "".join(f"value_{n} = compute({n}, other={n})\n" for n in range(60))
    lines = BODY.splitlines(keepends=True)
    pieces = ["".join(lines[:4]), "".join(lines[4:6]), "".join(lines[6:])]
    write(tree, "shop/long.txt", filler.join(pieces))
    assert audit({"tree": tree}, REMOVED) == []
    write(tree, "shop/short.txt", "and\n".join(pieces))
    assert [leak.path for leak in audit({"tree": tree}, REMOVED)] == ["tree/shop/short.txt"]


def functions_of(package: Path) -> list[tuple[Path, str, ast.AST]]:
    found: list[tuple[Path, str, ast.AST]] = []
    for path in sorted(package.rglob("*.py")):
        module = ast.parse(path.read_text())
        classes = [node for node in module.body if isinstance(node, ast.ClassDef)]
        for owner in [module, *classes]:
            prefix = f"{owner.name}." if isinstance(owner, ast.ClassDef) else ""
            functions = [node for node in owner.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
            found += [(path, prefix + node.name, node) for node in functions]
    return found


def bare_tokens(source: str) -> list[str]:
    """Names that could be local as one; the rest of the tokens as they are."""
    kinds = (tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING)
    tokens = [token.string for token in tokenize.generate_tokens(io.StringIO(source).readline) if token.type in kinds]
    return ["name" if token.isidentifier() and not keyword.iskeyword(token) else token for token in tokens]


def share_copied(body: str, other: str) -> float:
    """By difflib, which shares nothing with the audit."""
    wanted = bare_tokens(body)
    blocks = difflib.SequenceMatcher(None, wanted, bare_tokens(other), autojunk=False).get_matching_blocks()
    return sum(block.size for block in blocks if block.size >= 4) / len(wanted)


@pytest.mark.parametrize("package", ["click", "rich", "hypothesis", "pydantic", "libcst.codemod"])
def test_an_alarm_in_a_real_package_is_a_true_duplicate(package: str, tmp_path: Path):
    """Functions are deleted one at a time. Where there is an alarm, the file has a function that is nearly the same."""
    spec = find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    root = tmp_path / package
    ignored = shutil.ignore_patterns("__pycache__", "*.so", "tests", "v1", "_vendor")
    shutil.copytree(Path(spec.origin).parent, root, ignore=ignored)
    corpus = Corpus({"tree": root})
    functions = random.Random(0).sample(functions_of(root), 30)
    alarms = 0
    for path, name, node in functions:
        lines = path.read_text().splitlines(keepends=True)
        source = "".join(lines[node.lineno - 1 : node.end_lineno])
        relative = path.relative_to(root).as_posix()
        without = "".join([*lines[: node.lineno - 1], " " * node.col_offset, "pass\n", *lines[node.end_lineno :]])
        for leak in corpus.leaks({f"{relative}::{name}": source}, files={relative: without}):
            alarms += 1
            other = without if leak.path == f"tree/{relative}" else (root / leak.path.removeprefix("tree/")).read_text()
            body = "".join(lines[node.body[0].lineno - 1 : node.end_lineno])
            segments = [ast.get_source_segment(other, each) or "" for each in functions_in(other)]
            assert max(share_copied(f"if 1:\n{body}", segment) for segment in segments) >= 0.75, leak
    assert alarms <= 4


def functions_in(source: str) -> list[ast.AST]:
    return [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


# --- the corpus


def test_files_of_the_task_take_the_place_of_those_indexed(tree: Path):
    write(tree, MODULE, ORIGINAL)
    corpus = Corpus({"tree": tree})
    assert [leak.path for leak in corpus.leaks(REMOVED)] == [f"tree/{MODULE}"]
    assert corpus.leaks(REMOVED, files={MODULE: OTHERS}) == []
    assert corpus.leaks(REMOVED, files={MODULE: None}) == []
    assert [leak.path for leak in corpus.leaks(REMOVED, files={MODULE: None, "b.py": DELETED})] == ["tree/b.py"]
    write(tree, "copy/prices.py", ORIGINAL)
    both = Corpus({"tree": tree})
    assert [leak.path for leak in both.leaks(REMOVED)] == ["tree/copy/prices.py", f"tree/{MODULE}"]
    assert [leak.path for leak in both.leaks(REMOVED, files={MODULE: OTHERS})] == ["tree/copy/prices.py"]


def test_a_missing_place_is_an_error(tree: Path):
    with pytest.raises(FileNotFoundError, match="audited"):
        Corpus({"tree": tree, "deps": tree / "nowhere"})


def test_a_bomb_is_bounded_and_named(tree: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reading, "MOST_BYTES", 1 << 20)
    monkeypatch.setattr(reading, "MOST_UNPACKED", 3 << 20)
    write(tree, "bomb.zip", zipped({f"{n}.txt": b"0" * (1 << 20) for n in range(5)} | {"huge": b"0" * (1 << 21)}))
    corpus = Corpus({"tree": tree})
    assert set(corpus.unread) == {"tree/bomb.zip!3.txt"}
    write(tree, "bomb.zip", zipped({"huge": b"0" * (1 << 21), MODULE: ORIGINAL}))
    leaks = audit({"tree": tree}, REMOVED)
    assert [(leak.path, leak.how) for leak in leaks] == [
        (f"tree/bomb.zip!{MODULE}", "text"),
        ("tree/bomb.zip!huge", "unread"),
    ]


def test_what_cannot_be_unpacked_is_named(tree: Path):
    data = bytearray(zipped({"a": "secret words that nobody reads"}))
    for at in (6, data.index(b"PK\x01\x02") + 8):
        data[at] |= 1  # says that the member is encrypted
    write(tree, "encrypted.zip", bytes(data))
    write(tree, "broken.zip", zipped({"a": "x" * 1000, "b": "y" * 1000}).replace(b"\x4b\x4c", b"\x00\x00", 1))
    write(tree, "broken.gz", b"\x1f\x8b\x08\x00 nothing like it")
    write(tree, "stored.zst", b"\x28\xb5\x2f\xfd data")
    deep = ORIGINAL.encode()
    for level in range(5):
        deep = zipped({f"level{level}": deep})
    write(tree, "deep.zip", deep)
    unread = Corpus({"tree": tree}).unread
    assert unread["tree/encrypted.zip!a"] == "encrypted"
    assert {name.partition("!")[0] for name in unread} >= {"tree/broken.gz", "tree/stored.zst", "tree/deep.zip"}


def test_the_configuration_of_an_audited_repository_is_not_used(tree: Path):
    PLANTS["git_pack"](tree)
    write(tree, ".git/config", "[core]\n\trepositoryformatversion = 99\n[include]\n\tpath = /nowhere\n")
    assert any(leak.path.startswith("tree/.git!blob") for leak in audit({"tree": tree}, REMOVED))


@given(st.text(alphabet=st.sampled_from(list("ab_.(){}=+ \n\"'#,<&;")), max_size=300))
def test_quotes_and_commas_and_indentation_do_not_matter(text: str):
    """No digits here: a number in front of a line passes for the line's number."""
    plain = copies.tokens_of(copies.normalise(text))
    dressed = "\n".join("    # " + line for line in re.sub(r"[\"',]", " ", text).split("\n"))
    assert copies.tokens_of(copies.normalise(dressed)) == plain


@given(st.lists(st.sampled_from("abcdefgh.(=+1"), min_size=40, max_size=80), st.permutations("abcdefgh"))
def test_renaming_changes_no_renamed_shingle(tokens: list[str], names: list[str]):
    """Names after a dot and before a bracket stay, so those are not changed here."""
    table = dict(zip("abcdefgh", names, strict=True))
    free = [
        not (tokens[i - 1 : i] == ["."] or tokens[i + 1 : i + 2] == ["("]) and token in table
        for i, token in enumerate(tokens)
    ]
    renamed = [table[token] + "_" if is_free else token for token, is_free in zip(tokens, free, strict=True)]
    assert copies.renamed_shingles(renamed).tolist() == copies.renamed_shingles(tokens).tolist()


@given(st.lists(st.integers(0, 2**64 - 1), min_size=12, max_size=40), st.integers(0, 20))
def test_texts_that_share_a_window_share_a_kept_shingle(values: list[int], start: int):
    whole = np.array(values, dtype=np.uint64)
    part = whole[start : start + 6]
    if len(part) == 6:
        assert np.isin(copies.winnowed(part, 6), copies.winnowed(whole, 6)).all()


def test_docstrings_and_comments_are_told_from_code():
    assert copies.body_of(*copies.parsed(DELETED)) == BODY.lstrip()
    inner = 'def f():\n    def g():\n        """Text."""\n        return 1\n    return g\n'
    assert copies.BREAK in copies.body_of(*copies.parsed(inner))
    assert "dearest" not in copies.without_comments(DELETED)


# --- scrubbing

KEPT = [
    *("shop/__init__.py", "shop/prices.py", "shop/build/__init__.py", "shop/build/lib/x.py", "dist/release.sh"),
    *("build/steps.py", "tests/data/other-1.0.tar.gz", "tests/data/other-1.0-py3-none-any.whl", "docs/a.md"),
    *(".gitignore", ".github/workflows/ci.yml", "shop/native.so", "setup.cfg", "shop/tags/x.py"),
    *(".pre-commit-config.yaml", "profile.py", "shop/dist.py", "core.py"),
]
SCRUBBED = [
    *(".git/HEAD", ".git/objects/ab/cd", "sub/.git", ".hg/store/x", "shop/__pycache__/a.pyc", "shop/a.pyc", "b.pyo"),
    *(".mypy_cache/3.11/a.json", ".pytest_cache/v/x", ".ruff_cache/x", ".tox/x/y", ".nox/x", ".eggs/x", ".coverage"),
    *(
        ".coverage.host.1",
        "htmlcov/index.html",
        "coverage.xml",
        "shop.egg-info/SOURCES.txt",
        "shop-1.0.dist-info/RECORD",
    ),
    *(
        "lib/build/lib/shop/prices.py",
        "lib/dist/shop-1.0.tar.gz",
        "lib/dist/shop-1.0-py3-none-any.whl",
        "My_Shop-2.0.zip",
    ),
    *(".idea/x.xml", ".vscode/s.json", "shop/.a.py.swp", "shop/a.py~", "shop/a.py.orig", "a.rej", "a.bak", "#a.py#"),
    *(
        "n/.ipynb_checkpoints/x.ipynb",
        ".DS_Store",
        "run.prof",
        "docs/_build/html/a.html",
        "venv/pyvenv.cfg",
    ),
]


def test_scrub_takes_leftovers_and_leaves_source(tmp_path: Path):
    tree = tmp_path / "tree"
    for name in [*KEPT, *SCRUBBED]:
        write(tree, name, "content\n")
    outside = write(tmp_path, "outside/file.py", "kept\n")
    (tree / "inside").symlink_to("shop")
    (tree / "absolute").symlink_to(tree / "shop")
    (tree / "relative").symlink_to("../outside")
    removed = scrub(tree, frozenset({"shop", "my-shop"}))
    left = sorted(path.relative_to(tree).as_posix() for path in tree.rglob("*") if path.is_file())
    assert [name for name in left if not name.startswith("inside/")] == sorted(KEPT)
    assert (tmp_path / outside).exists()
    assert (tree / "inside").is_symlink()
    assert not (tree / "absolute").is_symlink()
    assert not (tree / "relative").is_symlink()
    assert {"absolute", "relative", ".git", "lib/build", "lib/dist", "venv"} <= set(removed)
    assert all(any(name == gone or name.startswith(f"{gone}/") for gone in removed) for name in SCRUBBED)
    assert scrub(tree, frozenset({"shop", "my-shop"})) == []


def test_a_package_called_build_is_kept(tmp_path: Path):
    write(tmp_path, "build/lib/x.py", "x = 1\n")
    assert scrub(tmp_path, frozenset({"build"})) == []
    assert scrub(tmp_path, frozenset({"other"})) == ["build"]


def test_a_scrubbed_tree_with_a_single_commit_gives_nothing_away(tree: Path):
    for name in ("git_pack", "backup_of_editor", "source_distribution"):
        PLANTS[name](tree)
    scrub(tree, frozenset({"shop"}))
    single_commit(tree)
    assert audit({"tree": tree}, REMOVED) == []


def test_the_history_is_one_commit_and_the_same_every_time(tmp_path: Path):
    heads = []
    for name in ("one", "two"):
        tree = tmp_path / name
        write_tree(tree, OTHERS)
        write(tree, ".gitignore", "generated.py\n")
        write(tree, "generated.py", "VERSION = '1'\n")
        PLANTS["git_pack"](tree)
        single_commit(tree)
        heads.append(run_command("git", "rev-parse", "HEAD", cwd=tree))
        assert run_command("git", "rev-list", "--all", "--count", cwd=tree) == "1\n"
        assert run_command("git", "status", "--porcelain", "--ignored", cwd=tree) == ""
        assert run_command("git", "remote", cwd=tree) == ""
        assert run_command("git", "reflog", cwd=tree) == ""
        assert run_command("git", "fsck", "--unreachable", cwd=tree) == ""
        assert not (tree / ".git/logs").exists()
        assert not list((tree / ".git/objects").glob("??/*"))
    assert heads[0] == heads[1] != ""


def test_no_git_is_said(tree: Path, monkeypatch: pytest.MonkeyPatch):
    PLANTS["git_loose_object"](tree)
    monkeypatch.setenv("PATH", str(tree))
    with pytest.raises(OffbookError, match="git is not installed"):
        single_commit(tree)
    assert Corpus({"tree": tree}).unread == {"tree/.git": "git is not installed"}


def test_zip_members_keep_their_names(tree: Path):
    with zipfile.ZipFile(tree / "a.zip", "w") as archive:
        archive.writestr("x/y.py", ORIGINAL)
    assert [leak.path for leak in audit({"deps": tree}, REMOVED)] == ["deps/a.zip!x/y.py"]
