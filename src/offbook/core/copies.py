"""Search for copies of code in any text: a page of documentation, a line of JSON, a hint, a program with other names.

Text is read in one way only, whether it is the code that is looked for or a place to look in: escapes are undone;
quotes, commas, comment marks and line prefixes (`+`, `>>>`, a line number) are dropped. What is left is cut into
shingles, runs of tokens. There are two kinds of shingles (WAYS): by text, and renamed, where a free name is only known
by how far back it was last used, so other local names change nothing. If all names differ, the structure of the
syntax tree is compared.
"""

import ast
import builtins
import html
import io
import keyword
import re
import textwrap
import tokenize
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from offbook.core.pycode import Function, nodes, try_parse

SKETCH_SHINGLE, SKETCH_SIZE = 5, 64
SAME = 0.7  # of the shingles of two sketches, from which on their code is the same
Hashes = npt.NDArray[np.uint64]
Sketch = tuple[int, ...]

SHINGLE = 10  # tokens; a line or a line and a half of Python
RENAMED_SHINGLE = 16  # longer, because it says less
KEPT_NAMES = frozenset(keyword.kwlist) | frozenset(dir(builtins)) | {"self", "cls"}
SHARED_TOKENS = 12  # of a request: so many in a row are no accident
SMALL = 15  # shingles, 24 tokens: shorter code has to be copied whole and below its own name
FEWEST_PARTS = 12  # of the structure of a body: shorter ones, such as `return self.name`, are equal by chance
FEWEST_PARTS_WANTED = 40  # of a structure that is searched for in all files
MAX_FILE = 1 << 20  # bytes; larger files are data
BREAK = "\x00"  # replaces a docstring: no shingle crosses it

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_NEWLINE_ESCAPE = re.compile(r"\\+[nrt]")
_CODE_ESCAPE = re.compile(r"\\+(?:u00|x)([0-9a-fA-F]{2})")
_MARKUP = re.compile(r"</[A-Za-z]|&(?:lt|gt|amp|quot|nbsp|#\d+|#x[0-9A-Fa-f]+);")
_TAG = re.compile(r"<[A-Za-z/!][^<>]{0,400}>")
_MARKS = r"[\s>|+\-#*!.:=~^/\"'`,;\\]"
_LINE_START = re.compile(rf"(?m)^{_MARKS}+(?:\d+[ \t:|]+{_MARKS}*)?|^\d+[ \t:|]+{_MARKS}*")
_TOKEN = re.compile(r"[^\W\d]\w*|\d[\w.]*|[^\w\s\"'`\\,;#\x00]")
_WORD = re.compile(r"\w+|[^\w\s]")
_COMMON = re.compile(r"[\w\s.\"']+:?|return \w+|raise .*")  # lines that say little


# Tokens and shingles.


def texts_below(folder: Path) -> Iterator[tuple[Path, str]]:
    """The relative paths and contents of all text files. Git's own files repeat the tree; links are not followed."""
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if ".git" in name.parts or path.is_symlink() or not path.is_file() or path.stat().st_size > MAX_FILE:
            continue
        data = path.read_bytes()
        if b"\x00" not in data:
            yield name, data.decode(errors="replace")


def normalise(text: str) -> str:
    """The text without colours and escapes; a text with markup in it is followed by itself without the markup."""
    text = _NEWLINE_ESCAPE.sub("\n", _ANSI.sub("", text))
    text = _CODE_ESCAPE.sub(lambda match: chr(int(match[1], 16)), text)
    if _MARKUP.search(text):
        # Both, since `a <b and c> d` in source would pass for a tag.
        text = text + "\n" + html.unescape(_TAG.sub(" ", text))
    return _LINE_START.sub("", text)


def tokens_of(normalised: str) -> list[str]:
    return _TOKEN.findall(normalised)


def named_shingles(tokens: Sequence[str], length: int = SHINGLE) -> Hashes:
    values = _hashed(tokens)
    count = max(0, len(tokens) - length + 1)
    return _rolled((values[start : start + count] for start in range(length)), count)


def renamed_shingles(tokens: Sequence[str]) -> Hashes:
    """Shingles without free names: those that are no keyword, built-in, attribute or called function."""
    free = np.zeros(len(tokens), dtype=bool)
    distance = np.zeros(len(tokens), dtype=np.uint64)
    last: dict[str, int] = {}
    neighbours = zip(["", *tokens], tokens, [*tokens[1:], ""], strict=False)
    for place, (before, token, after) in enumerate(neighbours):
        if before != "." and after != "(" and token[0].isidentifier() and token not in KEPT_NAMES:
            free[place] = True
            distance[place] = place - last.get(token, place)
            last[token] = place
    values = _hashed(tokens)
    count = max(0, len(tokens) - RENAMED_SHINGLE + 1)

    def column(offset: int) -> Hashes:
        inside = slice(offset, offset + count)
        # A use before the shingle's start is not part of the shingle.
        seen = np.where(distance[inside] <= np.uint64(offset), distance[inside], np.uint64(0))
        return np.where(free[inside], seen, values[inside])

    return _rolled(map(column, range(RENAMED_SHINGLE)), count)


