"""Whether what the failing tests check can be known from the tree as the agent sees it and from the instruction.

Trial comes first: examples out of the tests are run with the right code (examples.py). What no example can say is
looked up in the tests' code: names, attributes, errors and literals that the gone code has and nothing visible shows.
They are stated in the instruction, what is gone as a declaration; what cannot be stated refuses the task.

Left out: which of two documented behaviours holds in a case that the documentation does not mention.
"""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from offbook.core import copies, pycode
from offbook.core.pycode import bound_in, identifiers, nodes, strings_in
from offbook.tasks.factory.delete.symbols import Symbols, lost_in, lost_names, module_of, read_in, read_symbols
from offbook.tasks.factory.instruction.examples import (
    RAISING,
    Code,
    Example,
    best_of,
    last_name,
    reached,
    words_of,
)
from offbook.tasks.factory.types import FunctionKey, is_test_code, last

NAMES = "tests use names that nothing describes"
TEXTS = "tests look for texts that stand nowhere"
PRIVATE = "tests look into private state"
SILENT = "nothing says what it does"

MAX_TEXTS = 12  # that an instruction states; more is a listing of the tests
MAX_TEXT = 160  # characters
MIN_WORDS = 4  # of a docstring that says something
MIN_EXAMPLES = 2
MIN_SHOWN = 0.6  # of the statements that no docstring describes
FORMATTED = re.compile(r"%(?:\(\w+\))?[-+ #0]*[\d.*]*[sdrfxieg%]|\{[^{}]*\}")


