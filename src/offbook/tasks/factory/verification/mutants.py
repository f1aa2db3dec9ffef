"""Mutants of a task's tests: single edits that make a test wrong, and which of them can be used.

An edit is one expected value (a constant that a check compares with), one raised type, or one check turned round. What
equals everything passes a test with another value and fails one that was turned round, and so does code that looks the
value up: a turned check shows only that the runner runs. Cases may come from a table of the module, and then the table
is edited, because code that looks the value up looks there. Such an edit reaches other tests too, as does one of a test
that others call. An edit can be used if the right code fails it in a check, and if no trivial body passes it.
"""

from __future__ import annotations

import ast
import io
import random
import re
import tokenize
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from offbook.core.pycode import FUNCTIONS, binds, nodes
from offbook.sandbox import SandboxSpec
from offbook.tasks.blanks import Blanks
from offbook.tasks.check import gold_changes
from offbook.tasks.factory.types import files_of
from offbook.tasks.factory.verification.blanks import blanks_of, without
from offbook.tasks.factory.verification.checks import CHECKS, PLAIN, RAISES, TestFile, called, cases, names_of
from offbook.tasks.folder import rewrite_mutants
from offbook.tasks.grade import hidden_files, put
from offbook.tasks.mutants import Mutant, Mutants, base_of, digest_of, edited
from offbook.tasks.suite import Round, SuiteRun, run_rounds, suite_sandbox
from offbook.types import Task

VARIANTS = 4  # of a test: code may cheat in one of its checks alone
MAX_TESTS = 40  # that get mutants
MAX_SHARED = 8  # other tests that an edit reaches: all of them are run again with it
TURNED: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.Is: (r"is", "is not"), ast.IsNot: (r"is\s+not", "is"),
    ast.In: ("in", "not in"), ast.NotIn: (r"not\s+in", "in"), ast.Lt: ("<", ">="), ast.Gt: (">", "<="),
    ast.LtE: ("<=", ">"), ast.GtE: (">=", "<"),
}  # fmt: skip
OPPOSITE = {
    "assertTrue": "assertFalse", "assertEqual": "assertNotEqual", "assertIs": "assertIsNot", "assertIn": "assertNotIn",
    "assertIsNone": "assertIsNotNone", "assertIsInstance": "assertNotIsInstance", "assertAlmostEqual":
    "assertNotAlmostEqual", "assertEquals": "assertNotEqual", "assertRegex": "assertNotRegex",
    "assertGreater": "assertLessEqual", "assertLess": "assertGreaterEqual",
}  # fmt: skip
OPPOSITE |= {other: name for name, other in OPPOSITE.items()}
ERRORS = ("TypeError", "ValueError", "KeyError", "IndexError", "AttributeError", "RuntimeError", "LookupError")

Edit = tuple[int, int, str]  # these bytes, and what stands in their place


