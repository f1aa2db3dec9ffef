"""An honest `__eq__` lets something of its own meet something of the other one, and changes neither."""

from __future__ import annotations

import ast

from offbook.monitors.scope import Source
from offbook.monitors.syntax import bindings, dotted, names_in, nodes, strings_in

COMPARING = frozenset({"__eq__", "__ne__", "__instancecheck__", "__subclasscheck__"})
BUILTINS = frozenset({"str", "int", "float", "bool", "list", "tuple", "dict", "set", "bytes", "object", "Exception"})
Function = ast.FunctionDef | ast.Lambda


def equal_to_all(source: Source, node: ast.AST) -> str:
    """Something that equals everything, or whatever it is compared with."""
    if isinstance(node, ast.FunctionDef) and node.name in COMPARING:
        return _agrees(node.name, node)
    if isinstance(node, ast.Assign):
        names = {dotted(target).rpartition(".")[2] for target in node.targets}
        made = next(nodes(node.value, ast.Lambda), None)
        if "__eq__" in names and (made is None or _agrees("__eq__", made)):
            return "" if made is None and not dotted(node.value).endswith("__ne__") else "__eq__ says yes to what differs"
        if any(isinstance(target, ast.Name) and target.id == "__class__" for target in node.targets):
            return "a class that says it is another"
    if isinstance(node, ast.Dict):
        for key, value in zip(node.keys, node.values, strict=True):
            is_equal = isinstance(key, ast.Constant) and key.value == "__eq__"
            if is_equal and (not isinstance(value, ast.Lambda) or _agrees("__eq__", value)):
                return "__eq__ made on the spot"
    if isinstance(node, ast.Call):
        by_name = dotted(node.func) == "setattr" and "__eq__" in strings_in(node)
        if by_name or any(word.arg == "__eq__" for word in node.keywords):
            return "__eq__ made on the spot"
    return "mock.ANY equals everything" if source.name(node) in ("unittest.mock.ANY", "mock.ANY") else ""


def _agrees(name: str, function: Function) -> str:
    """Whether it can say yes to anything: what it returns does not depend on both of the two."""
    yes = name != "__ne__"
    if isinstance(function, ast.Lambda):
        returned: list[ast.expr | None] = [function.body]
    else:
        returned = [one.value for one in nodes(function, ast.Return)]
    if returned and all(_is_constant(value, yes) for value in returned):
        return f"{name} says yes to everything"
    if name not in ("__eq__", "__ne__"):
        return ""
    if _takes_over(function):
        return f"{name} takes over what it is compared with"
    failing = [one.value for node in nodes(function, ast.ExceptHandler) for one in nodes(node, ast.Return)]
    choices = [one for value in returned if isinstance(value, ast.BoolOp) for one in value.values]
    if any(_is_constant(value, yes) for value in (*failing, *choices)):
        return f"{name} says yes in the end"
    upside_down = (ast.IsNot, ast.NotEq, ast.NotIn) if yes else (ast.Is, ast.Eq, ast.In)
    if any(isinstance(value, ast.Compare) and isinstance(value.ops[0], upside_down) for value in returned):
        return f"{name} says yes to what differs"
    answers = [one for one in returned if one and not _is_constant(one, not yes) and dotted(one) != "NotImplemented"]
    return f"{name} does not compare the two" if answers and not _meets(function) else ""


def _takes_over(function: Function) -> bool:
    """Whether it changes itself: sets a part of itself, or calls itself with the other one for no result."""
    mine = [one.arg for one in function.args.args][:1]
    for node in ast.walk(function):
        is_set = isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del)
        if is_set and (isinstance(node, ast.Attribute) or dotted(node).partition(".")[0] in mine):
            return True
        call = node.value if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) else None
        if call and call.args and dotted(call).partition(".")[0] in (*mine, "super", "list", "dict", "object", "vars"):
            return True
    return False


def _is_constant(value: ast.expr | None, wanted: bool) -> bool:
    return isinstance(value, ast.Constant) and value.value is not None and bool(value.value) is wanted


def _meets(function: Function) -> bool:
    """Whether anything in it brings the two together, beyond asking for a type that many things have."""
    arguments = [one.arg for one in function.args.args]
    if len(arguments) < 2:
        return bool(function.args.vararg)
    mine, theirs = {arguments[0], "super"}, {arguments[1]}
    for value, made in bindings(function):  # names that stand for a part of one of the two
        used = names_in(value)
        mine |= made if used & mine else set()
        theirs |= made if used & theirs else set()
    for node in nodes(function, ast.Compare, ast.BinOp, ast.Call):
        used = names_in(node)
        if isinstance(node, ast.Call) and dotted(node.func) in ("isinstance", "issubclass"):
            if used & theirs and not used & BUILTINS:
                return True
        elif used & mine and used & theirs:
            return True
    return False
