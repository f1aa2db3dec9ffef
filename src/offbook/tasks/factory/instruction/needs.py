"""Whether what the failing tests check can be known from the tree as the agent sees it and from the instruction.

Trial comes first: examples out of the tests are run with the right code (examples.py). What no example can say is
looked up in the tests' code: names, attributes, errors and literals that the gone code has and nothing visible shows.
They are stated in the instruction, what is gone as a declaration; what it still lacks then refuses the task.

Left out: which of two documented behaviours holds in a case that the documentation does not mention.
"""

from __future__ import annotations

import ast
import copy
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from offbook.core import copies, pycode
from offbook.core.pycode import FUNCTIONS, defined_in, nodes, plain_dotted, rooted, text_in
from offbook.core.pycode import Function as Definition
from offbook.tasks.check import gold_changes
from offbook.tasks.factory.delete.symbols import Function, Lost, Module, Symbols, definitions, module_of, read_symbols
from offbook.tasks.factory.delete.visible import vanished
from offbook.tasks.factory.instruction.examples import (
    FOLDER,
    MIN_EXAMPLES,
    RAISING,
    Code,
    Example,
    Tried,
    are_enough,
    best_of,
    examples,
    last_name,
    reached,
    words_of,
)
from offbook.tasks.factory.types import FunctionKey, is_inside, is_test_code
from offbook.tasks.factory.workshop import read_texts
from offbook.types import Task

NAMES = "tests use names that nothing describes"
TEXTS = "tests look for texts that stand nowhere"
PRIVATE = "tests look into private state"
ERRORS = "tests expect errors that are stated nowhere"
SILENT = "nothing says what it does"

MAX_TEXTS = 12  # that an instruction states; more is a listing of the tests
MAX_TEXT = 160  # characters
MIN_WORDS = 4  # of a docstring that says something
MIN_SHOWN = 0.6  # of the statements that no docstring describes
FORMED = re.compile(r"\n|[^\w\s]")
FORMATTED = re.compile(r"%(?:\(\w+\))?[-+ #0]*[\d.*]*[sdrfxieg%]|\{[^{}]*\}")
COMPARING = re.compile(r"assert|match|expect|check|^raises$|^warns$|^param$|^parametrize$", re.I)
READING = {"read", "read_text", "readlines", "getvalue", "readouterr", "getMessage"}  # of files and streams, by a call
WRITTEN = {"out", "err", "output", "stdout", "stderr", "messages"}  # or as an attribute
# Numbers of more than one digit that anybody comes to think of, besides those about a power of two.
EVERYDAY = {11, 12, 15, 24, 25, 36, 75, 99, 120, 180, 360, 365, 366, 999, 1440, 3600, 86400, 0.25, 0.75, 1.5, 2.5}


@dataclass(frozen=True)
class Missing:
    """What the tests check and cannot be known. `reason` is one of those above."""

    reason: str
    evidence: str

    def __str__(self) -> str:
        return f"{self.reason}: {self.evidence}"


