"""What a release changed, in hunks that can be left out one by one and leave Python behind.

A hunk is a function, method or class that came, went or changed, one other statement, or one line of a list of names
(an import over several lines, `__all__`). A file that came is one hunk. Files that went stay: tests seldom need that.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from offbook.core import pycode
from offbook.tasks.factory.delete.names import Definition

WORD = re.compile(r"[A-Za-z_]\w*")
VERSION = re.compile(r"\s*(__version__|__version_info__|__version_tuple__|VERSION|version(_info|_tuple)?|__date__)\b")
TOP_NAME = re.compile(r"^(?:(?:async )?def |class )?([A-Za-z_]\w*)(?=\s*[(:=])", re.M)
LISTS = (ast.ImportFrom, ast.Import, ast.Assign, ast.AnnAssign, ast.AugAssign)


@dataclass(frozen=True, slots=True)
class Hunk:
    number: int
    path: str
    name: str  # the qualified name of a function or class; empty for other statements
    old: str
    new: str

    @property
    def words(self) -> frozenset[str]:
        """Names that it brings."""
        return frozenset(WORD.findall(self.new)) - frozenset(WORD.findall(self.old))

    @property
    def defines(self) -> frozenset[str]:
        """Names that others may need it for."""
        if self.name:
            return frozenset() if self.old else frozenset({self.name.rpartition(".")[2]})
        if self.is_file:
            path = PurePosixPath(self.path)
            return frozenset({*TOP_NAME.findall(self.new), path.stem if path.stem != "__init__" else path.parent.name})
        return self.words

    @property
    def is_file(self) -> bool:
        """The whole of a file that came."""
        return not self.name and not self.old and "\n" in self.new.rstrip("\n")

    @property
    def changed_lines(self) -> int:
        matcher = difflib.SequenceMatcher(None, self.old.split("\n"), self.new.split("\n"), autojunk=False)
        return sum(j2 - j1 + i2 - i1 for how, i1, i2, j1, j2 in matcher.get_opcodes() if how != "equal")


@dataclass(frozen=True, slots=True)
class _Slot:
    """A stretch of a file: `hunk` decides which of the two texts is there; None where they are the same."""

    hunk: int | None
    old: str
    new: str


@dataclass(slots=True)
class Hunks:
    """All hunks between two versions of a product."""

    hunks: list[Hunk] = field(default_factory=list)
    _slots: dict[str, list[_Slot]] = field(default_factory=dict)
    _came: set[str] = field(default_factory=set)

    def applied(self, chosen: Collection[int]) -> dict[str, str]:
        """The files that these hunks change, with them and no others."""
        paths = {self.hunks[number].path for number in chosen}
        return {
            path: "".join(slot.new if slot.hunk in chosen else slot.old for slot in self._slots[path])
            for path in sorted(paths)
        }

    def before(self, paths: Iterable[str], old: Mapping[str, str]) -> dict[str, str | None]:
        """The same files without any hunk, None where one is not there yet."""
        return {path: None if path in self._came else old[path] for path in paths}

    def _hunk(self, path: str, name: str, old: str, new: str) -> int:
        self.hunks.append(Hunk(len(self.hunks), path, name, old, new))
        return len(self.hunks) - 1


def hunks_between(old: Mapping[str, str], new: Mapping[str, str]) -> Hunks:
    """Both are the product's Python files. What only states the version is no hunk: it stays as it was."""
    found = Hunks()
    for path in sorted(new):
        if path not in old:
            found._came.add(path)
            found._slots[path] = [_Slot(found._hunk(path, "", "", new[path]), "", new[path])]
        elif old[path] != new[path]:
            slots = _Differ(found, path).slots(_segments(old[path]), _segments(new[path]))
            if any(slot.hunk is not None for slot in slots):
                found._slots[path] = slots
    return found


@dataclass(frozen=True, slots=True)
class _Segment:
    """A statement with the comments above it. Of a class also its parts, the first of which is its head."""

    key: str
    text: str
    node: ast.stmt | None
    parts: tuple[_Segment, ...] = ()


def _segments(source: str) -> list[_Segment]:
    lines = source.splitlines(keepends=True)
    try:
        body = pycode.parse(source).body
    except (SyntaxError, ValueError):
        return [_Segment("file", source, None)]
    if "\f" in source or len(source.split("\n")) - source.endswith("\n") != len(lines):
        return [_Segment("file", source, None)]  # line breaks that Python does not count
    found = _of_body(body, lines, 0, len(lines), "")
    return found or [_Segment("file", source, None)]


