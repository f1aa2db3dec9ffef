"""Expected values of test files: where they are written down, how to hide them, and how to make them wrong.

Blank rounds (tasks/blanks.py) hide the expected side of a check, mutants (tasks/mutants.py) change it. Both edit the
same expressions: the operands of assertions, the values of their names, the tables that cases come from.

A check is blanked if its expected side is written down in the tests: then every right solution reports what the right
code did. A check stays as it is if the code under test decides how often it runs, as in a loop over its results, and if
the expected side is the result of an unknown call.
"""

from __future__ import annotations

import ast
import builtins
import random
import re
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from itertools import accumulate
from typing import Any

from offbook.core.pycode import FUNCTIONS, Function, nodes
from offbook.tasks.blanks import Edit, Place
from offbook.tasks.mutants import Mutant

CHECKS = re.compile(r"(assert|eq|check|expect|verify|compare|ensure)_?\w*|are_equal", re.I)
KNOWN = tomllib.loads(resources.files(__package__).joinpath("assertions.toml").read_text())
PLAIN = {*KNOWN["plain"]}
WRITTEN = (PLAIN | {*KNOWN["written"]}) - {"approx"}
COMPARED = {**dict.fromkeys(KNOWN["equal"], "Eq"), **KNOWN["compared"]}
VAGUE = {"Regex", "NotRegex", "AlmostEqual", "NotAlmostEqual"}  # methods whose expected value is no equal one
STANDARD = sys.stdlib_module_names | {"pytest"}
LITERAL = (
    *(ast.Constant, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.Starred, ast.UnaryOp, ast.BinOp),
    *(ast.JoinedStr, ast.FormattedValue, ast.Subscript, ast.Slice, ast.Call, ast.Name),
)
DEPTH = 4  # of expressions that a table is put together from
OPEN = "an expected value that is not written down"
LOOSE = "a check that runs as often as the code likes"
NONE = "no expected value"
VISIBLE = "a value that the test uses otherwise too"

Row = tuple[ast.expr | None, list[ast.expr]]  # as a whole, and its cells; None for an entry of a dictionary


@dataclass(slots=True)
class Candidate:
    """An edit that blanks something of one or more tests."""

    edit: Edit
    places: list[int]
    tests: set[str]
    is_soft: bool  # a recorder replaces a value, which may be used for more than comparisons


@dataclass(slots=True)
class Found:
    """What can be blanked in some test files."""

    files: Mapping[str, bytes]
    candidates: list[Candidate] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    names: list[Edit] = field(default_factory=list)
    renamed: list[str] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)  # where a test is written down -> why not all of it

    def place(self, asks: str, value: str = "") -> int:
        self.places.append(Place(asks, value))
        return len(self.places) - 1

    def drop(self, unwanted: Callable[[Candidate], bool], why: str) -> None:
        for one in [one for one in self.candidates if unwanted(one)]:
            self.candidates.remove(one)
            for test in one.tests:
                self.left.setdefault(test, why)


def found_in(files: Mapping[str, bytes], tests: Collection[str]) -> Found:
    """`tests` are where tests are written down: path::name or path::Class::name."""
    found = Found(files)
    for path, data in sorted(files.items()):
        own = {test.partition("::")[2] for test in tests if test.startswith(f"{path}::")}
        try:
            file = TestFile(path, data)
        except (SyntaxError, ValueError):
            found.left.update(dict.fromkeys((f"{path}::{name}" for name in own), "syntax"))
            continue
        read = [Test(found, file, name) for name in file.functions if name in own]
        file.hide(found, read, own)
        file.rename(found, own)
    return found


