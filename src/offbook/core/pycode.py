"""Python source analysis with `ast`, for the monitors, the feedback rules and the task factory.

- Trees: `try_parse` takes any text and gives None where it is no Python; `canonical` is `try_parse` with one spelling
  of each thing, for code that may hide what it does.
- Walking: `nodes`, `parents`, `new_nodes` (what an edit added).
- Names: `dotted`, `rooted`, `plain_dotted`, `aliases` and `full_name` (what imports made of a name), `names_in`,
  `identifiers`, `imported_names`, `called_names`.
- Scopes: `bound_in`, `binds`, `bindings`, `local_names`, `arguments_of`.
- Constants: `strings_in`, `text_in`.
"""

import ast
import warnings
from collections.abc import Iterator
from functools import lru_cache
from typing import TypeVar

Node = TypeVar("Node", bound=ast.AST)
Function = ast.FunctionDef | ast.AsyncFunctionDef
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
NO_PYTHON = (SyntaxError, ValueError, RecursionError, MemoryError)


# Trees.

parse = ast.parse


def try_parse(source: str) -> ast.Module | None:
    """None where it is no Python of this version; warnings about the source are not printed.

    Python reads bytes: a byte order mark is no part of the code, and a declared encoding decides what is.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(source.encode(errors="replace"))
    except NO_PYTHON:
        return None


@lru_cache(maxsize=128)  # several rules read the same files, and rollouts of one task mostly the same ones
def canonical(source: str) -> ast.Module | None:
    """`try_parse` with one spelling of each thing: `getattr(a, "b")` is `a.b`. The tree is shared: only read it."""
    tree = try_parse(source)
    return _Canonical().visit(tree) if tree else None


# Walking.


def nodes(tree: ast.AST | None, *kinds: type[Node]) -> Iterator[Node]:
    """The nodes of some kinds, level by level; none where there is no tree."""
    return (node for node in ast.walk(tree or ast.Module([], [])) if isinstance(node, kinds))


def parents(tree: ast.Module, node: ast.AST) -> list[ast.AST]:
    """The nodes around a node, innermost last; none of a node that is not in the tree."""
    above, found = _parent_of(tree), list[ast.AST]()
    while (outer := above.get(id(node))) is not None:
        found.insert(0, outer)
        node = outer
    return found


@lru_cache(maxsize=64)  # asked for many nodes of one file after the other
def _parent_of(tree: ast.Module) -> dict[int, ast.AST]:
    return {id(inner): outer for outer in ast.walk(tree) for inner in ast.iter_child_nodes(outer)}


def new_nodes(before: ast.Module | None, after: ast.Module) -> Iterator[ast.AST]:
    """The nodes of `after` outside of statements that `before` has too.

    Statements are compared by content and not by place, so moved and reformatted code is not new.
    """
    known = {ast.dump(node) for node in nodes(before, ast.stmt)}
    left: list[ast.AST] = [after]
    while left:  # a stack: recursive generators cost quadratic time in deep expressions
        node = left.pop()
        if not (isinstance(node, ast.stmt) and ast.dump(node) in known):
            yield node
            left += reversed(list(ast.iter_child_nodes(node)))


# Names.


def dotted(node: ast.AST) -> str:
    """`os.path.join` of the syntax that spells it; calls and subscripts on the way are left out.

    It begins with a dot where the root is no name: `.join` of `"".join`.
    """
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    if isinstance(node, ast.Call | ast.Subscript):
        return dotted(node.func if isinstance(node, ast.Call) else node.value)
    return ""


def rooted(node: ast.AST) -> str:
    """`dotted`, empty where the root is no name."""
    name = dotted(node)
    return "" if name.startswith(".") else name


def plain_dotted(node: ast.AST) -> str:
    """`a.b.c` of names and attributes alone, else empty."""
    through = any(isinstance(part, ast.Call | ast.Subscript) for part in ast.walk(node))
    return "" if through else rooted(node)


def aliases(tree: ast.Module) -> dict[str, str]:
    """What names in a file stand for: `p` for `pytest` after `import pytest as p`."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.split(".")[0]
                found[alias.asname or first] = alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                found[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in nodes(tree, ast.Assign):  # another name for something imported: `leave = os._exit`
        first = dotted(node.value).partition(".")[0] if isinstance(node.value, ast.Name | ast.Attribute) else ""
        if first in found or first in ("unittest", "builtins", "_pytest", "pytest"):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    found.setdefault(target.id, full_name(node.value, found))
    return found


def full_name(node: ast.AST, names: dict[str, str]) -> str:
    """`dotted` with what an import made of its first part: `_pytest.python.Function.runtest`."""
    first, dot, rest = dotted(node).partition(".")
    return names.get(first, first) + dot + rest


def names_in(tree: ast.AST | None) -> set[str]:
    """The names of variables."""
    return {node.id for node in nodes(tree, ast.Name)}


def identifiers(tree: ast.AST) -> set[str]:
    """The names of variables, attributes and keywords."""
    attributes = {node.attr for node in nodes(tree, ast.Attribute)}
    return names_in(tree) | attributes | {node.arg for node in nodes(tree, ast.keyword) if node.arg}


def imported_names(tree: ast.AST | None) -> set[str]:
    """Modules, and `module.name` for names taken from one."""
    found = {alias.name for node in nodes(tree, ast.Import) for alias in node.names}
    for node in nodes(tree, ast.ImportFrom):
        if node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def called_names(tree: ast.AST | None) -> set[str]:
    """The last part of the name of everything that is called."""
    return {dotted(node.func).rpartition(".")[2] for node in nodes(tree, ast.Call)}


# Scopes.


def bound_in(tree: ast.AST) -> set[str]:
    """Every name that is given a value in it, imports left out."""
    stored = {one.id for one in nodes(tree, ast.Name) if not isinstance(one.ctx, ast.Load)}
    defined = {one.name for one in nodes(tree, ast.stmt) if isinstance(one, Function | ast.ClassDef)}
    return stored | defined | {one.arg for one in nodes(tree, ast.arg)}


def binds(statement: ast.AST) -> set[str]:
    """The names that a statement gives a value: its own, or all that it assigns."""
    if isinstance(statement, Function | ast.ClassDef):
        return {statement.name}
    return {node.id for node in nodes(statement, ast.Name) if isinstance(node.ctx, ast.Store)}


def bindings(tree: ast.AST) -> Iterator[tuple[ast.expr, set[str]]]:
    """Values with the names that they, or what is in them, are given."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign | ast.NamedExpr | ast.AnnAssign | ast.For | ast.comprehension):
            continue
        value = node.iter if isinstance(node, ast.For | ast.comprehension) else node.value
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if value is not None:
            yield value, {name for target in targets for name in names_in(target)}


def arguments_of(arguments: ast.arguments) -> list[ast.arg]:
    extra = [argument for argument in (arguments.vararg, arguments.kwarg) if argument]
    return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *extra]


def local_names(function: Function) -> set[str]:
    """Arguments and everything that the body binds, except what is global or nonlocal."""
    names = {argument.arg for argument in arguments_of(function.args)}
    not_local: set[str] = set()
    waiting: list[ast.AST] = [*function.body]
    while waiting:
        part = waiting.pop()
        if isinstance(part, Function | ast.ClassDef):
            names.add(part.name)
            continue
        if isinstance(part, ast.Global | ast.Nonlocal):
            not_local.update(part.names)
        elif isinstance(part, ast.alias):
            names.add(part.asname or part.name.partition(".")[0])
        elif isinstance(part, ast.arg):
            names.add(part.arg)
        elif isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
            names.add(part.id)
        elif isinstance(part, ast.ExceptHandler) and part.name:
            names.add(part.name)
        waiting += ast.iter_child_nodes(part)
    return names - not_local


def is_main_guard(node: ast.AST) -> bool:
    """`if __name__ == "__main__":`"""
    return isinstance(node, ast.If) and "__main__" in strings_in(node.test)


# Constants.


def strings_in(tree: ast.AST | None) -> list[str]:
    return [node.value for node in nodes(tree, ast.Constant) if isinstance(node.value, str)]


def text_in(node: ast.AST | None) -> str:
    """The value of a string constant; empty for any other node."""
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


class _Canonical(ast.NodeTransformer):
    """Replaces indirect spellings: strings written in pieces, attributes, modules and assignments by name."""

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.op, ast.Add) and _is_text(node.left) and _is_text(node.right):
            return ast.copy_location(ast.Constant(text_in(node.left) + text_in(node.right)), node)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        name, texts = dotted(node.func), list(map(text_in, node.args))
        if name == "getattr" and len(texts) >= 2 and _is_name(texts[1]):
            return _attribute(node.args[0], texts[1], node)
        loads = ("__import__", "import_module", "importlib.import_module", "sys.modules.get")
        if name in loads and texts and _is_name(texts[0]):
            return _module(texts[0], node)
        joined = node.func.value if isinstance(node.func, ast.Attribute) and node.func.attr == "join" else node
        if _is_text(joined) and not text_in(joined) and node.args:
            parts = node.args[0].elts if isinstance(node.args[0], ast.List | ast.Tuple) else []
            if parts and all(map(_is_text, parts)):
                return ast.copy_location(ast.Constant("".join(map(text_in, parts))), node)
        return node

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        self.generic_visit(node)
        text, name, value = text_in(node.slice), dotted(node.value), node.value
        if not _is_name(text):
            return node
        if isinstance(node.ctx, ast.Load) and name == "sys.modules":
            return _module(text, node)
        if isinstance(value, ast.Call) and name == "vars" and value.args:
            return _attribute(value.args[0], text, node)
        if name.endswith("__dict__") and isinstance(value, ast.Attribute):
            return _attribute(value.value, text, node)
        return _attribute(value, text, node) if name == "__builtins__" else node

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        """`setattr(a, "b", c)` and its relatives are `a.b = c`."""
        self.generic_visit(node)
        call = node.value
        if not isinstance(call, ast.Call):
            return node
        last, words = dotted(call.func).rpartition(".")[2], list(call.args)
        if last == "__setattr__" and len(words) == 2 and isinstance(call.func, ast.Attribute):
            words.insert(0, call.func.value)
        if last in ("setattr", "__setattr__") and len(words) == 3 and _is_name(text_in(words[1])):
            target = _attribute(words[0], text_in(words[1]), node)
            target.ctx = ast.Store()
            return ast.copy_location(ast.Assign([target], words[2]), node)
        return node


def _is_name(text: str) -> bool:
    return all(part.isidentifier() for part in text.split("."))


def _attribute(value: ast.expr, name: str, place: ast.AST) -> ast.Attribute:
    ctx = place.ctx if isinstance(place, ast.Subscript) else ast.Load()
    return ast.copy_location(ast.Attribute(value, name, ctx), place)


def _module(text: str, place: ast.AST) -> ast.expr:
    """A module by its name, as if it had been imported."""
    found: ast.expr = ast.Name(text.split(".")[0], ast.Load())
    for part in text.split(".")[1:]:
        found = ast.copy_location(ast.Attribute(found, part, ast.Load()), place)
    return ast.copy_location(found, place)
