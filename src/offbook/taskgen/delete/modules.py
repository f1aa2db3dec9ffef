"""One module as its text has it: what it imports, binds and exports."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import PurePosixPath

Definition = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Import:
    """One imported thing. `import a.b` has no name and binds `a`; a star is the name `*`."""

    module: str  # absolute and dotted
    name: str
    bound: str
    top: bool  # outside of functions


@dataclass(frozen=True, slots=True)
class Module:
    path: str
    name: str  # dotted
    docstring: str
    exports: tuple[str, ...] | None  # __all__, where it can be read
    imports: tuple[Import, ...]
    names: frozenset[str]  # what its top level binds
    bases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # class -> last names of its bases

    @property
    def package(self) -> str:
        """What relative imports start from."""
        return self.name if self.path.endswith("__init__.py") else self.name.rpartition(".")[0]

    def imports_module(self, name: str) -> bool:
        return any(name in {imported.module, f"{imported.module}.{imported.name}"} for imported in self.imports)


@lru_cache(maxsize=4096)
def module_of(path: str, source: str, import_roots: tuple[str, ...]) -> Module | None:
    """None for what is no Python."""
    try:
        return read_module(path, ast.parse(source), import_roots)
    except (SyntaxError, ValueError):
        return None


def read_module(path: str, tree: ast.Module, import_roots: tuple[str, ...]) -> Module:
    name = module_name(path, import_roots)
    package = name if path.endswith("__init__.py") else name.rpartition(".")[0]
    bases = {
        node.name: tuple(last(dotted(base)) for base in node.bases)
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    return Module(
        path, name, ast.get_docstring(tree) or "", _exports(tree), tuple(_imports(tree, package, top=True)),
        frozenset(_bound(tree.body)), bases,
    )  # fmt: skip


def module_name(path: str, import_roots: Iterable[str]) -> str:
    """`src/pkg/a.py` is `pkg.a` where `src` is an import root."""
    inside = PurePosixPath(path)
    for root in sorted(import_roots, key=len, reverse=True):
        if root not in {".", ""} and inside.is_relative_to(root):
            inside = inside.relative_to(root)
            break
    parts = inside.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def dotted(node: ast.AST) -> str:
    """`a.b.c` of a name or an attribute of names; of a call or a subscript that of what is called; else empty."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return f"{before}.{node.attr}" if before else ""
    if isinstance(node, ast.Call):
        return dotted(node.func)
    return dotted(node.value) if isinstance(node, ast.Subscript) else ""


def last(name: str) -> str:
    return name.rpartition(".")[2]


def _imports(node: ast.AST, package: str, top: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(alias.name, "", alias.asname or alias.name.partition(".")[0], top)
        elif isinstance(child, ast.ImportFrom):
            module = absolute(child.module or "", child.level, package)
            for alias in child.names:
                yield Import(module, alias.name, alias.asname or alias.name, top)
        else:
            yield from _imports(child, package, top and not isinstance(child, Definition))


def absolute(module: str, level: int, package: str) -> str:
    """What `from ..x import` means inside of `package`."""
    if not level:
        return module
    base = package.split(".")[: len(package.split(".")) - level + 1]
    return ".".join([*base, module] if module else base)


def _exports(tree: ast.Module) -> tuple[str, ...] | None:
    found: list[str] | None = None
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if not any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
                continue
            if not isinstance(node.value, ast.List | ast.Tuple):
                return None  # computed: cannot be read
            found = (found or []) + [str(e.value) for e in node.value.elts if isinstance(e, ast.Constant)]
    return None if found is None else tuple(found)


def _bound(body: Iterable[ast.AST]) -> Iterator[str]:
    for node in body:
        if isinstance(node, Definition | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        else:
            yield from _bound(ast.iter_child_nodes(node))
