"""Which expected values of a test file can be blanked (tasks/blanks.py), and what the right code reports there.

A check is blanked where the expected side is written down in the tests, however it is spelled: then every right
solution reports what the right code did. A check stays as it is where the code under test decides how often it runs, as
in a loop over what it returned, and where the expected side comes out of a call that nothing is known about.
"""

from __future__ import annotations

import ast
import builtins
import json
import random
import re
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from offbook.tasks.blanks import BlankRound, Blanks, Edit, Place, blank_round, holds, is_unknown
from offbook.tasks.factory.verification.checks import CHECKS, PLAIN, RAISES, TestFile, called, cases, names_of
from offbook.tasks.mutants import base_of
from offbook.tasks.suite_run import Round, SuiteRun

EQUALS = {
    **dict.fromkeys(("assertEqual", "assertEquals", "assertListEqual", "assertDictEqual", "assertTupleEqual"), "eq"),
    **dict.fromkeys(("assertSetEqual", "assertMultiLineEqual"), "eq"),
    "assertSequenceEqual": "seq",
    "assertCountEqual": "count",
}
ORDERED = {"assertIn": "in", "assertNotIn": "not in", "assertGreater": ">", "assertGreaterEqual": ">="}
ORDERED |= {"assertLess": "<", "assertLessEqual": "<=", "assertNotEqual": "!="}
SIGNS: dict[type[ast.cmpop], str] = {
    ast.NotEq: "!=", ast.In: "in", ast.NotIn: "not in", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=",
}  # fmt: skip
# Of these the truth says little of what the code returned.
WEAK = frozenset({"isinstance", "issubclass", "hasattr", "callable", "all", "any", "startswith", "endswith", "match"})
PLAIN_CALLS = PLAIN | {"param", "fromkeys", "zip", "enumerate", "len", "repr"}
OPEN = "an expected value that is not written down"
LOOSE = "a check that runs as often as the code likes"
NONE = "no expected value"
OBJECTS = "objects"
VISIBLE = "a value that the test uses otherwise too"
CHANGED = "the right code does not pass it blanked"
UNSTABLE = "the right code does not report the same twice"
TRIES = 4
LONGEST = 100_000  # characters of all that the cases of a test report


@dataclass(slots=True)
class Candidate:
    """An edit of one or more tests."""

    edit: Edit
    places: list[int]
    tests: set[str]
    is_soft: bool  # a recorder goes where a value went, and not all that it meets there is a comparison


@dataclass(slots=True)
class Found:
    """Candidates of some test files."""

    files: Mapping[str, bytes]
    candidates: list[Candidate] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    names: list[Edit] = field(default_factory=list)
    renamed: list[str] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)  # where a test is written down -> why not all of it

    def place(self, asks: str, value: str = "") -> int:
        self.places.append(Place(asks, value))
        return len(self.places) - 1

    def blanks(self, cases: Mapping[str, tuple[str, ...]], inherited: Mapping[str, str]) -> Blanks:
        """Without reports yet. `cases` are tests with their node ids."""
        tests = {test for one in self.candidates for test in one.tests}
        kept = {base: nodes for base, nodes in cases.items() if inherited.get(base, base) in tests}
        left = {base: self.left.get(inherited.get(base, base), "" if base in kept else NONE) for base in cases}
        left = {base: why for base, why in left.items() if why}
        edits = tuple(one.edit for one in self.candidates)
        return Blanks(edits, tuple(self.names), tuple(self.renamed), tuple(self.places), kept, {}, left)

    def drop(self, unwanted: Callable[[Candidate], bool], why: str) -> None:
        for one in [one for one in self.candidates if unwanted(one)]:
            self.candidates.remove(one)
            for test in one.tests:
                self.left.setdefault(test, why)

    def pruned(
        self, this: BlankRound, run: SuiteRun, fail_to_pass: Collection[str], inherited: Mapping[str, str]
    ) -> bool:
        """Drop what the right code does not bear. Whether there was something: then all have to be run again."""
        before = len(self.candidates), len(self.names), len(self.renamed)
        failing = set[str]()
        for base, own in this.blanks.cases.items():
            names = [name for name in run.collected if this.tests.get(base_of(name)) == base]
            if len(names) != len(own) and (self.names or self.renamed):
                self.names, self.renamed = [], []
                return True
            pairs = list(zip(own, names, strict=False))
            if len(names) != len(own) or any(name not in run.passed for node, name in pairs if node in fail_to_pass):
                failing.add(inherited.get(base, base))
            for token, data in (report for _, name in pairs for report in run.blanks.get(name, ())):
                place = this.tokens[token]
                if not _holds(self.places[place], data):
                    self.drop(lambda one, place=place: place in one.places, OBJECTS)  # type: ignore[misc]
        soft = {test for one in self.candidates if one.is_soft for test in one.tests}
        self.drop(lambda one: bool(one.tests & failing) and (one.is_soft or not one.tests & soft), CHANGED)
        return before != (len(self.candidates), len(self.names), len(self.renamed))


