"""Source in newer syntax than the Python that runs the tests is read, on the same lines."""

from __future__ import annotations

import ast
import asyncio
import shutil
import sys
import textwrap
from pathlib import Path

import pytest
from little_repo import deps, with_deps
from test_prepare import write

from offbook.core.pycode import lowered, parse
from offbook.sandbox import SandboxSpec
from offbook.tasks import load_tasks
from offbook.tasks.check import check_gold
from offbook.tasks.factory.make import MakeSettings
from offbook.tasks.factory.pipeline import make_tasks
from offbook.tasks.factory.prepare.dependencies import find_interpreter
from offbook.tasks.factory.prepare.prepare import PrepareSettings
from offbook.tasks.suite import make_interpreter
from offbook.types import OffbookError

__all__ = ["deps"]

NEWER = textwrap.dedent('''
    """Words."""
    type Pair[T] = tuple[T, T]


    def first[
        T, *Ts
    ](pair: Pair[T], w) -> T:
        """The first."""
        try:
            text = f"{pair["left"]!r:>{w["width"]}} and {", ".join(f"{"x"}" for _ in w)}"
        except ValueError, TypeError:
            text = f"""
                {
                    pair
                    # why
                }
            """
        return text + ("plain" f"{w["key"]}")


    class Sandbox[T = int]:
        def get(self) -> T:
            return t"{self.x}"
    last = 1
''')


def test_room_between_type_parameters_and_what_follows() -> None:
    """Formatters test themselves on it, so corpora of code have it."""
    first, second = "def one[T] (value: T): return 1\n\n\n", "class Sandbox[T] (list): pass\n\n\n"
    tree = parse(first + second + "def two[T] \\\n(value): return 2\n")
    assert [(node.name, node.lineno) for node in tree.body] == [("one", 1), ("Sandbox", 4), ("two", 7)]
    assert tree.body[2].body[0].lineno == 8


def test_names_strings_and_lines() -> None:
    tree = parse(NEWER)
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert names >= {"Pair", "tuple", "pair", "w", "ValueError", "TypeError", "self"}
    strings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    assert strings >= {"left", "width", ", ", "x", "key", "plain", " and "}
    lines = {node.name: (node.lineno, node.end_lineno) for node in ast.walk(tree) if hasattr(node, "name")}
    assert lines["first"] == (6, 19)
    assert lines["Sandbox"] == (22, 24)
    assert lines["get"] == (23, 24)
    assert tree.body[-1].lineno == 25 == NEWER.count("\n")
    assert ast.get_docstring(tree.body[2]) == "The first."


def test_what_this_python_knows_stays() -> None:
    source = "def f(a):\n    return f'{a!r:>{3}}' 'b'\n"
    assert ast.dump(parse(source)) == ast.dump(ast.parse(source))
    assert lowered(source) is None


@pytest.mark.parametrize("source", ["def f(:\n", "x = f'{'\n", "type X\n"])
def test_what_is_no_python_is_none(source: str) -> None:
    with pytest.raises(SyntaxError):
        parse(source)


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="this Python reads it itself")
def test_this_python_does_not_read_it() -> None:
    with pytest.raises(SyntaxError):
        ast.parse(NEWER)


PACKAGE = {
    "pyproject.toml": "[project]\nname = 'newer'\nversion = '1'\nrequires-python = '>=3.12'\n",
    "newer/__init__.py": '''
        """Words for pairs."""

        type Pair[T] = tuple[T, T]


        def joined[T](pair: Pair[T], marks: dict[str, str]) -> str:
            """Both sides, with the mark called `between` between them."""
            left, right = pair
            if not marks:
                return f"{left}{right}"
            return f"{left}{marks["between"]}{right}"


        def doubled[T](value: T) -> Pair[T]:
            return (value, value)
    ''',
    "tests/test_newer.py": """
        import pytest, newer
        @pytest.mark.parametrize("n", range(12))
        def test_doubled(n): assert newer.doubled(n) == (n, n)
        def test_joined(): assert newer.joined((1, 2), {"between": "-"}) == "1-2"
        def test_bare(): assert newer.joined((3, 4), {}) == "34"
    """,
}


def test_a_package_that_needs_another_python_gives_tasks(deps: Path, tmp_path: Path) -> None:
    try:
        python = asyncio.run(find_interpreter("3.12"))
    except OffbookError as error:
        pytest.skip(str(error))
    source, out = write(tmp_path / "newer", PACKAGE), tmp_path / "out"
    (refused,) = asyncio.run(make_tasks([str(source)], tmp_path / "none", SandboxSpec()))
    assert refused.unprepared.endswith("; say --python 3.12")
    folder = with_deps(out, source, deps)
    shutil.rmtree(folder / "python")
    make_interpreter(folder, python.path)
    settings = MakeSettings(heldout=0.0, prepare=PrepareSettings(python="3.12"))
    (made,) = asyncio.run(make_tasks([str(source)], out, SandboxSpec(), settings))
    assert [(one.refused, one.blank) for one in made.outcomes] == [("", 2)]
    (task,) = load_tasks(out / "train")
    assert "def joined[T](pair: Pair[T]" in (task.tree / "newer/__init__.py").read_text()
    assert asyncio.run(check_gold(task, SandboxSpec())) == ""


def test_brackets_deeper_than_any_python_reads_end_no_process() -> None:
    with pytest.raises(SyntaxError):
        parse("x = " + "(\n" * 50_000 + "1" + ")\n" * 50_000)
