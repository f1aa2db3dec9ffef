"""Source in newer syntax than the Python that runs the tests is read, on the same lines."""

from __future__ import annotations

import ast
import sys
import textwrap

import pytest

from offbook.syntax import lowered, parse

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


    class Box[T = int]:
        def get(self) -> T:
            return t"{self.x}"
    last = 1
''')


def test_names_strings_and_lines() -> None:
    tree = parse(NEWER)
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert names >= {"Pair", "tuple", "pair", "w", "ValueError", "TypeError", "self"}
    strings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    assert strings >= {"left", "width", ", ", "x", "key", "plain", " and "}
    lines = {node.name: (node.lineno, node.end_lineno) for node in ast.walk(tree) if hasattr(node, "name")}
    assert lines["first"] == (6, 19)
    assert lines["Box"] == (22, 24)
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
