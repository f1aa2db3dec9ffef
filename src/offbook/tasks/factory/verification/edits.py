"""Which single edits make a test wrong.

An edit is one expected value (a constant that a check compares with), one raised type, or one check turned round. What
equals everything passes a test with another value, and fails one that was turned round, as does whoever looks the value
up: a turned check shows only that the runner runs. Cases may come from a table of the module; an edit of the table, and
not of its use, is what somebody sees who looks there. Such an edit reaches other tests too, as does one of a test that
others call.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Collection, Iterable, Iterator

import libcst as cst
from libcst import matchers
from libcst.metadata import ByteSpanPositionProvider, MetadataWrapper

from offbook.core import pycode
from offbook.core.pycode import binds
from offbook.tasks.mutants import Mutant

MAX_SHARED = 8  # other tests that an edit reaches: all of them are run again with it
CHECKS = re.compile(r"(assert|eq|check|expect|verify|compare|ensure)_?\w*|are_equal", re.I)
# Calls whose arguments are as good as literals.
PLAIN = frozenset(
    {"list", "tuple", "set", "frozenset", "dict", "sorted", "str", "int", "float", "bytes", "bytearray", "range"}
    | {"approx", "OrderedDict", "Decimal", "Fraction", "deque", "Counter", "date", "datetime", "time", "timedelta"}
    | {"Path", "complex", "all", "any", "join", "dedent", "iter"}
)
TURNED: dict[type[cst.BaseCompOp], tuple[str, ...]] = {
    cst.Equal: ("==", "!="), cst.NotEqual: ("!=", "=="), cst.Is: ("is", "is not"), cst.IsNot: ("is not", "is"),
    cst.In: ("in", "not in"), cst.NotIn: ("not in", "in"), cst.LessThan: ("<", ">="), cst.GreaterThan: (">", "<="),
    cst.LessThanEqual: ("<=", ">"), cst.GreaterThanEqual: (">=", "<"),
}  # fmt: skip
OPPOSITE = {
    "assertTrue": "assertFalse", "assertEqual": "assertNotEqual", "assertIs": "assertIsNot", "assertIn": "assertNotIn",
    "assertIsNone": "assertIsNotNone", "assertIsInstance": "assertNotIsInstance", "assertAlmostEqual":
    "assertNotAlmostEqual", "assertEquals": "assertNotEqual", "assertRegex": "assertNotRegex",
    "assertGreater": "assertLessEqual", "assertLess": "assertGreaterEqual",
}  # fmt: skip
OPPOSITE |= {other: name for name, other in OPPOSITE.items()}
ERRORS = ("TypeError", "ValueError", "KeyError", "IndexError", "AttributeError", "RuntimeError", "LookupError")

Change = tuple[cst.CSTNode, str]  # what stands in the place of a node
Row = tuple["_Part", cst.BaseExpression, list[cst.BaseExpression]]  # as a whole, and its cells


class _Part:
    """A statement, which is read alone: a whole test file takes seconds."""

    def __init__(self, lines: list[bytes], statement: ast.stmt):
        first = min([statement.lineno, *(one.lineno for one in getattr(statement, "decorator_list", ()))]) - 1
        head = b"if 1:\n" if statement.col_offset else b""
        source = head + b"".join(lines[first : statement.end_lineno])
        self.module = MetadataWrapper(cst.parse_module(source), unsafe_skip_copy=True)
        self._spans = self.module.resolve(ByteSpanPositionProvider)
        self._before = sum(map(len, lines[:first])) - len(head)

    def span(self, node: cst.CSTNode) -> tuple[int, int]:
        start = self._before + self._spans[node].start
        return start, start + self._spans[node].length


class Module:
    """A test file: where its tests are written down (classes inherit from one another), and its tables."""

    def __init__(self, data: bytes):
        data.decode()
        tree = pycode.parse(data)
        self._lines = data.splitlines(keepends=True)
        self._functions: dict[str, ast.stmt] = {}  # of two of a name the last one counts
        self._parents: dict[str, list[str]] = {}
        self._names: dict[str, set[str]] = {}  # what a test, a function or a value of the module refers to
        self._everywhere = {"pytestmark"}  # what every test does
        self._tables: dict[str, ast.Assign] = {}
        self._reached_by: dict[str, set[str]] = {}
        self._read(tree.body, "", set())
        for node in tree.body:
            names = _names_in(node)
            for name in binds(node):
                self._names[name] = self._names.get(name, set()) | names
                if isinstance(node, ast.Assign) and name not in self._tables:
                    self._tables[name] = node
                else:
                    self._tables.pop(name, None)
            if isinstance(node, ast.FunctionDef):
                told = " ".join([node.name, *map(ast.unparse, node.decorator_list)])
                self._everywhere |= {node.name} if re.search("^(setup|teardown)_|autouse", told) else set()

    def _read(self, body: Iterable[ast.stmt], prefix: str, around: set[str]) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                self._functions[prefix + node.name] = node
                self._names[prefix + node.name] = _names_in(node) | around
                if prefix and node.name.startswith("test"):  # another one may call it: self.test_other()
                    self._names[node.name] = self._names.get(node.name, set()) | _names_in(node) | around
            elif isinstance(node, ast.ClassDef):
                self._parents[prefix + node.name] = [base.id for base in node.bases if isinstance(base, ast.Name)]
                rest = [one for one in node.body if not getattr(one, "name", "").startswith("test")]
                names = set[str]().union(*map(_names_in, [*rest, *node.decorator_list, *node.bases]))
                self._read(node.body, f"{prefix}{node.name}::", around | names)

    def place(self, test: str) -> str | None:
        if test in self._functions:
            return test
        owner, _, name = test.rpartition("::")
        found = (self.place(f"{parent}::{name}") for parent in self._parents.get(owner, ()) if parent != owner)
        return next((place for place in found if place), None)

    def mutants(self, path: str, test: str, tests: Collection[str], rng: random.Random, most: int) -> Iterator[Mutant]:
        """Of each kind some, the better kinds first. `path` is this file's; `tests` are all that may notice."""
        try:
            part = _Part(self._lines, self._functions[test])
            function = cst.ensure_type(
                next(iter(matchers.findall(part.module, matchers.FunctionDef()))), cst.FunctionDef
            )
            checks = _Checks()
            function.body.visit(checks)
            values = [(part, value) for value in checks.values]
            values += [(part, value) for name, value in checks.assigned if name in checks.compared]
            tables = [(words, rows) for words, rows in checks.loops if {*words} & checks.compared]
            tables += [found for decorator in function.decorators if (found := _cases(decorator))]
            for words, rows in tables:
                values += _cells(words, checks.compared, self._rows(rows, part, dict(checks.assigned), 4))
        except cst.ParserSyntaxError:  # as where the next statement begins on its last line
            return
        constants = [(of, change) for of, value in values for change in _constants(value, rng)]
        kinds = ("value", constants), ("raises", [(part, one) for one in checks.raised])
        left, callers = most, self._users({function.name.value}, test, tests)
        for kind, changes in (*kinds, ("check", [(part, one) for one in checks.turned])):
            for of, (node, text) in rng.sample(changes, len(changes)):
                shared = callers if of is part else self._users(_assigned(of), test, tests)
                if left and len(shared) <= MAX_SHARED:
                    left -= 1
                    others = tuple(f"{path}::{other}" for other in shared)
                    yield Mutant(f"{path}::{test}", *of.span(node), text, kind, shared=others)

    def _rows(self, value: cst.CSTNode, part: _Part, local: dict[str, cst.BaseExpression], depth: int) -> Iterator[Row]:
        """What an expression has for rows, as far as they are written down."""
        inside: list[cst.CSTNode] = []
        match value:
            case cst.List() | cst.Tuple() | cst.Set():
                for element in value.elements:
                    yield part, element.value, _of_row(element.value)
            case cst.Dict():
                for pair in value.elements:
                    if isinstance(pair, cst.DictElement):
                        yield part, pair.key, [pair.key, pair.value]
            case cst.Name() if value.value in local:
                inside = [local[value.value]]
            case cst.Name() if table := self._tables.get(value.value):
                other = _Part(self._lines, table)
                assigned = cst.ensure_type(next(iter(matchers.findall(other.module, matchers.Assign()))), cst.Assign)
                yield from self._rows(assigned.value, other, {}, depth - 1) if depth else ()
            case cst.BinaryOperation():
                inside = [value.left, value.right]
            case cst.Call():
                inside = [argument.value for argument in value.args]
                inside += [value.func.value] if isinstance(value.func, cst.Attribute) else []
        for one in inside if depth else ():
            yield from self._rows(one, part, local, depth - 1)

    def _users(self, names: set[str], test: str, tests: Collection[str]) -> tuple[str, ...]:
        """The other tests that a table reaches, or a test that others call, however. Not those of other files."""
        return tuple(other for other in sorted(tests) if other != test and names & self._reached(other))

    def _reached(self, test: str) -> set[str]:
        if test not in self._reached_by:
            reached, left = set[str](), [*self._everywhere, *self._names.get(test, ())]
            while left:
                if (name := left.pop()) not in reached:
                    reached.add(name)
                    left += self._names.get(name, ())
            self._reached_by[test] = reached
        return self._reached_by[test]


