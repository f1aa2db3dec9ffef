"""Examples: checks out of the failing tests that read by themselves, with the statements that they need.

Which of them are true of the right code, and which lines each runs of what is gone, is found by running them. The lines
say what an example is worth: one that runs none is about something else.
"""

from __future__ import annotations

import ast
import builtins
import copy
import json
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import PurePosixPath

from offbook.core.pycode import FUNCTIONS, arguments_of, binds, bound_in, identifiers, nodes, parse, rooted, text_in
from offbook.core.pycode import Function as Definition
from offbook.tasks.factory.delete.symbols import Import, Symbols, module_of
from offbook.tasks.factory.types import FunctionKey, last
from offbook.tasks.suite import Round, SuiteRun
from offbook.types import Suite

MAX_LINE = 160  # characters, and lines of one example
MAX_EXAMPLE = 360
MAX_LINES = 8
MAX_ROWS = 200  # of a table of cases
MAX_BEFORE = 20  # statements that are looked at: some tests have hundreds
FOLDER = "tmp_path"  # the one fixture that every reader knows
NEW_FOLDER = ("import pathlib", "import tempfile", f"{FOLDER} = pathlib.Path(tempfile.mkdtemp())")
EQUAL = {"assertEqual", "assertEquals", "assert_equal", "eq_"}
RAISING = {"raises", "assertRaises", "assertRaisesRegex", "assert_raises", "warns", "assertWarns"}
SETUP = re.compile(r"(async)?(setUp|tearDown)(Class)?|(setup|teardown)(_method|_class)?")


@dataclass(frozen=True)
class Code:
    """A piece of a test file that a test leads to."""

    path: str
    node: ast.stmt
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
        near = [path, *(other for other in modules if other in above or last(modules[other].name) in imported)]
        start = [name for other in near for name in _defined(tests[other]) if SETUP.fullmatch(name)]
        waiting = [*start, names[-1]]
        followed = set[str]()
        while waiting:
            name = waiting.pop()
            for other in near if name not in followed else ():
                for node in _defined(tests[other]).get(name, ()):
                    found.setdefault(id(node), Code(other, node, test))
                    fixtures = {argument.arg for argument in nodes(node, ast.arg)}
                    named = {text_in(one) for call in nodes(node, ast.Call) for one in call.args}  # usefixtures("a")
                    waiting += identifiers(node) | fixtures | named
            followed.add(name)
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
            statements = [_statement(imported[name]) for name in sorted(read & imported.keys())]
            statements = [*NEW_FOLDER, *statements] if FOLDER in read else statements
            is_direct = any(names <= read for names in asked)
            found.setdefault(text, Example(text, one.node.name, (not is_direct, not is_exact, place), (*statements,)))
    return sorted(found.values(), key=lambda example: example.rank)


def _statement(imported: Import) -> str:
    own = imported.name or imported.module.partition(".")[0]
    as_name = "" if imported.bound == own else f" as {imported.bound}"
    return f"from {imported.module} import {own}{as_name}" if imported.name else f"import {imported.module}{as_name}"


def _alone(node: Definition, imported: Collection[str]) -> Iterator[tuple[str, set[str], bool]]:
    """The checks of a test that read by themselves, the names in each, and whether it says what comes out."""
    known = {*imported, *dir(builtins)}
    for values in _cases(node):
        body = [_Fill(values).visit(copy.deepcopy(statement)) for statement in node.body]
        given = {argument.arg for argument in arguments_of(node.args)} - {*values, FOLDER}  # `self`, and fixtures
        for number, statement in enumerate(body):
            for check in (one for one in _checks(statement) if not _read(one) & given):
                before = body[max(0, number - MAX_BEFORE) : number]
                ways = [_with_needed(before, check, known, asserts=asserts) for asserts in (False, True)]
                for parts in ways if len(ways[0]) != len(ways[1]) else ways[:1]:
                    whole = ast.fix_missing_locations(ast.Module(parts, []))
                    text = _short(whole)
                    if text and _read(whole) - bound_in(whole) <= known | {FOLDER}:
                        yield text, identifiers(whole), _is_exact(check)


