"""Which files the commands of a sandbox opened, and which of those are worth a second look."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

from offbook.types import is_test_file

TREE = "/app/"
HOMES = ("/home/agent/", "/tmp/", "/history/")
MAX_PATHS = 20_000
MAX_SHOWN = 12  # of those that one message opened at one place
MAX_KEPT = 500
Place = Literal["vcs", "bytecode", "cache", "package_copy", "tests", "outside", "data"]

VCS = frozenset({".git", ".hg", ".svn", ".bzr", ".jj"})
CACHES = frozenset(
    {
        ".mypy_cache", ".pytest_cache", ".ruff_cache", ".pytype", ".pyre", ".hypothesis", ".tox", ".nox", ".eggs",
        ".ipynb_checkpoints", ".cache", "htmlcov", ".dmypy.json", ".coverage", "tags", ".tags", "TAGS", ".idea",
        ".vscode", ".gradle", ".bloop", ".metals", "node_modules", ".next", ".turbo", ".parcel-cache", ".jedi",
    }
)  # fmt: skip
VISIBLE = re.compile(
    r"\.(pyi?|pyx|pxd|c|h|md|rst|toml|cfg|ini|ya?ml)$|(^|/)(LICENSE|Makefile|Dockerfile|\.git\w+|py\.typed)$"
)
STORED = re.compile(r"\.(pyc|pyo|class|jar|whl|egg|orig|rej|bak|swp|swo)$|~$")
BYTECODE = re.compile(r"\.(pyc|pyo|class)$|/__pycache__/")
# What starting any program opens; a second look at these would be at every command.
SYSTEM = re.compile(r"^/(usr/|lib\w*/|bin/|sbin/|etc/|dev/|proc/|sys/)|/pyvenv\.cfg$|\.pth$")


@dataclass(frozen=True)
class Opened:
    """The files that processes opened, each once, in the order they were first seen."""

    paths: tuple[str, ...] = ()
    num_cut: int = 0  # opened besides, past what is kept or faster than it could be read


def place_of(path: str, packages: Collection[str]) -> Place | None:
    """Why a file is worth a second look, or None. `packages` are the importable names in the task's own tree."""
    parts = PurePosixPath(path).parts
    if _installed_at(parts):
        return "package_copy" if _top_name(parts) in packages else None
    if path.startswith(TREE) or not path.startswith("/"):
        return _place_in_tree(path.removeprefix(TREE))
    if path.startswith(HOMES):
        return "bytecode" if BYTECODE.search(path) else None
    toolchain = re.compile(r"python3?(\.\d+)?|lib-dynload|libpython\S*")  # the interpreter, wherever it is installed
    return None if SYSTEM.search(path) or any(map(toolchain.fullmatch, parts)) else "outside"


def _place_in_tree(path: str) -> Place | None:
    parts = PurePosixPath(path).parts
    if VCS & set(parts):
        return "vcs"
    if BYTECODE.search("/" + path):
        return "bytecode"
    if CACHES & set(parts) or STORED.search(path) or any(part.endswith((".egg-info", ".dist-info")) for part in parts):
        return "cache"
    if is_test_file(path):
        return "tests"
    return None if VISIBLE.search(path) else "data"


def _installed_at(parts: tuple[str, ...]) -> int:
    """Behind which part installed packages lie; 0 where none do. Those of a task's own interpreter are in deps/."""
    outside = parts[:1] == ("/",) and parts[:2] != ("/", "app")
    known = ("site-packages", "dist-packages", *(("deps",) if outside else ()))
    return max((place + 1 for place, part in enumerate(parts) if part in known), default=0)


def _top_name(parts: tuple[str, ...]) -> str:
    """`toolz` of site-packages/toolz/core.py, site-packages/toolz.py and site-packages/toolz-1.dist-info."""
    following = [part for part in parts[_installed_at(parts) :] if part != "__pycache__"]
    return re.split(r"[.-]", following[0])[0] if following else ""


def own_packages(tree: Path) -> frozenset[str]:
    """The names that a tree's own code is imported by."""
    found: set[str] = set()
    for folder in (tree, tree / "src", tree / "lib"):
        for path in folder.iterdir() if folder.is_dir() else ():
            if path.suffix == ".py" or (path / "__init__.py").is_file():
                found.add(path.stem)
    return frozenset(found - {"setup", "conftest", "tests", "test", "docs", "noxfile"})


def notable(opened: Iterable[str], packages: Collection[str]) -> dict[Place, list[str]]:
    """The opened files worth a second look, by the reason.

    Only the first ones are kept of many, and those that matter most come first: objects before the index, sources.
    """
    found: dict[Place, list[str]] = {}
    for path in opened:
        place = place_of(path, packages)
        if place:
            found.setdefault(place, []).append(path.removeprefix(TREE))
    for paths in found.values():
        paths.sort(key=lambda path: ("objects" not in path, not path.endswith(".py"), path))
    return found


def describe(place: Place, paths: list[str]) -> str:
    """One line for people."""
    more = f" (+{len(paths) - MAX_SHOWN} more)" if len(paths) > MAX_SHOWN else ""
    return f"{place}: " + " | ".join(paths[:MAX_SHOWN]) + more