def _assigned(table: _Part) -> set[str]:
    first = matchers.findall(table.module, matchers.AssignTarget(target=matchers.Name()))
    return {cst.ensure_type(cst.ensure_type(one, cst.AssignTarget).target, cst.Name).value for one in first}


def _names_in(node: ast.AST) -> set[str]:
    """With those of arguments, which may be fixtures, and of attributes that may be tests."""
    found = {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
    found |= {one.attr for one in ast.walk(node) if isinstance(one, ast.Attribute) and one.attr.startswith("test")}
    return found | {one.arg for one in ast.walk(node) if isinstance(one, ast.arg)}


def _of_row(row: cst.BaseExpression) -> list[cst.BaseExpression]:
    if isinstance(row, cst.Tuple | cst.List):
        return [element.value for element in row.elements]
    return [one.value for one in row.args if one.keyword is None] if isinstance(row, cst.Call) else [row]


def _cells(words: list[str], compared: Collection[str], rows: Iterable[Row]) -> Iterator[tuple[_Part, cst.CSTNode]]:
    """The values of a table that the test compares with."""
    places = [place for place, word in enumerate(words) if word in compared] or [len(words) - 1]
    for part, row, cells in rows:
        if len(words) > 1:
            yield from ((part, cells[place]) for place in places if place < len(cells))
        elif words[0] in compared:
            yield part, row


def _cases(decorator: cst.Decorator) -> tuple[list[str], cst.BaseExpression] | None:
    """The names of a parametrize table, and its rows."""
    call = decorator.decorator
    if not isinstance(call, cst.Call) or _called(call) != "parametrize" or len(call.args) < 2:
        return None
    names = call.args[0].value
    if isinstance(names, cst.SimpleString):
        words = re.findall(r"\w+", str(names.evaluated_value))
    elif isinstance(names, cst.List | cst.Tuple):
        words = [str(e.value.evaluated_value) for e in names.elements if isinstance(e.value, cst.SimpleString)]
    else:
        words = []
    return (words, call.args[1].value) if words else None


class _Checks(cst.CSTVisitor):
    """What a test function compares, expects to be raised, and checks."""

    def __init__(self) -> None:
        self.values: list[cst.CSTNode] = []  # operands that constants are looked for in
        self.compared: set[str] = set()  # names among the operands
        self.assigned: list[tuple[str, cst.BaseExpression]] = []
        self.loops: list[tuple[list[str], cst.BaseExpression]] = []  # names, and what they go through
        self.raised: list[Change] = []
        self.turned: list[Change] = []

    def visit_Assign(self, node: cst.Assign) -> None:
        target = node.targets[0].target
        if isinstance(target, cst.Name):
            self.assigned.append((target.value, node.value))

    def visit_For(self, node: cst.For) -> None:
        targets = node.target.elements if isinstance(node.target, cst.Tuple) else [node]
        names = [one.target if isinstance(one, cst.For) else one.value for one in targets]
        self.loops.append(([one.value if isinstance(one, cst.Name) else "" for one in names], node.iter))

    def visit_Assert(self, node: cst.Assert) -> bool:
        comparisons = _Comparisons()
        node.test.visit(comparisons)
        for comparison in comparisons.found:
            self._compared(comparison.left)
            for target in comparison.comparisons:
                operand = target.comparator
                # What is tested stands on the left, and what it should be may be wrapped: == Point(1, 2).
                if isinstance(operand, cst.Call) and isinstance(comparison.left, cst.Call):
                    self.values += [argument.value for argument in operand.args]
                else:
                    self._compared(operand)
            for target in comparison.comparisons:
                if pair := TURNED.get(type(target.operator)):
                    self.turned.append((target.operator, f" {pair[1]} "))
        if not comparisons.found:
            inner = node.test
            if isinstance(inner, cst.UnaryOperation) and isinstance(inner.operator, cst.Not):
                self.turned.append((inner.operator, ""))
            else:
                self.turned.append((inner, f"not ({cst.Module([]).code_for_node(inner)})"))
        return True

    def visit_Call(self, node: cst.Call) -> None:
        name = _called(node)
        if name in {"raises", "assertRaises", "assertRaisesRegex", "assert_raises"} and node.args:
            kind = node.args[0].value
            if isinstance(kind, cst.Name | cst.Attribute):
                word = kind.value if isinstance(kind, cst.Name) else kind.attr.value
                self.raised += [(kind, other) for other in ERRORS if other != word]
        elif CHECKS.fullmatch(name):
            for argument in node.args:
                self._compared(argument.value)
            if name in OPPOSITE:
                self.turned.append(
                    (node.func.attr if isinstance(node.func, cst.Attribute) else node.func, OPPOSITE[name])
                )

    def _compared(self, operand: cst.BaseExpression) -> None:
        self.values.append(operand)
        if isinstance(operand, cst.Name):
            self.compared.add(operand.value)


class _Comparisons(cst.CSTVisitor):
    def __init__(self) -> None:
        self.found: list[cst.Comparison] = []

    def visit_Comparison(self, node: cst.Comparison) -> None:
        self.found.append(node)


def _called(node: cst.Call) -> str:
    function = node.func
    if isinstance(function, cst.Attribute):
        return function.attr.value
    return function.value if isinstance(function, cst.Name) else ""  # table["name"](x) has none


class _Literals(cst.CSTVisitor):
    """Constants of an expression that stand for themselves: not as arguments of calls that compute something."""

    def __init__(self, rng: random.Random):
        self.rng, self.edits = rng, list[Change]()

    def visit_Call(self, node: cst.Call) -> bool:
        return _called(node) in PLAIN and not any(isinstance(arg.value, cst.Lambda) for arg in node.args)

    def visit_Subscript(self, node: cst.Subscript) -> bool:
        return False

    def visit_Lambda(self, node: cst.Lambda) -> bool:
        return False

    def visit_Integer(self, node: cst.Integer) -> None:
        number = node.evaluated_value
        self.edits.append((node, str(number + 1 if number == 0 else number + self.rng.choice((-1, 1)))))

    def visit_Float(self, node: cst.Float) -> None:
        self.edits.append((node, repr(node.evaluated_value + self.rng.choice((-1.0, 1.0)))))

    def visit_SimpleString(self, node: cst.SimpleString) -> None:
        if text := _other_text(node, self.rng):
            self.edits.append((node, text))

    def visit_FormattedString(self, node: cst.FormattedString) -> bool:
        return False

    def visit_Name(self, node: cst.Name) -> None:
        if node.value in {"True", "False", "None"}:
            self.edits.append((node, {"True": "False", "False": "True", "None": "False"}[node.value]))

    def visit_Attribute(self, node: cst.Attribute) -> bool:
        return False

    def visit_List(self, node: cst.List) -> None:
        if not node.elements:
            self.edits.append((node, "[0]"))

    def visit_Dict(self, node: cst.Dict) -> None:
        if not node.elements:
            self.edits.append((node, "{0: 0}"))

    def visit_Tuple(self, node: cst.Tuple) -> None:
        if not node.elements:
            self.edits.append((node, "(0,)"))


def _constants(value: cst.CSTNode, rng: random.Random) -> list[Change]:
    literals = _Literals(rng)
    value.visit(literals)
    return literals.edits


def _other_text(node: cst.SimpleString, rng: random.Random) -> str:
    """The same literal with one letter or digit another one; nothing where it has none."""
    opening, text = node.prefix + node.quote, node.raw_value
    places = [m.start(2) for m in re.finditer(r"(\\[uUxN].{0,8}|\\.)|([A-Za-z0-9])", text, re.S) if m.group(2)]
    if not places:
        return "" if text else f"{opening}x{node.quote}"
    place = rng.choice(places)
    old = text[place]
    pool = "0123456789" if old.isdigit() else "abcdefghijklmnopqrstuvwxyz"
    new = rng.choice([letter for letter in pool if letter != old.lower()])
    return f"{opening}{text[:place]}{new.upper() if old.isupper() else new}{text[place + 1 :]}{node.quote}"