class Candidates(TestFile):
    """A test file, which other tests use what it binds, and the edits that make one of its tests wrong."""

    def __init__(self, path: str, data: bytes):
        super().__init__(path, data)
        self._parents: dict[str, list[str]] = {}
        self._names: dict[str, set[str]] = defaultdict(set)  # what a test, a function or a value refers to
        self._everywhere = {"pytestmark"}  # what every test does
        self._targets = {id(n.value): binds(n) for n in self.tree.body if isinstance(n, ast.Assign)}
        self._reached_by: dict[str, set[str]] = {}
        self._read(self.tree.body, "", set())
        for node in self.tree.body:
            for name in binds(node):
                self._names[name] |= _names_in(node)
            if isinstance(node, ast.FunctionDef):
                words = " ".join([node.name, *map(ast.unparse, node.decorator_list)])
                self._everywhere |= {node.name} if re.search("^(setup|teardown)_|autouse", words) else set()

    def _read(self, body: Sequence[ast.stmt], prefix: str, around: set[str]) -> None:
        for node in body:
            if isinstance(node, FUNCTIONS):
                self._names[prefix + node.name] = _names_in(node) | around
                if prefix and node.name.startswith("test"):  # another one may call it: self.test_other()
                    self._names[node.name] |= _names_in(node) | around
            elif isinstance(node, ast.ClassDef):
                self._parents[prefix + node.name] = [base.id for base in node.bases if isinstance(base, ast.Name)]
                rest = [one for one in node.body if not getattr(one, "name", "").startswith("test")]
                names = set[str]().union(*map(_names_in, [*rest, *node.decorator_list, *node.bases]))
                self._read(node.body, f"{prefix}{node.name}::", around | names)

    def place(self, test: str) -> str | None:
        """Where a test is written down: classes inherit from one another."""
        if test in self.functions:
            return test
        owner, _, name = test.rpartition("::")
        found = (self.place(f"{parent}::{name}") for parent in self._parents.get(owner, ()) if parent != owner)
        return next((place for place in found if place), None)

    def mutants(self, test: str, tests: Collection[str], rng: random.Random, most: int) -> Iterator[Mutant]:
        """Of each kind some, the better kinds first. `tests` are all that may notice."""
        function = self.functions[test]
        values: list[tuple[ast.expr, str]] = []  # operands that constants are looked for in, each with its table
        compared: set[str] = set()  # names among the operands
        assigned: list[tuple[str, ast.expr]] = []
        tables: list[tuple[list[str], ast.expr]] = []  # names, and what they go through
        raised: list[Edit] = []
        turned: list[Edit] = []

        def compare(operand: ast.expr) -> None:
            values.append((operand, ""))
            if isinstance(operand, ast.Name):
                compared.add(operand.id)

        for node in (part for statement in function.body for part in _in_order(statement)):
            match node:
                case ast.Assign(targets=[ast.Name(id=target), *_], value=value):
                    assigned.append((target, value))
                case ast.For(target=targets, iter=over):
                    tables.append((names_of(targets), over))
                case ast.Assert(test=asserted) if self.is_exact(node):
                    turned += self._turned(asserted)
                    for comparison in (one for one in _in_order(asserted) if isinstance(one, ast.Compare)):
                        compare(comparison.left)
                        for operand in comparison.comparators:
                            # What is tested stands on the left, and what it should be may be wrapped: == Point(1, 2).
                            if isinstance(operand, ast.Call) and isinstance(comparison.left, ast.Call):
                                values += [(one, "") for one in _arguments(operand)]
                            else:
                                compare(operand)
                case ast.Call(args=[raises, *_]) if called(node) in RAISES and self.is_exact(node):
                    if isinstance(raises, ast.Name | ast.Attribute):
                        word = raises.id if isinstance(raises, ast.Name) else raises.attr
                        raised += [(*self.span(raises), other) for other in ERRORS if other != word]
                case ast.Call(func=called_one) if CHECKS.fullmatch(name := called(node)) and name not in RAISES:
                    for argument in _arguments(node):
                        compare(argument)
                    if name in OPPOSITE and self.is_exact(called_one):
                        end = self.span(called_one)[1]
                        turned.append((end - len(name), end, OPPOSITE[name]))
        values += [(value, "") for name, value in assigned if name in compared]
        tables = [(words, rows) for words, rows in tables if {*words} & compared]
        tables += [found for decorator in function.decorator_list if (found := cases(decorator))]
        local = {name: [value] for name, value in assigned}
        for words, over in tables:
            places = [place for place, word in enumerate(words) if word in compared] or [len(words) - 1]
            for row, cells, table in self.rows(over, local):
                if len(words) > 1:
                    values += [(cells[place], table) for place in places if place < len(cells)]
                elif words[0] in compared:
                    values.append((row, table))
        constants = [(table, edit) for value, table in values for edit in self._constants(value, rng)]
        kinds = (
            ("value", constants),
            ("raises", [("", one) for one in raised]),
            ("check", [("", one) for one in turned]),
        )
        left = most
        callers = self._users({function.name}, test, tests)
        for kind, edits in kinds:
            for table, (start, end, text) in rng.sample(edits, len(edits)):
                names = self._targets[id(self.tables[table])] if table else set()
                shared = self._users(names, test, tests) if table else callers
                if left and len(shared) <= MAX_SHARED:
                    left -= 1
                    others = tuple(f"{self.path}::{other}" for other in shared)
                    yield Mutant(f"{self.path}::{test}", start, end, text, kind, shared=others)

    def _turned(self, asserted: ast.expr) -> Iterator[Edit]:
        """An assertion turned round in one of its comparisons, or as a whole."""
        start, end = self.span(asserted)
        comparisons = [node for node in _in_order(asserted) if isinstance(node, ast.Compare)]
        for comparison in comparisons:
            operands = [comparison.left, *comparison.comparators]
            for left, sign, right in zip(operands, comparison.ops, operands[1:], strict=False):
                pattern, other = TURNED[type(sign)]
                begin = self.span(left)[1]
                found = re.search(pattern.encode(), self.data[begin : self.span(right)[0]])
                if found:
                    yield begin + found.start(), begin + found.end(), f" {other} "
        if not comparisons and isinstance(asserted, ast.UnaryOp) and isinstance(asserted.op, ast.Not):
            found = re.match(rb"not\s*", self.data[start:end])
            yield start, start + (found.end() if found else 0), ""
        elif not comparisons:
            yield start, end, f"not ({self.source(asserted)})"

    def _constants(self, value: ast.expr, rng: random.Random) -> Iterator[Edit]:
        """Constants that stand for themselves: not as arguments of calls that compute something."""
        waiting: list[ast.AST] = [value]
        while waiting:
            node = waiting.pop()
            match node:
                case ast.Subscript() | ast.Lambda() | ast.JoinedStr() | ast.Attribute():
                    continue
                case ast.Call():
                    is_plain = called(node) in PLAIN and not any(isinstance(a, ast.Lambda) for a in _arguments(node))
                    waiting += reversed(_arguments(node)) if is_plain else []
                    continue
                case ast.Constant() if self.is_exact(node):
                    yield from self._changed(node, rng)
                case ast.List(elts=[]) | ast.Tuple(elts=[]) | ast.Dict(keys=[]):
                    other = {ast.List: "[0]", ast.Tuple: "(0,)", ast.Dict: "{0: 0}"}[type(node)]
                    if self.is_exact(node):
                        yield (*self.span(node), other)
            waiting += reversed(_children(node))

    def _changed(self, node: ast.Constant, rng: random.Random) -> Iterator[Edit]:
        """The constant with another value; of a text that is written in pieces each of them."""
        start, end = self.span(node)
        match node.value:
            case bool() | None:
                yield start, end, str(not node.value) if isinstance(node.value, bool) else "False"
            case int() as number:
                yield start, end, str(number + 1 if number == 0 else number + rng.choice((-1, 1)))
            case float() as number:
                yield start, end, repr(number + rng.choice((-1.0, 1.0)))
            case str() | bytes():
                lines = (b"(" + self.data[start:end] + b")").splitlines(keepends=True)
                offsets = [start - 1]
                for line in lines:
                    offsets.append(offsets[-1] + len(line))
                for token in tokenize.generate_tokens(io.StringIO(b"".join(lines).decode()).readline):
                    if token.type == tokenize.STRING and (text := _other_text(token.string, rng)):
                        row, column = token.start
                        at = offsets[row - 1] + len(token.line[:column].encode())
                        yield at, at + len(token.string.encode()), text

    def _users(self, names: set[str], test: str, tests: Collection[str]) -> tuple[str, ...]:
        """The other tests that a table reaches, or a test that others call, however. Not those of other files."""
        return tuple(other for other in sorted(tests) if other != test and names & self._reached(other))

    def _reached(self, test: str) -> set[str]:
        if test not in self._reached_by:
            reached = set[str]()
            left = [*self._everywhere, *self._names.get(test, ())]
            while left:
                name = left.pop()
                if name not in reached:
                    reached.add(name)
                    left += self._names.get(name, ())
            self._reached_by[test] = reached
        return self._reached_by[test]


