"""Which files of a tree are the product, which are its tests, and how its pytest is set up."""

from __future__ import annotations

import configparser
import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Any

from offbook.tasks.factory.prepare.metadata import Project, lines_of, read_toml, table_of
from offbook.tasks.factory.types import Unprepared, is_test_code

ROOTS = ("src", "lib", "python", ".")  # the tree itself last: it holds folders that are no packages
NOT_PRODUCT = frozenset(
    {"test", "tests", "testing", "doc", "docs", "example", "examples", "benchmark", "benchmarks", "bench", "scripts"}
    | {"script", "tools", "tool", "setup", "conftest", "noxfile", "tasks", "build", "dist", "fuzz", "perf", "demo"}
    | {"utils", "util", "bin", "ci", "_build", "vendor", "requirements", "fabfile", "docs_src", "samples"}
)
NOT_TESTS = frozenset(
    {"doc", "docs", "example", "examples", "benchmark", "benchmarks", "bench", "build", "node_modules"}
)
HONOURED = ("--import-mode", "--asyncio-mode", "--ignore", "--ignore-glob", "--deselect")
LOOKS_LIKE_TESTS = re.compile(rb"^\s*(async )?def test|unittest|import pytest", re.M)


@dataclass(frozen=True, slots=True)
class Layout:
    import_roots: tuple[str, ...]
    modules: tuple[str, ...]  # what an import of the product names
    source_files: tuple[str, ...]
    test_files: tuple[str, ...]
    support_files: tuple[str, ...]
    options: tuple[str, ...]  # for pytest
    strict_warnings: bool  # its settings turn warnings into errors


@dataclass(frozen=True, slots=True)
class _Settings:
    """The pytest settings of a repository, from the one file that pytest would take."""

    file: str
    values: dict[str, Any]

    def words(self, name: str, default: tuple[str, ...] = ()) -> tuple[str, ...]:
        value = self.values.get(name, default)
        return tuple(shlex.split(value)) if isinstance(value, str) else tuple(map(str, value))


def find_layout(tree: Path, project: Project) -> Layout:
    files = sorted(path.relative_to(tree).as_posix() for path in tree.rglob("*") if path.is_file())
    python_files = [path for path in files if path.endswith(".py")]
    settings = _pytest_settings(tree)
    root, modules = _find_product(tree, project)
    prefix = "" if root == "." else f"{root}/"
    mine = tuple(f"{prefix}{module}" for module in modules)
    product = [path for path in python_files if path.startswith(tuple(f"{one}/" for one in mine)) or path[:-3] in mine]
    sources = tuple(path for path in product if not is_test_code(path))
    if not sources:
        raise Unprepared(f"{project.name} has no Python package or module")
    tests = _find_tests(tree, [path for path in python_files if path not in set(sources)], settings)
    if not tests:
        raise Unprepared(f"{project.name} has no test files")
    taken = {*sources, *tests}
    folders = {str(PurePosixPath(path).parent) for path in tests} - {"."}
    folders -= {str(PurePosixPath(path).parent) for path in sources}
    support = tuple(
        path
        for path in files
        if path not in taken
        and (path.startswith(tuple(f"{folder}/" for folder in folders)) or path.rpartition("/")[2] == "conftest.py")
    )
    options = _options(settings)
    if any(b"hypothesis" in (tree / path).read_bytes() for path in (*tests, *support) if path.endswith(".py")):
        options += ("--hypothesis-seed=0",)  # not for all: the option alone imports hypothesis, which takes a second
    strict = any("error" in line for line in lines_of(settings.values.get("filterwarnings", ())))
    return Layout((root,), modules, sources, tests, support, options, strict)


