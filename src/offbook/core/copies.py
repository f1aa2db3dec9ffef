"""Copies of code in any text: a page of documentation, a line of JSON, a hint, a program in which names were changed.

Text is read in one way only, whether it is the code that is looked for or a place to look in: escapes are undone;
quotes, commas, comment marks and what stands in front of a line (`+`, `>>>`, a line number) fall away. What is left is
cut into shingles, runs of SHINGLE tokens. The second kind of shingle knows a free name only by how far back it was last
used, so it stays the same where local names are changed. Where all names are changed, the structure is left.
"""

import ast
import builtins
import html
import io
import itertools
import keyword
import re
import textwrap
import tokenize
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeGuard

import numpy as np
import numpy.typing as npt

from offbook.core.pycode import Function, try_parse

SKETCH_SHINGLE, SKETCH_SIZE = 5, 64
SAME = 0.7  # of the shingles of two sketches, from which on their code is the same
Hashes = npt.NDArray[np.uint64]
Sketch = tuple[int, ...]

SHINGLE = 10  # tokens; a line or a line and a half of Python
RENAMED_SHINGLE = 16  # longer, because it says less
KEPT_NAMES = frozenset(keyword.kwlist) | frozenset(dir(builtins)) | {"self", "cls"}
SHARED_TOKENS = 12  # of a request: so many in a row are no accident
FEWEST = 3  # shingles, 12 tokens: shorter code is everywhere by chance and is not searched for
SMALL = 15  # shingles, 24 tokens: code shorter than this has to be there whole and under its own name
FEWEST_RENAMED = 25  # shingles, 40 tokens
NAME_REACH = 20  # tokens more than its signature before a small body, in which its name has to stand
FEWEST_PARTS = 40  # of a structure
# Source is full of code that looks like other code: overloads, mutants, the same loop again. Half a function in a
# document, a log or a cache is no such coincidence.
SOURCE_SHARE, OTHER_SHARE, RENAMED_SHARE = 0.85, 0.5, 0.9
BREAK = "\x00"  # stands where a docstring was: no shingle crosses it

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_NEWLINE_ESCAPE = re.compile(r"\\+[nrt]")
_CODE_ESCAPE = re.compile(r"\\+(?:u00|x)([0-9a-fA-F]{2})")
_MARKUP = re.compile(r"</[A-Za-z]|&(?:lt|gt|amp|quot|nbsp|#\d+|#x[0-9A-Fa-f]+);")
_TAG = re.compile(r"<[A-Za-z/!][^<>]{0,400}>")
_MARKS = r"[\s>|+\-#*!.:=~^/\"'`,;\\]"
_LINE_START = re.compile(rf"(?m)^{_MARKS}+(?:\d+[ \t:|]+{_MARKS}*)?|^\d+[ \t:|]+{_MARKS}*")
_TOKEN = re.compile(r"[^\W\d]\w*|\d[\w.]*|[^\w\s\"'`\\,;#\x00]")


def normalise(text: str) -> str:
    """The text without colours and escapes; a text with markup in it is followed by itself without the markup."""
    if "\x1b" in text:
        text = _ANSI.sub("", text)
    if "\\" in text:
        text = _CODE_ESCAPE.sub(lambda match: chr(int(match[1], 16)), _NEWLINE_ESCAPE.sub("\n", text))
    if _MARKUP.search(text):
        # Both, since `a <b and c> d` in source would pass for a tag.
        text = text + "\n" + html.unescape(_TAG.sub(" ", text))
    return _LINE_START.sub("", text)


def hashed(words: Sequence[str]) -> Hashes:
    """A hash of each word that is the same in every process: sketches are kept in files."""
    values = (zlib.crc32(word.encode(errors="replace")) for word in words)
    return np.fromiter(values, dtype=np.uint64, count=len(words))


_DOT, _OPEN = hashed([".", "("])
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_SHIFT = np.uint64(29)


