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
from functools import cached_property
from typing import Any

from offbook.core import copies, pycode
from offbook.core.pycode import Function as Definition
from offbook.core.pycode import defined_in, nodes, text_in
from offbook.tasks.check import gold_changes
from offbook.tasks.factory.delete.symbols import Symbols, lost_in, lost_names, module_of, read_in, read_symbols
from offbook.tasks.factory.instruction.examples import (
    FOLDER,
    RAISING,
    Code,
    Example,
    Tried,
    best_of,
    examples,
    last_name,
    reached,
    words_of,
)
from offbook.tasks.factory.types import FunctionKey, is_inside, is_test_code, last
from offbook.tasks.factory.workshop import read_texts
from offbook.types import Task

NAMES = "tests use names that nothing describes"
TEXTS = "tests look for texts that stand nowhere"
PRIVATE = "tests look into private state"
ERRORS = "tests expect errors that are stated nowhere"
SILENT = "nothing says what it does"

MAX_TEXTS = 12  # that an instruction states; more is a listing of the tests
MAX_TEXT = 160  # characters
MAX_VALUE = 80  # characters of what a declared name is set to
MAX_UNTRIED = 8  # examples that are shown where none was run
MIN_WORDS = 4  # of a docstring that says something
MIN_EXAMPLES = 2
MIN_SHOWN = 0.6  # of the statements that no docstring describes
FORMATTED = re.compile(r"%(?:\(\w+\))?[-+ #0]*[\d.*]*[sdrfxieg%]|\{[^{}]*\}")


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
    def code(self) -> list[Code]:
        """What the failing tests lead to."""
        tests = {path: text for path, text in self.before.items() if is_test_code(path)}
        return reached(tests, self.symbols.import_roots, self.failing)

    @cached_property
    def _gone_code(self) -> list[ast.Module]:
        return [tree for text in self.removed.values() if (tree := copies.parsed(text)[1])]

    # --- names

    @cached_property
    def names(self) -> dict[tuple[str, str], str]:
        """(module, name) that the tests import or read there and that is bound there no longer -> the test file."""
        modules = self.symbols.modules
        roots = self.symbols.import_roots
        before, shown = ({p: t for p, t in files.items() if p in modules} for files in (self.before, self.shown))
        lost = lost_names(before, shown, roots)
        found: dict[tuple[str, str], str] = {}
        for code in self.code:
            module = module_of(code.path, self.before[code.path], roots)
            for absolute in lost_in(module, read_in(code.node), lost).values() if module else ():
                owner, _, name = absolute.rpartition(".")
                found.setdefault((owner, name), code.path)
        return found

    @cached_property
    def gone(self) -> list[FunctionKey]:
        """Functions that are there no longer and have to be known: public ones, and those that tests reach."""
        left = read_symbols({key.path: self.shown.get(key.path, "") for key in self.functions}, ()).functions
        used = self._read.keys() | {name for _, name in self.names}
        functions = (self.symbols.functions[key] for key in self.functions if key not in left)
        return sorted(
            one.key
            for one in functions
            if not one.nested and (one.public or one.key in self.targets or one.simple in used)
        )

    def outline(self, with_values: bool = True) -> str:
        """Declarations of what is gone, by file."""
        wanted: dict[str, set[str]] = {}
        for key in self.gone:
            wanted.setdefault(key.path, {name for _, name in self.names}).add(key.name)
        parts = []
        for path, names in sorted(wanted.items()):
            if body := [*_declared(pycode.parse(self.before[path]).body, "", names, with_values)]:
                parts.append(f"# {path}\n{ast.unparse(ast.fix_missing_locations(ast.Module(body, [])))}")
        return "\n\n".join(parts)

    @cached_property
    def _read(self) -> dict[str, str]:
        """Attributes that the tests read, and private names that they look up or patch -> the test."""
        found: dict[str, str] = {}
        for code in self.code:
            for node in nodes(code.node, ast.Attribute, ast.Constant):
                name = node.attr if isinstance(node, ast.Attribute) else last(text_in(node))
                if isinstance(node, ast.Attribute) or (name.startswith("_") and name.isidentifier()):
                    found.setdefault(name, code.test)
        return found

    @cached_property
    def attributes(self) -> dict[str, str]:
        """Attributes that the tests read, the gone code sets or defines, and nothing visible shows -> the test."""
        defined = {FunctionKey.of(where).simple for where in self.removed}
        for tree in self._gone_code:
            defined |= {node.attr for node in nodes(tree, ast.Attribute) if isinstance(node.ctx, ast.Store)}
            defined |= defined_in(tree)
            for owner in nodes(tree, ast.ClassDef):
                defined |= {name for part in owner.body for name in pycode.binds(part)}
        defined -= {key.simple for key in self.gone}
        shown = "\n".join(self.shown.values())

        def is_shown(name: str) -> bool:  # a word of a sentence shows no public attribute
            public = rf"\.{name}\b|\b{name}\s*[:=]|\b(?:def|class) {name}\b"
            return bool(re.search(rf"\b{name}\b" if name.startswith("_") else public, shown))

        dunder = re.compile("__.*__")
        return {
            name: test
            for name, test in self._read.items()
            if name in defined and not dunder.fullmatch(name) and not is_shown(name)
        }

    @cached_property
    def errors(self) -> dict[str, str]:
        """Errors that the tests expect, the gone code raises and no docstring names -> the test."""
        raised = {last_name(node.exc) for tree in self._gone_code for node in nodes(tree, ast.Raise) if node.exc}
        told = "\n".join(self.symbols.functions[key].docstring for key in self.functions)
        found: dict[str, str] = {}
        for code in self.code:
            for call in nodes(code.node, ast.Call):
                if last_name(call) in RAISING and call.args:
                    kinds = call.args[0].elts if isinstance(call.args[0], ast.Tuple) else call.args[:1]
                    for kind in {*map(last_name, kinds)} & raised - {""}:
                        if not _has_word(told, kind):
                            found.setdefault(kind, code.test)
        return found

    # --- literals

    @cached_property
    def texts(self) -> dict[str, str]:
        """Literals that the tests have from the gone code, and that are shown nowhere -> the test."""
        pieces = set[str]()
        for tree in self._gone_code:
            silent = {id(node.value) for node in nodes(tree, ast.Expr)}
            for node in nodes(tree, ast.Constant):
                is_text = isinstance(node.value, str) and id(node) not in silent
                values = FORMATTED.split(node.value) if is_text else [node.value]  # type: ignore[arg-type]
                pieces |= {as_text(value) for value in values if id(node) not in silent}
        pieces = {piece for piece in pieces if piece and not self._is_shown(piece)}
        found: dict[str, str] = {}
        for code in self.code:
            for node in nodes(code.node, ast.Constant):
                text = as_text(node.value)
                is_own = any(_stands_in(text, piece) or _stands_in(piece, text) for piece in pieces if text)
                if is_own and text not in self.attributes and not self._is_shown(text):
                    found.setdefault(text, code.test)
        return found

    def _is_shown(self, text: str) -> bool:
        """Numbers stand everywhere: one counts as shown next to what is gone."""
        sources = [*self.shown.values()]
        if text[0].isdigit():
            touched = {where.partition("::")[0] for where in self.removed}
            sources = [self.outline(), *(self.shown.get(path, "") for path in touched)]
        ways = (text, repr(text)[1:-1])
        return any(way in source and _stands_in(way, source) for source in sources for way in ways)

    # --- documentation and examples

    @cached_property
    def brief(self) -> dict[FunctionKey, int]:
        """Targets whose docstrings have fewer words than the code has statements, or than 4 -> how many words."""
        found = {}
        for key in () if self.is_told else self.targets:
            function = self.symbols.functions[key]
            words = len(re.findall(r"[A-Za-z]{2,}", function.docstring))
            if words < max(MIN_WORDS, function.statements):
                found[key] = words
        return found

    @cached_property
    def candidates(self) -> list[Example]:
        tests = {path: text for path, text in self.before.items() if is_test_code(path)}
        found = examples(self.code, tests, self.symbols.import_roots, self.failing, self.functions)
        hidden = [name for name in self.attributes if name.startswith("_")]  # an example must not give it away
        return [example for example in found if not any(_has_word(example.text, name) for name in hidden)]

    @cached_property
    def examples(self) -> list[Example]:
        """Those that an instruction shows. Without a trial some of what no docstring describes."""
        if self.is_told:
            return []
        if self.tried is None:
            return self.candidates[:MAX_UNTRIED] if self.brief else []
        is_shown = all(">>>" in self.symbols.functions[key].docstring for key in self.targets)
        fewest = MIN_EXAMPLES if self.brief or not is_shown else 0
        return best_of(self.candidates, self.tried, fewest, self.texts.keys())

    def _is_exampled(self, instruction: str) -> bool:
        """Whether the examples in it run most of what is gone."""
        given = [example.text for example in self.candidates if example.text in instruction]
        if self.tried is None:
            return len(given) >= MIN_EXAMPLES
        lines = {line for text in given for line in self.tried.lines.get(text, ())}
        statements = sum(self.symbols.functions[key].statements for key in self.functions)
        return len(given) >= MIN_EXAMPLES and len(lines) >= MIN_SHOWN * statements

    # --- what is said, and what is missing then

    def stated(self, with_values: bool = True) -> str:
        """What an instruction has to say besides the request. Empty where the tree shows all of it.

        Without values the declaration of a class leaves out what its attributes are set to.
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
            short = {text: test for text, test in self.texts.items() if len(text) <= MAX_TEXT}
            lines = [f"- `{_quoted(text)}` ({words_of(test)})" for text, test in short.items()]
            parts.append("Texts and numbers that the tests look for, to the letter:\n\n" + "\n".join(lines))
        if chosen := self.examples:
            texts = [example.text for example in chosen]
            imports = sorted({line for one in chosen for line in one.imports if " as " in line})
            if any(_has_word(text, FOLDER) for text in texts):
                imports.append(f"# {FOLDER}: an empty folder, a pathlib.Path, a new one for each check")
            between = "\n\n" if any("\n" in text for text in texts) else "\n"
            parts.append(f"For example:\n\n{_fenced([*imports, between.join(texts)])}")
        return "\n\n".join(parts)

    def missing(self, instruction: str) -> list[Missing]:
        """What cannot be known from the tree and this instruction."""
        needed: list[tuple[str, str, tuple[str, ...]]] = []  # reason, evidence, texts of which the instruction has one
        for (module, name), path in sorted(self.names.items()):
            evidence = f"{path} imports {name} from {module}"
            needed.append((NAMES, evidence, (f"from {module} import {name}",)))
            shown = self.shown.get(self.symbols.path_of(module) or "", "")
            is_bound = module_of("", shown, ("",))
            if not self.symbols.path_of(f"{module}.{name}") and not (is_bound and name in is_bound.names):
                said = (f"def {name}(", f"class {name}(", f"class {name}:")
                needed.append((NAMES, f"{evidence}, and what it stands for is not said", said))
        for key in self.gone:
            evidence = f"{key.name} of {key.path} is gone, and how it is called is not said"
            needed.append((NAMES, evidence, (f"def {key.simple}(",)))
        for name, test in sorted(self.attributes.items()):
            needed.append((PRIVATE if name.startswith("_") else NAMES, f"{test} reads {name}", (name,)))
        needed += [(ERRORS, f"{test}: {kind}", (kind,)) for kind, test in self.errors.items()]
        needed += [(TEXTS, f"{test} has {text[:80]!r}", (text, _quoted(text))) for text, test in self.texts.items()]
        found = [Missing(reason, why) for reason, why, said in needed if not any(one in instruction for one in said)]
        if self.brief and not self._is_exampled(instruction):
            key, words = next(iter(self.brief.items()))
            counted = f"has {words} words of docstring for {self.symbols.functions[key].statements} statements"
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


def as_text(value: object) -> str:
    """Of a literal that says something: a word, or a number that is not guessed."""
    if isinstance(value, str):
        return value.strip() if re.search(r"[^\W_]{2}", value) else ""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return ""
    is_round = isinstance(value, int) and 0 in (value & (value - 1), value & (value + 1))
    digits = re.sub(r"e.*|\D", "", str(value)).strip("0")
    return str(value) if len(digits) > 1 and not is_round else ""


def _stands_in(part: str, whole: str) -> bool:
    """As whole words, in spite of the marks of a regular expression."""
    if part not in whole and "\\" not in whole:
        return False
    start = r"(?<!\w)" if part[0].isalnum() else ""
    end = r"(?!\w)" if part[-1].isalnum() else ""
    pattern = re.compile(start + re.escape(part) + end)
    return bool(pattern.search(whole) or pattern.search(re.sub(r"\\(.)", r"\1", whole)))


def _has_word(text: str, name: str) -> bool:
    return name in text and re.search(rf"\b{re.escape(name)}\b", text) is not None


def _fenced(lines: Iterable[str]) -> str:
    return "```python\n" + "\n".join(lines) + "\n```"


def _quoted(text: str) -> str:
    """On one line, as Python would write it between quotes."""
    return text if "\n" not in text and "`" not in text else repr(text)[1:-1].replace("`", "'")


def _declared(body: Iterable[ast.stmt], prefix: str, wanted: Collection[str], values: bool) -> Iterator[ast.stmt]:
    """The wanted functions without bodies, and classes with their fields."""
    for node in body:
        if isinstance(node, Definition) and prefix + node.name in wanted:
            yield _with_body(node, [])
        elif isinstance(node, ast.ClassDef):
            name = prefix + node.name
            inside = [*_declared(node.body, f"{name}.", wanted, values)]
            if name in wanted or (inside and f"{name}.__init__" in wanted):
                yield _with_body(node, [*(part for part in node.body if _is_field(part, values)), *inside])
            elif inside:
                part = _with_body(node, inside, with_docstring=False)
                part.decorator_list = []
                yield part
        elif isinstance(node, ast.If | ast.Try):
            inner = [part for part in ast.iter_child_nodes(node) if isinstance(part, ast.stmt)]
            yield from _declared(inner, prefix, wanted, values)


def _with_body(node: Any, inside: Sequence[ast.stmt], with_docstring: bool = True) -> Any:
    """A function or class with other statements."""
    declared = copy.copy(node)
    docstring = node.body[:1] if with_docstring and ast.get_docstring(node, clean=False) is not None else []
    declared.body = [*docstring, *(inside or [ast.Expr(ast.Constant(...))])]
    return declared


def _is_field(node: ast.stmt, values: bool) -> bool:
    if len(ast.unparse(node)) > MAX_VALUE:
        return False
    return (isinstance(node, ast.Assign) and values) or (isinstance(node, ast.AnnAssign) and (values or not node.value))
