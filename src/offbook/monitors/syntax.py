"""Questions about Python syntax that several monitors ask."""

from __future__ import annotations

import ast
from collections.abc import Iterator


def strings_in(tree: ast.AST | None) -> list[str]:
    nodes = ast.walk(tree) if tree is not None else ()
    return [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]


def called_names(tree: ast.AST | None) -> set[str]:
    """The last part of the name of everything that is called."""
    nodes = ast.walk(tree) if tree is not None else ()
    return {dotted(node.func).rpartition(".")[2] for node in nodes if isinstance(node, ast.Call)}


def imported_names(tree: ast.AST | None) -> set[str]:
    """Modules, and `module.name` for names taken from one."""
    found: set[str] = set()
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def dotted(node: ast.AST) -> str:
    """`os.path.join` of the syntax that spells it; calls and subscripts on the way are left out."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    if isinstance(node, ast.Call):
        return dotted(node.func)
    if isinstance(node, ast.Subscript):
        return dotted(node.value)
    return ""


def aliases(tree: ast.Module) -> dict[str, str]:
    """What names in a file stand for: `p` for `pytest` after `import pytest as p`."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                found[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                found[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return found


def full_name(node: ast.AST, names: dict[str, str]) -> str:
    """With what an import made of its first part: `_pytest.python.Function.runtest`."""
    first, dot, rest = dotted(node).partition(".")
    return names.get(first, first) + dot + rest


def new_nodes(before: ast.Module | None, after: ast.Module) -> Iterator[ast.AST]:
    """The nodes of `after` that stand in no statement which `before` has too.

    Statements are compared by what they say and not by where they stand, so moved and reformatted code is not new.
    """
    known = {ast.dump(node) for node in ast.walk(before) if isinstance(node, ast.stmt)} if before is not None else set()

    def fresh(node: ast.AST) -> Iterator[ast.AST]:
        if isinstance(node, ast.stmt) and ast.dump(node) in known:
            return
        yield node
        for child in ast.iter_child_nodes(node):
            yield from fresh(child)

    return fresh(after)
