"""Sufficiency: whether what the failing tests check can be known from what is shown, the instruction and the tree.

What has to be known is read from the tests' code and the code that is gone. A text, a number, an attribute or an error
counts only if both have it: what is computed from a documented behaviour need not be told. It is known if it stands in
the tree as the agent sees it; else the instruction has to state it (`Needs.stated`); what the instruction then still
lacks (`Needs.missing`) makes the task one that nobody can solve.

Left out: which of two documented behaviours holds in a case that the documentation does not mention.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from offbook.taskgen.delete.names import Definition, dotted, last, plain_dotted
from offbook.taskgen.delete.references import Lost
from offbook.taskgen.delete.symbols import Symbols, definitions, module_of, read_symbols
from offbook.taskgen.delete.visible import vanished
from offbook.taskgen.examples import RAISING, Example, examples
from offbook.taskgen.literals import as_text, checks, defined_names, has_word, parsed, removed_texts, shows, stands_in
from offbook.taskgen.nouns import FunctionKey, is_test_code
from offbook.taskgen.skeleton import skeleton
from offbook.taskgen.testcode import TestCode, read_in, words_of
from offbook.taskgen.tried import Tried, best_of
from offbook.taskgen.workshop import read_texts
from offbook.tasks.check import gold_changes
from offbook.types import Task

NAMES = "tests use names that nothing describes"
TEXTS = "tests look for texts that stand nowhere"
PRIVATE = "tests look into private state"
ERRORS = "tests expect errors that are stated nowhere"
SILENT = "nothing says what it does"
REASONS = (NAMES, TEXTS, PRIVATE, ERRORS, SILENT)

MAX_TEXTS = 12  # that an instruction states; more is a listing of the tests
MAX_TEXT = 160  # characters
MIN_DOCUMENTED = 4  # words of a docstring that says something
MIN_EXAMPLES, MAX_EXAMPLES = 2, 8
MIN_EXAMPLED_TESTS = 4  # or one in as many
FORMED = re.compile(r"\n|[^\w\s]")
MIN_SHOWN = 0.6  # of the statements that no docstring describes


@dataclass(frozen=True, slots=True)
class Missing:
    """What the tests check and nobody can know. `reason` is one of REASONS."""

    reason: str
    evidence: str

    def __str__(self) -> str:
        return f"{self.reason}: {self.evidence}"


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is judged by: all of it can be read from a task folder."""

    before: Mapping[str, str]  # the tree as it was: path -> text
    shown: Mapping[str, str]  # and as the agent sees it
    failing: tuple[str, ...]
    removed: Mapping[str, str]  # "path::name" -> text that is gone
    functions: tuple[FunctionKey, ...]  # that were deleted or stubbed
    targets: tuple[FunctionKey, ...]
    symbols: Symbols  # of the product before
    is_told: bool = False  # what it does is said by something else than docstrings: a changelog
    tried: Tried | None = None  # which examples are true; None where nothing was run


@dataclass(frozen=True, slots=True)
class _Literal:
    value: str
    test: str
    checked: bool  # compared with, and not only passed on


def missing_in(task: Task) -> list[Missing]:
    """What cannot be known of a task from its folder. Nothing is said of one that is no deletion from a repository."""
    record = task.folder / "solution/removed.json"
    if task.deleted is None or not record.is_file():
        return []
    shown, hidden = read_texts(task.tree), read_texts(task.hidden_tests)
    before = {path: text for path, text in {**shown, **gold_changes(task), **hidden}.items() if text is not None}
    product = {path: text for path, text in before.items() if is_inside(path, task.sources) and not is_test_code(path)}
    functions, targets = (tuple(map(FunctionKey.of, names)) for names in (task.deleted.functions, task.deleted.targets))
    symbols = read_symbols(product, task.suite.import_roots)
    removed = json.loads(record.read_text())
    is_told = task.deleted.kind == "release"
    needs = Needs(Evidence(before, shown, task.fail_to_pass, removed, functions, targets, symbols, is_told))
    return needs.missing(task.instruction)