@dataclass(frozen=True)
class Needs:
    """What has to be known to pass the failing tests, and stands nowhere in the tree.

    All that it is judged by can be read from a task folder.
    """

    before: Mapping[str, str]  # the tree as it was: path -> text
    shown: Mapping[str, str]  # and as the agent sees it
    failing: tuple[str, ...]
    removed: Mapping[str, str]  # "path::name" -> text that is gone
    functions: tuple[FunctionKey, ...]  # that were deleted or stubbed
    targets: tuple[FunctionKey, ...]
    symbols: Symbols  # of the product before
    is_told: bool = False  # a changelog says what it does, and not docstrings
    tried: Tried | None = None  # which examples are true; None where nothing was run

    @cached_property
    def _tests(self) -> dict[str, str]:
        return {path: text for path, text in self.before.items() if is_test_code(path)}

    @cached_property
    def code(self) -> list[Code]:
        """What the failing tests lead to."""
        return reached(self._tests, self.symbols.import_roots, self.failing)

    @cached_property
    def _gone_code(self) -> list[ast.Module]:
        return [tree for text in self.removed.values() if (tree := _parsed(text))]

    @cached_property
    def _touched(self) -> set[str]:
        return {where.partition("::")[0] for where in self.removed}

    @cached_property
    def _lost(self) -> Lost:
        """What each module binds no longer."""
        modules = self.symbols.modules
        before, shown = ({p: t for p, t in files.items() if p in modules} for files in (self.before, self.shown))
        return vanished(before, shown, self.symbols.import_roots)

    # --- names

    @cached_property
    def names(self) -> dict[tuple[str, str], str]:
        """(module, name) that the tests import or read there and that is bound there no longer -> the test file."""
        modules = {path: module.name for path, module in self.symbols.modules.items()}
        gone = {modules[path]: names for path, names in self._lost.items()}
        files = {name for path, name in modules.items() if path not in self.shown}
        found: dict[tuple[str, str], str] = {}
        for path in sorted({code.path for code in self.code}):
            used = {
                plain_dotted(n) for c in self.code if c.path == path for n in nodes(c.node, ast.Attribute, ast.Name)
            }
            test_module = module_of(path, self.before[path], self.symbols.import_roots)
            for name in _absolute_names(test_module, used) if test_module else ():
                parts = name.split(".")
                for at in range(1, len(parts)):
                    module = ".".join(parts[:at])
                    own = parts[at]
                    if own in gone.get(module, ()) or (at == len(parts) - 1 and name in files):
                        found.setdefault((module, own), path)
        return found

    def is_described(self, module: str, name: str, instruction: str) -> bool:
        """Whether the instruction or the tree has a definition of it. Modules need none."""
        if self.symbols.path_of(f"{module}.{name}"):
            return True
        shown = self.shown.get(self.symbols.path_of(module) or "", "")
        defined = re.compile(rf"^\s*(?:(?:async )?def |class )?(?:\w+, )*{name}\b(?:, \w+)*\s*[(:=]", re.M)
        return any(map(defined.search, (instruction, shown)))

    @cached_property
    def gone(self) -> list[FunctionKey]:
        """Functions and classes that are there no longer and have to be known: public ones, private ones that tests
        reach, and helpers whose docstrings say something."""
        files = {key.path for key in self.functions} & self.shown.keys()
        left = {FunctionKey(path, name) for path in files for name in definitions(self.shown[path])}
        functions = {key: self.symbols.functions[key] for key in self.functions}
        asked = {key for key in functions if key in self.targets or key.simple in self._used}
        return sorted(
            key
            for key, function in functions.items()
            if key not in left
            and not function.nested
            and (function.public or key in asked or num_words(function) >= MIN_WORDS)
        )

    def outline(self, with_values: bool = True) -> str:
        """Declarations of what is gone."""
        wanted = {name for _, name in self.names}
        modules = self.symbols.modules
        names = [(modules[path].name, name) for path, lost in self._lost.items() for name in wanted & lost.keys()]
        return skeleton(self.before, self.symbols, self.gone, names, with_values)

    @cached_property
    def _read(self) -> dict[str, str]:
        """Attributes that the tests read, and private names that they look up or patch -> the test."""
        found: dict[str, str] = {}
        for code in self.code:
            for node in ast.walk(code.node):
                name = node.attr if isinstance(node, ast.Attribute) else text_in(node).rpartition(".")[2]
                if isinstance(node, ast.Attribute) or (name.startswith("_") and name.isidentifier()):
                    found.setdefault(name, code.test)
        return found

    @cached_property
    def _used(self) -> set[str]:
        return self._read.keys() | {name for _, name in self.names}

    @cached_property
    def attributes(self) -> dict[str, str]:
        """Attributes that the tests read, the gone code sets or defines, and nothing near it shows -> the test."""
        defined = {FunctionKey.of(where).simple for where in self.removed}
        for tree in self._gone_code:
            defined |= {n.attr for n in nodes(tree, ast.Attribute) if isinstance(n.ctx, ast.Store)}
            defined |= defined_in(tree)
            fields = [part for n in nodes(tree, ast.ClassDef) for part in n.body]
            defined |= {n.id for part in fields for n in nodes(part, ast.Name) if isinstance(n.ctx, ast.Store)}
        defined -= {key.simple for key in self.gone}
        modules = self.symbols.modules
        near = [t for p, t in self.shown.items() if p in self._touched or is_test_code(p) or p not in modules]
        found: dict[str, str] = {}
        for name, test in self._read.items():
            if name not in defined or (name.startswith("__") and name.endswith("__")):
                continue
            ways = rf"\.{name}\b|\b{name}\s*[:=]|\b(?:def|class) {name}\b"  # a word of a sentence is no attribute
            hidden = name.startswith("_")
            pattern = re.compile(rf"\b{name}\b" if hidden else ways)
            if not any(name in text and pattern.search(text) for text in (near if hidden else self.shown.values())):
                found[name] = test
        return found

    @cached_property
    def errors(self) -> dict[str, str]:
        """Errors that the tests expect, the gone code raises and no docstring names -> the test."""
        raised = {last_name(n.exc) for tree in self._gone_code for n in nodes(tree, ast.Raise) if n.exc}
        told = "\n".join(self.symbols.functions[key].docstring for key in self.functions)
        found: dict[str, str] = {}
        for code in self.code:
            for call in nodes(code.node, ast.Call):
                if last_name(call) in RAISING and call.args:
                    kinds = call.args[0].elts if isinstance(call.args[0], ast.Tuple) else call.args[:1]
                    for kind in {*map(last_name, kinds)} & raised - {""}:
                        if not has_word(told, kind):
                            found.setdefault(kind, code.test)
        return found

    # --- literals

    @cached_property
    def texts(self) -> dict[str, str]:
        """Literals that the tests check, have from the gone code, and that are shown nowhere; and what tests of files
        and logs check, as far as it is more than words -> the test."""
        parts = {text for piece in self._pieces if (text := as_text(piece)) and not self._is_shown(text)}
        found: dict[str, str] = {}
        for value, test, is_checked, reads_back in self._constants:
            text = as_text(value)
            if any(stands_in(text, part) or (is_checked and stands_in(part, text)) for part in parts if text):
                found.setdefault(text, test)
            elif is_checked and reads_back and isinstance(value, str) and FORMED.search(value.strip()):
                found.setdefault(value.strip(), test)
        return {text: test for text, test in found.items() if text not in self.attributes and not self._is_shown(text)}

    @cached_property
    def _constants(self) -> Sequence[tuple[object, str, bool, bool]]:
        """Of the tests' code: a value, its test, whether that checks it, and whether it reads files or logs."""
        found = []
        for code in self.code:
            is_table = not isinstance(code.node, (*FUNCTIONS, ast.ClassDef))  # a constant of the test file
            checked = {id(n) for check in _checks(code.node) for n in ast.walk(check)}
            # Whether it reads what was written to a file, a stream or a log.
            attributes = nodes(code.node, ast.Attribute)
            reads_back = any(n.attr in READING | WRITTEN or rooted(n.value) == "caplog" for n in attributes)
            for node in nodes(code.node, ast.Constant):
                found.append((node.value, code.test, is_table or id(node) in checked, reads_back))
        return found

    @cached_property
    def _pieces(self) -> list[object]:
        """Literals of the gone code, docstrings left out; those with places to fill in, in pieces."""
        found: list[object] = []
        for tree in self._gone_code:
            silent = {id(n.value) for n in nodes(tree, ast.Expr)}
            for node in nodes(tree, ast.Constant):
                if id(node) not in silent:
                    found += FORMATTED.split(node.value) if isinstance(node.value, str) else [node.value]
        return found

    def _is_shown(self, text: str) -> bool:
        """Numbers stand everywhere: one counts as shown next to what is gone."""
        if is_number(text):
            near = (self.outline(), *(self.shown.get(path, "") for path in self._touched))
            return any(stands_in(text, source) for source in near)
        ways = (text, repr(text)[1:-1])
        return any(way in source and stands_in(way, source) for source in self.shown.values() for way in ways)

    # --- documentation and examples

    @cached_property
    def brief(self) -> dict[FunctionKey, str]:
        """Targets, and what else tests use by name, whose docstrings have few words. Helpers are what their callers
        make of them."""
        functions = {key: self.symbols.functions[key] for key in self.functions}
        asked = [
            key
            for key, f in functions.items()
            if key in self.targets or (key.simple in self._used and f.public and f.statements > 1 and not key.dunder)
        ]
        return {} if self.is_told else briefly_documented(asked, self.symbols)

    @cached_property
    def candidates(self) -> list[Example]:
        roots = self.symbols.import_roots
        failing = self.failing
        found = examples(self.code, self._tests, roots, failing, self.functions)
        hidden = [name for name in self.attributes if name.startswith("_")]  # an example must not give it away
        return [example for example in found if not any(has_word(example.text, name) for name in hidden)]

    @cached_property
    def _best(self) -> tuple[list[Example], int]:
        """Checks that are true, and show what the docstrings' own examples do not, or where a stated text belongs; of
        what no docstring describes or has an example of, one more from every test. And how many there are besides."""
        if self.is_told:
            return [], 0
        if self.tried is None:
            return (self.candidates[:8] if self.brief else []), 0
        is_shown = all(">>>" in self.symbols.functions[key].docstring for key in self.targets)
        fewest = MIN_EXAMPLES if self.brief or not is_shown else 0
        return best_of(self.candidates, self.tried, fewest, self.texts.keys())

    @property
    def examples(self) -> list[Example]:
        return self._best[0]

    def is_exampled(self, instruction: str) -> bool:
        """By enough checks, and for most of its lines."""
        given = [example for example in self.candidates if example.text in instruction]
        tried = self.tried
        if tried is not None:
            run = tried.documented.union(*(tried.lines.get(example.text, ()) for example in given))
            statements = sum(self.symbols.functions[key].statements for key in self.functions)
            if len(run) < MIN_SHOWN * statements:
                return False
        return are_enough(given, self.failing)

    # --- what is said, and what is missing then

    def stated(self, with_values: bool = True) -> str:
        """What an instruction has to say besides the request. Empty where the tree shows all of it.

        Without values the skeleton of a class leaves out what its attributes are set to.
        """
        parts = []
        if self.names:
            lines = [f"from {module} import {name}" for module, name in sorted(self.names)]
            parts.append(f"The tests find these names in these places:\n\n{_fenced(lines)}")
        if outline := self.outline(with_values):
            parts.append(f"What is missing, as it is documented:\n\n{_fenced([outline])}")
        if public := sorted(name for name in self.attributes if not name.startswith("_")):
            parts.append(f"Attributes that the tests read: {', '.join(f'`{name}`' for name in public)}.")
        if self.errors:
            lines = [f"- `{kind}` ({words_of(test)})" for kind, test in sorted(self.errors.items())]
            parts.append("Errors that the tests expect:\n\n" + "\n".join(lines))
        if self.texts and len(self.texts) <= MAX_TEXTS:
            lines = [
                f"- `{_quoted(text)}` ({words_of(test)})" for text, test in self.texts.items() if len(text) <= MAX_TEXT
            ]
            parts.append("Texts and numbers that the tests look for, to the letter:\n\n" + "\n".join(lines))
        chosen, count = self._best
        if chosen:
            texts = [example.text for example in chosen]
            between = "\n\n" if any("\n" in text for text in texts) else "\n"
            imports = sorted({line for one in chosen for line in one.imports if " as " in line})
            if any(has_word(text, FOLDER) for text in texts):
                imports.append(f"# {FOLDER}: an empty folder, a pathlib.Path, a new one for each check")
            more = f", and the tests have at least {count} more checks of this kind" if count else ""
            parts.append(f"For example{more}:\n\n{_fenced([*imports, between.join(texts)])}")
        return "\n\n".join(parts)

    def missing(self, instruction: str) -> list[Missing]:
        """What cannot be known from the tree and this instruction."""
        found = []
        for (module, name), path in sorted(self.names.items()):
            if not re.search(rf"from {re.escape(module)} import [^\n]*\b{re.escape(name)}\b", instruction):
                found.append(Missing(NAMES, f"{path} imports {name} from {module}"))
            elif not self.is_described(module, name, instruction):
                found.append(Missing(NAMES, f"{path} imports {name} from {module}, and what it stands for is not said"))
        for key in self.gone:
            if not re.search(rf"\b(?:def|class) {re.escape(key.simple)}\b", instruction):
                found.append(Missing(NAMES, f"{key.name} of {key.path} is gone, and how it is called is not said"))
        for name, test in sorted(self.attributes.items()):
            if not has_word(instruction, name):
                found.append(Missing(PRIVATE if name.startswith("_") else NAMES, f"{test} reads {name}"))
        found += [Missing(ERRORS, f"{test}: {kind}") for kind, test in self.errors.items() if kind not in instruction]
        for text, test in self.texts.items():
            if text not in instruction and _quoted(text) not in instruction:
                found.append(Missing(TEXTS, f"{test} has {text[:80]!r}"))
        if self.brief and not self.is_exampled(instruction):
            key, counted = next(iter(self.brief.items()))
            found.append(Missing(SILENT, f"{key} {counted}, and few tests are simple calls"))
        return found


