"""Deleted code as something to look for: its body's shingles, and its structure for where all names are changed."""

from __future__ import annotations

import ast
import io
import itertools
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeGuard

import numpy as np

from offbook.taskgen.audit.text import (
    KEPT_NAMES,
    SHINGLE,
    Hashes,
    Page,
    best_stretch,
    excerpt,
    named_shingles,
    normalise,
    renamed_shingles,
    tokens_of,
)

FEWEST = 3  # shingles, 12 tokens: shorter code is everywhere by chance and is not searched for
SMALL = 15  # shingles, 24 tokens: code shorter than this has to be there whole and under its own name
FEWEST_RENAMED = 25  # shingles, 40 tokens
NAME_REACH = 20  # tokens more than its signature before a small body, in which its name has to stand
FEWEST_PARTS = 40  # of a structure
# Source is full of code that looks like other code: overloads, twins, the same loop again. Half a function in a
# document, a log or a cache is no such coincidence.
SOURCE_SHARE, OTHER_SHARE, RENAMED_SHARE = 0.85, 0.5, 0.9
BREAK = "\x00"  # stands where a docstring was: no shingle crosses it


@dataclass(frozen=True, slots=True)
class Wanted:
    """A piece of deleted code to look for. Each list has the code with its comments and, if it has any, without."""

    what: str  # "path::name"
    name: str  # the last part of the name
    num_tokens: int
    num_before: int  # tokens of the signature and the docstring, which stand before the body that is looked for
    named: tuple[Hashes, ...]
    renamed: tuple[Hashes, ...]
    structure: str  # of its statements; empty where the text is not Python or too small


def wanted_pieces(what: str, source: str, allowed: str) -> list[Wanted]:
    """The code as a whole and, of a class, also each method: one of them alone gives enough away."""
    name = what.rpartition("::")[2].rpartition(".")[2]
    source, tree = parsed(source)
    pieces = [_wanted(what, name, source, allowed)]
    for owner in ast.walk(tree) if tree else ():
        for node in owner.body if isinstance(owner, ast.ClassDef) else ():
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                pieces.append(_wanted(what, node.name, ast.get_source_segment(source, node) or "", allowed))
    return [piece for piece in pieces if max(map(len, piece.named)) >= FEWEST]


def _wanted(what: str, name: str, source: str, allowed: str) -> Wanted:
    source, tree = parsed(source)
    head, full = divided(source, tree)
    bare = divided(*parsed(without_comments(source)))[1]
    variants = [full] if bare == full else [full, bare]
    cut = [[tokens_of(run) for run in normalise(variant).split(BREAK)] for variant in variants]
    free = [tokens_of(normalise(allowed)), tokens_of(normalise(without_comments(allowed)))]
    named: list[Hashes] = []
    renamed: list[Hashes] = []
    for shingles, found in ((named_shingles, named), (renamed_shingles, renamed)):
        known = np.concatenate([shingles(tokens) for tokens in free])
        for runs in cut:
            every = np.concatenate([shingles(run) for run in runs])
            found.append(every[~np.isin(every, known)])
    code = statements(tree) if tree is not None else []
    if len(code) == 1 and isinstance(code[0], ast.FunctionDef | ast.AsyncFunctionDef):
        code = code[0].body
    shape = structure(code) if code else ""
    return Wanted(
        what,
        name,
        max(sum(map(len, runs)) for runs in cut),
        len(tokens_of(normalise(head))),
        tuple(named),
        tuple(renamed),
        shape if shape.count(" ") >= FEWEST_PARTS else "",
    )


def parsed(source: str) -> tuple[str, ast.Module | None]:
    """The tree of a definition, or of a body cut out of its function; and the text that its positions refer to."""
    for prefix in ("", "if 1:\n", "if 1:\n    ", "if 1:\n        "):
        try:
            return prefix + source, ast.parse(prefix + source)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
    return source, None


def statements(tree: ast.Module) -> list[ast.stmt]:
    """Without the `if 1:` that `parsed` puts around an indented text."""
    first = tree.body[0] if tree.body else None
    return first.body if isinstance(first, ast.If) and isinstance(first.test, ast.Constant) else tree.body