def _hashed(tokens: Sequence[str]) -> Hashes:
    """A hash of each token that is the same in every process: sketches are kept in files."""
    values = (zlib.crc32(token.encode(errors="replace")) for token in tokens)
    return np.fromiter(values, dtype=np.uint64, count=len(tokens))


def _rolled(columns: Iterable[Hashes], count: int) -> Hashes:
    total = np.zeros(count, dtype=np.uint64)
    for column in columns:
        total = (total ^ column) * np.uint64(0x9E3779B97F4A7C15)
        total ^= total >> np.uint64(29)
    return total


def winnowed(shingles: Hashes, window: int) -> Hashes:
    """The least of every `window` shingles in a row (Schleimer, Wilkerson and Aiken 2003, section 3).

    Two texts that share a run of `window` shingles share one of those kept.
    """
    if len(shingles) >= window:
        shingles = np.lib.stride_tricks.sliding_window_view(shingles, window).min(axis=1)
    return np.unique(shingles)


@dataclass(frozen=True)
class Way:
    """A kind of shingle to search by.

    Source is full of code that looks like other code: overloads, mutants, the same loop again. Half a function in a
    document, a log or a cache is no such coincidence.
    """

    name: str
    shingles: Callable[[Sequence[str]], Hashes]
    fewest: int  # shingles of code that is searched for: shorter code is everywhere by chance
    window: int  # for the index
    source_share: float  # of the wanted shingles, from which on a source file has the code
    other_share: float


WAYS = (
    Way("text", named_shingles, fewest=3, window=3, source_share=0.85, other_share=0.5),
    Way("renamed", renamed_shingles, fewest=25, window=6, source_share=0.9, other_share=0.9),
)


# Searching.


@dataclass(frozen=True)
class Wanted:
    """A piece of deleted code to look for."""

    what: str  # "path::name"
    name: str  # the last part of the name
    num_tokens: int
    shingles: tuple[tuple[Way, Hashes], ...]  # of the code with its comments and, if it has any, without
    structure: str  # of its statements; empty if the text is not Python or too small


def wanted_pieces(what: str, source: str) -> list[Wanted]:
    """The code as a whole and, of a class, also each method: one of them alone gives enough away."""
    source, tree = parsed(source)
    pieces = [_wanted(what, what.rpartition("::")[2].rpartition(".")[2], source)]
    for owner in nodes(tree, ast.ClassDef):
        for node in owner.body:
            if isinstance(node, Function):
                pieces.append(_wanted(what, node.name, ast.get_source_segment(source, node) or ""))
    return [piece for piece in pieces if piece.shingles]


def _wanted(what: str, name: str, source: str) -> Wanted:
    source, tree = parsed(source)
    variants = dict.fromkeys([body_of(source, tree), body_of(*parsed(without_comments(source)))])
    cut = [[tokens_of(run) for run in normalise(variant).split(BREAK)] for variant in variants]
    found = [(way, np.concatenate([way.shingles(run) for run in runs])) for way in WAYS for runs in cut]
    shape = structure(code_of(tree)) if tree else ""
    return Wanted(
        what,
        name,
        num_tokens=max(sum(map(len, runs)) for runs in cut),
        shingles=tuple((way, shingles) for way, shingles in found if len(shingles) >= way.fewest),
        structure=shape if shape.count(" ") >= FEWEST_PARTS_WANTED else "",
    )


class Page:
    """A text to search in."""

    def __init__(self, text: str, is_source: bool):
        self.is_source = is_source
        self.tokens = tokens_of(normalise(text))
        self._text = text
        self._shingles = {way: way.shingles(self.tokens) for way in WAYS}

    @cached_property
    def _bodies(self) -> dict[str, str]:
        return dict(function_bodies(self._text)) if self.is_source else {}

    def find(self, wanted: Wanted) -> tuple[str, str] | None:
        """How the page gives the wanted code away, and an excerpt; None if it does not."""
        for way, shingles in wanted.shingles:
            share, start = best_stretch(self._shingles[way], shingles, wanted.num_tokens)
            if share < (way.source_share if self.is_source else way.other_share):
                continue
            is_whole = share == 1.0 and wanted.name in self.tokens[: start + SHINGLE]
            if is_whole or len(shingles) >= SMALL:
                return way.name, f"{share:.0%}: {' '.join(self.tokens[start : start + 40])}"
        if wanted.structure and wanted.structure in self._bodies:
            return "structure", f"def {self._bodies[wanted.structure]}"
        return None