def _find_product(tree: Path, project: Project) -> tuple[str, tuple[str, ...]]:
    """The folder that goes on sys.path and the names in it that are the product.

    By what the metadata say, else by the project's name, else every package that is not called like something else.
    """
    plain = re.sub(r"[-_.]+", "_", project.name).lower()
    own = {plain, plain.removeprefix("python_"), plain.removesuffix("_python"), plain.removeprefix("py"), f"py{plain}"}
    own |= {project.name.lower().split(".")[0], re.sub(r"\d+$", "", plain), plain.replace("_", "")}
    # Folders of other names count if they hold a package with the project's name: pysrc/, packages/.
    others = {path.parts[-3] for path in sorted(tree.glob("*/*/__init__.py")) if path.parts[-2].lower() in own}
    roots = (*ROOTS, *sorted(others - {*ROOTS} - NOT_PRODUCT))
    importable = {root: _importable(tree / root) for root in roots if (tree / root).is_dir()}
    for root, names in importable.items():
        declared = tuple(name for name in names if name in project.top_level and name not in NOT_PRODUCT)
        if declared:
            return root, declared
    for root, names in importable.items():
        called = tuple(name for name in names if name.lower() in own)
        if called:
            return root, called
    for root, names in importable.items():
        packages = tuple(name for name in names if name not in NOT_PRODUCT and (tree / root / name).is_dir())
        modules = tuple(name for name in names if name not in NOT_PRODUCT and not is_test_code(f"{name}.py"))
        if packages or (modules and root == "."):
            return root, packages or modules
    raise Unprepared(f"{project.name} has no Python package or module")


def _importable(folder: Path) -> list[str]:
    """Names of modules, packages, and folders that only hold packages (PEP 420)."""
    names = []
    for path in sorted(folder.iterdir()):
        if path.suffix == ".py" and path.is_file() and path.stem.isidentifier():
            names.append(path.stem)
        elif path.is_dir() and path.name.isidentifier():
            inside = path / "__init__.py"
            if inside.is_file() or any(path.glob("*/__init__.py")) or (folder.name == "src" and any(path.glob("*.py"))):
                names.append(path.name)
    return names


def _find_tests(tree: Path, python_files: Iterable[str], settings: _Settings) -> tuple[str, ...]:
    patterns = settings.words("python_files", ("test_*.py", "*_test.py"))
    places = [
        path.relative_to(tree).as_posix()
        for pattern in settings.words("testpaths")
        if not PurePosixPath(pattern).is_absolute() and ".." not in PurePosixPath(pattern).parts
        for path in ([tree] if pattern.strip("./") == "" else tree.glob(pattern))
    ]
    found = [path for path in python_files if not NOT_TESTS.intersection(PurePosixPath(path).parts[:-1])]
    chosen = [path for path in found if any(PurePosixPath(path).match(pattern) for pattern in patterns)]
    if places and "." not in places:
        inside = [path for path in chosen if path in places or path.startswith(tuple(f"{one}/" for one in places))]
        chosen = inside or chosen
    if not chosen:  # suites that are older than these names
        chosen = [path for path in found if is_test_code(path) or path in ("test.py", "tests.py")]
        chosen = [path for path in chosen if LOOKS_LIKE_TESTS.search((tree / path).read_bytes())]
        chosen = [path for path in chosen if path.rpartition("/")[2] not in ("conftest.py", "__init__.py")]
    return tuple(chosen)


def _pytest_settings(tree: Path) -> _Settings:
    for name in ("pytest.ini", ".pytest.ini", "pyproject.toml", "tox.ini", "setup.cfg"):
        path = tree / name
        if not path.is_file():
            continue
        text = path.read_text(errors="replace")
        if name == "pyproject.toml":
            table = table_of(read_toml(path), "tool", "pytest")
            values = table.get("ini_options", {}) or {key: table[key] for key in table if key != "ini_options"}
            if values:
                return _Settings(name, values)
            continue
        parser = configparser.ConfigParser(interpolation=None, strict=False)
        try:
            parser.read_string(text)
        except configparser.Error:
            continue
        section = "tool:pytest" if name == "setup.cfg" else "pytest"
        if parser.has_section(section) or name in ("pytest.ini", ".pytest.ini"):
            return _Settings(name, dict(parser.items(section)) if parser.has_section(section) else {})
    return _Settings("/dev/null", {})


def _options(settings: _Settings) -> tuple[str, ...]:
    """Where the settings are, and of `addopts` what decides which tests run, how they are imported and with which
    plugins."""
    options = ["-c", settings.file]
    words = settings.words("addopts")
    for word, following in pairwise((*words, "")):
        if word.startswith(tuple(f"{name}=" for name in HONOURED)):
            options.append(word)
        elif word in (*HONOURED, "-m", "-k") or (word == "-p" and not following.startswith("no:")):
            options += [word, following]
    return tuple(options)