def _holds(place: Place, data: Any) -> bool:
    """Whether what the right code reports can be told, and is right by what is asked for outside."""
    try:
        return holds(place, data, data) and (place.asks in {"truth", "is not"} or not is_unknown(data))
    except (TypeError, ValueError, OverflowError):
        return False


def found_in(files: Mapping[str, bytes], tests: Collection[str]) -> Found:
    """`tests` are where tests are written down: path::name or path::Class::name."""
    found = Found(files)
    for path, data in sorted(files.items()):
        own = {test.partition("::")[2]: test for test in tests if test.startswith(f"{path}::")}
        try:
            module = _Module(path, data, own)
        except (SyntaxError, ValueError):
            found.left.update(dict.fromkeys(own.values(), "syntax"))
            continue
        for name, function in module.functions.items():
            if name in own:
                _Test(found, module, own[name], function).read()
        module.hide(found)
        module.cut(found)
        _rename(found, module, own)
    return found


async def blanks_of(
    files: Mapping[str, bytes],
    fail_to_pass: Collection[str],
    inherited: Mapping[str, str],
    right: Mapping[str, str | None],
    run: Callable[[Sequence[Round], int], Awaitable[Sequence[SuiteRun]]],
    limit_s: float,
) -> Blanks:
    """Of the tests that need a feature, with what the right code reports. `files` has their test files; `run` takes
    rounds and a hash seed."""
    bases = sorted({base_of(node) for node in fail_to_pass})
    found = found_in(files, {inherited.get(base, base) for base in bases})
    cases: dict[str, tuple[str, ...]] = dict.fromkeys(bases, ())
    texts = {path: data.decode() for path, data in files.items()}
    plain = Round(sorted(files), bases, {**right, **texts}, limit_s)
    for _ in range(TRIES):
        blanks = found.blanks(cases, inherited)
        this = blank_round(blanks, blanks.cases, files, limit_s, random.Random(0))
        if this is None:
            return blanks
        blanked = replace(this.round, changes={**right, **this.round.changes})
        blank, whole = await run([blanked, plain], 0)
        cases = {base: tuple(node for node in whole.collected if base_of(node) == base) for base in bases}
        this = replace(this, blanks=found.blanks(cases, inherited))
        if found.pruned(this, blank, fail_to_pass, inherited):
            continue
        blanks = reported(this, blank, fail_to_pass)
        this = replace(this, blanks=blanks)
        blank, _ = await run([blanked, plain], 1)
        unstable = {base_of(node) for node in this.wrong(blank)[0]}
        return without(blanks, unstable, UNSTABLE)
    return without(found.blanks(cases, inherited), bases, CHANGED)


def blank_of(files: Mapping[str, bytes], tests: Collection[str]) -> BlankRound:
    """Of tests without parameters in which everything can be blanked."""
    blanks = found_in(files, tests).blanks({test: (test,) for test in tests}, {})
    this = blank_round(blanks, tests, files, 60.0, random.Random(0))
    assert this is not None
    return this


def reported(this: BlankRound, run: SuiteRun, fail_to_pass: Collection[str]) -> Blanks:
    """With what the right code reports in `run`; without tests that it does not pass in it."""
    reports: dict[str, list[list[Any]]] = {}
    bad = set[str]()
    for base, own in this.blanks.cases.items():
        names = [name for name in run.collected if this.tests.get(base_of(name)) == base]
        pairs = [(node, name) for node, name in zip(own, names, strict=False) if node in fail_to_pass]
        told = {node: [[this.tokens[token], data] for token, data in run.blanks.get(name, ())] for node, name in pairs}
        is_short = len(json.dumps(told)) <= LONGEST
        if len(own) == len(names) and is_short and all(name in run.passed for _, name in pairs):
            reports |= told
        else:
            bad.add(base)
    return without(replace(this.blanks, reports=reports), bad, CHANGED)