def divided(source: str, tree: ast.Module | None) -> tuple[str, str]:
    """A function's signature with its docstring, and its body; other code is all body. BREAK is where a docstring was.

    Signatures recur in overloads and overrides, and documentation may quote what a function says of itself.
    """
    if tree is None or not tree.body:
        return "", source
    data = source.encode()
    starts = [0, *itertools.accumulate(map(len, data.splitlines(keepends=True)))]
    code = statements(tree)
    begin = starts[code[0].lineno - 1] + code[0].col_offset
    if len(code) == 1 and isinstance(code[0], ast.FunctionDef | ast.AsyncFunctionDef):
        body = undocumented(code[0].body)
        begin = starts[body[0].lineno - 1] + body[0].col_offset if body else len(data)
    kept, at = [], begin
    for node in sorted(filter(is_text, ast.walk(tree)), key=lambda node: node.lineno):
        if (start := starts[node.lineno - 1] + node.col_offset) >= at:
            kept.append(data[at:start])
            at = starts[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)
    kept.append(data[at:])
    return data[:begin].decode(), BREAK.join(part.decode() for part in kept)


def is_text(node: ast.AST) -> TypeGuard[ast.Expr]:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def undocumented(body: list[ast.stmt]) -> list[ast.stmt]:
    return body[1:] if is_text(body[0]) else body


def without_comments(source: str) -> str:
    """What comes after something that is no Python stays as it is."""
    kept = source.splitlines(keepends=True)
    try:
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.COMMENT:
                row, column = token.start
                kept[row - 1] = kept[row - 1][:column].rstrip() + "\n"
    except (tokenize.TokenError, SyntaxError):
        pass
    return "".join(kept)


def structure(body: list[ast.stmt]) -> str:
    """What statements do, with their free names numbered as they come."""
    numbers: dict[str, int] = {}
    return " ".join(part for statement in undocumented(body) for part in _parts(statement, numbers))


class Functions:
    """The functions of a source file. It is parsed when first asked for: that takes longer than all the rest."""

    def __init__(self, source: str):
        self._source = source
        self._bodies: list[tuple[str, list[ast.stmt]]] | None = None

    def same_as(self, wanted: Wanted) -> str | None:
        """The name of a function that is the wanted one but for its names."""
        if not wanted.structure or not self._source:
            return None
        if self._bodies is None:
            nodes = ast.walk(parsed(self._source)[1] or ast.Module([], []))
            found = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
            self._bodies = [(node.name, body) for node in found if (body := undocumented(node.body))]
        first = wanted.structure.partition(" ")[0]
        same = (
            name
            for name, body in self._bodies
            if type(body[0]).__name__ == first and structure(body) == wanted.structure
        )
        return next(same, None)


def _parts(node: ast.AST, numbers: dict[str, int], called: bool = False) -> Iterator[str]:
    yield type(node).__name__
    if isinstance(node, ast.Name) and (called or node.id in KEPT_NAMES):
        yield node.id
        return
    for field, value in ast.iter_fields(node):
        if isinstance(node, ast.Name | ast.arg) and field in ("id", "arg"):
            yield str(numbers.setdefault(value, len(numbers)))
        elif field not in ("ctx", "kind", "type_comment", "annotation"):
            for item in value if isinstance(value, list) else [value]:
                if isinstance(item, ast.AST):
                    yield from _parts(item, numbers, called=isinstance(node, ast.Call) and field == "func")
                else:
                    yield repr(item)


def found_in(page: Page, wanted: Wanted) -> tuple[str, str] | None:
    """How the page gives the wanted code away, and where: None if it does not."""
    for shingles in wanted.named:
        share, start = best_stretch(page.named, shingles, wanted.num_tokens)
        if len(shingles) < FEWEST or share < (SOURCE_SHARE if page.is_source else OTHER_SHARE):
            continue
        before = page.tokens[max(0, start - NAME_REACH - wanted.num_before) : start + SHINGLE]
        if len(shingles) >= SMALL or (share == 1.0 and wanted.name in before):
            return "text", f"{share:.0%}: {excerpt(page, start)}"
    for shingles in wanted.renamed:
        share, start = best_stretch(page.renamed, shingles, wanted.num_tokens)
        if len(shingles) >= FEWEST_RENAMED and share >= RENAMED_SHARE:
            return "renamed", f"{share:.0%}: {excerpt(page, start)}"
    return None