def is_inside(path: str, places: Iterable[str]) -> bool:
    return any(path == place or path.startswith(f"{place}/") for place in places)


class Needs:
    """What has to be known to pass the failing tests, and stands nowhere in the tree."""

    def __init__(self, evidence: Evidence):
        self.evidence = evidence
        tests = {path: text for path, text in evidence.before.items() if is_test_code(path)}
        self._tests = TestCode(tests, evidence.symbols.import_roots)
        self._code = self._tests.reached(evidence.failing)

    # --- what it is

    @cached_property
    def _lost(self) -> Lost:
        """What each module of the product binds no longer."""
        modules = self.evidence.symbols.modules
        product = {path: text for path, text in self.evidence.before.items() if path in modules}
        after = {path: text for path, text in self.evidence.shown.items() if path in product}
        return vanished(product, after, self.evidence.symbols.import_roots)

    @cached_property
    def places(self) -> list[str]:
        """Where else gone functions were named: lists of exports, and files that bind them too."""
        if self.evidence.is_told:
            return []
        own, names, found = {*self.evidence.functions}, {key.name for key in self.evidence.functions}, []
        for path, module in self.evidence.symbols.modules.items():
            text = self.evidence.shown.get(path, "")
            if text and text != self.evidence.before.get(path):  # what comes by a star import comes back by itself
                now = module_of(path, text, self.evidence.symbols.import_roots)
                bound = {name for name in names & self._lost.get(path, {}).keys() if FunctionKey(path, name) not in own}
                exports = {*(module.exports or ())} - {*((now and now.exports) or ())}
                found += [f"`{name}` in `{path}`" for name in sorted(bound)]
                found += [f"`{name}` in `__all__` of `{path}`" for name in sorted(exports)]
        return found

    @cached_property
    def names(self) -> dict[tuple[str, str], str]:
        """(module, name) that the tests import or read there and that is bound there no longer -> the test file."""
        modules = {path: module.name for path, module in self.evidence.symbols.modules.items()}
        gone = {modules[path]: names for path, names in self._lost.items()}
        files = {name for path, name in modules.items() if path not in self.evidence.shown}
        found: dict[tuple[str, str], str] = {}
        for path in sorted({code.path for code in self._code}):
            module = self._tests.module(path)
            used = {plain_dotted(n) for code in self._code if code.path == path for n in ast.walk(code.node)
                    if isinstance(n, ast.Attribute | ast.Name)}  # fmt: skip
            for imported in module.imports if module else ():
                whole = f"{imported.module}.{imported.name}" if imported.name else imported.module
                if imported.name in gone.get(imported.module, ()) or (imported.name and whole in files):
                    found.setdefault((imported.module, imported.name), path)
                if imported.name == "*":
                    found |= {(imported.module, name): path for name in gone.get(imported.module, ()) if name in used}
                if not imported.name and imported.bound == imported.module.partition(".")[0]:
                    whole = imported.bound  # import a.b binds a
                for name, names in gone.items():
                    if name == whole or name.startswith(f"{whole}."):
                        bound = imported.bound + name[len(whole) :]
                        found |= {(name, own): path for own in names if f"{bound}.{own}" in used}
        return found

    @cached_property
    def gone(self) -> list[FunctionKey]:
        """Functions and classes that are there no longer and that somebody has to know: public ones, private ones
        that tests reach, and helpers whose docstrings say something."""
        left = {
            FunctionKey(path, name)
            for path in {key.path for key in self.evidence.functions} & self.evidence.shown.keys()
            for name in definitions(self.evidence.shown[path])
        }
        attributes = {n.attr for code in self._code for n in ast.walk(code.node) if isinstance(n, ast.Attribute)}
        asked = attributes | {name for _, name in self.names}
        functions = self.evidence.symbols.functions
        return sorted(
            key
            for key in self.evidence.functions
            if key not in left and not functions[key].nested
            and (
                functions[key].public
                or key in self.evidence.targets
                or key.simple in asked
                or _num_words(functions[key].docstring) >= MIN_DOCUMENTED
            )
        )  # fmt: skip

    @cached_property
    def texts(self) -> list[_Literal]:
        """Literals that the tests check, have from the code that is gone, and that are shown nowhere."""
        parts = {part for part in removed_texts(self.evidence.removed) if not self._is_shown(part)}
        found: dict[str, _Literal] = {}
        for literal in self._literals() if parts else ():
            if literal.value not in found and any(
                (literal.checked and stands_in(part, literal.value)) or stands_in(literal.value, part) for part in parts
            ):
                found[literal.value] = literal
        hidden = self.private.keys()
        return [one for one in found.values() if one.value not in hidden and not self._is_shown(one.value)]

    @cached_property
    def form(self) -> _Literal | None:
        """A text of several lines, or with more in it than words and numbers, that the tests compare a result with and
        that nothing shows: what stands where in it cannot be computed from words."""
        names = {key.simple for key in self.evidence.functions}
        for code in self._code:
            nodes = [*ast.walk(code.node)]
            assigned = {
                last(dotted(target)): node.value
                for node in nodes
                if isinstance(node, ast.Assign)
                for target in node.targets
            }
            for node in nodes:
                if not isinstance(node, ast.Compare) or len(node.comparators) != 1:
                    continue
                for side, other in ((node.left, node.comparators[0]), (node.comparators[0], node.left)):
                    text = assigned.get(dotted(side), side)
                    called = {last(dotted(call)) for call in ast.walk(other) if isinstance(call, ast.Call)}
                    value = text.value if isinstance(text, ast.Constant) and isinstance(text.value, str) else ""
                    if FORMED.search(value.strip()) and called & names and not self._is_shown(value):
                        return _Literal(value, code.test, True)
        return None

    @property
    def _has_doctest(self) -> bool:
        functions = self.evidence.symbols.functions
        return any(">>>" in functions[key].docstring for key in self.evidence.functions)

    @cached_property
    def attributes(self) -> dict[str, str]:
        """Public attributes of what is gone that the tests read -> the test."""
        return {name: test for name, test in self._attributes() if not name.startswith("_")}

    @cached_property
    def private(self) -> dict[str, str]:
        return {name: test for name, test in self._attributes() if name.startswith("_")}

    @cached_property
    def errors(self) -> dict[str, str]:
        """Errors that the tests expect, the gone code raises and no documentation names -> an example, or words."""
        raised = {
            last(dotted(node.exc))
            for tree in parsed(self.evidence.removed)
            for node in ast.walk(tree)
            if isinstance(node, ast.Raise) and node.exc
        }
        told = "\n".join(self.evidence.symbols.functions[key].docstring for key in self.evidence.functions)
        found: dict[str, str] = {}
        for code in self._code:
            for node in ast.walk(code.node):
                for call, body in _expecting(node):
                    kinds = call.args[0].elts if isinstance(call.args[0], ast.Tuple) else call.args[:1]
                    for kind in filter(None, map(last, map(dotted, kinds))):
                        if kind in raised and not has_word(told, kind):
                            found.setdefault(kind, _shortly(body) or words_of(code.test))
        return found

    @cached_property
    def silent(self) -> list[FunctionKey]:
        """Targets, and what else tests use by name, that have no docstring of some length. Helpers are what their
        callers make of them."""
        if self.evidence.is_told:
            return []
        functions, targets = self.evidence.symbols.functions, self.evidence.targets
        used = read_in(self._code).keys() | {name for _, name in self.names}
        asked = [
            key
            for key in self.evidence.functions
            if key in targets
            or (key.simple in used and functions[key].public and functions[key].statements > 1 and not key.dunder)
        ]
        return undocumented(asked, self.evidence.functions, self.evidence.symbols)

    @cached_property
    def _candidates(self) -> list[Example]:
        return examples(self._code, self._tests, self.evidence.failing, self.evidence.functions)

    @cached_property
    def examples(self) -> list[str]:
        """Checks that are true, and show what the docstrings' own examples do not; of what no docstring describes, or
        no words can, one more from every test."""
        if self.evidence.is_told:
            return []
        needed = bool(self.silent) or (self.form is not None and not self._has_doctest)
        if self.evidence.tried is None:
            return [example.text for example in self._candidates[:MAX_EXAMPLES]] if needed else []
        chosen = best_of(self._candidates, self.evidence.tried, MAX_EXAMPLES, MIN_EXAMPLES if needed else 0)
        return [example.text for example in chosen]

    def _is_exampled(self, instruction: str) -> bool:
        """By enough checks, and for most of its lines."""
        given = [example for example in self._candidates if example.text in instruction]
        if self.evidence.tried is not None:
            run = {*self.evidence.tried.documented}.union(
                *(self.evidence.tried.lines.get(example.text, ()) for example in given)
            )
            functions = [self.evidence.symbols.functions[key] for key in self.evidence.functions]
            if len(run) < MIN_SHOWN * sum(function.statements for function in functions):
                return False
        return are_enough(given, self.evidence.failing)

    # --- the instruction

    def stated(self, with_values: bool = True) -> str:
        """What an instruction has to say besides the request. Empty where the tree shows all of it.

        Without values the skeleton of a class leaves out what its attributes are set to.
        """
        parts = []
        if self.names:
            lines = [f"from {module} import {name}" for module, name in sorted(self.names)]
            parts.append(f"The tests find these names in these places:\n\n{_fenced(lines)}")
        if self.places and len(self.places) <= MAX_TEXTS:
            parts.append(f"These are gone too and have to come back: {', '.join(self.places)}.")
        aliases = [(module, name) for module, name in self.names]
        if outline := skeleton(self.evidence.before, self.evidence.symbols, self.gone, aliases, with_values):
            parts.append(f"What is missing, as it is documented:\n\n{_fenced([outline])}")
        if self.attributes:
            parts.append(
                f"Attributes that the tests read: {', '.join(f'`{name}`' for name in sorted(self.attributes))}."
            )
        if self.errors:
            lines = [f"- `{kind}`: {example}" for kind, example in sorted(self.errors.items())]
            parts.append("Errors that the tests expect:\n\n" + "\n".join(lines))
        if self.texts and len(self.texts) <= MAX_TEXTS:
            lines = [
                f"- `{_quoted(text.value)}` ({words_of(text.test)})" for text in self.texts if _is_short(text.value)
            ]
            parts.append("Texts that the tests look for, to the letter:\n\n" + "\n".join(lines))
        if self.examples:
            apart = "\n\n" if any("\n" in text for text in self.examples) else "\n"
            parts.append(f"For example:\n\n{_fenced([apart.join(self.examples)])}")
        return "\n\n".join(parts)

    def missing(self, instruction: str) -> list[Missing]:
        """What cannot be known from the tree and this instruction."""
        found = [
            Missing(NAMES, f"{path} imports {name} from {module}")
            for (module, name), path in sorted(self.names.items())
            if not re.search(rf"from {re.escape(module)} import [^\n]*\b{re.escape(name)}\b", instruction)
        ]
        found += [
            Missing(NAMES, f"{key.name} of {key.path} is gone, and how it is called is not said")
            for key in self.gone
            if not re.search(rf"\b(?:def|class) {re.escape(key.simple)}\b", instruction)
        ]
        found += [
            Missing(PRIVATE, f"{test} reads {name}")
            for name, test in sorted(self.private.items())
            if not has_word(instruction, name)
        ]
        found += [
            Missing(NAMES, f"{test} reads {name}")
            for name, test in sorted(self.attributes.items())
            if not has_word(instruction, name)
        ]
        found += [Missing(ERRORS, f"{kind}: {why}") for kind, why in self.errors.items() if kind not in instruction]
        found += [
            Missing(TEXTS, f"{text.test} has {text.value[:80]!r}")
            for text in self.texts
            if text.value not in instruction and _quoted(text.value) not in instruction
        ]
        if self.form and not self.examples and not self._has_doctest and self.form.value not in instruction:
            found.append(Missing(TEXTS, f"{self.form.test} has {self.form.value[:80]!r}, and no example is given"))
        if self.silent and not self._is_exampled(instruction):
            found.append(
                Missing(SILENT, f"{self.silent[0]} has no docstring to speak of, and few tests are simple calls")
            )
        return found

    # --- how it is found

    def _is_shown(self, text: str) -> bool:
        return any(shows(source, text) for source in self.evidence.shown.values())

    def _literals(self) -> Iterator[_Literal]:
        for code in self._code:
            checked = {id(n) for check in checks(code.node) for n in ast.walk(check)}
            table = not isinstance(code.node, Definition | ast.ClassDef)  # a constant of the test file: both
            for node in ast.walk(code.node):
                if isinstance(node, ast.Constant) and (value := as_text(node.value)):
                    yield _Literal(value, code.test, table or id(node) in checked)

    def _attributes(self) -> Iterator[tuple[str, str]]:
        """Attributes that the tests read, the gone code sets or defines, and nothing near it shows."""
        defined = defined_names(self.evidence.removed) - {key.simple for key in self.gone}
        touched = {where.partition("::")[0] for where in self.evidence.removed}
        near = [
            text
            for path, text in self.evidence.shown.items()
            if path in touched or is_test_code(path) or path not in self.evidence.symbols.modules
        ]
        for name, test in read_in(self._code).items():
            everywhere = near if name.startswith("_") else [*self.evidence.shown.values()]
            is_there = has_word if name.startswith("_") else has_attribute
            if name in defined and not any(is_there(text, name) for text in everywhere):
                yield name, test