def missing_in(task: Task) -> list[Missing]:
    """What cannot be known of a task from its folder. Empty for one that is no deletion from a repository."""
    record = task.folder / "solution/removed.json"
    if task.deleted is None or not record.is_file():
        return []
    shown = read_texts(task.tree)
    with_gold = {**shown, **gold_changes(task), **read_texts(task.hidden_tests)}
    before = {path: text for path, text in with_gold.items() if text is not None}
    product = {path: text for path, text in before.items() if is_inside(path, task.sources) and not is_test_code(path)}
    needs = Needs(
        before=before,
        shown=shown,
        failing=task.fail_to_pass,
        removed=json.loads(record.read_text()),
        functions=tuple(map(FunctionKey.of, task.deleted.functions)),
        targets=tuple(map(FunctionKey.of, task.deleted.targets)),
        symbols=read_symbols(product, task.suite.import_roots),
        is_told=task.deleted.kind == "release",
    )
    return needs.missing(task.instruction)


def num_words(function: Function) -> int:
    """Of its docstring."""
    return len(re.findall(r"[A-Za-z]{2,}", function.docstring))


def briefly_documented(asked: Iterable[FunctionKey], symbols: Symbols) -> dict[FunctionKey, str]:
    """Those with fewer words of docstring than statements, or than 4 -> how many. What a base class says of the method
    it overrides is too general to count."""
    functions = {key: symbols.functions[key] for key in asked}
    return {
        key: f"has {num_words(function)} words of docstring for {function.statements} statements"
        for key, function in functions.items()
        if num_words(function) < max(MIN_WORDS, function.statements)
    }


