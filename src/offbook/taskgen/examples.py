"""Examples for what no docstring describes: checks out of the failing tests that read by themselves."""

from __future__ import annotations

import ast
import builtins
import copy
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from offbook.taskgen.delete.names import Definition, dotted, last
from offbook.taskgen.nouns import FunctionKey
from offbook.taskgen.testcode import Code, TestCode

MAX_EXAMPLE = 160  # characters
MAX_ROWS = 3  # of a table of cases
GENERIC = {
    "init",
    "process",
    "get",
    "set",
    "value",
    "parse",
    "format",
    "handle",
    "filter",
    "do",
    "to",
    "is",
    "make",
    "test",
}
EQUAL = {"assertEqual", "assertEquals", "assert_equal", "eq_"}


def examples(
    code: Sequence[Code], tests: TestCode, keys: Iterable[FunctionKey], failing: Iterable[str]
) -> dict[str, str]:
    """Checks that use nothing but imported names and literals, and are about these functions: they name one, or the
    test's name has a word of theirs. Every test has its turn. Each with the name of its test."""
    asked = [*keys]
    names = {key.simple for key in asked}
    about = {word for key in asked for word in words(key.name)} - GENERIC
    test_names = {test.partition("[")[0].split("::")[-1] for test in failing}
    found: dict[str, tuple[int, bool, str]] = {}
    for one in code:
        node = one.node
        if not isinstance(node, Definition) or node.name not in test_names:
            continue
        module = tests.module(one.path)
        imported = {i.bound for i in module.imports} if module else set()
        place = 0  # the first of every test, then the second
        for text, used in _alone(node, imported):
            if text not in found and (used & names or (used & imported and about & {*words(node.name)})):
                found[text] = (place, not used & names, node.name)
                place += 1
    return {text: found[text][2] for text in sorted(found, key=lambda text: found[text])}


def words(name: str) -> list[str]:
    """`SplitText.at_width` is split, text, at, width."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])|[^A-Za-z]+", " ", name).lower().split()


def _alone(node: Definition, imported: Collection[str]) -> Iterator[tuple[str, set[str]]]:
    """The checks of a test that read by themselves, and the names in each."""
    known = {*imported, *dir(builtins)}
    for values in _cases(node):
        for check in _checks(node, values):
            names = [part for part in ast.walk(check) if isinstance(part, ast.Name)]
            free = {name.id for name in names if isinstance(name.ctx, ast.Load)}
            own = {name.id for name in names if isinstance(name.ctx, ast.Store)}
            own |= {part.arg for part in ast.walk(check) if isinstance(part, ast.arg)}
            try:
                text = ast.unparse(ast.fix_missing_locations(check))
            except ValueError:  # a backslash inside of an f-string
                continue
            if "isinstance(" not in text and free - own <= known and len(text) <= MAX_EXAMPLE and "\n" not in text:
                yield text, free | {part.attr for part in ast.walk(check) if isinstance(part, ast.Attribute)}


def _cases(node: Definition) -> Sequence[Mapping[str, ast.expr]]:
    """Values of the test's parameters, a mapping a case; one empty mapping where it has no table."""
    for decorator in node.decorator_list:
        if not (isinstance(decorator, ast.Call) and last(dotted(decorator.func)) == "parametrize"):
            continue
        if len(decorator.args) < 2 or not isinstance(decorator.args[1], ast.List | ast.Tuple):
            continue
        names = _parameter_names(decorator.args[0])
        rows = []
        for row in decorator.args[1].elts[:MAX_ROWS]:
            values = [row] if len(names) == 1 else [*getattr(row, "elts", [])]
            if len(values) == len(names):
                rows.append(dict(zip(names, values, strict=True)))
        return rows or [{}]
    return [{}]


def _parameter_names(node: ast.expr) -> list[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [name.strip() for name in node.value.split(",") if name.strip()]
    return [str(part.value) for part in getattr(node, "elts", []) if isinstance(part, ast.Constant)]


def _checks(node: Definition, values: Mapping[str, ast.expr]) -> Iterator[ast.stmt]:
    """Assertions at the top level of a test, with what its names were set to in their places."""
    known = dict(values)
    for statement in node.body:
        if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            target = statement.targets[0]
            if isinstance(target, ast.Name):
                known[target.id] = _filled(statement.value, known)
                continue
        if isinstance(statement, ast.Assert):
            yield ast.Assert(_filled(statement.test, known))
        elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            call = statement.value
            if last(dotted(call.func)) in EQUAL and len(call.args) >= 2:
                left, right = (_filled(argument, known) for argument in call.args[:2])
                yield ast.Assert(ast.Compare(left, [ast.Eq()], [right]))
            else:
                known = dict(values)  # something may have changed what the names stand for
        else:
            known = dict(values)


def _filled(expression: ast.expr, known: Mapping[str, ast.expr]) -> ast.expr:
    class Fill(ast.NodeTransformer):
        def visit_Name(self, name: ast.Name) -> ast.expr:
            return copy.deepcopy(known[name.id]) if isinstance(name.ctx, ast.Load) and name.id in known else name

    filled = Fill().visit(copy.deepcopy(expression))
    assert isinstance(filled, ast.expr)
    return filled