def _of_body(body: Sequence[ast.stmt], lines: Sequence[str], start: int, end: int, prefix: str) -> list[_Segment]:
    """Of lines[start:end]. Statements that share a line are one segment."""
    found: list[_Segment] = []
    known: Counter[str] = Counter()
    groups: list[list[ast.stmt]] = []
    for node in body:
        if groups and _first(node) < (groups[-1][-1].end_lineno or 0):
            groups[-1].append(node)
        else:
            groups.append([node])
    for group in groups:
        node, last = group[0], group[-1].end_lineno or start
        name = _key(node, prefix)
        known[name] += 1
        key = name if known[name] == 1 else f"{name}#{known[name]}"
        parts: list[_Segment] = []
        if isinstance(node, ast.ClassDef) and _first(node.body[0]) > node.lineno - 1 and len(group) == 1:
            inner = f"{prefix}{node.name}."
            members = _of_body(node.body, lines, _first(node.body[0]), last, inner)
            head = _Segment(f"head {inner}", "".join(lines[start : _first(node.body[0])]), None)
            parts = [head, *members]
        found.append(_Segment(key, "".join(lines[start:last]), node, tuple(parts)))
        start = last
    if start < end:
        found.append(_Segment("rest", "".join(lines[start:end]), None))
    return found


def _first(node: ast.stmt) -> int:
    """The number of lines before it."""
    decorators = getattr(node, "decorator_list", ())
    return min([node.lineno, *(decorator.lineno for decorator in decorators)]) - 1


def _key(node: ast.stmt, prefix: str) -> str:
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            return f"def {prefix}{node.name}"
        case ast.ClassDef():
            return f"class {prefix}{node.name}"
        case ast.ImportFrom():
            return f"from {'.' * node.level}{node.module or ''}"
        case ast.Assign(targets=[ast.Name(id=name), *_]) | ast.AnnAssign(target=ast.Name(id=name)):
            return f"= {prefix}{name}"
        case ast.Expr(value=ast.Constant()):
            return f"doc {prefix}"
    return f"{type(node).__name__} {ast.unparse(node)[:60]}"


class _Differ:
    def __init__(self, hunks: Hunks, path: str):
        self._hunks, self._path = hunks, path

    def slots(self, old: Sequence[_Segment], new: Sequence[_Segment]) -> list[_Slot]:
        before, after = [one.key for one in old], [one.key for one in new]
        found: list[_Slot] = []
        moved: dict[str, int | None] = {}
        gone, came = {one.key: one for one in old}, {one.key: one for one in new}
        for how, i1, i2, j1, j2 in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
            if how == "equal":
                for one, other in zip(old[i1:i2], new[j1:j2], strict=True):
                    found += self._pair(one, other)
                continue
            for segment in (*old[i1:i2], *new[j1:j2]):
                if segment.key not in moved:  # what moved is one hunk in two places
                    moved[segment.key] = self._number(gone.get(segment.key), came.get(segment.key))
            found += [_Slot(moved[segment.key], segment.text, "") for segment in old[i1:i2]]
            found += [_Slot(moved[segment.key], "", segment.text) for segment in new[j1:j2]]
        return found

    def _number(self, old: _Segment | None, new: _Segment | None) -> int | None:
        segment = new or old
        assert segment is not None
        if VERSION.match(segment.text.lstrip("\n")):
            return None
        return self._hunks._hunk(self._path, _name(segment), old.text if old else "", new.text if new else "")

    def _pair(self, old: _Segment, new: _Segment) -> list[_Slot]:
        if old.text == new.text:
            return [_Slot(None, old.text, new.text)]
        if old.parts and new.parts:
            return self.slots(old.parts, new.parts)
        if VERSION.match(new.text.lstrip("\n")):
            return [_Slot(None, old.text, old.text)]
        if isinstance(new.node, LISTS) and isinstance(old.node, LISTS) and old.text.count("\n") > 1:
            return self._by_line(old.text.splitlines(keepends=True), new.text.splitlines(keepends=True))
        return [_Slot(self._hunks._hunk(self._path, _name(new), old.text, new.text), old.text, new.text)]

    def _by_line(self, old: Sequence[str], new: Sequence[str]) -> list[_Slot]:
        found = []
        for how, i1, i2, j1, j2 in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
            if how == "equal":
                found.append(_Slot(None, "".join(old[i1:i2]), "".join(new[j1:j2])))
            elif how == "insert":
                found += [_Slot(self._hunks._hunk(self._path, "", "", line), "", line) for line in new[j1:j2]]
            else:
                before, after = "".join(old[i1:i2]), "".join(new[j1:j2])
                found.append(_Slot(self._hunks._hunk(self._path, "", before, after), before, after))
        return found


def _name(segment: _Segment) -> str:
    if isinstance(segment.node, (*Definition.__args__, ast.ClassDef)):
        return segment.key.partition(" ")[2].partition("#")[0]
    return ""
