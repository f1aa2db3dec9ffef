"""What some tests read: their own code, and the fixtures, helpers and tables in test files that it leads to."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import PurePosixPath

from offbook.core import pycode
from offbook.tasks.factory.delete.names import Definition, arguments_of, binds, dotted, last, plain_dotted
from offbook.tasks.factory.delete.symbols import Module, read_module

SETUP = {
    "setUp", "setUpClass", "asyncSetUp", "setup_method", "setup_class", "setup", "tearDown", "teardown_method",
    "tearDownClass", "asyncTearDown", "teardown_class", "teardown",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Code:
    """A piece of a test file that a test leads to."""

    path: str
    node: ast.AST
    test: str  # the first one that does


@dataclass(frozen=True, slots=True)
class _File:
    module: Module
    tree: ast.Module
    defined: dict[str, list[ast.stmt]] = field(default_factory=dict)  # name -> what binds it at the top level


@lru_cache(maxsize=512)
def _read(path: str, source: str, import_roots: tuple[str, ...]) -> _File | None:
    try:
        tree = pycode.parse(source)
    except (SyntaxError, ValueError):
        return None
    file = _File(read_module(path, tree, import_roots), tree)
    for statement in _statements(tree.body):
        for name in binds(statement):
            file.defined.setdefault(name, []).append(statement)
    return file


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Those that run at import, one by one: what stands under `if` and `try` too."""
    for statement in body:
        if isinstance(statement, ast.If | ast.Try | ast.With):
            parts = [part for part in ast.iter_child_nodes(statement) if isinstance(part, ast.stmt)]
            parts += [p for h in getattr(statement, "handlers", []) for p in h.body]
            yield from _statements(parts)
        else:
            yield statement


