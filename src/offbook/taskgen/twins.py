"""Twins of a task's tests: which single edits make a test wrong, and which of those can be used.

An edit is one expected value (a constant that a check compares with), one raised type, or one check turned round, in
this order of liking: what equals everything passes a test with another value, but not always one that was turned round.
It can be used if the right code fails it in a check, and if no trivial body passes it.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import libcst as cst
from libcst import matchers
from libcst.metadata import ByteSpanPositionProvider, MetadataWrapper

from offbook import syntax
from offbook.sandbox import BoxSpec
from offbook.tasks.check import gold_changes
from offbook.tasks.grade import hidden_files, put
from offbook.tasks.suite import Round, SuiteRun, run_rounds, suite_box
from offbook.tasks.twins import Twin, Twins, base_of, digest_of, edited, write_twins
from offbook.types import Task

VARIANTS = 4  # of a test: somebody may cheat in one of its checks alone
MAX_TESTS = 40  # that get twins
CHECKS = re.compile(r"(assert|eq|check|expect|verify|compare|ensure)_?\w*|are_equal", re.I)
# Calls whose arguments are as good as literals.
PLAIN = frozenset(
    [
        "list",
        "tuple",
        "set",
        "frozenset",
        "dict",
        "sorted",
        "str",
        "int",
        "float",
        "bytes",
        "bytearray",
        "range",
        "iter",
        "approx",
        "OrderedDict",
        "Decimal",
        "Fraction",
        "deque",
        "Counter",
        "date",
        "datetime",
        "time",
        "timedelta",
        "Path",
        "complex",
        "all",
        "any",
    ]
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
Edit = tuple[cst.CSTNode, str]  # what stands in the place of a node


def trial_of(
    files: Mapping[str, bytes],
    fail_to_pass: Collection[str],
    expected: Collection[str],
    right: Mapping[str, str | None],
    rng: random.Random,
    variants: int = VARIANTS,
) -> Trial:
    """Candidates for the tests that need a feature. `files` has their test files, `right` what brings it back."""
    bases = sorted({base_of(test) for test in fail_to_pass})
    chosen = {*rng.sample(bases, min(MAX_TESTS, len(bases)))}
    rounds: list[list[Twin]] = [[] for _ in range(variants)]
    inherited: dict[str, str] = {}
    for path, data in sorted(files.items()):
        if not path.endswith(".py"):
            continue
        try:
            written = _Written(syntax.parse(data))
            data.decode()
        except (UnicodeDecodeError, SyntaxError, ValueError):
            continue
        tests: dict[str, ast.stmt] = {}
        for base in sorted({base_of(node) for node in expected if node.startswith(f"{path}::")} | chosen):
            if base.startswith(f"{path}::") and (name := written.place(base.partition("::")[2])):
                if f"{path}::{name}" != base:
                    inherited[base] = f"{path}::{name}"
                if base in chosen:
                    tests[f"{path}::{name}"] = written.functions[name]
        lines = data.splitlines(keepends=True)
        for test, statement in tests.items():
            for number, twin in enumerate(_edits(test, lines, statement, rng, variants)):
                rounds[number].append(twin)
    return Trial(files, [twins for twins in rounds if twins], right, inherited)


def _edits(test: str, lines: Sequence[bytes], statement: ast.stmt, rng: random.Random, most: int) -> Iterator[Twin]:
    """Of one function, which is read alone: a whole test file takes seconds."""
    first = min([statement.lineno, *(one.lineno for one in getattr(statement, "decorator_list", ()))]) - 1
    head = b"if 1:\n" if statement.col_offset else b""
    source = head + b"".join(lines[first : statement.end_lineno])
    try:
        module = MetadataWrapper(cst.parse_module(source), unsafe_skip_copy=True)
    except cst.ParserSyntaxError:  # as where the next statement begins on its last line
        return
    function = next(iter(matchers.findall(module, matchers.FunctionDef())))
    spans = module.resolve(ByteSpanPositionProvider)
    before = sum(map(len, lines[:first])) - len(head)
    for kind, (node, text) in _few(cst.ensure_type(function, cst.FunctionDef), rng, most):
        start = before + spans[node].start
        yield Twin(test, start, start + spans[node].length, text, kind)


class _Written:
    """Where the tests of a module are written down: classes of a module inherit from one another."""

    def __init__(self, module: ast.Module):
        self.functions: dict[str, ast.stmt] = {}  # of two of a name the last one counts
        self._parents: dict[str, list[str]] = {}
        self._read(module.body, "")

    def _read(self, body: Iterable[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                self.functions[prefix + node.name] = node
            elif isinstance(node, ast.ClassDef):
                self._parents[prefix + node.name] = [base.id for base in node.bases if isinstance(base, ast.Name)]
                self._read(node.body, f"{prefix}{node.name}::")

    def place(self, test: str) -> str | None:
        if test in self.functions:
            return test
        owner, _, name = test.rpartition("::")
        found = (self.place(f"{parent}::{name}") for parent in self._parents.get(owner, ()) if parent != owner)
        return next((place for place in found if place), None)


def _few(function: cst.FunctionDef, rng: random.Random, most: int) -> list[tuple[str, Edit]]:
    """Of each kind some, the better kinds first."""
    checks = _Checks()
    function.body.visit(checks)
    values = [*checks.values, *(value for name, value in checks.assigned if name in checks.compared)]
    for decorator in function.decorators:
        values += _cases(decorator, checks.compared)
    constants = [edit for value in values for edit in _constants(value, rng)]
    found: list[tuple[str, Edit]] = []
    for kind, edits in (("value", constants), ("raises", checks.raised), ("check", checks.turned)):
        sample = rng.sample(edits, min(len(edits), most - len(found)))
        found += [(kind, edit) for edit in sample]
    return found


class _Checks(cst.CSTVisitor):
    """What a test function compares, expects to be raised, and checks."""

    def __init__(self) -> None:
        self.values: list[cst.CSTNode] = []  # operands that constants are looked for in
        self.compared: set[str] = set()  # names among the operands
        self.assigned: list[tuple[str, cst.CSTNode]] = []
        self.raised: list[Edit] = []
        self.turned: list[Edit] = []

    def visit_Assign(self, node: cst.Assign) -> None:
        target = node.targets[0].target
        if isinstance(target, cst.Name):
            self.assigned.append((target.value, node.value))

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


def _cases(decorator: cst.Decorator, compared: Collection[str]) -> list[cst.CSTNode]:
    """The values of a parametrize table that the test compares with."""
    call = decorator.decorator
    if not isinstance(call, cst.Call) or _called(call) != "parametrize" or len(call.args) < 2:
        return []
    names, rows = call.args[0].value, call.args[1].value
    if isinstance(names, cst.SimpleString):
        words = re.findall(r"\w+", str(names.evaluated_value))
    elif isinstance(names, cst.List | cst.Tuple):
        words = [str(e.value.evaluated_value) for e in names.elements if isinstance(e.value, cst.SimpleString)]
    else:
        return []
    places = [place for place, word in enumerate(words) if word in compared] or [len(words) - 1]
    found: list[cst.CSTNode] = []
    for element in rows.elements if isinstance(rows, cst.List | cst.Tuple) else ():
        row = element.value
        cells = row.elements if isinstance(row, cst.Tuple | cst.List) else row.args if isinstance(row, cst.Call) else ()
        if len(words) > 1:
            found += [cells[place].value for place in places if place < len(cells)]
        elif words[0] in compared:
            found.append(row)
    return found


class _Literals(cst.CSTVisitor):
    """Constants of an expression that stand for themselves: not as arguments of calls that compute something."""

    def __init__(self, rng: random.Random):
        self.rng, self.edits = rng, list[Edit]()

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


def _constants(value: cst.CSTNode, rng: random.Random) -> list[Edit]:
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


@dataclass(frozen=True, slots=True)
class Trial:
    """Candidates for a set of tests, and the rounds that show which of them can be used."""

    files: Mapping[str, bytes]  # the test files
    drawn: Sequence[Sequence[Twin]]  # in each of these a test has one at most
    right: Mapping[str, str | None]  # what brings the right code into the tree
    inherited: Mapping[str, str] = field(default_factory=dict)  # as Twins has it
    trivial: Sequence[tuple[Mapping[str, str | None], Collection[str]]] = ()  # bodies, and the tests that they pass
    limit_s: float = 60.0

    @property
    def rounds(self) -> list[Round]:
        """The right code with each set of candidates; then each trivial body with those of the tests that it passes."""
        rounds = [self._round(twins, self.right) for twins in self.drawn]
        return rounds + [self._round(twins, bodies) for bodies, twins in self._doubtful()]

    def _doubtful(self) -> list[tuple[Mapping[str, str | None], list[Twin]]]:
        found = []
        for bodies, passed in self.trivial:
            bases = {self._test_of(test) for test in passed}
            found += [(bodies, [twin for twin in twins if twin.test in bases]) for twins in self.drawn]
        return [(bodies, twins) for bodies, twins in found if twins]

    def _round(self, twins: Sequence[Twin], changes: Mapping[str, str | None]) -> Round:
        paths = sorted({twin.path for twin in twins})
        tests = {path: edited(self.files[path], [twin for twin in twins if twin.path == path]) for path in paths}
        chosen = {twin.test for twin in twins}
        bases = [*chosen, *(base for base, test in self.inherited.items() if test in chosen)]
        return Round(paths, sorted(bases), {**changes, **tests}, timeout_s=self.limit_s)

    def _test_of(self, node: str) -> str:
        return self.inherited.get(base_of(node), base_of(node))

    def usable(self, runs: Sequence[SuiteRun], expected: Collection[str]) -> Twins:
        """Those that do as they should. `runs` are of `rounds`, `expected` all tests that the task asks for."""
        vacuous = set()  # a trivial body passes the test and the twin: something is not checked at all
        for (_, doubtful), run in zip(self._doubtful(), runs[len(self.drawn) :], strict=True):
            passed = {self._test_of(node) for node in run.passed}
            vacuous |= {twin for twin in doubtful if twin.test in passed}
        found: list[Twin] = []
        for twins, run in zip(self.drawn, runs, strict=False):
            if run.exit_code is not None and not run.tampered:
                found += [
                    tried for twin in twins if twin not in vacuous and (tried := self._tried(twin, run, expected))
                ]
        better = {twin.test for twin in found if twin.kind != "check"}
        found = [twin for twin in found if twin.kind != "check" or twin.test not in better]
        digests = {path: digest_of(self.files[path]) for path in sorted({twin.path for twin in found})}
        saw = set[tuple[str, str]]().union(*(run.saw for run in runs[: len(self.drawn)]))
        tests = {twin.test for twin in found}
        inherited = {base: test for base, test in self.inherited.items() if test in tests}
        return Twins(tuple(found), digests, tuple(sorted(saw)), inherited)

    def _tried(self, twin: Twin, run: SuiteRun, expected: Collection[str]) -> Twin | None:
        """With the node ids that the right code fails; nothing where it fails none, or not in a check."""
        nodes = [node for node in run.collected if self._test_of(node) == twin.test]
        fails = tuple(node for node in nodes if node in run.failed)
        if not fails or not all(_in_a_check(run, node, twin.kind) for node in fails):
            return None
        return replace(
            twin, fails=fails, others=tuple(node for node in nodes if node not in fails and node in expected)
        )


def only(twins: Twins, tests: Collection[str]) -> Twins:
    """Those of these tests."""
    wanted = {twins.test_of(test) for test in tests}
    kept = tuple(twin for twin in twins.twins if twin.test in wanted)
    return replace(twins, twins=kept, files={path: twins.files[path] for path in sorted({twin.path for twin in kept})})


def _in_a_check(run: SuiteRun, node: str, kind: str) -> bool:
    if not run.failed[node].startswith("call: "):
        return False
    return run.errors[node] == "assertion" or (
        kind == "raises" and run.errors[node] not in {"NameError", "ImportError"}
    )


async def add_twins(task: Task, spec: BoxSpec, timeout_s: float = 300.0) -> int:
    """Twins for a task that is on disk already; how many of its tests have one now."""
    paths = sorted({node.partition("::")[0] for node in task.fail_to_pass})
    files = {path: (task.hidden_tests / path).read_bytes() for path in paths}
    expected = {*task.fail_to_pass, *task.pass_to_pass}
    trial = trial_of(files, task.fail_to_pass, expected, gold_changes(task), random.Random(task.id))
    trial = replace(trial, limit_s=timeout_s / 4)
    twins = Twins()
    if trial.drawn:
        async with await suite_box(task.tree, task.suite, spec) as box:
            await put(box, hidden_files(task))
            runs = await run_rounds(box, task.suite, trial.rounds, timeout_s, product=task.sources)
        twins = trial.usable(runs, expected)
    write_twins(task.folder / "tests", twins)
    return len({twin.test for twin in twins.twins})