@dataclass(frozen=True)
class Needs:
    """What has to be known to pass the failing tests, and stands nowhere in the tree."""

    before: Mapping[str, str]  # the tree as it was: path -> text
    shown: Mapping[str, str]  # and as the agent sees it
    failing: tuple[str, ...]
    removed: Mapping[str, str]  # "path::name" -> text that is gone
    functions: tuple[FunctionKey, ...]  # that were deleted or stubbed
    targets: tuple[FunctionKey, ...]
    symbols: Symbols  # of the product before
    is_told: bool = False  # a changelog says what it does, and not docstrings
    examples: tuple[Example, ...] = ()  # checks of the tests that are true of the right code

    @cached_property
    def code(self) -> list[Code]:
        """What the failing tests lead to."""
        tests = {path: text for path, text in self.before.items() if is_test_code(path)}
        return reached(tests, self.symbols.import_roots, self.failing)

    @cached_property
    def gone_code(self) -> list[ast.Module]:
        return [tree for text in self.removed.values() if (tree := copies.parsed(text)[1])]

    @cached_property
    def shown_text(self) -> str:
        return "\n".join(self.shown.values())

    # --- names

    @cached_property
    def names(self) -> dict[tuple[str, str], str]:
        """(module, name) that the tests import or read there and that is bound there no longer -> the test file."""
        roots = self.symbols.import_roots
        before, shown = (
            {path: text for path, text in files.items() if path in self.symbols.modules}
            for files in (self.before, self.shown)
        )
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
        used = self.read.keys() | {name for _, name in self.names}
        functions = [self.symbols.functions[key] for key in sorted(self.functions) if key not in left]
        return [
            one.key
            for one in functions
            if not one.nested and (one.public or one.key in self.targets or one.simple in used)
        ]

    @cached_property
    def outline(self) -> str:
        """Declarations of what is gone, by file."""
        wanted = {name for _, name in self.names}
        parts = []
        for path in sorted({key.path for key in self.gone}):
            names = wanted | {key.name for key in self.gone if key.path == path}
            body = [*_declared(pycode.parse(self.before[path]).body, "", names)]
            if body:
                parts.append(f"# {path}\n{ast.unparse(ast.fix_missing_locations(ast.Module(body, [])))}")
        return "\n\n".join(parts)

    @cached_property
    def read(self) -> dict[str, str]:
        """Attributes that the tests read, and private names that they look up or patch -> the test."""
        found: dict[str, str] = {}
        for code in self.code:
            spelled = {last(text) for text in strings_in(code.node)}
            private = {name for name in spelled if name.startswith("_") and name.isidentifier()}
            for name in private.union(node.attr for node in nodes(code.node, ast.Attribute)):
                found.setdefault(name, f"{code.path}::{code.name}")
        return found

    @cached_property
    def attributes(self) -> dict[str, str]:
        """Attributes that the tests read, the gone code sets or defines, and nothing visible shows -> the test."""
        own = set[str]()
        for tree in self.gone_code:
            own |= bound_in(tree)
            own.update(node.attr for node in nodes(tree, ast.Attribute) if isinstance(node.ctx, ast.Store))
        own -= {key.simple for key in self.gone}
        found = {}
        for name in sorted(self.read.keys() & own):
            # A word of a sentence shows no public attribute.
            public = rf"\.{name}\b|\b{name}\s*[:=]|\b(?:def|class) {name}\b"
            is_dunder = name.startswith("__") and name.endswith("__")
            if not is_dunder and not re.search(rf"\b{name}\b" if name.startswith("_") else public, self.shown_text):
                found[name] = self.read[name]
        return found

    @cached_property
    def errors(self) -> dict[str, str]:
        """Errors that the tests expect, the gone code raises and no docstring names -> the test."""
        raised = {last_name(node.exc) for tree in self.gone_code for node in nodes(tree, ast.Raise) if node.exc}
        documented = "\n".join(self.symbols.functions[key].docstring for key in self.functions)
        found: dict[str, str] = {}
        for code in self.code:
            for call in nodes(code.node, ast.Call):
                for kind in identifiers(call.args[0]) & raised if last_name(call) in RAISING and call.args else ():
                    if not _has_word(documented, kind):
                        found.setdefault(kind, f"{code.path}::{code.name}")
        return found

    @cached_property
    def texts(self) -> dict[str, str]:
        """Literals that the tests have from the gone code, and that are shown nowhere -> the test."""
        pieces = set[str]()
        for tree in self.gone_code:
            silent = {id(node.value) for node in nodes(tree, ast.Expr)}
            for node in nodes(tree, ast.Constant):
                values = FORMATTED.split(node.value) if isinstance(node.value, str) else [node.value]
                pieces |= {_as_text(value) for value in values if id(node) not in silent}
        pieces = {piece for piece in pieces if piece and not self._is_shown(piece)}
        found: dict[str, str] = {}
        for code in self.code:
            for node in nodes(code.node, ast.Constant):
                text = _as_text(node.value)
                ways = {text, re.sub(r"\\(.)", r"\1", text)}  # without the marks of a regular expression
                is_own = any(_has_word(way, one) or _has_word(one, way) for one in pieces for way in ways)
                if text and is_own and text not in self.attributes and not self._is_shown(text):
                    found.setdefault(text, f"{code.path}::{code.name}")
        return found

    def _is_shown(self, text: str) -> bool:
        """Numbers stand everywhere: one counts as shown next to what is gone."""
        source = self.shown_text
        if text[0].isdigit():
            touched = {where.partition("::")[0] for where in self.removed}
            source = "\n".join([self.outline, *(self.shown.get(path, "") for path in touched)])
        return _has_word(source, text) or _has_word(source, repr(text)[1:-1])

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
    def chosen(self) -> list[Example]:
        """The examples that an instruction shows."""
        hidden = [name for name in self.attributes if name.startswith("_")]  # an example must not give it away
        open_ones = [one for one in self.examples if not any(_has_word(one.text, name) for name in hidden)]
        is_shown = all(">>>" in self.symbols.functions[key].docstring for key in self.targets)
        return best_of(open_ones, MIN_EXAMPLES if self.brief or not is_shown else 0, self.texts.keys())

    # --- what is said, and what is missing then

    def stated(self) -> str:
        """What an instruction has to say besides the request. Empty where the tree shows all of it."""
        parts = []
        if self.names:
            lines = [f"from {module} import {name}" for module, name in sorted(self.names)]
            parts.append(f"The tests find these names in these places:\n\n{_fenced(lines)}")
        if self.outline:
            parts.append(f"What is missing, as it is documented:\n\n{_fenced([self.outline])}")
        if public := sorted(name for name in self.attributes if not name.startswith("_")):
            parts.append(f"Attributes that the tests read: {', '.join(f'`{name}`' for name in public)}.")
        if self.errors:
            lines = [f"- `{kind}` ({words_of(test)})" for kind, test in sorted(self.errors.items())]
            parts.append("Errors that the tests expect:\n\n" + "\n".join(lines))
        if self.texts:
            lines = [f"- `{_quoted(text)}` ({words_of(test)})" for text, test in self.texts.items()]
            parts.append("Texts and numbers that the tests look for, to the letter:\n\n" + "\n".join(lines))
        if self.chosen:
            imports = sorted({line for one in self.chosen for line in one.imports if " as " in line})
            texts = [example.text for example in self.chosen]
            between = "\n\n" if any("\n" in text for text in texts) else "\n"
            parts.append(f"For example:\n\n{_fenced([*imports, between.join(texts)])}")
        return "\n\n".join(parts)

    def missing(self) -> list[tuple[str, str]]:
        """What cannot be known from the tree and what is stated: one of the reasons above, and the evidence."""
        found = []
        for (module, name), path in sorted(self.names.items()):
            shown = module_of("", self.shown.get(self.symbols.path_of(module) or "", ""), ("",))
            is_bound = self.symbols.path_of(f"{module}.{name}") or (shown and name in shown.names)
            if not is_bound and not re.search(rf"\b(def|class) {name}\b", self.outline):
                why = f"{path} imports {name} from {module}, and what it stands for is not said"
                found.append((NAMES, why))
        found += [(PRIVATE, f"{test} reads {name}") for name, test in self.attributes.items() if name[0] == "_"]
        long = [text for text in self.texts if len(text) > MAX_TEXT] or [*self.texts][MAX_TEXTS:]
        found += [(TEXTS, f"{self.texts[text]} has {text[:80]!r}") for text in long]
        lines = {line for one in self.chosen for line in one.lines}
        statements = sum(self.symbols.functions[key].statements for key in self.functions)
        if self.brief and (len(self.chosen) < MIN_EXAMPLES or len(lines) < MIN_SHOWN * statements):
            key, words = next(iter(self.brief.items()))
            counted = f"has {words} words of docstring for {self.symbols.functions[key].statements} statements"
            found.append((SILENT, f"{key} {counted}, and few tests are simple calls"))
        return found


