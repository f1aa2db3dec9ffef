"""Names in Python source, read with `ast`: dotted ones, and which are local to a function."""

from __future__ import annotations

import ast

Definition = ast.FunctionDef | ast.AsyncFunctionDef
# Methods of built-in types, and what files, patterns and parsers have: such a name says little about whose it is.
BUILTIN = frozenset(
    name for kind in (str, bytes, list, dict, set, tuple, int, float, type, object, BaseException) for name in dir(kind)
)
COMMON = BUILTIN | {
    "read", "write", "close", "open", "run", "match", "search", "group", "send", "next", "compile", "parse",
}  # fmt: skip


def dotted(node: ast.AST) -> str:
    """`a.b.c` of a name or an attribute of names; of a call or a subscript that of what is called; else empty."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return f"{before}.{node.attr}" if before else ""
    if isinstance(node, ast.Call):
        return dotted(node.func)
    return dotted(node.value) if isinstance(node, ast.Subscript) else ""


def plain_dotted(node: ast.AST) -> str:
    """`a.b.c` of names and attributes alone, else empty."""
    through = any(isinstance(part, ast.Call | ast.Subscript) for part in ast.walk(node))
    return "" if through else dotted(node)


def binds(statement: ast.AST) -> set[str]:
    """Names that it gives a value: its own, or all that it assigns."""
    if isinstance(statement, Definition | ast.ClassDef):
        return {statement.name}
    return {n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


def last(name: str) -> str:
    return name.rpartition(".")[2]


def arguments_of(arguments: ast.arguments) -> list[ast.arg]:
    extra = [argument for argument in (arguments.vararg, arguments.kwarg) if argument]
    return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *extra]


def local_names(node: Definition) -> set[str]:
    names = {argument.arg for argument in arguments_of(node.args)}
    not_local: set[str] = set()
    waiting: list[ast.AST] = list(node.body)
    while waiting:
        part = waiting.pop()
        if isinstance(part, Definition | ast.ClassDef):
            names.add(part.name)
            continue
        if isinstance(part, ast.Global | ast.Nonlocal):
            not_local |= set(part.names)
        elif isinstance(part, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name.partition(".")[0] for alias in part.names}
        elif isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
            names.add(part.id)
        elif isinstance(part, ast.ExceptHandler) and part.name:
            names.add(part.name)
        elif isinstance(part, ast.Lambda):
            names |= {argument.arg for argument in arguments_of(part.args)}
        waiting += ast.iter_child_nodes(part)
    return names - not_local
