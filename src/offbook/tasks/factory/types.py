"""What passes from one step of making tasks to the next. Plain data."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from offbook.types import OffbookError, Suite, is_test_file

Level = Literal["stub", "hybrid", "gone"]
LEVELS: tuple[Level, ...] = get_args(Level)
Kind = Literal["single", "cluster", "release"]
# Methods of built-in types, and what files, patterns and parsers have: such a name says little about whose it is.
BUILTIN = frozenset(
    name for kind in (str, bytes, list, dict, set, tuple, int, float, type, object, BaseException) for name in dir(kind)
)
COMMON = BUILTIN | {
    "read", "write", "close", "open", "run", "match", "search", "group", "send", "next", "compile", "parse",
}  # fmt: skip


class Unprepared(OffbookError):
    """A repository that no tasks can be made from, and why, in one sentence."""


@dataclass(frozen=True, slots=True, order=True)
class FunctionKey:
    """A function or method: its file and its qualified name, `Class.method` or `outer.<locals>.inner`."""

    path: str  # relative to the tree, with forward slashes
    name: str

    @classmethod
    def of(cls, where: str) -> FunctionKey:
        path, _, name = where.partition("::")
        return cls(path, name)

    def __str__(self) -> str:
        return f"{self.path}::{self.name}"

    @property
    def simple(self) -> str:
        return last(self.name)

    def is_inside(self, others: Collection[FunctionKey]) -> bool:
        """Whether a function or class around it is among them."""
        parts = self.name.split(".")
        return any(FunctionKey(self.path, ".".join(parts[:end])) in others for end in range(1, len(parts)))


@dataclass(frozen=True)
class Repository:
    """A repository that is ready: its source, its tests, what they need, and which tests can be relied on."""

    name: str
    version: str
    folder: Path  # holds tree/, deps/ and the logs
    import_roots: tuple[str, ...]  # folders of the tree that go on sys.path: (".",) or ("src",)
    source_files: tuple[str, ...]  # the product's own Python files: no tests, docs, examples, set-up scripts
    test_files: tuple[str, ...]
    support_files: tuple[str, ...]  # conftest, fixtures, data: what the tests need besides the test files
    tests: tuple[str, ...]  # node ids that passed in every baseline run
    excluded: dict[str, str] = field(default_factory=dict)  # node id -> why it cannot be relied on
    seconds: dict[str, float] = field(default_factory=dict)  # how long each reliable test takes
    pytest_options: tuple[str, ...] = ()
    start: str = ""  # a command that gets a sandbox ready

    @property
    def tree(self) -> Path:
        return self.folder / "tree"

    @property
    def deps(self) -> Path:
        return self.folder / "deps"

    @property
    def suite(self) -> Suite:
        return Suite(self.folder, self.import_roots, self.pytest_options, self.start)


@dataclass(frozen=True)
class Map:
    """Which test enters which function, and what runs when the package is imported."""

    tests_of: dict[FunctionKey, frozenset[str]]
    at_import: frozenset[FunctionKey]


@dataclass(frozen=True)
class Feature:
    """A target and its exclusive closure: every function that only the target's tests enter. Or a cluster of such."""

    id: str
    kind: Kind
    targets: tuple[FunctionKey, ...]
    functions: tuple[FunctionKey, ...]  # targets included
    tests: tuple[str, ...]  # what should fail without it


@dataclass(frozen=True)
class Deletion:
    """A feature taken out of the tree."""

    feature: Feature
    level: Level | Literal["release"]
    files: dict[str, str | None]  # path -> text after the deletion, None where the file goes
    removed: dict[str, str]  # "path::name" -> source text that is no longer there: what must not leak
    stubbed: tuple[FunctionKey, ...]
    deleted: tuple[FunctionKey, ...]
    # Of a release: the test files as they run without what it brings. They are not in the tree; that has older ones.
    tests: dict[str, str] = field(default_factory=dict)

    @property
    def targets(self) -> tuple[str, ...]:
        """What the instruction asks for, as "path::name"."""
        return tuple(map(str, self.feature.targets))


def last(name: str) -> str:
    return name.rpartition(".")[2]


def identity_of(*parts: str) -> str:
    """What a task is called, from words of any kind."""
    return re.sub(r"[^a-z0-9]+", "-", "-".join(parts).lower())


def files_of(tests: Iterable[str]) -> list[str]:
    """The test files of some node ids."""
    return sorted({test.partition("::")[0] for test in tests})


def is_inside(path: str, places: Iterable[str]) -> bool:
    """Whether it is one of these files, or is in one of these folders."""
    return any(path == place or path.startswith(f"{place}/") for place in places)


def last_words(output: str) -> str:
    """The last line that a program printed, which says why it failed."""
    lines = [line.strip() for line in output.splitlines() if line.strip()] or ["no output"]
    return lines[-1].removeprefix("E ").strip()


def is_test_code(path: str) -> bool:
    return path.endswith(".py") and (is_test_file(path) or "test" in path.split("/")[:-1])
