"""The map: exactly the functions that each test enters, however it enters them, and what runs at import apart."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import textwrap
from pathlib import Path

import pytest
from test_prepare import deps

from offbook.sandbox import SandboxSpec
from offbook.tasks.factory.prepare import tests
from offbook.tasks.factory.prepare.tests import load_map, map_tests
from offbook.tasks.factory.types import FunctionKey, Map, Repository, Unprepared
from offbook.tasks.suite import make_interpreter

__all__ = ["deps"]

SOURCE = '''
    """Module."""
    import asyncio, functools, threading

    def decorate(function):
        "Runs at import; so does register, but not wrapper."
        @functools.wraps(function)
        def wrapper(*arguments):
            """Doc."""
            return function(*arguments)
        return wrapper

    def register(): return {}
    REGISTRY = register()

    class Thing:
        """Class."""
        size = property(lambda self: self._size())
        def __init__(self): self.value = 1
        def _size(self): return 1
        @property
        def both(self): return self.value
        @both.setter
        def both(self, value): self.value = value
        class Inner:
            def deep(self): return [helper(n) for n in range(2)]

    def helper(n): return n
    def only_doc():
        """Nothing but this."""
    @decorate
    def decorated(): return 1
    def numbers():
        yield 1
    async def waits(): return 1
    def in_thread(): return 1
    def run_thread():
        thread = threading.Thread(target=in_thread)
        thread.start()
        thread.join()
    def recursive(n): return n and recursive(n - 1)
    def wide(): return 1
    def narrow(): return 1
    def outer():
        def inner(): return 1
        class Local:
            def method(self): return inner()
        return Local().method()
    def never(): return 1
    def set_up_class(): return 1
'''
TESTS = """
    import asyncio, sys, unittest, pytest, pkg
    from pkg import core

    @pytest.fixture(scope="module")
    def shared(): return core.wide()
    @pytest.fixture(scope="session")
    def outermost(shared_later): return core.helper(1)
    @pytest.fixture(scope="session")
    def shared_later(): return 1
    @pytest.fixture
    def single(): return core.narrow()

    def test_nothing(): pass
    def test_thing(): assert core.Thing().size == 1
    def test_setter(): core.Thing().both = 1
    def test_deep(): core.Thing.Inner().deep()
    def test_only_doc(): assert core.only_doc() is None and core.only_doc.__doc__ == "Nothing but this."
    def test_decorated(): core.decorated()
    def test_generator(): assert list(core.numbers()) == [1]
    def test_generator_not_started(): core.numbers()
    def test_coroutine(): asyncio.run(core.waits())
    def test_thread(): core.run_thread()
    def test_recursive(): core.recursive(50)
    def test_outer(): core.outer()
    def test_own_tracing():
        sys.settrace(None); sys.setprofile(None)
        core.helper(1)
    @pytest.mark.parametrize("n", [1, 2])
    def test_again(n): core.helper(n)
    def test_first(shared): pass
    def test_second(shared, single): pass
    def test_third(outermost): pass
    def test_fourth(outermost): pass
    class TestClass(unittest.TestCase):
        @classmethod
        def setUpClass(cls): core.set_up_class()
        def test_a(self): pass
        def test_b(self): pass
"""
EXPECTED = {
    "Thing.__init__": "thing setter",
    "Thing._size": "thing",
    "Thing.both": "setter",
    "Thing.Inner.deep": "deep",
    "helper": "deep own_tracing again[1] again[2] third fourth",
    "only_doc": "only_doc",
    "decorate.<locals>.wrapper": "decorated",
    "decorated": "decorated",
    "numbers": "generator",
    "waits": "coroutine",
    "in_thread": "thread",
    "run_thread": "thread",
    "recursive": "recursive",
    "outer": "outer",
    "outer.<locals>.inner": "outer",
    "outer.<locals>.Local.method": "outer",
    "wide": "first second",
    "narrow": "second",
    "set_up_class": "TestClass::test_a TestClass::test_b",
}


def make_repository(folder: Path, deps: Path, tests: str = TESTS) -> Repository:
    files = {"pkg/__init__.py": "", "pkg/core.py": SOURCE, "tests/test_core.py": tests, "other.py": "def f(): pass\n"}
    for name, text in files.items():
        (folder / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "tree" / name).write_text(textwrap.dedent(text))
    shutil.copytree(deps, folder / "deps", copy_function=os.link)
    make_interpreter(folder, Path(os.path.realpath(sys.executable)))
    names = sorted(
        f"tests/test_core.py::{name}" for name in {f"test_{one}" for one in _words()} | set(_words_of_class())
    )
    sources, test_files = ("pkg/__init__.py", "pkg/core.py"), ("tests/test_core.py",)
    seconds = dict.fromkeys(names, 0.01)
    return Repository(
        "pkg", "1", folder, (".",), sources, test_files, (), tuple(names), {}, seconds, ("-c", "/dev/null")
    )


def _words() -> set[str]:
    words = {word for line in EXPECTED.values() for word in line.split() if "::" not in word}
    return words | {"nothing", "generator_not_started"}


def _words_of_class() -> list[str]:
    return EXPECTED["set_up_class"].split()


def names_of(found: Map) -> dict[str, set[str]]:
    start = "tests/test_core.py::"
    assert {key.path for key in found.tests_of} == {"pkg/core.py"}
    return {
        key.name: {test.removeprefix(start).removeprefix("test_") for test in tests}
        for key, tests in found.tests_of.items()
    }


def test_each_test_and_what_it_enters(deps: Path, tmp_path: Path) -> None:
    repository = make_repository(tmp_path / "made", deps)
    found = asyncio.run(map_tests(repository, SandboxSpec()))
    assert names_of(found) == {name: set(tests.split()) for name, tests in EXPECTED.items()}
    assert found.at_import == {FunctionKey("pkg/core.py", name) for name in ("decorate", "register")}
    assert load_map(tmp_path / "made" / "map.json") == found
    shutil.rmtree(repository.tree)
    assert asyncio.run(map_tests(repository, SandboxSpec())) == found


def test_what_does_not_fit_in_one_run(deps: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In runs of a few tests the same comes out, but for functions that were entered in none."""
    repository = make_repository(tmp_path / "made", deps)
    monkeypatch.setattr(tests, "TESTS_A_RUN", 14)
    found = asyncio.run(map_tests(repository, SandboxSpec()))
    assert names_of(found) == {name: set(tests.split()) for name, tests in EXPECTED.items()}


def test_tests_that_are_not_there_any_more(deps: Path, tmp_path: Path) -> None:
    repository = make_repository(tmp_path / "made", deps, "def test_nothing(): pass\n")
    with pytest.raises(Unprepared, match=r"20 tests of pkg cannot be traced, among them tests/test_core.py::"):
        asyncio.run(map_tests(repository, SandboxSpec()))
    assert not (tmp_path / "made" / "map.json").exists()