def without(blanks: Blanks, tests: Collection[str], why: str) -> Blanks:
    """These are not blanked, and the reason is kept."""
    cases = {test: nodes for test, nodes in blanks.cases.items() if test not in tests}
    reports = {node: told for node, told in blanks.reports.items() if base_of(node) in cases}
    return replace(blanks, cases=cases, reports=reports, left={**blanks.left, **dict.fromkeys(tests, why)})


def _rename(found: Found, module: _Module, own: Mapping[str, str]) -> None:
    """Functions and classes that nothing in their file names, and files that no other one names."""
    words = Counter(re.findall(rb"\w+", module.data))
    defined = Counter(node.name for node in module.functions.values())
    parts = {part for name in own for part in name.split("::")}
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ClassDef):
            prefix = "Test" if node.name.startswith("Test") else "Of" if "test" in node.name.lower() else ""
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name in parts:
            prefix = "test_" if node.name.startswith("test") else ""
        else:
            continue
        if prefix and words[node.name.encode()] == (defined[node.name] or 1):
            start = module.data.index(node.name.encode(), module.offset(node.lineno, node.col_offset))
            found.names.append(Edit(module.path, start, start + len(node.name.encode()), prefix))
    name = module.path.rpartition("/")[2]
    stem = name.removesuffix(".py")
    is_named = any(re.search(rf"\b{stem}\b".encode(), data) for path, data in found.files.items())
    if own and not is_named and (name.startswith("test_") or name.endswith("_test.py")):
        found.renamed.append(module.path)


class _Module(TestFile):
    """A test file, and which of its values tests ask to hide."""

    def __init__(self, path: str, data: bytes, own: Collection[str]):
        super().__init__(path, data)
        if self._moved:
            raise SyntaxError("newer than this Python")
        # Tests that are not blanked are not run with those that are.
        tests = [(name, node) for name, node in self.functions.items() if node.name.startswith("test")]
        self.others = [node for name, node in tests if name not in own]
        self.users = _loads(self.tree)
        for other in self.others:
            self.users -= _loads(other)
        self.imported: dict[str, bool] = {}  # name -> whether it is of the standard library
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    self.imported[(alias.asname or alias.name).partition(".")[0]] = _is_standard(alias.name)
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    self.imported[alias.asname or alias.name] = not node.level and _is_standard(node.module or "")
        self.wanted: dict[tuple[int, int], tuple[ast.expr, set[str], str]] = {}  # span -> value, tests, its table
        self.asked: dict[str, Counter[str]] = {}  # table -> tests that hide something in it, and how often they name it

    def hide(self, found: Found) -> None:
        """Values that tests have asked to hide: those of a table only if nothing else uses the table."""
        for (start, end), (_, tests, table) in sorted(self.wanted.items()):
            if table and self.users[table] > sum(self.asked[table].values()):
                for test in tests:
                    found.left.setdefault(test, VISIBLE)
                continue
            place = found.place("eq")
            edit = Edit(self.path, start, end, f"__blank__({place})")
            found.candidates.append(Candidate(edit, [place], set(tests), is_soft=True))

    def cut(self, found: Found) -> None:
        """The bodies of tests that are not run with those that are blanked, and that nothing names."""
        words = Counter(re.findall(rb"\w+", self.data))
        for node in self.others:
            if words[node.name.encode()] == 1:
                start, end = self.span(node.body[0])[0], self.span(node.body[-1])[1]
                found.candidates.append(Candidate(Edit(self.path, start, end, "pass"), [], set(), is_soft=False))


