"""Examples: checks out of the failing tests that read by themselves, with the statements that they need.

Which of them are true of the right code, and which lines each runs of what is gone, is found by running them. The lines
say what an example is worth. One that runs none is about something else, and one that runs a line which the docstrings'
own examples do not run shows what nothing else says. But a line that looks things up in a table is run by any of its
rows: what the instruction states to the letter is shown in its place as well.
"""

from __future__ import annotations

import ast
import builtins
import copy
import json
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import PurePosixPath
from typing import TypeVar

from offbook.core.pycode import FUNCTIONS, arguments_of, binds, bound_in, nodes, parse, rooted, text_in
from offbook.core.pycode import Function as Definition
from offbook.tasks.factory.delete.symbols import Import, Symbols, module_name, module_of
from offbook.tasks.factory.types import FunctionKey, last
from offbook.tasks.suite import Round, SuiteRun
from offbook.types import Suite

MAX_LINE = 160  # characters, and lines of one example
MAX_EXAMPLE = 360
MAX_LINES = 8
MAX_ROWS = 200  # of a table of cases
FOLDER = "tmp_path"  # the one fixture that everybody knows
NEW_FOLDER = ("import pathlib", "import tempfile", f"{FOLDER} = pathlib.Path(tempfile.mkdtemp())")
MAX_BEFORE = 20  # statements that are looked at: some tests have hundreds
Node = TypeVar("Node", bound=ast.AST)
EQUAL = {"assertEqual", "assertEquals", "assert_equal", "eq_"}
RAISING = {"raises", "assertRaises", "assertRaisesRegex", "assert_raises", "warns", "assertWarns"}
SETUP = re.compile(r"(async)?(setUp|tearDown)(Class)?|(setup|teardown)(_method|_class)?")


@dataclass(frozen=True)
class Code:
    """A piece of a test file that a test leads to."""

    path: str
    node: ast.AST
    test: str  # the first one that does


def reached(tests: Mapping[str, str], import_roots: tuple[str, ...], failing: Iterable[str]) -> list[Code]:
    """What the failing tests lead to, once each: helpers, fixtures and tables, by their names alone.

    A name may be one of the file itself, of a test file that it imports, or of a conftest file above it. So it is
    rather too much than too little.
    """
    modules = {path: module for path, text in tests.items() if (module := module_of(path, text, import_roots))}
    found: dict[int, Code] = {}
    for test in failing:
        path, *names = test.partition("[")[0].split("::")
        if path not in modules or not names:
            continue
        imported = {part for one in modules[path].imports for part in (last(one.module), one.name)}
        above = {str(folder / "conftest.py") for folder in PurePosixPath(path).parents}
        near = [path, *(o for o in modules if o in above or last(modules[o].name) in imported)]
        waiting = [
            (place, node)
            for place in near
            for name, defined in _defined(tests[place]).items()
            for node in defined
            if name == names[-1] or SETUP.fullmatch(name) or _is_automatic(node)
        ]
        while waiting:
            place, node = waiting.pop()
            if id(node) not in found:
                found[id(node)] = Code(place, node, test)
                used = _identifiers(node)
                for other in near:
                    defined_there = _defined(tests[other])
                    waiting += [(other, one) for name in used & defined_there.keys() for one in defined_there[name]]
    return [*found.values()]


@lru_cache(maxsize=512)
def _defined(source: str) -> dict[str, list[ast.stmt]]:
    """Name -> what binds it in a test file: at the top level, or in a class there."""
    found: dict[str, list[ast.stmt]] = defaultdict(list)
    waiting: list[ast.AST] = [parse(source)]
    while waiting:
        for node in ast.iter_child_nodes(waiting.pop(0)):
            if isinstance(node, ast.If | ast.Try | ast.With | ast.ExceptHandler):
                waiting.append(node)
            elif isinstance(node, ast.stmt):
                for name in binds(node):
                    found[name].append(node)
                waiting += [node] if isinstance(node, ast.ClassDef) else []
    return found


def _is_automatic(node: ast.stmt) -> bool:
    calls = [one for one in getattr(node, "decorator_list", ()) if isinstance(one, ast.Call)]
    return any(last_name(one) == "fixture" and "autouse" in {keyword.arg for keyword in one.keywords} for one in calls)


def _identifiers(node: ast.AST) -> set[str]:
    """Names that a piece of code reads, of fixtures too."""
    found = _read(node) | {n.attr for n in nodes(node, ast.Attribute)} | {n.arg for n in nodes(node, ast.arg)}
    named = (call for call in nodes(node, ast.Call) if last_name(call) in {"usefixtures", "getfixturevalue"})
    return found | {text_in(argument) for call in named for argument in call.args}


def words_of(test: str) -> str:
    """The words of a test's name."""
    words = split_name(test.partition("[")[0].split("::")[-1])
    return " ".join(words[1:] if words[:1] == ["test"] else words)


def split_name(name: str) -> list[str]:
    return re.sub(r"(?<=[a-z])(?=[A-Z])|_", " ", name).lower().split()