def _absolute_names(module: Module, used: Iterable[str]) -> Iterator[str]:
    """Dotted names that a file imports, or reads of what it imports, from the top."""
    for imported in module.imports:
        whole = f"{imported.module}.{imported.name}" if imported.name else imported.module
        if imported.name == "*":
            yield from (f"{imported.module}.{name}" for name in used if name)
            continue
        if imported.name:
            yield whole
        elif imported.bound == imported.module.partition(".")[0]:
            whole = imported.bound  # import a.b binds a
        for name in used:
            if name.startswith(f"{imported.bound}."):
                yield whole + name[len(imported.bound) :]


def as_text(value: object) -> str:
    """Of a literal that says something: a word, or a number that is not guessed."""
    if isinstance(value, str):
        return value.strip() if re.search(r"[^\W_]{2}", value) else ""
    if not isinstance(value, int | float) or isinstance(value, bool) or value in EVERYDAY:
        return ""
    is_round = isinstance(value, int) and 0 in (value & (value - 1), value & (value + 1))
    digits = re.sub(r"e.*|\D", "", str(value)).strip("0")
    return str(value) if len(digits) > 1 and not is_round else ""


def is_number(text: str) -> bool:
    return re.fullmatch(r"\d+(\.\d+)?(e[+-]?\d+)?", text) is not None


