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
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

from offbook.core.pycode import (
    FUNCTIONS,
    arguments_of,
    binds,
    bound_in,
    identifiers,
    nodes,
    parse,
    rooted,
    strings_in,
)
from offbook.core.pycode import Function as Definition
from offbook.tasks.factory.delete.symbols import Import, Symbols, module_of
from offbook.tasks.factory.types import FunctionKey, last
from offbook.tasks.suite import Round, SuiteRun
from offbook.types import Suite

MAX_EXAMPLE = 360  # characters, and lines
MAX_LINES = 8
MAX_ROWS = 200  # of a table of cases
MAX_BEFORE = 20  # statements that are looked at: some tests have hundreds
EQUAL = {"assertEqual", "assertEquals", "assert_equal", "eq_"}
RAISING = {"raises", "assertRaises", "assertRaisesRegex", "assert_raises", "warns", "assertWarns"}


@dataclass(frozen=True)
class Code:
    """A function of a test file, or another statement at its top level."""

    path: str
    node: ast.stmt
    name: str


def reached(tests: Mapping[str, str], import_roots: tuple[str, ...], failing: Iterable[str]) -> list[Code]:
    """What the failing tests may lead to: all of their files, of test files that these import, and of conftest files.

    That is rather too much than too little: tests that pass say nothing of what is gone.
    """
    modules = {path: module for path, text in tests.items() if (module := module_of(path, text, import_roots))}
    files = {test.partition("::")[0] for test in failing} & modules.keys()
    imported = {"conftest"}
    for path in files:
        for one in modules[path].imports:
            imported |= {last(one.module), one.name}
    found = []
    for path, module in modules.items():
        if path in files or last(module.name) in imported:
            tree = parse(tests[path])
            others = [node for node in tree.body if not isinstance(node, FUNCTIONS)]
            for node in (*nodes(tree, *FUNCTIONS), *others):
                found.append(Code(path, node, "/".join(sorted(binds(node)))))
    return found


def words_of(test: str) -> str:
    """The words of a test's name."""
    return " ".join(split_name(test.partition("[")[0].split("::")[-1])).removeprefix("test ")


def split_name(name: str) -> list[str]:
    return re.sub(r"(?<=[a-z])(?=[A-Z])|_", " ", name).lower().split()


def last_name(node: ast.AST) -> str:
    return last(rooted(node))


@dataclass(frozen=True)
class Example:
    text: str
    test: str  # the name of the function it is from
    rank: tuple[bool, int]  # indirect: it does not name what is gone; its place in the test
    imports: tuple[str, ...]  # statements that say what its names mean
    lines: frozenset[int] = frozenset()  # that it runs of what is gone


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
        if not module or not isinstance(one.node, FUNCTIONS) or one.name not in test_names:
            continue
        imports = {each.bound: _statement(each) for each in module.imports if each.top and each.bound != "*"}
        for place, whole in enumerate(_alone(one.node, {*imports, *dir(builtins)})):
            text = _short(whole)
            read = identifiers(whole)
            rank = (not any(names <= read for names in asked), place)
            if text:
                needed = tuple(imports[name] for name in sorted(read & imports.keys()))
                found.setdefault(text, Example(text, one.name, rank, needed))
    return sorted(found.values(), key=lambda example: example.rank)


def _statement(imported: Import) -> str:
    own = imported.name or imported.module.partition(".")[0]
    as_name = "" if imported.bound == own else f" as {imported.bound}"
    return f"from {imported.module} import {own}{as_name}" if imported.name else f"import {imported.module}{as_name}"


