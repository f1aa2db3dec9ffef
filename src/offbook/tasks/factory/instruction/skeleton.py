"""What is gone as a declaration: signatures, docstrings, bases and fields, and no bodies."""

from __future__ import annotations

import ast
import copy
from collections.abc import Collection, Iterable, Iterator, Mapping

from offbook.core import pycode
from offbook.core.pycode import Function as Definition
from offbook.tasks.factory.delete.symbols import Symbols
from offbook.tasks.factory.types import FunctionKey

MAX_VALUE = 80  # characters of what a name is set to


def skeleton(
    files: Mapping[str, str],
    symbols: Symbols,
    gone: Collection[FunctionKey],
    names: Iterable[tuple[str, str]],
    with_values: bool = True,
) -> str:
    """Declarations of the gone functions and of the gone names (module, name), by file. `files` is the tree before."""
    by_file: dict[str, set[str]] = {}
    for key in gone:
        by_file.setdefault(key.path, set()).add(key.name)
    for module, name in names:
        if path := symbols.path_of(module):
            by_file.setdefault(path, set()).add(name)
    parts = []
    for path, wanted in sorted(by_file.items()):
        body = [*_declared(pycode.parse(files[path]).body, "", wanted, with_values)]
        if body:
            text = ast.unparse(ast.fix_missing_locations(ast.Module(body, [])))
            parts.append(f"# {path}\n{text}")
    return "\n\n".join(parts)


def _declared(body: Iterable[ast.stmt], prefix: str, wanted: Collection[str], values: bool) -> Iterator[ast.stmt]:
    for node in body:
        if isinstance(node, Definition):
            if prefix + node.name in wanted:
                yield _function(node)
        elif isinstance(node, ast.ClassDef):
            name = prefix + node.name
            inside = [*_declared(node.body, f"{name}.", wanted, values)]
            if name in wanted or (inside and any(own.startswith(f"{name}.__init__") for own in wanted)):
                fields = [part for part in node.body if _is_field(part, values)]
                yield _class(node, [*fields, *inside], whole=True)
            elif inside:
                yield _class(node, inside, whole=False)
        elif isinstance(node, ast.If | ast.Try):
            inner = [part for part in ast.iter_child_nodes(node) if isinstance(part, ast.stmt)]
            yield from _declared(inner, prefix, wanted, values)
        elif isinstance(node, ast.Assign | ast.AnnAssign) and not prefix:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if {*map(pycode.rooted, targets)} & {*wanted} and len(ast.unparse(node)) <= MAX_VALUE:
                yield node


def _function(node: Definition) -> Definition:
    declared = copy.copy(node)
    docstring = node.body[:1] if ast.get_docstring(node, clean=False) is not None else []
    declared.body = [*docstring, ast.Expr(ast.Constant(...))]
    return declared


def _class(node: ast.ClassDef, inside: list[ast.stmt], whole: bool) -> ast.ClassDef:
    declared = copy.copy(node)
    docstring = node.body[:1] if whole and ast.get_docstring(node, clean=False) is not None else []
    declared.body = [*docstring, *inside] or [ast.Expr(ast.Constant(...))]
    if not whole:
        declared.decorator_list = []
    return declared


def _is_field(node: ast.stmt, values: bool) -> bool:
    if isinstance(node, ast.AnnAssign):
        return values or node.value is None
    return values and isinstance(node, ast.Assign) and len(ast.unparse(node)) <= MAX_VALUE