def last_name(node: ast.AST) -> str:
    return last(rooted(node))


@dataclass(frozen=True)
class Example:
    text: str
    test: str  # the name of the function it is from
    rank: tuple[bool, bool, int]  # indirect: it does not name what is gone; vague; its place in the test
    imports: tuple[str, ...]  # statements that say what its names mean


def examples(
    code: Iterable[Code],
    tests: Mapping[str, str],
    import_roots: tuple[str, ...],
    failing: Iterable[str],
    keys: Iterable[FunctionKey],
) -> list[Example]:
    """Checks that use nothing but imported names and literals: the best of every test first."""
    asked = [{*key.name.split(".")} - {"__init__", "__call__"} for key in keys]
    test_names = {test.partition("[")[0].split("::")[-1] for test in failing}
    found: dict[str, Example] = {}
    for one in code:
        module = module_of(one.path, tests[one.path], import_roots)
        if not module or not isinstance(one.node, FUNCTIONS) or one.node.name not in test_names:
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
        names = [(part, _read(part), bound_in(part)) for part in body]
        for number, statement in enumerate(body):
            for check in (one for one in _checks(statement) if not _read(one) & given):
                before = names[max(0, number - MAX_BEFORE) : number]
                ways = [_with_needed(before, check, known, asserts=asserts) for asserts in (False, True)]
                for parts in ways if len(ways[0]) != len(ways[1]) else ways[:1]:
                    whole = ast.fix_missing_locations(ast.Module(parts, []))
                    read = _read(whole)
                    if read - bound_in(whole) <= known | {FOLDER} and (text := _short(whole)):
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
    rows = []
    for call in node.decorator_list:
        if isinstance(call, ast.Call) and last_name(call) == "parametrize" and len(call.args) > 1:
            names = re.findall(r"\w+", text_in(call.args[0])) or [*map(text_in, getattr(call.args[0], "elts", []))]
            for row in getattr(call.args[1], "elts", [])[:MAX_ROWS]:
                values = [row] if len(names) == 1 else getattr(row, "elts", [])
                if len(values) == len(names):
                    rows.append(dict(zip(names, values, strict=True)))
            break
    return rows or [{}]


def _checks(statement: ast.stmt) -> Iterator[ast.stmt]:
    """Assertions at the top level of a test, and loops and expected errors that are one."""
    if isinstance(statement, ast.Assert):
        told = ast.Assert(statement.test)
        if not any(isinstance(part, ast.Name) and part.id == "isinstance" for part in ast.walk(told)):
            yield told
    elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        call = statement.value
        if last_name(call) in EQUAL and len(call.args) >= 2:
            yield ast.Assert(ast.Compare(call.args[0], [ast.Eq()], [call.args[1]]))
    elif isinstance(statement, ast.With):
        if all(last_name(item.context_expr) in RAISING for item in statement.items):
            yield statement
    elif isinstance(statement, ast.For) and any(isinstance(part, ast.Assert) for part in ast.walk(statement)):
        yield statement


def _with_needed(
    before: Sequence[tuple[ast.stmt, set[str], set[str]]], check: ast.stmt, known: Collection[str], *, asserts: bool
) -> list[ast.stmt]:
    """A check after the statements that make or change what it reads."""
    parts = [check]
    needed = _read(check).difference(known)
    for statement, read, bound in reversed(before):
        if not needed & (read | bound) or (isinstance(statement, ast.Assert) and not asserts):
            continue
        if isinstance(statement, ast.Assign) and all(isinstance(target, ast.Name) for target in statement.targets):
            if not needed & {*map(rooted, statement.targets)}:  # it makes something else out of what is needed
                continue
            needed -= {*map(rooted, statement.targets)}
        needed |= read.difference(known)
        parts.insert(0, statement)
    return parts


def _read(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}


def _filled(node: Node, values: Mapping[str, ast.expr]) -> Node:
    """With values in the places of names."""

    class Fill(ast.NodeTransformer):
        def visit_Name(self, name: ast.Name) -> ast.expr:
            return copy.deepcopy(values[name.id]) if isinstance(name.ctx, ast.Load) and name.id in values else name

    filled: Node = Fill().visit(copy.deepcopy(node)) if values else node
    return filled


MODULE = "offbook_tried"
MAX_TRIED = 60
MAX_BY_LINES = 8  # examples that are chosen by the lines they run
MAX_SHOWN = 16
MIN_EXAMPLES = 2
MIN_EXAMPLED_TESTS = 4  # or one in as many
TRIED_S = 30.0
LINES = 100_000  # a line is one number: that of its file times this, and its own
RUNNER = f"""
import doctest, functools, importlib, os, sys

PLACES = {{os.path.realpath(path): (number * {LINES}, spans) for number, (path, spans) in enumerate(SPANS.items())}}

@functools.cache
def place_of(code):
    number, spans = PLACES.get(os.path.realpath(code.co_filename), (0, ()))
    return number if any(first <= code.co_firstlineno <= last for first, last in spans) else None

def lines_of(do):
    lines = set()

    def trace(frame, event, _):
        place = place_of(frame.f_code)
        if place is not None and event == "line":
            lines.add(place + frame.f_lineno)
        return None if place is None else trace

    sys.settrace(trace)
    try:
        do()
    finally:
        sys.settrace(None)
    return sorted(lines)

def check(number):
    code = compile(CHECKS[number], "example", "exec")
    return lines_of(lambda: exec(code, {{"__name__": "example"}}))

def documented(number):
    module, text = DOCUMENTED[number]
    test = doctest.DocTestParser().get_doctest(text, dict(vars(importlib.import_module(module))), "example", None, 0)
    return lines_of(lambda: doctest.DocTestRunner(verbose=False).run(test, out=lambda text: None))
"""


