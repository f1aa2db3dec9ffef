"""What has to be known to pass the failing tests, and stands nowhere in the tree as the agent sees it.

It is read from the tests' code and the code that is gone. A text, a number, an attribute or an error counts only if
both have it: what is computed from a documented behaviour need not be told. Whether an instruction says it is for
sufficient.py.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from offbook.tasks.factory.delete.names import Definition, dotted, last, plain_dotted
from offbook.tasks.factory.delete.references import Lost
from offbook.tasks.factory.delete.symbols import Symbols, definitions, module_of
from offbook.tasks.factory.delete.visible import vanished
from offbook.tasks.factory.instruction.counts import MIN_EXAMPLES, MIN_WORDS, are_enough, briefly_documented, num_words
from offbook.tasks.factory.instruction.examples import RAISING, Example, examples, unread_rows
from offbook.tasks.factory.instruction.literals import (
    as_text,
    checks,
    compared,
    defined_names,
    has_word,
    is_number,
    is_read_back,
    literals_in,
    parsed,
    removed_texts,
    shows,
    stands_in,
)
from offbook.tasks.factory.instruction.skeleton import skeleton
from offbook.tasks.factory.instruction.testcode import TestCode, read_in, words_of
from offbook.tasks.factory.instruction.tried import MAX_SHOWN, Tried, best_of
from offbook.tasks.factory.types import FunctionKey, is_test_code

MAX_EXAMPLES = 8  # by the lines they run
FORMED = re.compile(r"\n|[^\w\s]")
MIN_SHOWN = 0.6  # of the statements that no docstring describes


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
        """Where else gone functions were named: lists of exports, and files that bind them too. Private helpers that no
        test reads need not come back."""
        if self.evidence.is_told:
            return []
        own, found = {*self.evidence.functions}, []
        read = read_in(self._code).keys() | {name for _, name in self.names}
        names = {
            key.name
            for key in own
            if self.evidence.symbols.functions[key].public or key in self.evidence.targets or key.simple in read
        }
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

    def origin(self, module: str, name: str, depth: int = 8) -> tuple[str, str]:
        """Where what a name stood for was made, and as what: through imports, also under another name."""
        path = self.evidence.symbols.path_of(module)
        for imported in self.evidence.symbols.modules[path].imports if path and depth else ():
            if imported.top and imported.bound == name and imported.name not in ("", "*"):
                return self.origin(imported.module, imported.name, depth - 1)
            if imported.name == "*" and name in self._lost.get(self._path_of(imported.module), ()):
                return self.origin(imported.module, name, depth - 1)
        return module, name

    def is_described(self, module: str, name: str, instruction: str) -> bool:
        """Whether the instruction or the tree has a definition of it. Modules and what is a library's need none."""
        module, name = self.origin(module, name)
        if not self._path_of(module) or self._path_of(f"{module}.{name}"):
            return True
        defined = re.compile(rf"^\s*(?:(?:async )?def |class )?(?:\w+, )*{name}\b(?:, \w+)*\s*[(:=]", re.M)
        return any(map(defined.search, (instruction, self.evidence.shown.get(self._path_of(module), ""))))

    def _path_of(self, module: str) -> str:
        return self.evidence.symbols.path_of(module) or ""

    def outline(self, with_values: bool = True) -> str:
        """Declarations of what is gone."""
        names = {self.origin(module, name) for module, name in self.names}
        return skeleton(self.evidence.before, self.evidence.symbols, self.gone, names, with_values)

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
                or num_words(functions[key]) >= MIN_WORDS
            )
        )  # fmt: skip

    @cached_property
    def texts(self) -> list[_Literal]:
        """Literals that the tests check, have from the code that is gone, and that are shown nowhere; and what they
        find in files and logs, as far as it is more than words."""
        found = {text.value: text for text in self._compared(is_read_back) if FORMED.search(text.value)}
        parts = self._parts
        for literal in self._literals() if parts else ():
            if literal.value not in found and any(
                (literal.checked and stands_in(part, literal.value)) or stands_in(literal.value, part) for part in parts
            ):
                found[literal.value] = literal
        hidden = self.private.keys()
        return [one for one in found.values() if one.value not in hidden and not self._is_shown(one.value)]

    @cached_property
    def _parts(self) -> set[str]:
        """Texts and numbers of the gone code that are shown nowhere."""
        return {part for part in removed_texts(self.evidence.removed) if not self._is_shown(part)}

    @cached_property
    def unworded(self) -> _Literal | None:
        """What no words give, and no docstring has an example of: what stands where in a text that the tests compare a
        result with, or a number of the gone code that nobody guesses and that is not stated."""
        if self._has_doctest:
            return None
        names = {key.simple for key in self.evidence.functions}
        for text in self._compared(lambda other: bool(_called_in(other) & names)):
            if FORMED.search(text.value):
                return text
        unstated = self._parts - {text.value for text in self.texts}
        numbers = sorted(filter(is_number, unstated)) if not self.evidence.is_told else []
        return _Literal(numbers[0], str(self.evidence.targets[0]), True) if numbers else None

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
    def brief(self) -> dict[FunctionKey, str]:
        """Targets, and what else tests use by name, whose docstrings have few words -> how many. Helpers are what their
        callers make of them."""
        if self.evidence.is_told:
            return {}
        functions, targets = self.evidence.symbols.functions, self.evidence.targets
        used = read_in(self._code).keys() | {name for _, name in self.names}
        asked = [
            key
            for key in self.evidence.functions
            if key in targets
            or (key.simple in used and functions[key].public and functions[key].statements > 1 and not key.dunder)
        ]
        return briefly_documented(asked, self.evidence.functions, self.evidence.symbols)

    @cached_property
    def _candidates(self) -> list[Example]:
        return examples(self._code, self._tests, self.evidence.failing, self.evidence.functions)

    @cached_property
    def examples(self) -> list[Example]:
        """Checks that are true, and show what the docstrings' own examples do not, or where a text belongs that is
        stated; of what no docstring describes or has an example of, or no words can, one more from every test."""
        if self.evidence.is_told:
            return []
        if self.evidence.tried is None:
            return self._candidates[:MAX_EXAMPLES] if self.brief or self.unworded else []
        return self._best(self.evidence.tried, MAX_SHOWN)

    @cached_property
    def num_more_examples(self) -> int:
        """At least: those that would be shown as well, were there room, and rows of their tables that nobody read."""
        tried = None if self.evidence.is_told else self.evidence.tried
        if tried is None:
            return 0
        unread = sum(len(self._unread.get(test, ())) for test in {example.test for example in self.examples})
        return len(self._best(tried, len(self._candidates))) - len(self.examples) + unread

    @cached_property
    def _unread(self) -> dict[str, list[ast.expr]]:
        """Test -> rows of its table past those that are looked at."""
        definitions = (code.node for code in self._code if isinstance(code.node, Definition))
        return {node.name: rows for node in definitions if (rows := unread_rows(node))}

    def unplaced(self, instruction: str) -> list[_Literal]:
        """Stated texts of tables that the instruction has rows of: only rows that nobody read say where they belong."""
        given = [example for example in self._candidates if example.text in instruction]
        placed = {literal for example in given for literal in literals_in(example.text)}
        unread = {
            str(node.value).strip()
            for test in {example.test for example in given}
            for row in self._unread.get(test, ())
            for node in ast.walk(row)
            if isinstance(node, ast.Constant)
        }
        return [text for text in self.texts if text.value in unread - placed]

    def _best(self, tried: Tried, bound: int) -> list[Example]:
        functions = self.evidence.symbols.functions
        is_shown = all(">>>" in functions[key].docstring for key in self.evidence.targets)
        fewest = MIN_EXAMPLES if self.brief or self.unworded or not is_shown else 0
        return best_of(self._candidates, tried, MAX_EXAMPLES, fewest, {text.value for text in self.texts}, bound)

    def is_exampled(self, instruction: str) -> bool:
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

    # --- how it is found

    def _is_shown(self, text: str) -> bool:
        """Numbers stand everywhere: one counts as shown beside what is gone."""
        return any(shows(source, text) for source in (self._near if is_number(text) else self.evidence.shown.values()))

    @cached_property
    def _near(self) -> list[str]:
        touched = {where.partition("::")[0] for where in self.evidence.removed}
        return [self.outline(), *(self.evidence.shown.get(path, "") for path in touched)]

    def _compared(self, wanted: Callable[[ast.AST], bool]) -> Iterator[_Literal]:
        """Texts that the tests compare with something of that kind, and that nothing shows."""
        for code in self._code:
            for text, other in compared(code.node):
                if wanted(other) and not self._is_shown(text):
                    yield _Literal(text, code.test, True)

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


def _called_in(node: ast.AST) -> set[str]:
    return {last(dotted(call)) for call in ast.walk(node) if isinstance(call, ast.Call)}


def has_attribute(text: str, name: str) -> bool:
    """Whether code has it: a word of a sentence says nothing of an attribute."""
    return bool(
        re.search(rf"\.{re.escape(name)}\b|\b{re.escape(name)}\s*[:=]|\b(?:def|class) {re.escape(name)}\b", text)
    )


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
