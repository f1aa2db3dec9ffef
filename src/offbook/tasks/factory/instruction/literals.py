"""Literals: what code that is gone has, what tests check, and where a text is shown."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache

from offbook.core import copies, pycode
from offbook.tasks.factory.delete.names import Definition, dotted, last
from offbook.tasks.factory.types import FunctionKey

FORMATTED = re.compile(r"%(?:\(\w+\))?[-+ #0]*[\d.*]*[sdrfxieg%]|\{[^{}]*\}")
COMPARING = ("assert", "match", "expect", "check")
EQUAL = {"assertEqual", "assertEquals", "assert_equal", "eq_"}
# Numbers of more than one digit that anybody comes to think of, besides those about a power of two.
EVERYDAY = {11, 12, 15, 24, 25, 36, 75, 99, 120, 180, 360, 365, 366, 999, 1440, 3600, 86400, 0.25, 0.75, 1.5, 2.5}
READING = {"read", "read_text", "readlines", "getvalue", "readouterr", "getMessage"}  # what was written, by a call
WRITTEN = {"out", "err", "output", "stdout", "stderr", "messages"}  # or as an attribute


def as_text(value: object) -> str:
    """Of a literal that says something: a word, or a number that nobody guesses."""
    if isinstance(value, str):
        return value.strip() if re.search(r"[^\W_]{2}", value) else ""
    if not isinstance(value, int | float) or isinstance(value, bool) or value in EVERYDAY:
        return ""
    is_round = isinstance(value, int) and 0 in (value & (value - 1), value & (value + 1))
    digits = re.sub(r"e.*|\D", "", str(value)).strip("0")
    return str(value) if len(digits) > 1 and not is_round else ""


@lru_cache(maxsize=4096)
def literals_in(source: str) -> frozenset[str]:
    """All texts and numbers of a program."""
    return frozenset(str(n.value).strip() for n in ast.walk(pycode.parse(source)) if isinstance(n, ast.Constant))


def is_number(text: str) -> bool:
    return re.fullmatch(r"\d+(\.\d+)?(e[+-]?\d+)?", text) is not None


def removed_texts(removed: Mapping[str, str]) -> set[str]:
    """Literals of the code that is gone, without docstrings; those with places to fill in, in pieces."""
    found: set[str] = set()
    for tree in parsed(removed):
        silent = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and id(node) not in silent:
                pieces = FORMATTED.split(node.value) if isinstance(node.value, str) else [node.value]
                found |= {text for piece in pieces if (text := as_text(piece))}
    return found


def parsed(removed: Mapping[str, str]) -> list[ast.Module]:
    return [_tree(source) for source in removed.values()]


@lru_cache(maxsize=256)
def _tree(source: str) -> ast.Module:
    return copies.parsed(source)[1] or ast.Module([], [])


def stands_in(part: str, whole: str) -> bool:
    """As whole words, in spite of the marks of a regular expression."""
    if part not in whole and "\\" not in whole:
        return False
    start = r"(?<!\w)" if part[0].isalnum() else ""
    end = r"(?!\w)" if part[-1].isalnum() else ""
    pattern = re.compile(start + re.escape(part) + end)
    return bool(pattern.search(whole) or pattern.search(re.sub(r"\\(.)", r"\1", whole)))


@lru_cache(maxsize=4096)
def _constants(source: str) -> str:
    """The strings of a program, as they read; all of a text that is no program."""
    try:
        tree = pycode.parse(source)
    except (SyntaxError, ValueError):
        return ""
    return "\n\0\n".join(n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str))


def shows(source: str, text: str) -> bool:
    if text in source:
        return stands_in(text, source)
    escaped = "\n" in text or '"' in text or "'" in text or "\\" in text
    return escaped and text in _constants(source)


@lru_cache(maxsize=4096)
def _words(source: str) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", source))


def has_word(source: str, name: str) -> bool:
    return name in _words(source)


def checks(node: ast.AST) -> Iterator[ast.AST]:
    """Where a test says what should come out: assertions, comparisons, keys, tables of cases, `match=`."""
    for part in ast.walk(node):
        if isinstance(part, ast.Assert | ast.Compare | ast.Subscript):
            yield part
        elif isinstance(part, ast.Call):
            name = last(dotted(part.func)).lower()
            if any(word in name for word in COMPARING) or name in {"raises", "warns", "parametrize", "param"}:
                yield part
        elif isinstance(part, ast.Assign) and any("expect" in dotted(target).lower() for target in part.targets):
            yield part


def compared(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Texts that a test compares something with, and what it is; each by the value that a name was given last."""
    nodes = [*ast.walk(node)]
    assigned = {dotted(target): part.value for part in nodes if isinstance(part, ast.Assign) for target in part.targets}
    for part in nodes:
        sides = []
        if isinstance(part, ast.Compare) and len(part.comparators) == 1:
            sides = [part.left, part.comparators[0]]
        elif isinstance(part, ast.Call) and last(dotted(part.func)) in EQUAL:
            sides = part.args[:2]
        values = [assigned.get(dotted(side), side) if isinstance(side, ast.Name) else side for side in sides]
        for one, other in (values, values[::-1]) if len(values) == 2 else ():
            for text in [one, *(one.elts if isinstance(one, ast.List | ast.Tuple) else ())]:
                if isinstance(text, ast.Constant) and isinstance(text.value, str) and text.value.strip():
                    yield text.value.strip(), other


def is_read_back(node: ast.AST) -> bool:
    """Whether it is what somebody wrote: to a file, a stream or a log."""
    for part in ast.walk(node):
        if isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute) and part.func.attr in READING:
            return True
        if isinstance(part, ast.Attribute) and (part.attr in WRITTEN or dotted(part.value) == "caplog"):
            return True
    return False


def defined_names(removed: Mapping[str, str]) -> set[str]:
    """Names that the gone code gives to attributes, functions and fields."""
    found: set[str] = {FunctionKey.of(where).simple for where in removed}
    for tree in parsed(removed):
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
            elif isinstance(node, Definition | ast.ClassDef):
                found.add(node.name)
            if isinstance(node, ast.ClassDef):
                targets = [t for p in node.body if isinstance(p, ast.Assign) for t in p.targets]
                targets += [p.target for p in node.body if isinstance(p, ast.AnnAssign)]
                found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return {name for name in found if not (name.startswith("__") and name.endswith("__"))}
