"""Python that an agent wrote: its syntax, the command lines that it starts, and which of its lines only comment."""

from __future__ import annotations

import ast
import io
import re
import shlex
import tokenize
import warnings
from collections.abc import Iterator
from contextlib import suppress
from typing import TypeVar

Node = TypeVar("Node", bound=ast.AST)

STARTS = re.compile(
    r"^(subprocess\.\w+|os\.(system|popen)|(\w+\.)*(check_output|check_call|Popen)|run|(\w+\.)*pip(\.\w+)*\.main)$"
)
COMMENT = re.compile(r"\s*(#(?!!)|//)")  # the line of a comment, in Python and in most other languages
DEFINED = re.compile(r"^\s*(?:async\s+)?(?:def|class|func|fn|function)\s+(\w+)", re.MULTILINE)


def parse(source: str) -> ast.Module | None:
    """None where it is no Python. An invalid escape in somebody's code is not ours to print.

    Python reads bytes: a byte order mark is no part of the code, and a declared encoding decides what is.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(source.encode(errors="replace"))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def nodes(tree: ast.AST | None, *kinds: type[Node]) -> Iterator[Node]:
    """Those of some kinds, level by level; none where there is no tree."""
    return (node for node in ast.walk(tree or ast.Module([], [])) if isinstance(node, kinds))


def commands_in(code: str) -> list[str]:
    """Command lines that Python code starts; what is not written down in it becomes `$x`."""
    named = [(ast.unparse(node.func), node) for node in nodes(parse(code), ast.Call) if node.args]
    lines = [(name, _line(node.args[0])) for name, node in named if STARTS.search(name)]
    return [f"pip {line}" if "pip" in name else line for name, line in lines if line]


def _line(node: ast.expr) -> str:
    if isinstance(node, ast.List | ast.Tuple):
        words = [_line(one) for one in node.elts]
        return " ".join(word if word.startswith("$") else shlex.quote(word) for word in words)
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_line(one) for one in node.values)
    if ast.unparse(node) == "sys.executable":
        return "python"
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "split":
        return _line(node.func.value)
    return "$x"


def comment_lines(source: str) -> set[int]:
    """Lines with nothing but a comment or a bare string on them. Of source that does not parse, only the comments."""
    lines: set[int] = set()
    with suppress(tokenize.TokenError, SyntaxError):
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.COMMENT and not token.line[: token.start[1]].strip():
                lines.add(token.start[0])
    tree = parse(source)
    nodes = list(ast.walk(tree)) if tree else []
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    docstrings = {id(node.body[0]) for node in nodes if isinstance(node, documented) and node.body}
    for node in (node for node in nodes if isinstance(node, ast.Expr) and id(node) not in docstrings):
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines
