"""Examples: checks out of the failing tests that read by themselves, with the statements that they need.

Which of them are true of the right code, and what they reach of it, is found by running them (tried.py).
"""

from __future__ import annotations

import ast
import builtins
import copy
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from offbook.tasks.factory.delete.names import Definition, arguments_of, dotted, last
from offbook.tasks.factory.delete.symbols import Import
from offbook.tasks.factory.instruction.literals import EQUAL
from offbook.tasks.factory.instruction.testcode import Code, TestCode
from offbook.tasks.factory.types import FunctionKey

MAX_LINE, MAX_EXAMPLE, MAX_LINES = 160, 360, 8  # characters, and lines of one example
MAX_ROWS = 20  # of a table of cases: more than are shown
FOLDER = "tmp_path"  # the one fixture that everybody knows
NEW_FOLDER = ("import pathlib", "import tempfile", f"{FOLDER} = pathlib.Path(tempfile.mkdtemp())")
MAX_BEFORE = 20  # statements that are looked at: some tests have hundreds
Node = TypeVar("Node", bound=ast.AST)
RAISING = {"raises", "assertRaises", "assertRaisesRegex", "assert_raises", "warns", "assertWarns"}


@dataclass(frozen=True, slots=True)
class Example:
    text: str
    test: str  # the name of the function it is from
    rank: tuple[bool, bool, int]  # indirect: it does not name what is gone; vague; its place in the test
    imports: tuple[str, ...]  # statements that say what its names mean


def examples(
    code: Iterable[Code], tests: TestCode, failing: Iterable[str], keys: Iterable[FunctionKey]
) -> list[Example]:
    """Checks that use nothing but imported names and literals: the best of every test first."""
    asked = [{*key.name.split(".")} - {"__init__", "__call__"} for key in keys]
    test_names = {test.partition("[")[0].split("::")[-1] for test in failing}
    found: dict[str, Example] = {}
    for one in code:
        module = tests.module(one.path)
        if not module or not isinstance(one.node, Definition) or one.node.name not in test_names:
            continue
        imported = {i.bound: i for i in module.imports if i.top and i.bound != "*"}
        for place, (text, read, is_exact) in enumerate(_alone(one.node, imported)):
            statements = tuple(_statement(imported[name]) for name in sorted(read & imported.keys()))
            statements = (*(NEW_FOLDER if FOLDER in read else ()), *statements)
            is_direct = any(names <= read for names in asked)
            found.setdefault(text, Example(text, one.node.name, (not is_direct, not is_exact, place), statements))
    return sorted(found.values(), key=lambda example: example.rank)


def _statement(imported: Import) -> str:
    own = imported.name or imported.module.partition(".")[0]
    as_name = "" if imported.bound == own else f" as {imported.bound}"
    return f"from {imported.module} import {own}{as_name}" if imported.name else f"import {imported.module}{as_name}"


def _alone(node: Definition, imported: Collection[str]) -> Iterator[tuple[str, set[str], bool]]:
    """The checks of a test that read by themselves, the names in each, and whether it says what comes out."""
    known = {*imported, *dir(builtins)}
    for values in _cases(node):
        body = [_filled(statement, values) for statement in node.body]
        given = {argument.arg for argument in arguments_of(node.args)} - {*values, FOLDER}  # `self`, and fixtures
        names = [(part, _read(part), _bound(part)) for part in body]
        for number, statement in enumerate(body):
            for check in (one for one in _checks(statement) if not _read(one) & given):
                before = names[max(0, number - MAX_BEFORE) : number]
                ways = [_with_needed(before, check, known, asserts=asserts) for asserts in (False, True)]
                for parts in ways if len(ways[0]) != len(ways[1]) else ways[:1]:
                    whole = ast.fix_missing_locations(ast.Module(parts, []))
                    read = _read(whole)
                    if read - _bound(whole) <= known | {FOLDER} and (text := _short(whole)):
                        attributes = {n.attr for n in ast.walk(whole) if isinstance(n, ast.Attribute)}
                        yield text, read | attributes, _is_exact(check)


def _short(whole: ast.Module) -> str:
    """Its text, empty where that is long."""
    try:
        text = ast.unparse(whole)
    except ValueError:  # a backslash inside of an f-string
        return ""
    lines = text.split("\n")
    is_short = len(text) <= MAX_EXAMPLE and len(lines) <= MAX_LINES and max(map(len, lines)) <= MAX_LINE
    return text if is_short else ""


def _is_exact(check: ast.stmt) -> bool:
    """It says what comes out, or which error."""
    test = check.test if isinstance(check, ast.Assert) else None
    if not isinstance(test, ast.Compare):
        return isinstance(check, ast.With | ast.For)
    sides = [test.left, *test.comparators]
    return isinstance(test.ops[0], ast.Eq) and any(not _read(side) - {"int", "str", "float"} for side in sides)