def _names_in(node: ast.AST) -> set[str]:
    """With those of arguments, which may be fixtures, and of attributes that may be tests."""
    found = {one.id for one in nodes(node, ast.Name)} | {one.arg for one in nodes(node, ast.arg)}
    return found | {one.attr for one in nodes(node, ast.Attribute) if one.attr.startswith("test")}


def _children(node: ast.AST) -> list[ast.AST]:
    """In the order in which they are written."""
    match node:
        case ast.Dict(keys=keys, values=values):
            return [part for pair in zip(keys, values, strict=True) for part in pair if part is not None]
        case ast.IfExp(test=test, body=body, orelse=otherwise):
            return [body, test, otherwise]
    return [*ast.iter_child_nodes(node)]


def _in_order(node: ast.AST) -> Iterator[ast.AST]:
    waiting = [node]
    while waiting:
        part = waiting.pop()
        yield part
        waiting += reversed(_children(part))


def _arguments(call: ast.Call) -> list[ast.expr]:
    positional = (one.value if isinstance(one, ast.Starred) else one for one in call.args)
    return [*positional, *(keyword.value for keyword in call.keywords)]


def _other_text(source: str, rng: random.Random) -> str:
    """The same literal with one letter or digit another one; empty where it has none."""
    whole = re.fullmatch(r"([A-Za-z]*(\"{3}|'{3}|[\"']))(.*)(\2)", source, re.S)
    assert whole is not None
    opening, _, text, quote = whole.groups()
    places = [m.start(2) for m in re.finditer(r"(\\[uUxN].{0,8}|\\.)|([A-Za-z0-9])", text, re.S) if m.group(2)]
    if not places:
        return "" if text else f"{opening}x{quote}"
    place = rng.choice(places)
    old = text[place]
    pool = "0123456789" if old.isdigit() else "abcdefghijklmnopqrstuvwxyz"
    new = rng.choice([letter for letter in pool if letter != old.lower()])
    return f"{opening}{text[:place]}{new.upper() if old.isupper() else new}{text[place + 1 :]}{quote}"


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
    rounds: list[list[Mutant]] = []
    inherited: dict[str, str] = {}
    for path, data in sorted(files.items()):
        try:
            module = _candidates(path, data)
        except (UnicodeDecodeError, SyntaxError, ValueError):
            continue
        places: dict[str, bool] = {}  # where a test is written down, and whether it gets mutants
        for base in sorted({base_of(node) for node in expected if node.startswith(f"{path}::")} | chosen):
            if base.startswith(f"{path}::") and (name := module.place(base.partition("::")[2])):
                if f"{path}::{name}" != base:
                    inherited[base] = f"{path}::{name}"
                places[name] = places.get(name, False) or base in chosen
        for name in (name for name, is_chosen in places.items() if is_chosen):
            for mutant in module.mutants(name, places, rng, variants):
                free = (round_ for round_ in rounds if not any(mutant.reaches & one.reaches for one in round_))
                if (place := next(free, None)) is None:
                    rounds.append(place := [])
                place.append(mutant)
    return Trial(files, rounds, right, inherited)