def best_stretch(shingles: Hashes, wanted: Hashes, num_tokens: int) -> tuple[float, int]:
    """The largest share of the wanted shingles that are close together, and where that stretch starts.

    Over a whole large file the shingles of a function add up by chance; within its own length they do not.
    """
    hits = np.flatnonzero(np.isin(shingles, wanted))
    if not len(hits):
        return 0.0, 0
    ends = np.searchsorted(hits, hits + int(num_tokens * 1.5) + SHINGLE)
    most = np.argsort(np.arange(len(hits)) - ends, kind="stable")[:16]
    counts = [len(np.unique(shingles[hits[start : ends[start]]])) for start in most]
    best = int(np.argmax(counts))
    return counts[best] / len(np.unique(wanted)), int(hits[most[best]])


def shared_code(text: str, removed: Mapping[str, str]) -> str | None:
    """Why a request gives removed code ("path::name" -> source) away, or None. Stricter than a search for copies: a
    line, or SHARED_TOKENS in a row, is enough. Signatures and docstrings are no code."""
    text = re.sub(r"\bdef \w+\([^`\n]*", "", text)  # a call that passes everything on looks like the signature
    flat = " ".join(text.split())
    said = f" {' '.join(_WORD.findall(text))} "
    for where, source in removed.items():
        body = body_of(*parsed(without_comments(textwrap.dedent(source)))).replace(BREAK, "\n")
        lines = [" ".join(line.split()) for line in body.split("\n")]
        lines = [line for line in lines if not line.startswith(("def ", "async def ", "class ", "@"))]
        for line in lines:
            if len(line) >= 16 and not _COMMON.fullmatch(line) and line in flat:
                return f"it has a line of {where}: {line}"
        code = _WORD.findall("\n".join(lines))
        for start in range(len(code) - SHARED_TOKENS + 1):
            run = " ".join(code[start : start + SHARED_TOKENS])
            if f" {run} " in said:
                return f"it shares code with {where}: {run}"
    return None


# Comparing whole sets of code.


def sketch_of(sources: Iterable[str]) -> Sketch:
    """The smallest shingles of Python code without comments, docstrings and layout: enough to tell which share two sets
    have in common (Broder 1997, bottom-k sketch)."""
    return sketch_of_words(
        tokens_of(normalise(body_of(*parsed(without_comments(source))))) or tokens_of(source) for source in sources
    )


def sketch_of_words(texts: Iterable[Sequence[str]]) -> Sketch:
    shingles = [named_shingles(words, min(len(words), SKETCH_SHINGLE)) for words in texts]
    return tuple(map(int, np.unique(np.concatenate(shingles))[:SKETCH_SIZE])) if shingles else ()


def shared(one: Sketch, other: Sketch) -> float:
    """About which share of what both have is in both."""
    both = {*one} & {*other}
    smallest = sorted({*one, *other})
    if SKETCH_SIZE in (len(one), len(other)):
        smallest = smallest[:SKETCH_SIZE]
    return len(both.intersection(smallest)) / len(smallest) if smallest else 0.0


# Python source.


def parsed(source: str) -> tuple[str, ast.Module | None]:
    """The tree of a definition, or of a body cut out of its function; and the text that its positions refer to."""
    for prefix in ("", "if 1:\n", "if 1:\n    ", "if 1:\n        "):
        if tree := try_parse(prefix + source):
            return prefix + source, tree
    return source, None


def code_of(tree: ast.Module) -> list[ast.stmt]:
    """Statements without the `if 1:` that `parsed` adds; of a single function its body without the docstring."""
    first = tree.body[0] if tree.body else None
    code = first.body if isinstance(first, ast.If) and isinstance(first.test, ast.Constant) else tree.body
    return undocumented(code[0].body) if len(code) == 1 and isinstance(code[0], Function) else code


def body_of(source: str, tree: ast.Module | None) -> str:
    """The text of `code_of` with BREAK for each docstring; all of a text that is not Python.

    Signatures recur in overloads and overrides, and documentation may quote what a function says of itself.
    """
    if tree is None:
        return source
    code = code_of(tree)
    if not code:
        return ""
    lines = source.encode().splitlines(keepends=True)
    for node in filter(is_text, nodes(tree, ast.Expr)):
        end = node.end_lineno or node.lineno
        lines[node.lineno - 1 : end] = [BREAK.encode()] * (end - node.lineno + 1)
    first = code[0].lineno - 1
    lines[first] = lines[first][code[0].col_offset :]
    return b"".join(lines[first:]).decode()


def is_text(node: ast.AST) -> bool:
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


def function_bodies(source: str) -> Iterator[tuple[str, str]]:
    """The structures of the functions' bodies, each with its function's name."""
    for node in nodes(parsed(source)[1], ast.AST):
        if isinstance(node, Function):
            body = structure(undocumented(node.body))
            if body.count(" ") + 1 >= FEWEST_PARTS:
                yield body, node.name


def structure(body: list[ast.stmt]) -> str:
    """What statements do, with their free names numbered as they come."""
    numbers: dict[str, int] = {}
    return " ".join(part for statement in body for part in _parts(statement, numbers))


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