class TestFile:
    """A parsed test file. Raises SyntaxError or ValueError for what this Python cannot read."""

    __test__ = False

    def __init__(self, path: str, data: bytes):
        self.path, self.data = path, data
        self.tree = ast.parse(data.decode())
        self.starts = [0, *accumulate(map(len, data.splitlines(keepends=True)))]
        self.words = Counter(re.findall(rb"\w+", data))
        self.loads = names_of(self.tree, ast.Load)
        self.functions = dict(_functions(self.tree.body, ""))  # of two of a name the last one counts
        stored = names_of(self.tree, ast.Store)
        self.tables = {
            target.id: node.value
            for node in self.tree.body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name) and stored[target.id] == 1
        }
        self.imported: dict[str, bool] = {}  # name -> whether it is of the standard library
        for one in ast.walk(self.tree):
            for alias in one.names if isinstance(one, ast.Import | ast.ImportFrom) else ():
                module = f"{'.' * one.level}{one.module}" if isinstance(one, ast.ImportFrom) else alias.name
                self.imported[(alias.asname or alias.name).partition(".")[0]] = module.partition(".")[0] in STANDARD

    def span(self, node: Any) -> tuple[int, int]:
        return self.starts[node.lineno - 1] + node.col_offset, self.starts[node.end_lineno - 1] + node.end_col_offset

    def is_named(self, function: Function) -> bool:
        """Whether something in the file refers to a function, as far as its name is not used for another one."""
        defined = sum(one.name == function.name for one in self.functions.values())
        return self.words[function.name.encode()] > defined

    def rows(self, value: ast.expr, local: Mapping[str, Iterable[ast.expr]], depth: int = DEPTH) -> Iterator[Row]:
        """The rows of an expression, as far as they are written down; `local` are names with their values."""
        inside: Iterable[ast.expr] = ()
        match value:
            case ast.List(elts=elements) | ast.Tuple(elts=elements) | ast.Set(elts=elements):
                yield from ((element, _cells(element)) for element in elements)
            case ast.Dict(keys=keys, values=values):
                yield from ((None, [key, one]) for key, one in zip(keys, values, strict=True) if key is not None)
            case ast.Name(id=name) if name in local:
                inside = local[name]
            case ast.Name(id=name) if name in self.tables:
                inside = [self.tables[name]]
                local = {}
            case ast.BinOp(left=left, right=right):
                inside = [left, right]
            case ast.Call(func=ast.Attribute(value=owner), args=arguments):
                inside = [*arguments, owner]
            case ast.Call(args=arguments):
                inside = arguments
        for one in inside if depth else ():
            yield from self.rows(one, local, depth - 1)

    def hide(self, found: Found, tests: Sequence[Test], own: Collection[str]) -> None:
        """Blank the values that tests compare with by name.

        Tests that are not blanked are not run together with those that are, so their bodies are cut."""
        wanted: dict[tuple[int, int], set[str]] = defaultdict(set)
        for test in tests:
            for value in test.wanted:
                wanted[self.span(value)].add(test.name)
        for (start, end), names in sorted(wanted.items()):
            place = found.place("eq")
            edit = Edit(self.path, start, end, f"__blank__({place})")
            found.candidates.append(Candidate(edit, [place], names, is_soft=True))
        for name, node in self.functions.items():
            if node.name.startswith("test") and name not in own and not self.is_named(node):
                start = self.span(node.body[0])[0]
                for decorator in getattr(node.body[0], "decorator_list", [])[:1]:
                    start = self.data.rindex(b"@", 0, self.span(decorator)[0])
                edit = Edit(self.path, start, self.span(node.body[-1])[1], "pass")
                found.candidates.append(Candidate(edit, [], set(), is_soft=False))

    def rename(self, found: Found, own: Collection[str]) -> None:
        """The tests and their classes that nothing in the file names, and the file if no other one names it."""
        parts = {part for name in own for part in name.split("::")}
        defined = [one for one in ast.walk(self.tree) if isinstance(one, Function | ast.ClassDef)]
        counts = Counter(node.name for node in defined)
        for node in defined:
            word = node.name.encode()
            if node.name in parts and self.words[word] == counts[node.name]:
                prefix = "test_"
                if isinstance(node, ast.ClassDef):
                    prefix = "Test" if node.name.lower().startswith("test") else "Of"
                start = self.data.index(word, self.span(node)[0])
                found.names.append(Edit(self.path, start, start + len(word), prefix))
        stem = self.path.rpartition("/")[2].removesuffix(".py")
        is_found = stem.startswith("test_") or stem.endswith("_test")
        if own and is_found and not any(re.search(rf"\b{stem}\b".encode(), data) for data in found.files.values()):
            found.renamed.append(self.path)