def stands_in(part: str, whole: str) -> bool:
    """As whole words, in spite of the marks of a regular expression."""
    if part not in whole and "\\" not in whole:
        return False
    start = r"(?<!\w)" if part[0].isalnum() else ""
    end = r"(?!\w)" if part[-1].isalnum() else ""
    pattern = re.compile(start + re.escape(part) + end)
    return bool(pattern.search(whole) or pattern.search(re.sub(r"\\(.)", r"\1", whole)))


def has_word(text: str, name: str) -> bool:
    return name in text and re.search(rf"\b{re.escape(name)}\b", text) is not None


@lru_cache(maxsize=256)
def _parsed(source: str) -> ast.Module | None:
    return copies.parsed(source)[1]


def _checks(node: ast.AST) -> Iterator[ast.AST]:
    """Where a test says what should come out: assertions, comparisons, keys, tables of cases, `match=`."""
    for part in nodes(node, ast.Assert, ast.Compare, ast.Subscript, ast.Call, ast.Assign):
        calls = isinstance(part, ast.Call)
        names = (
            [last_name(part)] if calls else map(rooted, part.targets) if isinstance(part, ast.Assign) else ["expect"]
        )
        if any(COMPARING.search(name) if calls else "expect" in name.lower() for name in names):
            yield part