def _alone(node: Definition, known: Set[str]) -> Iterator[ast.Module]:
    """The checks of a test that read by themselves, each after the statements that it needs: without the checks before
    it, and with them, because some change what they read."""
    for values in _cases(node):
        body = [_Fill(values).visit(copy.deepcopy(statement)) for statement in node.body]
        given = {argument.arg for argument in arguments_of(node.args)} - values.keys()  # `self`, and fixtures
        for number, statement in enumerate(body):
            before = body[max(0, number - MAX_BEFORE) : number]
            for check in _checks(statement):
                for some in ([one for one in before if not isinstance(one, ast.Assert)], before):
                    whole = ast.fix_missing_locations(ast.Module(_with_needed(some, check, known), []))
                    if not _read(check) & given and _read(whole) - bound_in(whole) <= known:
                        yield whole


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
    return text if len(text) <= MAX_EXAMPLE and text.count("\n") < MAX_LINES else ""


def _cases(node: Definition) -> Sequence[Mapping[str, ast.expr]]:
    """Values of the test's parameters, a mapping a case; one empty mapping where it has no table."""
    for call in node.decorator_list:
        if isinstance(call, ast.Call) and last_name(call) == "parametrize" and len(call.args) > 1:
            names = re.findall(r"\w+", ",".join(strings_in(call.args[0])))
            rows = getattr(call.args[1], "elts", [])[:MAX_ROWS]
            cases = [[row] if len(names) == 1 else getattr(row, "elts", []) for row in rows]
            return [dict(zip(names, case, strict=True)) for case in cases if len(case) == len(names)] or [{}]
    return [{}]


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


def _with_needed(before: Sequence[ast.stmt], check: ast.stmt, known: Set[str]) -> list[ast.stmt]:
    """A check after the statements that make or change what it reads."""
    parts = [check]
    needed = _read(check) - known
    for statement in reversed(before):
        read = _read(statement)
        made = binds(statement) if isinstance(statement, ast.Assign) else set[str]()
        if not needed & (made or read | bound_in(statement)):  # what makes something else of it is left out
            continue
        needed = (needed - made) | (read - known)
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


def trying_of(
    suite: Suite,
    symbols: Symbols,
    functions: Iterable[FunctionKey],
    examples: Sequence[Example],
    right: Mapping[str, str | None],
) -> Round | None:
    """The round that runs the examples. `right` is what brings the right code into the tree."""
    spans: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for key in functions:
        if key in symbols.functions:
            spans[key.path] += symbols.functions[key].lines
    if not spans or not examples:
        return None
    checks = ["\n".join([*example.imports, example.text]) for example in examples[:MAX_TRIED]]
    text = f"SPANS = {dict(spans)!r}\nCHECKS = {checks!r}\n{RUNNER}"
    calls = [(MODULE, "check", repr(([number], {}))) for number in range(len(checks))]
    path = str(PurePosixPath(suite.import_roots[0], f"{MODULE}.py"))
    return Round((), changes={**right, path: text}, timeout_s=TRIED_S, per_test_s=1.0, calls=calls)


def tried_in(run: SuiteRun, examples: Sequence[Example]) -> tuple[Example, ...]:
    """Those that are true."""
    found = []
    for number, text in sorted(run.returned.items()):
        kind, *lines = json.loads(text)[0]
        if kind == "list":  # and no error
            found.append(replace(examples[number], lines=frozenset(lines)))
    return tuple(found)


def best_of(examples: Iterable[Example], fewest: int, stated: Set[str] = frozenset()) -> list[Example]:
    """In the order of their ranks: each runs a line that no better one runs, or says where a `stated` literal belongs.
    With `fewest` at least so many, and one from every test."""
    chosen: list[Example] = []
    known = set[object]()
    for example in examples:
        literals = {str(node.value).strip() for node in nodes(ast.parse(example.text), ast.Constant)}
        shows = {*example.lines, *(literals & stated)}
        is_of_new_test = example.test not in {one.test for one in chosen}
        if example.lines and (shows - known or (fewest and (is_of_new_test or len(chosen) < fewest))):
            chosen.append(example)
            known |= shows
    chosen = chosen[:MAX_SHOWN]
    return [one for one in chosen if not any(other.text.endswith(f"\n{one.text}") for other in chosen)]