class TestCode:
    """The test files of a repository, and what leads where in them."""

    __test__ = False

    def __init__(self, files: Mapping[str, str], import_roots: tuple[str, ...]):
        self._files = {
            path: file
            for path, text in files.items()
            if path.endswith(".py") and (file := _read(path, text, import_roots))
        }
        self._by_name = {file.module.name: path for path, file in self._files.items()}
        self._by_stem = {last(file.module.name): path for path, file in self._files.items()}

    def module(self, path: str) -> Module | None:
        return self._files[path].module if path in self._files else None

    def reached(self, tests: Iterable[str]) -> list[Code]:
        """Everything that the tests lead to, once each."""
        found: dict[int, Code] = {}
        for test in tests:
            waiting = [*self._of_test(test)]
            while waiting:
                path, node, owner = waiting.pop()
                if id(node) not in found:
                    found[id(node)] = Code(path, node, test)
                    waiting += self._led_to(path, node, owner)
        return [*found.values()]

    def _of_test(self, test: str) -> Iterator[tuple[str, ast.AST, ast.ClassDef | None]]:
        path, *names = test.partition("[")[0].split("::")
        if path not in self._files or not names:
            return
        owner: ast.ClassDef | None = None
        found: list[ast.stmt] = []
        for name in names:
            body = self._members(path, owner, name) if owner else self._files[path].defined.get(name, [])
            found = body
            if body and isinstance(body[-1], ast.ClassDef):
                owner = body[-1]
        yield from ((path, node, owner) for node in found or ([owner] if owner else self._files[path].tree.body))
        if owner:
            for name in SETUP:
                yield from ((path, node, owner) for node in self._members(path, owner, name))
        for place in self._conftests(path):
            for statement in self._files[place].tree.body:
                if isinstance(statement, Definition) and _is_automatic(statement):
                    yield place, statement, None
        if owner:
            automatic = (part for part in owner.body if isinstance(part, Definition) and _is_automatic(part))
            yield from ((path, part, owner) for part in automatic)

    def _members(self, path: str, owner: ast.ClassDef, name: str, depth: int = 6) -> list[ast.stmt]:
        """What a class or one of its bases has by that name."""
        own = [part for part in owner.body if name in binds(part)]
        if own or depth == 0:
            return own
        bases = (node for base in owner.bases for _, node in self._named(path, dotted(base)))
        found = (
            self._members(path, b, name, depth - 1) for b in bases if isinstance(b, ast.ClassDef) and b is not owner
        )
        return next(filter(None, found), [])

    def _named(self, path: str, name: str) -> Iterator[tuple[str, ast.stmt]]:
        """What a dotted name means in a test file, as far as it is test code."""
        file, first = self._files[path], name.partition(".")[0]
        if first in file.defined:
            yield from ((path, statement) for statement in file.defined[first])
            return
        for imported in file.module.imports:
            inside, wanted = self._path_of(imported.module), imported.name
            if imported.name == "*":
                wanted = first
            elif imported.bound != first:
                continue
            elif not imported.name:
                wanted = name.rpartition(".")[2]
            elif not inside:  # a module, of which the next part is an attribute
                inside = self._path_of(f"{imported.module}.{imported.name}".lstrip("."))
                wanted = name.partition(".")[2].partition(".")[0]
            if inside:
                yield from ((inside, node) for node in self._files[inside].defined.get(wanted, ()))

    def _path_of(self, module: str) -> str | None:
        """Test files import one another by full names, or by bare ones where their folder is on the path."""
        return self._by_name.get(module) or (self._by_stem.get(module) if "." not in module else None)

    def _conftests(self, path: str) -> Iterator[str]:
        yield path
        for folder in PurePosixPath(path).parents:
            place = str(folder / "conftest.py")
            if place in self._files:
                yield place

    def _led_to(
        self, path: str, node: ast.AST, owner: ast.ClassDef | None
    ) -> Iterator[tuple[str, ast.AST, ast.ClassDef | None]]:
        names: set[str] = set()
        fixtures: set[str] = set()
        for part in ast.walk(node):
            if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load):
                names.add(part.id)
            elif isinstance(part, ast.Attribute):
                names.add(plain_dotted(part))
                if owner and dotted(part.value) in {"self", "cls"}:
                    yield from ((path, member, owner) for member in self._members(path, owner, part.attr))
            elif isinstance(part, Definition):
                fixtures |= {argument.arg for argument in arguments_of(part.args)}
            elif isinstance(part, ast.Call) and last(dotted(part.func)) in {"usefixtures", "getfixturevalue"}:
                fixtures |= {str(a.value) for a in part.args if isinstance(a, ast.Constant)}
        for name in names - {""}:
            for place, statement in self._named(path, name):
                yield place, statement, statement if isinstance(statement, ast.ClassDef) else None
        for name in fixtures:
            own = self._members(path, owner, name) if owner else []
            yield from ((path, member, owner) for member in own)
            for place in [] if own else self._conftests(path):
                if defined := self._files[place].defined.get(name):
                    yield from ((place, statement, None) for statement in defined)
                    break


def _is_automatic(function: Definition) -> bool:
    return any(
        isinstance(decorator, ast.Call)
        and last(dotted(decorator.func)) == "fixture"
        and any(keyword.arg == "autouse" for keyword in decorator.keywords)
        for decorator in function.decorator_list
    )


def words_of(test: str) -> str:
    """The words of a test's name."""
    words = split_name(test.partition("[")[0].split("::")[-1])
    return " ".join(words[1:] if words[:1] == ["test"] else words)


def split_name(name: str) -> list[str]:
    return re.sub(r"(?<=[a-z])(?=[A-Z])|_", " ", name).lower().split()


def read_in(code: Iterable[Code]) -> dict[str, str]:
    """Attributes that test code reads, and names that it looks up or patches -> the test."""
    found: dict[str, str] = {}
    for one in code:
        for node in ast.walk(one.node):
            if isinstance(node, ast.Attribute):
                found.setdefault(node.attr, one.test)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                name = last(node.value)
                if name.startswith("_") and name.isidentifier():
                    found.setdefault(name, one.test)
    return found