def _as_text(value: object) -> str:
    """Of a literal that says something: a word, or a number that is not guessed."""
    if isinstance(value, str):
        return value.strip() if re.search(r"[^\W_]{2}", value) else ""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return ""
    is_round = isinstance(value, int) and 0 in (value & (value - 1), value & (value + 1))
    digits = re.sub(r"e.*|\D", "", str(value)).strip("0")
    return str(value) if len(digits) > 1 and not is_round else ""


def _has_word(text: str, word: str) -> bool:
    """Whether it stands there and is no part of a longer word."""
    pattern = rf"(?:\b|(?=\W)){re.escape(word)}(?:\b|(?<=\W))"
    return bool(word) and word in text and re.search(pattern, text) is not None


def _fenced(lines: Iterable[str]) -> str:
    return "```python\n" + "\n".join(lines) + "\n```"


def _quoted(text: str) -> str:
    """On one line, as Python would write it between quotes."""
    return text if "\n" not in text and "`" not in text else repr(text)[1:-1].replace("`", "'")


def _declared(body: Iterable[ast.AST], prefix: str, wanted: Collection[str]) -> Iterator[ast.stmt]:
    """The wanted functions without bodies, and classes with their annotated fields."""
    for node in body:
        if isinstance(node, ast.If | ast.Try):
            yield from _declared(ast.iter_child_nodes(node), prefix, wanted)
        if not isinstance(node, pycode.Function | ast.ClassDef):
            continue
        name = prefix + node.name
        inside: list[ast.stmt] = []
        if isinstance(node, ast.ClassDef):
            inside = [*_declared(node.body, f"{name}.", wanted)]
            if name in wanted or f"{name}.__init__" in wanted:
                fields = [_without_default(part) for part in node.body if isinstance(part, ast.AnnAssign)]
                inside = [*fields, *inside]
        if inside or name in wanted:
            declared = copy.copy(node)
            docstring = node.body[:1] if ast.get_docstring(node) is not None else []
            declared.body = [*docstring, *(inside or [ast.Expr(ast.Constant(...))])]
            yield declared


def _without_default(node: ast.AnnAssign) -> ast.AnnAssign:
    return ast.AnnAssign(node.target, node.annotation, ast.Constant(...) if node.value else None, node.simple)