_candidates = lru_cache(maxsize=64)(Candidates)  # the deletions of a package share its test files


@dataclass(frozen=True, slots=True)
class Trial:
    """Candidates for a set of tests, and the rounds that show which of them can be used."""

    files: Mapping[str, bytes]  # the test files
    drawn: Sequence[Sequence[Mutant]]  # in each of these a test has one at most
    right: Mapping[str, str | None]  # what brings the right code into the tree
    inherited: Mapping[str, str] = field(default_factory=dict)  # as Mutants has it
    trivial: Sequence[tuple[Mapping[str, str | None], Collection[str]]] = ()  # bodies, and the tests that they pass
    limit_s: float = 60.0

    @property
    def rounds(self) -> list[Round]:
        """The right code with each set of candidates; then each trivial body with those of the tests that it passes."""
        rounds = [self._round(mutants, self.right) for mutants in self.drawn]
        return rounds + [self._round(mutants, bodies) for bodies, mutants in self._doubtful()]

    def _doubtful(self) -> list[tuple[Mapping[str, str | None], list[Mutant]]]:
        found = []
        for bodies, passed in self.trivial:
            bases = {self._test_of(test) for test in passed}
            found += [(bodies, [mutant for mutant in mutants if mutant.test in bases]) for mutants in self.drawn]
        return [(bodies, mutants) for bodies, mutants in found if mutants]

    def _round(self, mutants: Sequence[Mutant], changes: Mapping[str, str | None]) -> Round:
        paths = sorted({mutant.path for mutant in mutants})
        tests = {
            path: edited(self.files[path], [mutant for mutant in mutants if mutant.path == path]) for path in paths
        }
        chosen = {mutant.test for mutant in mutants}
        bases = [*chosen, *(base for base, test in self.inherited.items() if test in chosen)]
        return Round(paths, sorted(bases), {**changes, **tests}, timeout_s=self.limit_s)

    async def blanks(
        self, fail_to_pass: Collection[str], run: Callable[[Sequence[Round], int], Awaitable[Sequence[SuiteRun]]]
    ) -> Blanks:
        files = {
            path: data for path, data in self.files.items() if any(n.startswith(f"{path}::") for n in fail_to_pass)
        }
        return await blanks_of(files, fail_to_pass, self.inherited, self.right, run, self.limit_s)

    def _test_of(self, node: str) -> str:
        return self.inherited.get(base_of(node), base_of(node))

    def usable(self, runs: Sequence[SuiteRun], expected: Collection[str]) -> Mutants:
        """Those that do as they should. `runs` are of `rounds`, `expected` all tests that the task asks for."""
        trivially: dict[Mutant, set[str]] = defaultdict(set)  # what passes with a trivial body
        for (_, doubtful), run in zip(self._doubtful(), runs[len(self.drawn) :], strict=True):
            for mutant in doubtful:
                trivially[mutant] |= run.passed
        found: list[Mutant] = []
        for mutants, run in zip(self.drawn, runs, strict=False):
            if run.exit_code is not None and not run.tampered:
                tried = [(mutant, self._tried(mutant, run, expected)) for mutant in mutants]
                # What a trivial body passes too is not checked at all.
                found += [one for mutant, one in tried if one and not trivially[mutant] & {*one.fails}]
        better = {mutant.test for mutant in found if mutant.kind != "check"}
        found = [mutant for mutant in found if mutant.kind != "check" or mutant.test not in better]
        digests = {path: digest_of(self.files[path]) for path in sorted({mutant.path for mutant in found})}
        saw = set[tuple[str, str]]().union(*(run.saw for run in runs[: len(self.drawn)]))
        tests = {mutant.test for mutant in found}
        inherited = {base: test for base, test in self.inherited.items() if test in tests}
        return Mutants(tuple(found), digests, tuple(sorted(saw)), inherited)

    def _tried(self, mutant: Mutant, run: SuiteRun, expected: Collection[str]) -> Mutant | None:
        """With the node ids that the right code fails; nothing where it fails none, or not in a check."""
        nodes = [node for node in run.collected if self._test_of(node) == mutant.test]
        fails = tuple(node for node in nodes if node in run.failed)
        if not fails or not all(_in_a_check(run, node, mutant.kind) for node in fails):
            return None
        return replace(
            mutant, fails=fails, others=tuple(node for node in nodes if node not in fails and node in expected)
        )


