"""Questions about Python syntax that several monitors ask."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import lru_cache

from offbook.signals.trajectory import python
from offbook.signals.trajectory.python import nodes as nodes

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@lru_cache(maxsize=128)  # several rules read the same files, and rollouts of one task much the same ones
def parse(text: str) -> ast.Module | None:
    """With one spelling of each thing (`_Plain`). For reading only: the tree is shared."""
    tree = python.parse(text)
    return _Plain().visit(tree) if tree else None


def strings_in(tree: ast.AST | None) -> list[str]:
    return [node.value for node in nodes(tree, ast.Constant) if isinstance(node.value, str)]


def called_names(tree: ast.AST | None) -> set[str]:
    """The last part of the name of everything that is called."""
    return {dotted(node.func).rpartition(".")[2] for node in nodes(tree, ast.Call)}


def defined_in(tree: ast.AST | None) -> set[str]:
    """The names of its functions and classes."""
    return {node.name for node in nodes(tree, ast.stmt) if isinstance(node, (*FUNCTIONS, ast.ClassDef))}


def bound_in(tree: ast.AST) -> set[str]:
    """Every name that is given a meaning in it, imports left out."""
    stored = {one.id for one in nodes(tree, ast.Name) if not isinstance(one.ctx, ast.Load)}
    return stored | {one.arg for one in nodes(tree, ast.arg)} | defined_in(tree)


def bindings(tree: ast.AST) -> Iterator[tuple[ast.expr, set[str]]]:
    """Values with the names that they, or what is in them, are given."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign | ast.NamedExpr | ast.AnnAssign | ast.For | ast.comprehension):
            continue
        value = node.iter if isinstance(node, ast.For | ast.comprehension) else node.value
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if value is not None:
            yield value, {name for target in targets for name in names_in(target)}


def names_in(tree: ast.AST | None) -> set[str]:
    return {node.id for node in nodes(tree, ast.Name)}


def identifiers(tree: ast.AST) -> set[str]:
    """Every name in it: of variables, attributes and keywords."""
    attributes = {node.attr for node in nodes(tree, ast.Attribute)}
    return names_in(tree) | attributes | {node.arg for node in nodes(tree, ast.keyword) if node.arg}


def is_main_guard(node: ast.AST) -> bool:
    """`if __name__ == "__main__":`"""
    return isinstance(node, ast.If) and "__main__" in strings_in(node.test)


