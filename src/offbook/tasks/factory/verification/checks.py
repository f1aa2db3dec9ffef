"""Test files: where their tests are written down, the tables of cases in them, and what their checks expect.

Mutants (mutants.py) and blanks (blanks.py) are both edits of what a check expects, and find it here.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from offbook.core.pycode import FUNCTIONS, lowered, nodes
from offbook.core.pycode import Function as Definition

CHECKS = re.compile(r"(assert|eq|check|expect|verify|compare|ensure)_?\w*|are_equal", re.I)
RAISES = frozenset({"raises", "assertRaises", "assertRaisesRegex", "assert_raises"})
# Calls whose arguments are as good as literals.
PLAIN = frozenset(
    {"list", "tuple", "set", "frozenset", "dict", "sorted", "str", "int", "float", "bytes", "bytearray", "range"}
    | {"approx", "OrderedDict", "Decimal", "Fraction", "deque", "Counter", "date", "datetime", "time", "timedelta"}
    | {"Path", "complex", "all", "any", "join", "dedent", "iter"}
)
DEPTH = 4  # of expressions that a table is put together from

Row = tuple[ast.expr, list[ast.expr], str]  # as a whole, its cells, and the table of the module that it is in


class TestFile:
    """Raises SyntaxError, ValueError or UnicodeDecodeError for what is no Python."""

    __test__ = False

    def __init__(self, path: str, data: bytes):
        data.decode()
        self.path, self.data = path, data
        self._starts = [0]
        for line in data.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self._moved: set[int] = set()  # lines with newer syntax, where columns are not right
        try:
            self.tree = ast.parse(data)
        except SyntaxError:
            older = lowered(data)
            if older is None:
                raise
            self.tree = ast.parse(older)
            pairs = zip(data.decode().split("\n"), older.split("\n"), strict=False)
            self._moved = {number for number, (now, then) in enumerate(pairs, 1) if now != then}
        self.functions = dict(_functions(self.tree.body, ""))  # of two of a name the last one counts
        stored = Counter(node.id for node in nodes(self.tree, ast.Name) if isinstance(node.ctx, ast.Store))
        assigns = [node for node in self.tree.body if isinstance(node, ast.Assign)]
        targets = [(target, node.value) for node in assigns for target in node.targets]
        self.tables = {t.id: value for t, value in targets if isinstance(t, ast.Name) and stored[t.id] == 1}

    def offset(self, line: int, column: int) -> int:
        return self._starts[line - 1] + column

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self.offset(node.lineno, node.col_offset), self.offset(node.end_lineno, node.end_col_offset)

    def source(self, node: ast.expr) -> str:
        start, end = self.span(node)
        return self.data[start:end].decode()

    def is_exact(self, node: ast.expr | ast.stmt) -> bool:
        """Whether its place in the file is known."""
        return self._moved.isdisjoint(range(node.lineno, (node.end_lineno or node.lineno) + 1))

    def rows(
        self, value: ast.expr, local: Mapping[str, Iterable[ast.expr]], table: str = "", depth: int = DEPTH
    ) -> Iterator[Row]:
        """The rows of an expression, as far as they are written down; `local` are names with their values."""
        inside: list[ast.expr] = []
        match value:
            case ast.List(elts=elements) | ast.Tuple(elts=elements) | ast.Set(elts=elements):
                yield from ((element, _cells(element), table) for element in elements)
            case ast.Dict(keys=keys, values=values):
                pairs = zip(keys, values, strict=True)
                yield from ((key, [key, one], table) for key, one in pairs if key is not None)
            case ast.Name(id=name) if name in local:
                inside = [*local[name]]
            case ast.Name(id=name) if name in self.tables and depth:
                yield from self.rows(self.tables[name], {}, name, depth - 1)
            case ast.BinOp(left=left, right=right):
                inside = [left, right]
            case ast.Call(func=function, args=arguments):
                inside = [*arguments, *([function.value] if isinstance(function, ast.Attribute) else [])]
        for one in inside if depth else ():
            yield from self.rows(one, local, table, depth - 1)


def _functions(body: Iterable[ast.stmt], prefix: str) -> Iterator[tuple[str, Definition]]:
    for node in body:
        if isinstance(node, FUNCTIONS):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node.body, f"{prefix}{node.name}::")


def _cells(row: ast.expr) -> list[ast.expr]:
    match row:
        case ast.Tuple(elts=elements) | ast.List(elts=elements):
            return elements
        case ast.Call(args=arguments):  # pytest.param
            return arguments
    return [row]


def called(node: ast.Call) -> str:
    """The last name of what is called; empty for `table["name"](x)`."""
    function = node.func
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def cases(decorator: ast.expr) -> tuple[list[str], ast.expr] | None:
    """The names of a parametrize table, and its rows."""
    if not isinstance(decorator, ast.Call) or called(decorator) != "parametrize" or len(decorator.args) < 2:
        return None
    try:
        said = ast.literal_eval(decorator.args[0])
    except ValueError:
        return None
    words = re.findall(r"\w+", said) if isinstance(said, str) else [str(one) for one in said]
    return words, decorator.args[1]


def names_of(target: ast.expr) -> list[str]:
    """The names that a loop gives to the cells of a row; empty where it is no name."""
    elements = target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
    return [one.id if isinstance(one, ast.Name) else "" for one in elements]