class _Test:
    """Reads one test function."""

    def __init__(self, found: Found, module: _Module, test: str, function: ast.FunctionDef | ast.AsyncFunctionDef):
        self.found, self.module, self.test, self.function = found, module, test, function
        self.strong = 0
        self.compared: list[ast.Name] = []  # names on expected sides, which are not read any more
        self.sources: dict[str, list[tuple[ast.expr, str]]] = {}  # name -> expressions of its values, each with a table
        self.spans: list[tuple[int, int]] = []
        stored = Counter(
            node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        )
        for words, rows in filter(None, map(cases, function.decorator_list)):
            if self.is_written(rows, deep=False):
                self._columns(words, rows, Counter())
        for node in ast.walk(function):
            if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                name = node.targets[0].id
                if stored[name] == 1 and self.is_written(node.value):
                    self.sources[name] = [(node.value, "")]
            elif isinstance(node, ast.For) and self.is_written(node.iter):
                self._columns(names_of(node.target), node.iter, stored)

    def read(self) -> None:
        self._statements(self.function.body, is_certain=True)
        if not self.strong:
            self._leave(NONE)
        loads = _loads(self.function)
        hidden = Counter(name.id for name in self.compared)
        for name, count in hidden.items():
            if loads[name] > count:
                if any(one.id == name and getattr(one, "is_alone", False) for one in self.compared):
                    self._leave(VISIBLE)
                continue
            for value, table in self.sources.get(name, ()):
                span = self.module.span(value)
                _, tests, _ = self.module.wanted.setdefault(span, (value, set(), table))
                tests.add(self.test)
                if table:
                    used = [n for n in ast.walk(self.function) if isinstance(n, ast.Name) and n.id == table]
                    self.module.asked.setdefault(table, Counter())[self.test] = len(used)

    def _leave(self, why: str) -> None:
        self.found.left.setdefault(self.test, why)

    # --- what is written down

    def _columns(self, words: Sequence[str], over: ast.expr, stored: Mapping[str, int]) -> None:
        """The values of names that go through the rows of a table."""
        local = {name: [value for value, _ in values] for name, values in self.sources.items()}
        rows = [*self.module.rows(over, local)]
        for place, word in enumerate(words):
            if stored.get(word, 1) != 1 or not word:
                continue
            if len(words) == 1:
                # Keys of a dictionary are looked up by the test too.
                self.sources[word] = [(r, table) for r, cells, table in rows if len(cells) != 2 or cells[0] is not r]
            else:
                self.sources[word] = [(cells[place], table) for _, cells, table in rows if place < len(cells)]

    def is_written(self, node: ast.AST | None, deep: bool = True) -> bool:
        """Whether the tests alone decide about this value. Not `deep`: calls are taken to be of the tests too."""
        match node:
            case None | ast.Constant():
                return True
            case ast.Name(id=name):
                if name in self.sources or (hasattr(builtins, name) and name not in self.module.imported):
                    return True
                table = self.module.tables.get(name)
                return table is not None and self.is_written(table, deep)
            case ast.Call(func=function, args=arguments, keywords=keywords):
                parts: list[ast.AST | None] = [*arguments, *(one.value for one in keywords)]
                known = self.module.imported
                match function:
                    case ast.Name(id=name):
                        is_known = name in PLAIN_CALLS and known.get(name, True)
                    case ast.Attribute(value=ast.Name(id=owner), attr=name) if owner in known:
                        is_known = name in PLAIN_CALLS and known[owner]
                    case ast.Attribute(value=owner):  # a method of something that is written down itself
                        is_known = True
                        parts.append(owner)
                    case _:
                        is_known = False
                return (is_known or not deep) and all(self.is_written(part, deep) for part in parts)
            case ast.List() | ast.Tuple() | ast.Set() | ast.Dict() | ast.Starred() | ast.UnaryOp() | ast.BinOp():
                return all(self.is_written(part, deep) for part in _parts(node))
            case ast.JoinedStr() | ast.FormattedValue() | ast.Subscript() | ast.Slice():
                return all(self.is_written(part, deep) for part in _parts(node))
        return False

    # --- checks

    def _statements(self, body: Iterable[ast.stmt], is_certain: bool) -> None:
        for node in body:
            match node:
                case ast.Assert():
                    self._assertion(node, is_certain)
                case ast.Expr(value=ast.Call() as call):
                    self._call(call, is_certain)
                case ast.With(items=items, body=inner) | ast.AsyncWith(items=items, body=inner):
                    for item in items:
                        if isinstance(item.context_expr, ast.Call):
                            self._raised(item.context_expr, is_certain)
                    self._statements(inner, is_certain)
                case ast.For(iter=over, body=inner, orelse=otherwise):
                    self._statements([*inner, *otherwise], is_certain and self.is_written(over))
                case ast.If(test=test, body=inner, orelse=otherwise):
                    self._statements([*inner, *otherwise], is_certain and self._is_of_platform(test))
                case ast.While(body=inner) | ast.FunctionDef(body=inner) | ast.AsyncFunctionDef(body=inner):
                    self._statements(inner, is_certain=False)
                case ast.Try(body=inner, handlers=handlers, orelse=otherwise, finalbody=final):
                    every = [*inner, *(one for handler in handlers for one in handler.body), *otherwise, *final]
                    self._statements(every, is_certain and not handlers)
                case ast.ClassDef(body=inner):
                    self._statements(inner, is_certain=False)

    def _is_of_platform(self, test: ast.expr) -> bool:
        names = {node.id for node in ast.walk(test) if isinstance(node, ast.Name)}
        return names <= {"sys", "os", "platform"} or self.is_written(test)

    def _assertion(self, node: ast.Assert, is_certain: bool) -> None:
        if not is_certain:
            self._leave(LOOSE)
            return
        places: list[int] = []
        self._edit(node, f"assert {self._check(node.test, places)}", places)

    def _edit(self, node: ast.expr | ast.stmt, text: str, places: list[int], is_soft: bool = False) -> None:
        start, end = self.module.span(node)
        if any(start < other_end and other < end for other, other_end in self.spans):
            self._leave(OPEN)
            return
        self.spans.append((start, end))
        edit = Edit(self.module.path, start, end, text)
        self.found.candidates.append(Candidate(edit, places, {self.test}, is_soft))

    def _check(self, node: ast.expr, places: list[int]) -> str:
        """An expression in the place of one that is asserted."""
        if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.And):
            return " and ".join(self._check(one, places) for one in node.values)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return self._truth(node.operand, False, places)
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            sign, left, right = node.ops[0], node.left, node.comparators[0]
            if isinstance(sign, ast.Eq):
                return self._equal(left, right, "eq", places) or self._truth(node, True, places)
            if isinstance(sign, ast.Is | ast.IsNot) and isinstance(right, ast.Constant):
                asks = "is" if isinstance(sign, ast.Is) else "is not"
                return self._recorder([left], places, asks, repr(right.value))
            if type(sign) in SIGNS:
                return self._ordered(left, right, SIGNS[type(sign)], places) or self._truth(node, True, places)
        return self._truth(node, True, places)

    def _recorder(self, values: Sequence[ast.expr], places: list[int], asks: str, value: str = "") -> str:
        place = self.found.place(asks, value)
        places.append(place)
        self.strong += 1
        return f"__blank__({place}, {', '.join(f'({self.module.source(one)})' for one in values)})"

    def _equal(self, left: ast.expr, right: ast.expr, asks: str, places: list[int]) -> str:
        for value, expected in ((left, right), (right, left)):
            if isinstance(expected, ast.Call) and called(expected) == "approx" and asks == "eq":
                near = _tolerance(expected)
                if near and self.is_written(expected.args[0]):
                    self._expect(expected.args[0])
                    return self._recorder([value], places, "approx", near)
                return ""
            if self.is_written(expected):
                self._expect(expected)
                return self._recorder([value], places, asks)
        self._leave(OPEN)
        return self._recorder([left, right], places, "same") if asks == "eq" else ""

    def _expect(self, expected: ast.expr) -> None:
        """It is not read any more where a recorder is."""
        for node in ast.walk(expected):
            if isinstance(node, ast.Name):
                setattr(node, "is_alone", node is expected)  # noqa: B010
                self.compared.append(node)

    def _ordered(self, left: ast.expr, right: ast.expr, sign: str, places: list[int]) -> str:
        for value, expected, asks in ((left, right, sign), (right, left, f".{sign}")):
            try:
                literal = ast.literal_eval(expected)
            except (ValueError, TypeError, SyntaxError, MemoryError):
                continue
            return self._recorder([value], places, asks, repr(literal))
        return ""

    def _truth(self, node: ast.expr, truth: bool, places: list[int]) -> str:
        if not isinstance(node, ast.Call | ast.Name | ast.Attribute | ast.Subscript | ast.Await):
            self._leave(OPEN)
        text = self._recorder([node], places, "truth", repr(truth))
        if isinstance(node, ast.Call) and called(node) in WEAK:
            self.strong -= 1
        return text

    def _call(self, node: ast.Call, is_certain: bool) -> None:
        name, arguments = called(node), node.args
        if name in RAISES:
            self._raised(node, is_certain)
            return
        if not CHECKS.fullmatch(name):
            return
        if not is_certain or any(isinstance(one, ast.Starred) for one in arguments):
            self._leave(LOOSE)
            return
        places: list[int] = []
        text = self._method(name, node, places) if isinstance(node.func, ast.Attribute) else ""
        if text:
            self._edit(node, text, places)
        elif name not in {*EQUALS, "assertRegex", "assertNotRegex"}:
            written = [one for one in arguments if self.is_written(one) and not isinstance(one, ast.Name)]
            if len(written) == 1 and len(arguments) > 1:
                self.strong += 1
                places = [self.found.place("eq")]
                self._edit(written[0], f"__blank__({places[0]})", places, is_soft=True)
            elif len(arguments) == 2 and isinstance(arguments[1], ast.Name) and self.is_written(arguments[1]):
                self.strong += 1
                self._expect(arguments[1])
            else:
                self._leave(OPEN)

    def _method(self, name: str, node: ast.Call, places: list[int]) -> str:
        """A recorder in the place of an assertion of unittest's; nothing where there is none for it."""
        first, second = [*node.args, None, None][:2]
        if first is None:
            return ""
        if name in EQUALS and second:
            return self._equal(first, second, EQUALS[name], places)
        if name in ORDERED and second:
            return self._ordered(first, second, ORDERED[name], places)
        if name in {"assertTrue", "assert_"}:
            return self._check(first, places)
        if name == "assertFalse":
            return self._truth(first, False, places)
        if name in {"assertIsNone", "assertIsNotNone"}:
            return self._recorder([first], places, "is" if name == "assertIsNone" else "is not", "None")
        if name in {"assertIs", "assertIsNot"} and isinstance(second, ast.Constant):
            return self._recorder([first], places, "is" if name == "assertIs" else "is not", repr(second.value))
        if name in {"assertIsInstance", "assertNotIsInstance"} and second:
            kind = f"isinstance({self.module.source(first)}, {self.module.source(second)})"
            place = self.found.place("truth", repr(name == "assertIsInstance"))
            places.append(place)
            return f"__blank__({place}, {kind})"
        if name == "assertAlmostEqual" and second and self.is_written(second):
            third = node.args[2:3] or [one.value for one in node.keywords if one.arg == "places"]
            if (third and not isinstance(third[0], ast.Constant)) or any(one.arg == "delta" for one in node.keywords):
                return ""
            digits = third[0].value if third and isinstance(third[0], ast.Constant) else 7
            self._expect(second)
            return self._recorder([first], places, "approx", repr((0.0, 0.5 * 10.0 ** -int(str(digits)))))
        return ""

    def _raised(self, node: ast.Call, is_certain: bool) -> None:
        if called(node) not in RAISES or not node.args:
            return
        kinds = node.args[0].elts if isinstance(node.args[0], ast.Tuple) else [node.args[0]]
        names = [
            one.id if isinstance(one, ast.Name) else one.attr
            for one in kinds
            if isinstance(one, ast.Name | ast.Attribute)
        ]
        if not is_certain or len(names) != len(kinds):
            self._leave(LOOSE if not is_certain else OPEN)
            return
        self.strong += 1
        place = self.found.place("raises", "|".join(names))
        self._edit(node.args[0], f"__blank__.raises({place})", [place])


def _loads(tree: ast.AST) -> Counter[str]:
    return Counter(node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load))


def _is_standard(name: str) -> bool:
    return name.partition(".")[0] in {*sys.stdlib_module_names, "pytest"}


def _parts(node: ast.AST) -> list[ast.AST | None]:
    skipped = (ast.expr_context, ast.operator, ast.unaryop)
    return [one for one in ast.iter_child_nodes(node) if not isinstance(one, skipped)]


def _tolerance(approx: ast.Call) -> str:
    """Of pytest.approx: the text of (relative, absolute); nothing where it is not written down."""
    given: dict[str, Any] = {"rel": None, "abs": None}
    for name, value in [
        *zip(("rel", "abs"), approx.args[1:], strict=False),
        *((k.arg, k.value) for k in approx.keywords),
    ]:
        if name not in given or not isinstance(value, ast.Constant):
            return ""
        given[name] = value.value
    relative = given["rel"] if given["rel"] is not None else 0.0 if given["abs"] is not None else 1e-6
    return repr((float(relative), float(given["abs"] if given["abs"] is not None else 1e-12))) if approx.args else ""