def imported_names(tree: ast.AST | None) -> set[str]:
    """Modules, and `module.name` for names taken from one."""
    found = {alias.name for node in nodes(tree, ast.Import) for alias in node.names}
    for node in nodes(tree, ast.ImportFrom):
        if node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def dotted(node: ast.AST) -> str:
    """`os.path.join` of the syntax that spells it; calls and subscripts on the way are left out."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    if isinstance(node, ast.Call | ast.Subscript):
        return dotted(node.func if isinstance(node, ast.Call) else node.value)
    return ""


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
            for target in (target for target in node.targets if isinstance(target, ast.Name)):
                found.setdefault(target.id, full_name(node.value, found))
    return found


def full_name(node: ast.AST, names: dict[str, str]) -> str:
    """With what an import made of its first part: `_pytest.python.Function.runtest`."""
    first, dot, rest = dotted(node).partition(".")
    return names.get(first, first) + dot + rest


def parents(tree: ast.Module, node: ast.AST) -> list[ast.AST]:
    """The nodes around a node, innermost last; none of a node that is not in the tree."""
    above, found = _above(tree), list[ast.AST]()
    while (outer := above.get(id(node))) is not None:
        found.insert(0, outer)
        node = outer
    return found


@lru_cache(maxsize=64)  # asked for many nodes of one file after the other
def _above(tree: ast.Module) -> dict[int, ast.AST]:
    return {id(inner): outer for outer in ast.walk(tree) for inner in ast.iter_child_nodes(outer)}


def is_left_out(tree: ast.Module, node: ast.AST) -> bool:
    """Whether a constant names what is passed over: `IGNORED = {...}`, `if x in (...): continue`, `x not in (...)`."""
    outer = parents(tree, node)
    if any(_negates(one) for one in outer):
        return True
    around = [one for one in outer if isinstance(one, ast.stmt)]
    inner = around[-1] if around else None
    if isinstance(inner, ast.If):
        return all(isinstance(one, ast.Continue | ast.Return | ast.Delete) for one in inner.body)
    if isinstance(inner, ast.Assign) and isinstance(inner.targets[0], ast.Name):
        name = inner.targets[0].id
        if any(name in names_in(one) for one in ast.walk(tree) if _negates(one)):
            return True
    is_simple = inner is not None and not hasattr(inner, "body")
    return is_simple and bool(re.search(r"(?i)ignor|exclu|skip|prun|omit", ast.unparse(inner)))  # type: ignore[arg-type]


def _negates(node: ast.AST) -> bool:
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.Not)
    return isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.NotIn | ast.NotEq)


def new_nodes(before: ast.Module | None, after: ast.Module) -> Iterator[ast.AST]:
    """The nodes of `after` that stand in no statement which `before` has too.

    Statements are compared by what they say and not by where they stand, so moved and reformatted code is not new.
    """
    known = {ast.dump(node) for node in nodes(before, ast.stmt)}

    left: list[ast.AST] = [after]
    while left:  # by hand: a generator in a generator costs as much more as an expression is deep
        node = left.pop()
        if not (isinstance(node, ast.stmt) and ast.dump(node) in known):
            yield node
            left += reversed(list(ast.iter_child_nodes(node)))


class _Plain(ast.NodeTransformer):
    """Several spellings of one thing become one: what is written in pieces or by name is what it stands for."""

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        left, right = _text(node.left), _text(node.right)
        if isinstance(node.op, ast.Add) and left is not None and right is not None:
            return ast.copy_location(ast.Constant(left + right), node)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        name, texts = dotted(node.func), [_text(one) for one in node.args]
        if name == "getattr" and len(texts) >= 2 and _is_name(texts[1]):
            return _attribute(node.args[0], str(texts[1]), node)
        loads = ("__import__", "import_module", "importlib.import_module", "sys.modules.get")
        if name in loads and texts and _is_name(texts[0]):
            return _path(str(texts[0]), node)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "join" and _text(node.func.value) == "":
            parts = node.args[0].elts if node.args and isinstance(node.args[0], ast.List | ast.Tuple) else []
            words = [word for one in parts if (word := _text(one)) is not None]
            if parts and len(words) == len(parts):
                return ast.copy_location(ast.Constant("".join(words)), node)
        return node

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        self.generic_visit(node)
        text, name = _text(node.slice), dotted(node.value)
        if isinstance(node.ctx, ast.Load) and name == "sys.modules" and _is_name(text):
            return _path(str(text), node)
        if isinstance(node.value, ast.Call) and name == "vars" and node.value.args and _is_name(text):
            return _attribute(node.value.args[0], str(text), node)
        if name.endswith("__dict__") and isinstance(node.value, ast.Attribute) and _is_name(text):
            return _attribute(node.value.value, str(text), node)
        if name == "__builtins__" and _is_name(text):
            return _attribute(node.value, str(text), node)
        return node

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        """`setattr(a, "b", c)` and its relatives are `a.b = c`."""
        self.generic_visit(node)
        call = node.value
        if not isinstance(call, ast.Call):
            return node
        last, words = dotted(call.func).rpartition(".")[2], list(call.args)
        if last == "__setattr__" and len(words) == 2 and isinstance(call.func, ast.Attribute):
            words.insert(0, call.func.value)
        if last in ("setattr", "__setattr__") and len(words) == 3 and _is_name(_text(words[1])):
            target = _attribute(words[0], str(_text(words[1])), node)
            target.ctx = ast.Store()
            return ast.copy_location(ast.Assign([target], words[2]), node)
        return node


def _text(node: ast.AST) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def text_in(node: ast.AST) -> str:
    """What a string says; nothing of anything else."""
    return _text(node) or ""


def _is_name(text: str | None) -> bool:
    return text is not None and all(part.isidentifier() for part in text.split("."))


def _attribute(value: ast.expr, name: str, place: ast.AST) -> ast.Attribute:
    ctx = place.ctx if isinstance(place, ast.Subscript) else ast.Load()
    return ast.copy_location(ast.Attribute(value, name, ctx), place)


def _path(text: str, place: ast.AST) -> ast.expr:
    """A module by its name, as if it had been imported."""
    found: ast.expr = ast.Name(text.split(".")[0], ast.Load())
    for part in text.split(".")[1:]:
        found = ast.copy_location(ast.Attribute(found, part, ast.Load()), place)
    return ast.copy_location(found, place)