def _functions(body: Iterable[ast.stmt], prefix: str) -> Iterator[tuple[str, Function]]:
    for node in body:
        if isinstance(node, FUNCTIONS):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node.body, f"{prefix}{node.name}::")


class Test:
    """One test function: the edits that blank its checks, and those that make them wrong."""

    __test__ = False

    def __init__(self, found: Found, file: TestFile, name: str):
        self.found, self.file, self.name = found, file, f"{file.path}::{name}"
        self.function = file.functions[name]
        self.operands: list[ast.expr] = []  # what checks compare
        self.raised: list[Edit] = []
        self.wanted: list[ast.expr] = []  # values to hide
        self._has_value = False
        self._compared: list[ast.Name] = []  # names on expected sides, which are not read any more
        self._alone: set[str] = set()  # those of them that are a whole expected side
        self._spans: list[tuple[int, int]] = []
        self._sources: dict[str, list[ast.expr]] = {}  # name -> expressions of its values
        self._loads = names_of(self.function, ast.Load)
        self._read_sources()
        self._statements(self.function.body, is_certain=True)
        if not self._has_value:
            self._leave(NONE)
        for name, count in Counter(node.id for node in self._compared).items():
            if self._loads[name] == count:
                self.wanted += self._sources.get(name, ())
            elif name in self._alone:
                self._leave(VISIBLE)

    def _leave(self, why: str) -> None:
        self.found.left.setdefault(self.name, why)

    # --- what is written down

    def _read_sources(self) -> None:
        stored = names_of(self.function, ast.Store)
        for decorator in self.function.decorator_list:
            match decorator:
                case ast.Call(args=[words, rows, *_]) if called(decorator) == "parametrize":
                    self._columns(re.findall(r"\w+", ast.unparse(words)), rows, {})
        assigned: dict[str, list[ast.expr]] = defaultdict(list)
        for node in ast.walk(self.function):
            match node:
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    assigned[name].append(value)
                    if stored[name] == len(assigned[name]) and all(map(self.is_written, assigned[name])):
                        self._sources[name] = assigned[name]
                case ast.For(target=target, iter=over) if self.is_written(over):
                    elements = target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
                    self._columns([getattr(one, "id", "") for one in elements], over, stored)

    def _columns(self, words: Sequence[str], over: ast.expr, stored: Mapping[str, int]) -> None:
        """The values of names that go through the rows of a table, if all of them are written down."""
        rows = [*self.file.rows(over, {**self._sources})]
        for place, word in enumerate(words):
            values = [cells[place] for _, cells in rows if place < len(cells)]
            if len(words) == 1:  # keys of a dictionary are looked up by the test too
                values = [row for row, _ in rows if row]
            if word and stored.get(word, 1) == 1 and values and all(map(self.is_written, values)):
                self._sources[word] = values

    def is_written(self, tree: ast.expr) -> bool:
        """Whether the tests alone decide about this value."""
        known = self.file.imported
        passed_by: list[ast.AST] = []  # functions and modules, which are no values
        for call in nodes(tree, ast.Call):
            is_known = called(call) in WRITTEN
            passed_by.append(call.func)
            match call.func:
                case ast.Attribute(value=ast.Name(id=module) as owner) if module in known:
                    is_known = is_known and known[module]
                    passed_by.append(owner)
                case ast.Attribute():  # a method of something that is written down itself
                    is_known = True
                case _:
                    is_known = is_known and known.get(called(call), True)
            if not is_known:
                return False
        for node in nodes(tree, ast.expr):
            if isinstance(node, ast.Name) and node not in passed_by:
                table = self.file.tables.get(node.id)
                is_builtin = hasattr(builtins, node.id) and node.id not in known
                if node.id not in self._sources and not is_builtin and (table is None or not self.is_written(table)):
                    return False
            elif not isinstance(node, LITERAL) and node not in passed_by:
                return False
        return True

    # --- checks

    def _statements(self, body: Iterable[ast.stmt], is_certain: bool) -> None:
        """`is_certain`: the code under test does not decide whether these run, and how often."""
        for node in body:
            is_kept = False
            match node:
                case ast.Assert(test=test):
                    self._assertion(node, test, "assert ", is_certain)
                case ast.Expr(value=ast.Call() as call):
                    self._call(call, is_certain)
                case ast.With(items=items) | ast.AsyncWith(items=items):
                    is_kept = True
                    for item in items:
                        if isinstance(item.context_expr, ast.Call) and called(item.context_expr) in KNOWN["raises"]:
                            self._raised(item.context_expr, is_certain)
                case ast.For(iter=over):
                    is_kept = self.is_written(over)
                case ast.If(test=test):
                    names = {name.id for name in nodes(test, ast.Name)}
                    is_kept = names <= {"sys", "os", "platform"} or self.is_written(test)
                case ast.Try(handlers=handlers):
                    is_kept = not handlers
                    self._statements([one for handler in handlers for one in handler.body], is_certain=False)
            inner = [one for name in ("body", "orelse", "finalbody") for one in getattr(node, name, ())]
            self._statements(inner, is_certain and is_kept)

    def _call(self, node: ast.Call, is_certain: bool) -> None:
        name, arguments = called(node), node.args
        if name in KNOWN["raises"]:
            self._raised(node, is_certain)
            return
        if not CHECKS.fullmatch(name):
            return
        method = name.removeprefix("assert")
        is_starred = any(isinstance(one, ast.Starred) for one in arguments)
        if isinstance(node.func, ast.Attribute) and not is_starred and (asserted := _asserted(method, arguments)):
            self._assertion(node, asserted, "", is_certain)
            return
        self.operands += arguments_of(node)
        if not is_certain or is_starred:
            self._leave(LOOSE)
            return
        written = [one for one in arguments if self.is_written(one)]
        literals = [one for one in written if not isinstance(one, ast.Name)]
        names = [one for one in written if one in arguments[:2] and isinstance(one, ast.Name)]
        if method not in VAGUE and len(literals) == 1 and len(arguments) > 1:
            place = self.found.place("eq")
            self._edit(literals[0], f"__blank__({place})", [place], is_soft=True)
        elif names:
            self._expect(names[-1])
        else:
            self._leave(OPEN)
            return
        self._has_value = True

    def _assertion(self, node: ast.Assert | ast.Call, asserted: ast.expr, before: str, is_certain: bool) -> None:
        for comparison in nodes(asserted, ast.Compare):
            self.operands.append(comparison.left)
            for right in comparison.comparators:
                # What is tested is on the left, and what it should be may be wrapped: f() == Point(1, 2).
                if isinstance(right, ast.Call) and isinstance(comparison.left, ast.Call):
                    self.operands += arguments_of(right)
                else:
                    self.operands.append(right)
        if not is_certain:
            self._leave(LOOSE)
            return
        first = len(self.found.places)
        text = before + self._check(asserted)
        self._edit(node, text, [*range(first, len(self.found.places))])

    def _edit(self, node: ast.expr | ast.stmt, text: str, places: list[int], is_soft: bool = False) -> None:
        start, end = self.file.span(node)
        if any(start < other_end and other < end for other, other_end in self._spans):
            self._leave(OPEN)
            return
        self._spans.append((start, end))
        self.found.candidates.append(Candidate(Edit(self.file.path, start, end, text), places, {self.name}, is_soft))

    def _check(self, node: ast.expr, truth: bool = True) -> str:
        """The expression with recorders that replaces an asserted one."""
        match node:
            case ast.BoolOp(op=ast.And(), values=values) if truth:
                return " and ".join(map(self._check, values))
            case ast.UnaryOp(op=ast.Not(), operand=operand) if truth:
                return self._check(operand, truth=False)
            case ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]) if truth:
                for value, expected in ((left, right), (right, left)):
                    near, expected = _tolerance(expected)
                    if self.is_written(expected):
                        self._expect(expected)
                        return self._recorder("approx" if near else "eq", near, value)
                self._leave(OPEN)
                return self._recorder("same", "", left, right)
            case ast.Compare(left=left, ops=[operator], comparators=[right]) if truth:
                sign = KNOWN["signs"][type(operator).__name__]
                for value, expected, asks in ((left, right, sign), (right, left, f".{sign}")):
                    try:
                        literal = ast.literal_eval(expected)
                    except (ValueError, TypeError, SyntaxError, MemoryError):
                        continue
                    return self._recorder(asks, repr(literal), value)
        if not isinstance(node, ast.Call | ast.Name | ast.Attribute | ast.Subscript | ast.Await):
            self._leave(OPEN)
        self._has_value |= not (isinstance(node, ast.Call) and called(node) in KNOWN["weak"])
        return self._recorder("truth", repr(truth), node)

    def _recorder(self, asks: str, expected: str, *values: ast.expr) -> str:
        self._has_value |= asks != "truth"
        return f"__blank__({self.found.place(asks, expected)}, {', '.join(f'({ast.unparse(one)})' for one in values)})"

    def _expect(self, expected: ast.expr) -> None:
        """Nothing reads this expression once a recorder replaces the check."""
        self._compared += nodes(expected, ast.Name)
        if isinstance(expected, ast.Name):
            self._alone.add(expected.id)

    def _raised(self, node: ast.Call, is_certain: bool) -> None:
        if not node.args:
            return
        kind = node.args[0]
        kinds = kind.elts if isinstance(kind, ast.Tuple) else [kind]
        names = [ast.unparse(one).rpartition(".")[2] for one in kinds if isinstance(one, ast.Name | ast.Attribute)]
        if isinstance(kind, ast.Name | ast.Attribute):
            span = self.file.span(kind)
            self.raised += [Edit(self.file.path, *span, word) for word in KNOWN["errors"] if word != names[0]]
        if not is_certain or len(names) != len(kinds):
            self._leave(LOOSE if not is_certain else OPEN)
            return
        self._has_value = True
        place = self.found.place("raises", "|".join(names))
        self._edit(kind, f"__blank__.raises({place})", [place])

    # --- mutants

    def mutants(self, rng: random.Random, most: int) -> list[Mutant]:
        """Single edits that make the test wrong, the better kinds first."""
        owner = self.name.split("::")[-2].encode()
        if self.file.is_named(self.function) or self.file.words[owner] > 1:  # another test may call it, or inherit it
            return []
        values = [edit for operand in self.operands for edit in self._constants(operand, rng)]
        kinds = [("value", edit) for edit in rng.sample(values, len(values))]
        kinds += [("raises", edit) for edit in rng.sample(self.raised, len(self.raised))]
        return [Mutant(self.name, edit.start, edit.end, edit.text, kind) for kind, edit in kinds[:most]]

    def _constants(self, node: ast.AST, rng: random.Random, depth: int = DEPTH) -> Iterator[Edit]:
        """Other values of constants that stand for themselves: not of arguments of calls that compute something, and
        not of tables that are used elsewhere."""
        inside: Iterable[ast.AST] = ()
        match node:
            case ast.Name(id=name) if depth:
                inside = [value for value in self._sources.get(name, ()) if not self._is_shared(value)]
                depth -= 1
            case ast.Call():
                inside = arguments_of(node) if called(node) in PLAIN else ()
            case ast.Constant() if not hasattr(node, "lineno"):  # the None of assertIsNone
                pass
            case ast.Constant() | ast.List(elts=[]) | ast.Tuple(elts=[]) | ast.Dict(keys=[]):
                start, end = self.file.span(node)
                text = _other(ast.literal_eval(node), rng)
                lines = "\n" * self.file.data[start:end].count(b"\n")  # a mutant has as many lines as the test
                if text:
                    yield Edit(self.file.path, start, end, f"({text}{lines})" if lines else text)
            case ast.Subscript() | ast.Lambda() | ast.JoinedStr() | ast.Attribute():
                pass
            case _:
                inside = ast.iter_child_nodes(node)
        for one in inside:
            yield from self._constants(one, rng, depth)

    def _is_shared(self, value: ast.expr) -> bool:
        """Whether it is in a table of the module that is read elsewhere too."""
        return any(
            value in ast.walk(table) and self.file.loads[name] != self._loads[name]
            for name, table in self.file.tables.items()
        )