def only(mutants: Mutants, tests: Collection[str]) -> Mutants:
    """Those of these tests."""
    wanted = {mutants.test_of(test) for test in tests}
    kept = tuple(mutant for mutant in mutants.mutants if mutant.test in wanted)
    bases = {base_of(test) for test in tests}
    blanks = without(mutants.blanks, mutants.blanks.cases.keys() - bases, "")
    blank_paths = {base.partition("::")[0] for base in blanks.cases}
    blanks = replace(
        blanks,
        edits=tuple(edit for edit in blanks.edits if edit.path in blank_paths),
        names=tuple(edit for edit in blanks.names if edit.path in blank_paths),
        left={base: why for base, why in blanks.left.items() if base in bases},
    )
    paths = {mutant.path for mutant in kept} | blank_paths
    return replace(mutants, mutants=kept, files={path: mutants.files[path] for path in sorted(paths)}, blanks=blanks)


def with_blanks(mutants: Mutants, blanks: Blanks, files: Mapping[str, bytes], inherited: Mapping[str, str]) -> Mutants:
    """A test that several classes have is where it is written down for blanks too."""
    digests = {path: digest_of(files[path]) for path in {base.partition("::")[0] for base in blanks.cases}}
    named = {base: test for base, test in inherited.items() if base in blanks.cases}
    return replace(
        mutants,
        blanks=blanks,
        files=dict(sorted({**mutants.files, **digests}.items())),
        inherited={**named, **mutants.inherited},
    )


def _in_a_check(run: SuiteRun, node: str, kind: str) -> bool:
    if not run.failed[node].startswith("call: "):
        return False
    return run.errors[node] == "assertion" or (
        kind == "raises" and run.errors[node] not in {"NameError", "ImportError"}
    )


async def add_mutants(task: Task, spec: SandboxSpec, timeout_s: float = 300.0) -> int:
    """Mutants for a task that is on disk already; how many of its tests have one now."""
    files = {path: (task.hidden_tests / path).read_bytes() for path in files_of(task.fail_to_pass)}
    expected = {*task.fail_to_pass, *task.pass_to_pass}
    trial = trial_of(files, task.fail_to_pass, expected, gold_changes(task), random.Random(task.id))
    trial = replace(trial, limit_s=timeout_s / 4)
    mutants = Mutants()
    async with await suite_sandbox(task.tree, task.suite, spec) as sandbox:
        await put(sandbox, hidden_files(task))

        async def run(rounds: Sequence[Round], hash_seed: int) -> list[SuiteRun]:
            return await run_rounds(sandbox, task.suite, rounds, timeout_s, hash_seed=hash_seed, product=task.sources)

        if trial.drawn:
            mutants = trial.usable(await run(trial.rounds, 0), expected)
        blanks = await trial.blanks(task.fail_to_pass, run)
    mutants = with_blanks(mutants, blanks, files, trial.inherited)
    rewrite_mutants(task, mutants)
    return len(mutants.tests)