def undocumented(asked: Iterable[FunctionKey], functions: Sequence[FunctionKey], symbols: Symbols) -> list[FunctionKey]:
    """Those that have fewer words of docstring than statements, alone or with all `functions` that went with them. What
    a base class says of the method it overrides is too general to count."""
    whole = [symbols.functions[key] for key in functions if not symbols.functions[key].nested]
    num_statements = sum(function.statements for function in whole)
    if sum(_num_words(function.docstring) for function in whole) < num_statements:
        return [*asked]
    return [
        key
        for key in asked
        if _num_words(symbols.functions[key].docstring) < max(MIN_DOCUMENTED, symbols.functions[key].statements)
    ]


def are_enough(given: Sequence[Example], failing: Iterable[str]) -> bool:
    """Two checks at least, out of a quarter of the failing tests or four of them."""
    tests = {test.partition("[")[0] for test in failing}
    named = {example.test for example in given}
    return len(given) >= MIN_EXAMPLES and len(named) >= min(MIN_EXAMPLED_TESTS, len(tests) / MIN_EXAMPLED_TESTS)


def has_attribute(text: str, name: str) -> bool:
    """Whether code has it: a word of a sentence says nothing of an attribute."""
    return bool(
        re.search(rf"\.{re.escape(name)}\b|\b{re.escape(name)}\s*[:=]|\b(?:def|class) {re.escape(name)}\b", text)
    )