def _rolled(columns: Iterator[Hashes], count: int) -> Hashes:
    total = np.zeros(count, dtype=np.uint64)
    for column in columns:
        total = (total ^ column) * _FACTOR
        total ^= total >> _SHIFT
    return total


def named_shingles(tokens: Sequence[str], length: int = SHINGLE) -> Hashes:
    count = max(0, len(tokens) - length + 1)
    values = hashed(tokens)
    return _rolled((values[start : start + count] for start in range(length)), count)


def renamed_shingles(tokens: list[str]) -> Hashes:
    """Free names are those that are no keyword, built-in, attribute or called function."""
    count = len(tokens) - RENAMED_SHINGLE + 1
    if count <= 0:
        return np.zeros(0, dtype=np.uint64)
    values = hashed(tokens)
    _, first, kinds = np.unique(values, return_index=True, return_inverse=True)
    is_name = [(tokens[i][0].isalpha() or tokens[i][0] == "_") and tokens[i] not in KEPT_NAMES for i in first]
    free = np.array(is_name, dtype=bool)[kinds]
    free[1:] &= values[:-1] != _DOT
    free[:-1] &= values[1:] != _OPEN
    places = np.flatnonzero(free)
    places = places[np.argsort(kinds[places], kind="stable")]
    again = kinds[places[1:]] == kinds[places[:-1]]
    distance = np.zeros(len(tokens), dtype=np.uint64)
    distance[places[1:][again]] = (places[1:] - places[:-1])[again]

    def column(offset: int) -> Hashes:
        inside = slice(offset, offset + count)
        # A use before the shingle's start is not part of the shingle.
        seen = np.where(distance[inside] <= np.uint64(offset), distance[inside], np.uint64(0))
        return np.where(free[inside], seen, values[inside])

    return _rolled((column(offset) for offset in range(RENAMED_SHINGLE)), count)


def winnowed(shingles: Hashes, window: int) -> Hashes:
    """The least of every `window` shingles in a row (Schleimer, Wilkerson and Aiken 2003, section 3).

    Two texts that share a run of `window` shingles share one of those kept.
    """
    if len(shingles) < window:
        return np.unique(shingles)
    count = len(shingles) - window + 1
    least = shingles[:count]
    for start in range(1, window):
        least = np.minimum(least, shingles[start : start + count])
    return np.unique(least)


def sketch_of(sources: Iterable[str]) -> Sketch:
    """The smallest shingles of Python code without comments, docstrings and layout: enough to tell which share two sets
    have in common (Broder 1997, bottom-k sketch)."""
    return sketch_of_words(
        tokens_of(normalise(divided(*parsed(without_comments(source)))[1])) or tokens_of(source) for source in sources
    )


def sketch_of_words(texts: Iterable[Sequence[str]]) -> Sketch:
    shingles = [named_shingles(words, min(len(words), SKETCH_SHINGLE)) for words in texts]
    return tuple(map(int, np.unique(np.concatenate(shingles))[:SKETCH_SIZE])) if shingles else ()


def shared(one: Sketch, other: Sketch) -> float:
    """About which share of what both have is in both."""
    size = SKETCH_SIZE if SKETCH_SIZE in (len(one), len(other)) else len({*one, *other})
    smallest = sorted({*one, *other})[:size]
    return len({*smallest} & {*one} & {*other}) / len(smallest) if smallest else 0.0


def tokens_of(normalised: str) -> list[str]:
    return _TOKEN.findall(normalised)


@dataclass(frozen=True)
class Page:
    """A text that has been opened again, with everything that is needed to look closely."""

    text: str
    tokens: list[str]
    named: Hashes
    renamed: Hashes
    is_source: bool


def page_of(text: str, is_source: bool) -> Page:
    text = normalise(text)
    tokens = tokens_of(text)
    return Page(text, tokens, named_shingles(tokens), renamed_shingles(tokens), is_source)