def _cases(node: Definition) -> Sequence[Mapping[str, ast.expr]]:
    """Values of the test's parameters, a mapping a case; one empty mapping where it has no table."""
    names, table = _table(node)
    rows = []
    for row in table[:MAX_ROWS]:
        values = [row] if len(names) == 1 else [*getattr(row, "elts", [])]
        if len(values) == len(names):
            rows.append(dict(zip(names, values, strict=True)))
    return rows or [{}]


def unread_rows(node: Definition) -> list[ast.expr]:
    """The rows of a test's table that nobody looks at."""
    return _table(node)[1][MAX_ROWS:]


def _table(node: Definition) -> tuple[list[str], list[ast.expr]]:
    """The names of a test's parameters and the rows of values; both empty where it has no table."""
    for decorator in node.decorator_list:
        if not (isinstance(decorator, ast.Call) and last(dotted(decorator.func)) == "parametrize"):
            continue
        if len(decorator.args) > 1 and isinstance(table := decorator.args[1], ast.List | ast.Tuple):
            return _parameter_names(decorator.args[0]), table.elts
    return [], []


def _parameter_names(node: ast.expr) -> list[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [name.strip() for name in node.value.split(",") if name.strip()]
    return [str(part.value) for part in getattr(node, "elts", []) if isinstance(part, ast.Constant)]


def _checks(statement: ast.stmt) -> Iterator[ast.stmt]:
    """Assertions at the top level of a test, and loops and expected errors that are one."""
    if isinstance(statement, ast.Assert):
        told = ast.Assert(statement.test)
        if not any(isinstance(part, ast.Name) and part.id == "isinstance" for part in ast.walk(told)):
            yield told
    elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        call = statement.value
        if last(dotted(call.func)) in EQUAL and len(call.args) >= 2:
            yield ast.Assert(ast.Compare(call.args[0], [ast.Eq()], [call.args[1]]))
    elif isinstance(statement, ast.With):
        if all(last(dotted(item.context_expr)) in RAISING for item in statement.items):
            yield statement
    elif isinstance(statement, ast.For) and any(isinstance(part, ast.Assert) for part in ast.walk(statement)):
        yield statement


def _with_needed(
    before: Sequence[tuple[ast.stmt, set[str], set[str]]], check: ast.stmt, known: Collection[str], *, asserts: bool
) -> list[ast.stmt]:
    """A check after the statements that make or change what it reads. A value that is used once stands in its place."""
    parts, needed = [check], _read(check).difference(known)
    for statement, read, bound in reversed(before):
        if not needed & (read | bound) or (isinstance(statement, ast.Assert) and not asserts):
            continue
        if isinstance(statement, ast.Assign) and all(isinstance(target, ast.Name) for target in statement.targets):
            if not needed & {*map(dotted, statement.targets)}:  # it makes something else out of what is needed
                continue
            needed -= {*map(dotted, statement.targets)}
        needed |= read.difference(known)
        parts.insert(0, statement)
    while (number := next(_used_once(parts), None)) is not None:
        value = parts.pop(number)
        assert isinstance(value, ast.Assign)
        parts = [_filled(part, {dotted(value.targets[0]): value.value}) for part in parts]
    return parts


def _used_once(parts: Sequence[ast.stmt]) -> Iterator[int]:
    """Places of assignments whose value can stand where the name is read: nothing is done in between."""
    if not all(isinstance(part, ast.Assign) for part in parts[:-1]):
        return
    for number, part in enumerate(parts):
        if isinstance(part, ast.Assign) and len(part.targets) == 1 and isinstance(name := part.targets[0], ast.Name):
            places = [n for one in parts for n in ast.walk(one) if isinstance(n, ast.Name) and n.id == name.id]
            if len(places) == 2:
                yield number


def _read(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}


def _bound(node: ast.AST) -> set[str]:
    stored = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    stored |= {n.name for n in ast.walk(node) if isinstance(n, Definition | ast.ClassDef)}
    return stored | {n.arg for n in ast.walk(node) if isinstance(n, ast.arg)}


def _filled(node: Node, values: Mapping[str, ast.expr]) -> Node:
    """With values in the places of names, and a function without a name that is called as what it returns."""

    class Fill(ast.NodeTransformer):
        def visit_Name(self, name: ast.Name) -> ast.expr:
            return copy.deepcopy(values[name.id]) if isinstance(name.ctx, ast.Load) and name.id in values else name

        def visit_Lambda(self, node: ast.Lambda) -> ast.Lambda:
            own = {argument.arg for argument in arguments_of(node.args)}
            node.body = _filled(node.body, {name: value for name, value in values.items() if name not in own})
            return node

        def visit_Call(self, call: ast.Call) -> ast.expr:
            self.generic_visit(call)
            if not isinstance(call.func, ast.Lambda) or call.keywords:
                return call
            names = [argument.arg for argument in arguments_of(call.func.args)]
            if len(names) != len(call.args) or any(isinstance(argument, ast.Starred) for argument in call.args):
                return call
            return _filled(call.func.body, dict(zip(names, call.args, strict=True)))

    if not values:
        return node
    filled: Node = Fill().visit(copy.deepcopy(node))
    return filled