def _num_words(docstring: str) -> int:
    return len(re.findall(r"[A-Za-z]{2,}", docstring))


def _fenced(lines: Iterable[str]) -> str:
    return "```python\n" + "\n".join(lines) + "\n```"


def _quoted(text: str) -> str:
    """On one line, as Python would write it between quotes."""
    return text if "\n" not in text and "`" not in text else repr(text)[1:-1].replace("`", "'")


def _is_short(text: str) -> bool:
    return len(text) <= MAX_TEXT


def _expecting(node: ast.AST) -> Iterator[tuple[ast.Call, list[ast.stmt]]]:
    """Calls that say which error should come, and the statements that should raise it."""
    if isinstance(node, ast.With | ast.AsyncWith):
        for item in node.items:
            call = item.context_expr
            if isinstance(call, ast.Call) and last(dotted(call.func)) in RAISING and call.args:
                yield call, node.body
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        call = node.value
        if last(dotted(call.func)) in RAISING and len(call.args) > 1:
            yield call, [ast.Expr(ast.Call(call.args[1], call.args[2:], call.keywords))]


def _shortly(body: list[ast.stmt]) -> str:
    text = "; ".join(map(ast.unparse, map(ast.fix_missing_locations, body)))
    return f"`{text}`" if "\n" not in text and len(text) <= 100 and "`" not in text else ""