def best_stretch(shingles: Hashes, wanted: Hashes, num_tokens: int) -> tuple[float, int]:
    """The largest share of the wanted shingles that are close together, and where that stretch starts.

    Over a whole large file the shingles of a function add up by chance; within its own length they do not.
    """
    distinct = np.unique(wanted)
    if not len(distinct):
        return 0.0, 0
    slots = np.minimum(np.searchsorted(distinct, shingles), len(distinct) - 1)
    hits = np.flatnonzero(distinct[slots] == shingles)
    if not len(hits):
        return 0.0, 0
    ends = np.searchsorted(hits, hits + int(num_tokens * 1.5) + SHINGLE)
    most = np.argsort(np.arange(len(hits)) - ends, kind="stable")[:16]
    counts = [len(np.unique(slots[hits[start : ends[start]]])) for start in most]
    best = int(np.argmax(counts))
    return counts[best] / len(distinct), int(hits[most[best]])


def excerpt(page: Page, start: int, length: int = 160) -> str:
    for number, match in enumerate(_TOKEN.finditer(page.text)):
        if number == start:
            return " ".join(page.text[match.start() : match.start() + length].split())
    return ""


@dataclass(frozen=True)
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
            if isinstance(node, Function):
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
    if len(code) == 1 and isinstance(code[0], Function):
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


PREFIXES = ("", "if 1:\n", "if 1:\n    ", "if 1:\n        ")


def parsed(source: str) -> tuple[str, ast.Module | None]:
    """The tree of a definition, or of a body cut out of its function; and the text that its positions refer to."""
    for prefix in PREFIXES:
        if tree := try_parse(prefix + source):
            return prefix + source, tree
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
    if len(code) == 1 and isinstance(code[0], Function):
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
    return body[1:] if body and is_text(body[0]) else body


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
    """The functions of a source file, parsed when first asked for."""

    def __init__(self, source: str):
        self._source = source

    @cached_property
    def _structures(self) -> dict[str, str]:
        """Names of functions by the structure of their bodies."""
        nodes = ast.walk(parsed(self._source)[1] or ast.Module([], []))
        return {structure(node.body): node.name for node in nodes if isinstance(node, Function)}

    def same_as(self, wanted: Wanted) -> str | None:
        """The name of a function that is the wanted one but for its names."""
        return self._structures.get(wanted.structure) if wanted.structure and self._source else None


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


def shared_code(text: str, removed: Mapping[str, str]) -> str | None:
    """Why a request gives removed code ("path::name" -> source) away, or None. Stricter than a search for copies: a
    line, or SHARED_TOKENS in a row, is enough. Signatures and docstrings are no code."""
    text = re.sub(r"\bdef \w+\([^`\n]*", "", text)  # a call that passes everything on looks like the signature
    words = _WORD.findall(text)
    shown = {tuple(words[start : start + SHARED_TOKENS]) for start in range(len(words) - SHARED_TOKENS + 1)}
    flat = " ".join(text.split())
    for where, source in removed.items():
        lines = _code_lines(source)
        for line in lines:
            if len(line) >= 16 and not _COMMON.fullmatch(line) and line in flat:
                return f"it has a line of {where}: {line}"
        code = _WORD.findall("\n".join(lines))
        for start in range(len(code) - SHARED_TOKENS + 1):
            if tuple(code[start : start + SHARED_TOKENS]) in shown:
                return f"it shares code with {where}: {' '.join(code[start : start + SHARED_TOKENS])}"
    return None


_WORD = re.compile(r"\w+|[^\w\s]")
_COMMON = re.compile(r"[\w\s.\"']+:?|return \w+|raise .*")  # lines that say little


def _code_lines(source: str) -> list[str]:
    """The lines of a removed text that are code: no signatures, docstrings, comments."""
    body = divided(*parsed(without_comments(textwrap.dedent(source))))[1]
    lines = [" ".join(line.split()) for line in body.replace(BREAK, "\n").split("\n")]
    return [line for line in lines if line and not line.startswith(("def ", "async def ", "class ", "@"))]