def _other(value: Any, rng: random.Random) -> str:
    """The source of another value of the same type; empty if there is none."""
    match value:
        case bool():
            return repr(not value)
        case None:
            return "False"
        case int() | float():
            return repr(value + (rng.choice((-1, 1)) if value else 1))
        case str():
            place = rng.randrange(len(value)) if value else 0
            letter = rng.choice([letter for letter in "abcdefghijk" if letter != value[place : place + 1]])
            return repr(value[:place] + letter + value[place + 1 :])
        case bytes():
            return repr(value + b"x")
        case list() | tuple() | dict():
            return {list: "[0]", tuple: "(0,)", dict: "{0: 0}"}[type(value)]
    return ""


def _asserted(method: str, arguments: list[ast.expr]) -> ast.expr | None:
    """What an assertion method of unittest asserts, as an expression; None if that is not known."""
    match method, arguments:
        case "True" | "_", [first, *_]:
            return first
        case "False", [first, *_]:
            return ast.UnaryOp(ast.Not(), first)
        case "IsNone" | "IsNotNone", [first, *_]:
            return ast.Compare(first, [ast.Is() if method == "IsNone" else ast.IsNot()], [ast.Constant(None)])
        case "IsInstance", [first, second, *_]:
            return ast.Call(ast.Name("isinstance", ast.Load()), [first, second], [])
        case "NotIsInstance", _:
            asserted = _asserted("IsInstance", arguments)
            return asserted and ast.UnaryOp(ast.Not(), asserted)
        case _, [first, second, *_] if method in COMPARED:
            return ast.Compare(first, [getattr(ast, COMPARED[method])()], [second])
    return None