@dataclass(frozen=True)
class Tried:
    lines: Mapping[str, frozenset[int]] = field(default_factory=dict)  # of what is gone, of each example that is true
    documented: frozenset[int] = frozenset()  # lines that the docstrings' examples run


def trying_of(
    suite: Suite,
    symbols: Symbols,
    functions: Iterable[FunctionKey],
    examples: Sequence[Example],
    right: Mapping[str, str | None],
) -> Round | None:
    """The round that runs the examples. `right` is what brings the right code into the tree."""
    asked = [symbols.functions[key] for key in functions if key in symbols.functions]
    if not asked or not examples:
        return None
    spans: dict[str, list[tuple[int, int]]] = {}
    for function in asked:
        spans.setdefault(function.key.path, []).extend(function.lines)
    checks = ["\n".join([*example.imports, example.text]) for example in examples[:MAX_TRIED]]
    documented = [(module_name(f.key.path, suite.import_roots), f.docstring) for f in asked if ">>>" in f.docstring]
    text = f"SPANS = {spans!r}\nCHECKS = {checks!r}\nDOCUMENTED = {documented!r}\n{RUNNER}"
    calls = [(MODULE, "check", repr(([number], {}))) for number in range(len(checks))]
    calls += [(MODULE, "documented", repr(([number], {}))) for number in range(len(documented))]
    path = str(PurePosixPath(suite.import_roots[0], f"{MODULE}.py"))
    return Round((), changes={**right, path: text}, timeout_s=TRIED_S, per_test_s=1.0, calls=calls)


def tried_in(run: SuiteRun, examples: Sequence[Example]) -> Tried:
    chosen = examples[:MAX_TRIED]
    returned = {number: json.loads(text)[0] for number, text in run.returned.items()}
    lines = {number: frozenset(data[1:]) for number, data in returned.items() if data[0] == "list"}
    documented = (one for number, one in lines.items() if number >= len(chosen))
    true = {example.text: lines[number] for number, example in enumerate(chosen) if number in lines}
    return Tried(true, frozenset().union(*documented))


def are_enough(given: Sequence[Example], failing: Iterable[str]) -> bool:
    """Two checks at least, out of a quarter of the failing tests or four of them."""
    tests = {test.partition("[")[0] for test in failing}
    named = {example.test for example in given}
    return len(given) >= MIN_EXAMPLES and len(named) >= min(MIN_EXAMPLED_TESTS, len(tests) / MIN_EXAMPLED_TESTS)


def best_of(
    examples: Sequence[Example], tried: Tried, fewest: int, stated: Set[str] = frozenset()
) -> tuple[list[Example], int]:
    """True ones, in the order of their ranks, and how many more there are of the kind.

    First those with a line that neither docstrings nor a better one runs; then those that say where a `stated` literal
    belongs, and what the same test says exactly next to it. With `fewest` at least so many, and one from every test.
    """
    lines = tried.lines
    seen = {*tried.documented}
    useful = [example for example in examples if lines.get(example.text)]
    chosen: list[Example] = []
    while len(chosen) < MAX_BY_LINES and (new := [example for example in useful if lines[example.text] - seen]):
        best = [example for example in new if example.rank[:2] == new[0].rank[:2]]
        chosen.append(max(best, key=lambda example: len(lines[example.text] - seen)))
        seen |= lines[chosen[-1].text]

    def add(is_wanted: Callable[[Example], bool]) -> None:
        for example in useful:
            if example not in chosen and is_wanted(example):
                chosen.append(example)

    literals = {
        one: {*stated} & {str(n.value).strip() for n in nodes(ast.parse(one.text), ast.Constant)} for one in useful
    }
    add(lambda example: bool(literals[example].difference(*(literals[one] for one in chosen))))
    if fewest:
        add(lambda example: len(chosen) < fewest or example.test not in {one.test for one in chosen})
    add(lambda example: bool(literals[example]))
    tables = {example.test for example in useful if literals[example]}
    add(lambda example: example.test in tables and not any(example.rank[:2]))
    texts = [one.text for one in chosen[:MAX_SHOWN]]
    tails = {text for text in texts if any(other.endswith(f"\n{text}") for other in texts)}  # said by the longer one
    shown = [example for example in useful if example.text in texts and example.text not in tails]
    return shown, max(0, len(chosen) - MAX_SHOWN)
