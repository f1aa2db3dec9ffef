"""Whether a test module asks for less than it did: its collected tests and their checks, before and after.

An old check must still be reached in the same way: under the same conditions, with the same names behind it. New tests,
more checks and names that were renamed throughout lose nothing.
"""

from __future__ import annotations

import ast
import re
import unittest
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from offbook.monitors.syntax import FUNCTIONS, called_names, dotted, nodes

Function = ast.FunctionDef | ast.AsyncFunctionDef
OWN_SETUP = frozenset({"setUp", "tearDown", "setUpClass", "tearDownClass", "asyncSetUp", "asyncTearDown", "maxDiff",
                       "longMessage", "__doc__", "__module__", "__slots__"})  # fmt: skip
MACHINERY = frozenset(dir(unittest.TestCase)) - OWN_SETUP  # what makes a test case run and fail
CHECK = re.compile(r"(^|\.)(assert\w*|fail|raises|warns|deprecated_call)$")
MARKS = re.compile(r"(^|\.)mark\.\w+$|^(staticmethod|classmethod)$")
IDENTIFIERS = frozenset({"id", "attr", "arg", "name", "asname"})  # the fields of syntax that hold names
Leaf = tuple[str, Any, Any]  # a field of syntax that holds no further syntax, and its value on both sides
Reached = tuple[Any, ...]  # a check, behind what decides whether it is reached


def weaker(
    old: ast.Module, new: ast.Module, elsewhere: Sequence[Function] = (), instruction: str = ""
) -> tuple[str, int] | None:
    """What an old test module lost, and the line of it. `elsewhere`: the tests of other modules."""
    before, after = collected(old), collected(new)
    if is_renamed(old, new) and len(before) == len(after):
        return None
    if found := _taken_over(old, new):
        return found
    if lost := lost_data(old, new):
        return f"{lost} was changed", 1
    for name, node in before.items():
        if name not in after:
            moved = any(same(node, one) or _only_name_differs(node, one, before) for one in after.values())
            if not moved and not any(same(node, one) for one in elsewhere):
                return f"test {name} is gone", 1
        elif not is_renamed(node, after[name]) and (told := _loses(node, after[name], instruction)):
            return f"test {name} {told}", after[name].lineno
    return None


def _only_name_differs(old: Function, new: Function, before: dict[str, Function]) -> bool:
    """The same test under a name that no other had."""
    is_free = new.name not in {one.name for one in before.values()}
    return is_free and _differing(old, new) == [("name", old.name, new.name)]


def collected(tree: ast.Module) -> dict[str, Function]:
    """The tests that a runner finds in a module. A later definition hides an earlier one, `del` takes it away."""
    found: dict[str, Function] = {}
    for node in tree.body:
        if isinstance(node, FUNCTIONS) and node.name.startswith("test"):
            found[node.name] = node
        elif isinstance(node, ast.ClassDef):
            found = {name: one for name, one in found.items() if not name.startswith(f"{node.name}.")}
            bases = [dotted(base) for base in node.bases]
            if node.name.startswith("Test") or any(base not in ("object", "") for base in bases):
                inner = [one for one in node.body if isinstance(one, FUNCTIONS) and one.name.startswith("test")]
                found |= {f"{node.name}.{one.name}": one for one in inner}
        elif isinstance(node, ast.Delete):
            for target in node.targets:
                gone = dotted(target)
                found = {name: one for name, one in found.items() if name != gone and not name.startswith(f"{gone}.")}
    return found


def same(old: ast.AST, new: ast.AST) -> bool:
    return _differing(old, new) == []


def _differing(old: Any, new: Any) -> list[Leaf] | None:
    leaves = _leaves("", old, new)
    return leaves and [leaf for leaf in leaves if type(leaf[1]) is not type(leaf[2]) or leaf[1] != leaf[2]]


def _leaves(field: str, old: Any, new: Any) -> list[Leaf] | None:
    """Both side by side, down to what is no syntax any more; None where their shapes differ."""
    if isinstance(old, ast.AST) and type(old) is type(new):
        pairs = [(name, getattr(old, name, None), getattr(new, name, None)) for name in old._fields]
    elif isinstance(old, list | tuple) and isinstance(new, list | tuple) and len(old) == len(new):
        pairs = [(field, one, other) for one, other in zip(old, new, strict=True)]
    elif isinstance(old, ast.AST | list | tuple) or isinstance(new, ast.AST | list | tuple):
        return None
    else:
        return [(field, old, new)]
    found: list[Leaf] = []
    for pair in pairs:
        inner = _leaves(*pair)
        if inner is None:
            return None
        found += inner
    return found


