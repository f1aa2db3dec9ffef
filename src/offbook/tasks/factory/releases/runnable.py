"""The tests of a release on a tree that has not all of its names.

One import of a missing name keeps a whole test file from being collected. Such names get something in their place, so
that only tests which use them fail. What stands in can be raised, subclassed, subscripted and
listed, and does nothing right.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from offbook.core import pycode
from offbook.tasks.factory.delete.symbols import Module, absolute, module_name, module_of, package_of

SUBSCRIPTED = "{'__class_getitem__': classmethod(lambda cls, _: cls)}"


@dataclass(frozen=True, slots=True)
class _Import:
    """One statement at the top level of a test file, in its own lines."""

    first: int
    last: int
    indent: str
    module: str  # absolute; empty for `import a, b`
    names: tuple[tuple[str, str], ...]  # what it imports, and as what
    head: str  # "from x import " as it is written


class TestImports:
    """What the test files import, read once."""

    __test__ = False

    def __init__(self, tests: Mapping[str, str], import_roots: tuple[str, ...]):
        self.tests = tests
        self._imports: dict[str, list[_Import]] = {}
        for path, text in tests.items():
            if path.endswith(".py"):
                try:
                    self._imports[path] = [*_imports(pycode.parse(text), path, import_roots)]
                except (SyntaxError, ValueError):
                    continue

    def on(self, product: Product) -> dict[str, str]:
        """The test files that need something else in the place of a name, as they run on that product."""
        changed = {}
        for path, imports in self._imports.items():
            lines = self.tests[path].split("\n")
            for one in reversed(imports):
                if lacking := {name for name, _ in one.names if product.lacks(one.module, name)}:
                    lines[one.first : one.last] = [one.indent + _rewritten(one, lacking)]
            if (text := "\n".join(lines)) != self.tests[path]:
                changed[path] = text
        return changed


class Product:
    """Which modules there are and what each of them binds."""

    def __init__(self, files: Mapping[str, str], import_roots: tuple[str, ...]):
        modules = [module for path, text in files.items() if (module := module_of(path, text, import_roots))]
        self._modules: dict[str, Module] = {module.name: module for module in modules}
        self._tops = {name.partition(".")[0] for name in self._modules}
        self._bound: dict[str, set[str] | None] = {}

    def lacks(self, module: str, name: str) -> bool:
        whole = f"{module}.{name}" if module else name
        if whole.partition(".")[0] not in self._tops or whole in self._modules:
            return False
        if module not in self._modules:
            return not any(known.startswith(f"{whole}.") for known in self._modules)
        bound = self._names(module, frozenset())
        return name != "*" and bound is not None and name not in bound

    def _names(self, module: str, seen: frozenset[str]) -> set[str] | None:
        """None where a module has names that cannot be read."""
        if module in self._bound:
            return self._bound[module]
        known = self._modules[module]
        names: set[str] | None = {*known.names}
        if "__getattr__" in known.names:
            names = None
        for imported in known.imports:
            if imported.name == "*" and names is not None and imported.module not in seen:
                more = self._shown(imported.module, seen | {module})
                names = None if more is None else names | more
        if not seen:
            self._bound[module] = names
        return names

    def _shown(self, module: str, seen: frozenset[str]) -> set[str] | None:
        """What a star import takes from a module."""
        if module not in self._modules:
            return None
        exports = self._modules[module].exports
        return self._names(module, seen) if exports is None else {*exports}


def _imports(tree: ast.Module, path: str, import_roots: tuple[str, ...]) -> Iterator[_Import]:
    package = package_of(path, module_name(path, import_roots))
    waiting: list[ast.AST] = [tree]
    while waiting:
        for node in ast.iter_child_nodes(waiting.pop()):
            if isinstance(node, ast.Import | ast.ImportFrom):
                module, head = "", "import "
                if isinstance(node, ast.ImportFrom):
                    module = absolute(node.module or "", node.level, package)
                    head = f"from {'.' * node.level}{node.module or ''} import "
                names = tuple((alias.name, alias.asname or "") for alias in node.names)
                first = node.lineno - 1
                yield _Import(first, node.end_lineno or node.lineno, " " * node.col_offset, module, names, head)
            elif isinstance(node, ast.If | ast.Try | ast.With | ast.ExceptHandler):
                waiting.append(node)


def _rewritten(one: _Import, lacking: set[str]) -> str:
    kept = [f"{name} as {bound}" if bound else name for name, bound in one.names if name not in lacking]
    lost = [bound or name.partition(".")[0] for name, bound in one.names if name in lacking]
    parts = [one.head + ", ".join(kept)] if kept else []
    return "; ".join([*parts, *(f"{name} = type({name!r}, (Exception,), {SUBSCRIPTED})" for name in lost)])
