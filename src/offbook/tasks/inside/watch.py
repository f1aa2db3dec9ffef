"""Observes the code under test: which functions each test enters, and what only a cheat does."""

from __future__ import annotations

import ast
import builtins
import importlib
import importlib.machinery
import os
import sys
from collections.abc import Collection, Generator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from offbook.tasks.inside.report import Pipe, Recorder

if TYPE_CHECKING:
    from types import FrameType

    import pytest
    from _pytest.fixtures import FixtureDef, SubRequest

HITS = "__offbook_hits__"


class Tracer:
    """Which functions of the source files are entered, test by test.

    It puts a statement at the start of every function as its file is imported. That costs a dictionary entry a call,
    and threads, generators, coroutines and tests that trace on their own do not disturb it. What a fixture of a wider
    scope enters belongs to every test that uses the fixture, not only to the first one.
    """

    def __init__(self, recorder: Recorder, sources: dict[str, str]):
        self.recorder, self.sources = recorder, sources  # absolute path -> path in the tree
        self.entered: dict[int, bool] = {}
        self.num_functions = 0
        self.of_fixture: dict[int, set[int]] = {}  # by id of the FixtureDef

    def start(self) -> None:
        setattr(builtins, HITS, self.entered)
        compile_source = importlib.machinery.SourceFileLoader.source_to_code

        def source_to_code(loader: Any, data: Any, path: Any, **options: Any) -> Any:
            relative = self.sources.get(os.path.realpath(path)) if isinstance(data, bytes) else None
            if relative is not None:
                data = ast.parse(data, path)
                self._insert(data, relative, "")
            return compile_source(loader, data, path, **options)

        setattr(importlib.machinery.SourceFileLoader, "source_to_code", source_to_code)  # noqa: B010

    def _insert(self, node: ast.AST, path: str, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                self._insert(child, path, f"{prefix}{child.name}.")
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                name = prefix + child.name
                self._insert(child, path, f"{name}.<locals>.")
                at = 1 if ast.get_docstring(child, clean=False) is not None else 0
                mark = ast.parse(f"{HITS}[{self.num_functions}] = True").body[0]
                self.recorder.pipe.tell("function", self.num_functions, path, name)
                self.num_functions += 1
                for inserted in ast.walk(mark):
                    ast.copy_location(inserted, child.body[min(at, len(child.body) - 1)])
                child.body.insert(at, mark)
            elif not isinstance(child, ast.expr):
                self._insert(child, path, prefix)

    def finish(self, number: int, more: set[int]) -> None:
        self.recorder.pipe.tell("enters", number, sorted(more.union(self.entered)))
        self.entered.clear()

    def pytest_collection_finish(self) -> None:
        self.finish(-1, set())

    def pytest_fixture_setup(self, fixturedef: FixtureDef[Any], request: SubRequest) -> Generator[None, Any, Any]:
        if request.scope == "function":
            return (yield)
        before = dict(self.entered)
        self.entered.clear()
        try:
            return (yield)
        finally:
            self.of_fixture[id(fixturedef)] = set(self.entered)
            self.entered.update(before)

    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        self.entered.clear()
        result = yield
        shared: set[int] = set()
        for definitions in getattr(item, "_fixtureinfo").name2fixturedefs.values():  # noqa: B009  # private to pytest
            for definition in definitions:
                shared |= self.of_fixture.get(id(definition), set())
        self.finish(self.recorder.numbers[item.nodeid], shared)
        return result


class Watcher:
    """Reports what product code does that only makes sense to look at the tests or the runner. An audit hook, which
    cannot be removed; reports once per file and kind."""

    KINDS: ClassVar = {
        "sys._getframe": "frames",
        "sys._current_frames": "frames",
        "sys.settrace": "tracing",
        "sys.setprofile": "tracing",
        "gc.get_objects": "gc",
        "gc.get_referrers": "gc",
        "gc.get_referents": "gc",
        "ctypes.dlopen": "ctypes",
        "ctypes.dlsym": "ctypes",
    }
    LOOKERS = ("inspect.py", "traceback.py", "linecache.py", "pathlib.py", "tokenize.py", "codecs.py", "mock.py")

    def __init__(self, pipe: Pipe, product: Sequence[str], tests: Collection[str]):
        self.pipe, self.product = pipe, tuple(map(os.path.realpath, product))
        self.tests = {os.path.realpath(path) for path in tests}
        self.seen: set[tuple[str, str]] = set()
        self.busy = False

    def hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        kind = self.KINDS.get(event)
        if kind is None:
            if event == "open":
                if not isinstance(arguments[0], str) or os.path.abspath(arguments[0]) not in self.tests:
                    return
                kind = "tests read"
            elif event == "object.__setattr__" and arguments[1] == "__code__":
                kind = "code replaced"
            elif event == "object.__getattr__" and arguments[1] == "tb_frame":
                kind = "frames"
            else:
                return
        if self.busy or os.getpid() != self.pipe.process:
            return
        self.busy = True
        try:
            path = self.caller()
            if path and (kind, path) not in self.seen:
                self.seen.add((kind, path))
                self.pipe.tell("saw", kind, os.path.relpath(path))
        finally:
            self.busy = False

    def caller(self) -> str:
        """The product's file that does it, by itself or through what is there to look at code."""
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and frame.f_code.co_filename.endswith(self.LOOKERS):
            frame = frame.f_back
        name = os.path.abspath(frame.f_code.co_filename) if frame else ""
        return name if any(name == root or name.startswith(root + os.sep) for root in self.product) else ""