def is_renamed(old: ast.AST, new: ast.AST) -> bool:
    """Whether names became other names, throughout and each into one that was not there: nothing else differs.

    Words in strings are names too: what tests compare with may be one.
    """
    leaves = _leaves("", old, new)
    became: dict[str, str] = {}
    for _, left, right in leaves or ():
        one, other = (re.findall(r"\w+|\W", str(value)) for value in (left, right))
        if type(left) is not type(right) or len(one) != len(other):
            return False
        if any(became.setdefault(*pair) != pair[1] for pair in zip(one, other, strict=True)):
            return False
    changed = {left: right for left, right in became.items() if left != right}
    names = {str(left) for field, left, _ in leaves or () if field in IDENTIFIERS}
    fresh = all(right.isidentifier() and right not in became for right in changed.values())
    kept = not any(CHECK.search(name) for pair in changed.items() for name in pair)
    is_whole = set(changed) <= names and len(set(changed.values())) == len(changed)
    return leaves is not None and kept and fresh and is_whole


def _taken_over(old: ast.Module, new: ast.Module) -> tuple[str, int] | None:
    """New statements of the module that change which tests there are, or what the old ones go by."""
    known = {ast.dump(node) for node in ast.walk(old)}
    tests = set(collected(old))
    shared = _bound(old.body) | {name.partition(".")[0] for name in tests}
    for inner in ast.walk(new):
        is_set = isinstance(inner, ast.Attribute) and _is_stored(inner) and inner.attr in MACHINERY
        if is_set and ast.dump(inner) not in known:
            return f"sets {dotted(inner)}", getattr(inner, "lineno", 1)
    for node in (one for one in new.body if ast.dump(one) not in known):
        if told := _statement(node, shared, old):
            return told, node.lineno
        if isinstance(node, ast.ClassDef) and any(name.startswith(f"{node.name}.") for name in tests):
            for one in node.body:
                made = _bound([one]) & MACHINERY
                if ast.dump(one) not in known and made:
                    return f"{node.name} makes {min(made)} its own", one.lineno
    return None


def _statement(node: ast.stmt, shared: set[str], old: ast.Module) -> str:
    if isinstance(node, FUNCTIONS):
        if node.name in ("load_tests", "setUpModule") or node.name.startswith("pytest_"):
            return f"{node.name} decides about the tests"
        if any(word.arg == "autouse" for word in nodes(node, ast.keyword)):
            return f"fixture {node.name} for every test"
    if isinstance(node, ast.Delete):
        return f"without {ast.unparse(node)}"
    if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names):
        return "takes whatever is elsewhere"
    if isinstance(node, ast.Import | ast.ImportFrom):
        return ""  # names from elsewhere are compared in `lost_data`
    if not isinstance(node, (*FUNCTIONS, ast.ClassDef)):
        stored = [one for one in ast.walk(node) if isinstance(one, ast.Attribute | ast.Subscript) and _is_stored(one)]
        if set_ := next((dotted(one) for one in stored if dotted(one).partition(".")[0] in {*shared, "globals"}), ""):
            return f"sets {set_}"
        if called_names(node) & {"setattr", "delattr", "exec", "globals", "vars"}:
            return "changes what was defined"
    made = _bound([node]) & shared
    is_test = isinstance(node, ast.ClassDef) or (isinstance(node, FUNCTIONS) and node.name.startswith("test"))
    # An import or a test is bound anew. A changed helper or table is found by `lost_data`.
    compared = [one for one in old.body if isinstance(one, ast.FunctionDef | ast.Assign | ast.AnnAssign)]
    is_hidden = not any(min(made, default="") in _bound([one]) for one in compared)
    return f"puts something in the place of {min(made)}" if made and not is_test and is_hidden else ""


def _is_stored(node: ast.Attribute | ast.Subscript) -> bool:
    return isinstance(node.ctx, ast.Store | ast.Del)


def _bound(body: list[ast.stmt]) -> set[str]:
    """The names that statements give a meaning to, those of inner functions left out."""
    found: set[str] = set()
    for node in _same_function(body):
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store | ast.Del):
            found.add(node.id)
    return found


def lost_data(old: ast.Module, new: ast.Module) -> str:
    """Tables, helpers and imports that tests go by, and that are no longer the same."""
    there = {ast.dump(node) for node in ast.walk(new)}
    for node in old.body:
        is_helper = isinstance(node, ast.FunctionDef) and not node.name.startswith("test")
        if (is_helper or isinstance(node, ast.Assign | ast.AnnAssign)) and ast.dump(node) not in there:
            if any(is_renamed(node, one) for one in new.body):
                continue
            return node.name if isinstance(node, ast.FunctionDef) else ast.unparse(node).partition("=")[0].strip()
    before, after = _imports(old), _imports(new)
    return min((name for name in before if name in after and before[name] != after[name]), default="")