class _Fill(ast.NodeTransformer):
    """Puts values in the places of names."""

    def __init__(self, values: Mapping[str, ast.expr]):
        self._values = values

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return copy.deepcopy(self._values.get(node.id, node)) if isinstance(node.ctx, ast.Load) else node


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
    match statement:
        case ast.Assert() if "isinstance" not in _read(statement.test):
            yield ast.Assert(statement.test)
        case ast.Expr(value=ast.Call(args=[first, second, *_]) as call) if last_name(call) in EQUAL:
            yield ast.Assert(ast.Compare(first, [ast.Eq()], [second]))
        case ast.With() if all(last_name(item.context_expr) in RAISING for item in statement.items):
            yield statement
        case ast.For() if any(nodes(statement, ast.Assert)):
            yield statement


def _with_needed(before: Sequence[ast.stmt], check: ast.stmt, known: Set[str], *, asserts: bool) -> list[ast.stmt]:
    """A check after the statements that make or change what it reads."""
    parts = [check]
    needed = _read(check) - known
    for statement in reversed(before):
        read = _read(statement)
        if not needed & (read | bound_in(statement)) or (isinstance(statement, ast.Assert) and not asserts):
            continue
        if isinstance(statement, ast.Assign) and all(isinstance(target, ast.Name) for target in statement.targets):
            if not needed & binds(statement):  # it makes something else out of what is needed
                continue
            needed -= binds(statement)
        needed |= read - known
        parts.insert(0, statement)
    return parts


def _read(node: ast.AST) -> set[str]:
    return {name.id for name in nodes(node, ast.Name) if isinstance(name.ctx, ast.Load)}


MODULE = "offbook_tried"
MAX_TRIED = 60
MAX_SHOWN = 16
TRIED_S = 30.0
LINES = 100_000  # a line is one number: that of its file times this, and its own
RUNNER = f"""
import functools, os, sys

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
"""


@dataclass(frozen=True)
class Tried:
    lines: Mapping[str, frozenset[int]] = field(default_factory=dict)  # of what is gone, of each example that is true


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
    text = f"SPANS = {spans!r}\nCHECKS = {checks!r}\n{RUNNER}"
    calls = [(MODULE, "check", repr(([number], {}))) for number in range(len(checks))]
    path = str(PurePosixPath(suite.import_roots[0], f"{MODULE}.py"))
    return Round((), changes={**right, path: text}, timeout_s=TRIED_S, per_test_s=1.0, calls=calls)


def tried_in(run: SuiteRun, examples: Sequence[Example]) -> Tried:
    returned = {number: json.loads(text)[0] for number, text in run.returned.items()}
    lines = {number: frozenset(data[1:]) for number, data in returned.items() if data[0] == "list"}
    return Tried({one.text: lines[number] for number, one in enumerate(examples[:MAX_TRIED]) if number in lines})


def best_of(examples: Sequence[Example], tried: Tried, fewest: int, stated: Set[str] = frozenset()) -> list[Example]:
    """True ones in the order of their ranks: each runs a line that no better one runs, or says where a `stated` literal
    belongs. With `fewest` at least so many, and one from every test."""
    useful = [example for example in examples if tried.lines.get(example.text)]
    chosen: list[Example] = []
    known = set[str]()
    for example in useful:
        lines = {*map(str, tried.lines[example.text])}
        literals = {*stated} & {str(node.value).strip() for node in nodes(ast.parse(example.text), ast.Constant)}
        is_of_new_test = example.test not in {one.test for one in chosen}
        if (lines | literals) - known or (fewest and (is_of_new_test or len(chosen) < fewest)):
            chosen.append(example)
            known |= lines | literals
    chosen = chosen[:MAX_SHOWN]
    return [one for one in chosen if not any(other.text.endswith(f"\n{one.text}") for other in chosen)]