def _fenced(lines: Iterable[str]) -> str:
    return "```python\n" + "\n".join(lines) + "\n```"


def _quoted(text: str) -> str:
    """On one line, as Python would write it between quotes."""
    return text if "\n" not in text and "`" not in text else repr(text)[1:-1].replace("`", "'")


MAX_VALUE = 80  # characters of what a name is set to


def skeleton(
    files: Mapping[str, str],
    symbols: Symbols,
    gone: Collection[FunctionKey],
    names: Iterable[tuple[str, str]],
    with_values: bool = True,
) -> str:
    """Declarations of the gone functions and of the gone names (module, name), by file. `files` is the tree before."""
    by_file: dict[str, set[str]] = {}
    for key in gone:
        by_file.setdefault(key.path, set()).add(key.name)
    for module, name in names:
        if path := symbols.path_of(module):
            by_file.setdefault(path, set()).add(name)
    parts = []
    for path, wanted in sorted(by_file.items()):
        body = [*_declared(pycode.parse(files[path]).body, "", wanted, with_values)]
        if body:
            text = ast.unparse(ast.fix_missing_locations(ast.Module(body, [])))
            parts.append(f"# {path}\n{text}")
    return "\n\n".join(parts)


def _declared(body: Iterable[ast.stmt], prefix: str, wanted: Collection[str], values: bool) -> Iterator[ast.stmt]:
    for node in body:
        if isinstance(node, Definition):
            if prefix + node.name in wanted:
                yield _function(node)
        elif isinstance(node, ast.ClassDef):
            name = prefix + node.name
            inside = [*_declared(node.body, f"{name}.", wanted, values)]
            if name in wanted or (inside and any(own.startswith(f"{name}.__init__") for own in wanted)):
                fields = [part for part in node.body if _is_field(part, values)]
                yield _class(node, [*fields, *inside], whole=True)
            elif inside:
                yield _class(node, inside, whole=False)
        elif isinstance(node, ast.If | ast.Try):
            inner = [part for part in ast.iter_child_nodes(node) if isinstance(part, ast.stmt)]
            yield from _declared(inner, prefix, wanted, values)
        elif isinstance(node, ast.Assign | ast.AnnAssign) and not prefix:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if {*map(pycode.rooted, targets)} & {*wanted} and len(ast.unparse(node)) <= MAX_VALUE:
                yield node


def _function(node: Definition) -> Definition:
    declared = copy.copy(node)
    docstring = node.body[:1] if ast.get_docstring(node, clean=False) is not None else []
    declared.body = [*docstring, ast.Expr(ast.Constant(...))]
    return declared


def _class(node: ast.ClassDef, inside: list[ast.stmt], whole: bool) -> ast.ClassDef:
    declared = copy.copy(node)
    docstring = node.body[:1] if whole and ast.get_docstring(node, clean=False) is not None else []
    declared.body = [*docstring, *inside] or [ast.Expr(ast.Constant(...))]
    if not whole:
        declared.decorator_list = []
    return declared


def _is_field(node: ast.stmt, values: bool) -> bool:
    if isinstance(node, ast.AnnAssign):
        return values or node.value is None
    return values and isinstance(node, ast.Assign) and len(ast.unparse(node)) <= MAX_VALUE