def _tolerance(node: ast.expr) -> tuple[str, ast.expr]:
    """Of a pytest.approx the text of (relative, absolute), and its value; of other expressions nothing, and itself."""
    match node:
        case ast.Call(args=[value], keywords=given) if called(node) == "approx":
            known = {one.arg: one.value.value for one in given if isinstance(one.value, ast.Constant)}
            if len(known) == len(given) and None not in known.values():
                return repr((known.get("rel", 0.0 if "abs" in known else 1e-6), known.get("abs", 1e-12))), value
    return "", node


def called(node: ast.Call) -> str:
    """The last name of what is called; empty for `table["name"](x)`."""
    function = node.func
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def arguments_of(call: ast.Call) -> list[ast.expr]:
    positional = (one.value if isinstance(one, ast.Starred) else one for one in call.args)
    return [*positional, *(keyword.value for keyword in call.keywords)]


def names_of(tree: ast.AST, context: type[ast.expr_context]) -> Counter[str]:
    """How often each name is read, or written."""
    return Counter(node.id for node in nodes(tree, ast.Name) if isinstance(node.ctx, context))


def _cells(row: ast.expr) -> list[ast.expr]:
    match row:
        case ast.Tuple(elts=elements) | ast.List(elts=elements):
            return elements
        case ast.Call(args=arguments):  # pytest.param
            return arguments
    return [row]