def _imports(tree: ast.Module) -> dict[str, str]:
    found = [(alias, node) for node in nodes(tree, ast.ImportFrom) for alias in node.names]
    return {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias, node in found}


def _loses(old: Function, new: Function, instruction: str) -> str:
    """Whether a check of the old test is missing from the new one, or no longer reached in the same way."""
    if type(old) is not type(new):
        return "is run in another way"
    lost, added = list(_checks(old)), []
    for check in _checks(new):
        if (kept := next((one for one in lost if _differing(one, check) == []), None)) is not None:
            lost.remove(kept)
        else:
            added.append(check)
    if any(not any(_is_told(one, other, instruction) for other in added) for one in lost):
        return "lost a check"
    if gone := [one for one in old.decorator_list if not any(same(one, other) for other in new.decorator_list)]:
        return f"was changed: {ast.unparse(gone[0])}"
    around = [one for one in new.decorator_list if not any(same(one, other) for other in old.decorator_list)]
    if wrapped := [one for one in around if not MARKS.search(dotted(one))]:
        return f"is wrapped by {ast.unparse(wrapped[0])}"
    inside = {ast.dump(node) for node in ast.walk(old)}
    for node in _same_function(new.body):
        if isinstance(node, ast.Return | ast.Raise | ast.Yield | ast.Global) and ast.dump(node) not in inside:
            return "ends before its checks"
    read = {name for node in ast.walk(old) if _is_check(node) for name in _read(node)}
    bound = [node for node in _same_function(new.body) if isinstance(node, ast.stmt) and ast.dump(node) not in inside]
    simple = [node for node in bound if not hasattr(node, "body")]
    again = {name for node in simple for name in _bound([node])} & read
    again |= _arguments(new) & read & _read(old) - _arguments(old)
    return f"gives another meaning to {min(again)}" if again else ""


def _is_told(old: Reached, new: Reached, instruction: str) -> bool:
    """Whether a check wants another value than before, and the instruction has that value."""
    differing = _differing(old, new)
    return differing is not None and all(
        field == "value"
        and len(str(value)) > 1
        and not isinstance(value, bool | None)
        and re.search(rf"(?<![\w.]){re.escape(str(value))}(?!\w)", instruction)
        for field, _, value in differing
    )


def _arguments(function: Function) -> set[str]:
    return {one.arg for one in nodes(function.args, ast.arg)}


def _read(node: ast.AST) -> set[str]:
    return {one.id for one in nodes(node, ast.Name) if isinstance(one.ctx, ast.Load)}


def _same_function(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """All nodes but those inside of functions and classes that are defined there."""
    for node in body:
        yield node
        if not isinstance(node, (*FUNCTIONS, ast.ClassDef, ast.Lambda)):
            yield from _same_function(ast.iter_child_nodes(node))


def _checks(function: Function) -> Iterator[Reached]:
    """Each check with the conditions that it stands under. A `subTest` is none."""

    def go(nodes: list[ast.AST], under: Reached) -> Iterator[Reached]:
        for node in nodes:
            if _is_check(node):  # a message is no part of it
                yield (*under, node.test if isinstance(node, ast.Assert) else node)
            head = _head(node)
            yield from go(list(ast.iter_child_nodes(node)), (*under, head) if head else under)

    return go(list(function.body), ())


def _head(node: ast.AST) -> ast.AST | list[ast.withitem] | str:
    """What decides whether the statements inside are reached."""
    if isinstance(node, ast.If | ast.While):
        return node.test
    if isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
        return node.iter
    if isinstance(node, ast.With | ast.AsyncWith):
        plain = all(dotted(item.context_expr).endswith("subTest") for item in node.items)
        return "" if plain else node.items
    if isinstance(node, ast.Try):
        return "try" if node.handlers else ""
    if isinstance(node, (*FUNCTIONS, ast.ClassDef, ast.Lambda)):
        return "another function"
    return "case" if isinstance(node, ast.match_case) else ""


def _is_check(node: ast.AST) -> bool:
    if isinstance(node, ast.With):
        return any(CHECK.search(dotted(item.context_expr)) for item in node.items)
    return isinstance(node, ast.Assert) or (isinstance(node, ast.Expr) and bool(CHECK.search(dotted(node.value))))
