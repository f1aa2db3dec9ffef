"""Findings in Python source that need no dependency and no opinion: each is a mistake or dead code.

The same text gives the same findings on every machine, which a linter that may or may not be installed would not.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import PurePosixPath

from offbook.core.pycode import nodes, try_parse


def findings(path: str, source: str) -> Counter[str]:
    """How often each kind of finding occurs. What does not parse has one, `syntax`, and is looked at no further."""
    tree = try_parse(source)
    if tree is None:
        return Counter({"syntax": 1})
    formats = {id(node.format_spec) for node in nodes(tree, ast.FormattedValue)}  # f-strings of their own
    found = Counter(kind for node in ast.walk(tree) if id(node) not in formats for kind in _of_node(node))
    if PurePosixPath(path).name != "__init__.py":  # there an import is the package's face
        found.update({"unused_import": len(_unused_imports(tree))})
    return +found


def _of_node(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.ExceptHandler) and node.type is None:
        yield "bare_except"
    if isinstance(node, ast.Compare):
        yield from ("compared_with_none" for _ in range(_none_comparisons(node)))
    if isinstance(node, ast.JoinedStr) and not any(isinstance(part, ast.FormattedValue) for part in node.values):
        yield "empty_f_string"
    if isinstance(node, ast.Assert) and isinstance(node.test, ast.Tuple) and node.test.elts:
        yield "assert_on_tuple"
    if isinstance(node, ast.Dict):
        keys = Counter(repr(key.value) for key in node.keys if isinstance(key, ast.Constant))
        yield from ("repeated_key" for count in keys.values() if count > 1)
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        defaults = [*node.args.defaults, *node.args.kw_defaults]
        yield from ("mutable_default" for default in defaults if isinstance(default, ast.List | ast.Dict | ast.Set))
        yield from ("unused_variable" for _ in _unused_variables(node))
    for block in ("body", "orelse", "finalbody"):
        statements = getattr(node, block, None)
        if isinstance(statements, list):
            yield from _of_block(statements)


def _of_block(statements: list[ast.stmt]) -> Iterator[str]:
    ends = ast.Return | ast.Raise | ast.Break | ast.Continue
    if any(isinstance(statement, ends) for statement in statements[:-1]):
        yield "unreachable"
    for first, second in pairwise(statements):
        names = [item.name for item in (first, second) if isinstance(item, ast.FunctionDef) and not item.decorator_list]
        if len(names) == 2 and names[0] == names[1]:
            yield "redefined"


def _none_comparisons(node: ast.Compare) -> int:
    sides = zip(node.ops, [node.left, *node.comparators], node.comparators, strict=False)
    return sum(
        isinstance(op, ast.Eq | ast.NotEq)
        and any(isinstance(side, ast.Constant) and side.value is None for side in (left, right))
        for op, left, right in sides
    )


def _unused_imports(tree: ast.Module) -> set[str]:
    aliases = [alias for node in nodes(tree, ast.Import) for alias in node.names]
    aliases += [alias for node in nodes(tree, ast.ImportFrom) if node.module != "__future__" for alias in node.names]
    bound = {alias.asname or alias.name.split(".")[0] for alias in aliases if alias.asname != alias.name} - {"*"}
    names = {node.id for node in nodes(tree, ast.Name)}
    # A name in a string may be an annotation or an entry of __all__.
    texts = [node.value for node in nodes(tree, ast.Constant) if isinstance(node.value, str)]
    words = {word for text in texts for word in re.findall(r"\w+", text)}
    return bound - names - words


def _unused_variables(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """Names that a plain assignment of this function binds and that nothing in it reads."""
    inside = [node for statement in function.body for node in ast.walk(statement)]
    if any(isinstance(node, ast.Name) and node.id in ("locals", "exec", "eval") for node in inside):
        return set()
    scopes = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef  # what those bind is theirs
    theirs = {id(node) for inner in inside if isinstance(inner, scopes) for node in ast.walk(inner)}
    elsewhere = {name for node in inside if isinstance(node, ast.Global | ast.Nonlocal) for name in node.names}
    bound = {
        target.id
        for node in inside
        if isinstance(node, ast.Assign) and id(node) not in theirs
        for target in node.targets
        if isinstance(target, ast.Name) and not target.id.startswith("_")
    }
    read = {node.id for node in inside if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Store)}
    read |= {node.target.id for node in inside if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name)}
    return bound - read - elsewhere
