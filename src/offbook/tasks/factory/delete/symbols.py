"""A static picture of a repository's product code: its modules, its functions, and what uses what.

Read with `ast`, so nothing is run. Who uses whom is resolved (calls.py), and not guessed by bare names.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import PurePosixPath

from offbook.core import pycode
from offbook.core.pycode import Function as Definition
from offbook.core.pycode import rooted
from offbook.tasks.factory.delete.calls import Calls, Resolver, is_export
from offbook.tasks.factory.types import FunctionKey, last

PROPERTIES = {"property", "cached_property", "setter", "getter", "deleter", "abstractproperty"}


@dataclass(frozen=True)
class Import:
    """One imported thing. `import a.b` has no name and binds `a`; a star is the name `*`."""

    module: str  # absolute and dotted
    name: str
    bound: str
    top: bool  # outside of functions

    @property
    def whole(self) -> str:
        """Absolute and dotted."""
        return f"{self.module}.{self.name}" if self.name else self.module


@dataclass(frozen=True)
class Module:
    path: str
    name: str  # dotted
    docstring: str
    exports: tuple[str, ...] | None  # __all__, where it can be read
    imports: tuple[Import, ...]
    names: frozenset[str]  # what its top level binds


@dataclass(frozen=True)
class Function:
    """A function or method. Where a name is defined more than once, all its definitions are one Function."""

    key: FunctionKey
    lines: tuple[tuple[int, int], ...]  # first and last line of each definition, decorators included
    signature: str  # of the last definition that is no overload
    docstring: str
    public: bool
    owner: str  # qualified name of the class; empty for a function
    decorators: tuple[str, ...]
    statements: int  # of all bodies; docstrings, pass and ... do not count
    body_lines: int

    def source(self, text: str) -> str:
        """All its definitions, of the text of its file."""
        lines = text.split("\n")
        return "\n".join(line for first, last in self.lines for line in lines[first - 1 : last])

    @property
    def simple(self) -> str:
        return self.key.simple

    @property
    def nested(self) -> bool:
        return "<locals>" in self.key.name

    @property
    def dunder(self) -> bool:
        return self.key.dunder

    @property
    def is_property(self) -> bool:
        return any(last(name) in PROPERTIES for name in self.decorators)

    @property
    def is_declaration(self) -> bool:
        """There is no body to implement: an overload, or an abstract method without statements."""
        kinds = {last(name) for name in self.decorators}
        return self.statements == 0 or "abstractmethod" in kinds


@dataclass(frozen=True)
class Symbols:
    functions: dict[FunctionKey, Function]
    modules: dict[str, Module]  # by path
    callers: dict[FunctionKey, tuple[FunctionKey, ...]]
    import_roots: tuple[str, ...]
    calls: dict[FunctionKey, Calls]  # of functions, class bodies, and modules, which have an empty name
    resolver: Resolver = field(repr=False, compare=False)

    @property
    def errors(self) -> frozenset[FunctionKey]:
        """Exception classes."""
        return self.resolver.errors

    def path_of(self, module: str) -> str | None:
        return next((path for path, known in self.modules.items() if known.name == module), None)


@lru_cache(maxsize=4096)
def module_of(path: str, source: str, import_roots: tuple[str, ...]) -> Module | None:
    """None for what is no Python."""
    try:
        return read_module(path, pycode.parse(source), import_roots)
    except pycode.NO_PYTHON:
        return None


def read_module(path: str, tree: ast.Module, import_roots: tuple[str, ...]) -> Module:
    name = module_name(path, import_roots)
    package = name if path.endswith("__init__.py") else name.rpartition(".")[0]
    imports = tuple(_imports(tree, package, top=True))
    return Module(path, name, ast.get_docstring(tree) or "", _exports(tree), imports, frozenset(_bound(tree)))


def module_name(path: str, import_roots: Iterable[str]) -> str:
    """`src/pkg/a.py` is `pkg.a` where `src` is an import root."""
    inside = PurePosixPath(path)
    for root in sorted(import_roots, key=len, reverse=True):
        if root not in {".", ""} and inside.is_relative_to(root):
            inside = inside.relative_to(root)
            break
    parts = inside.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(node: ast.AST, package: str, top: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(alias.name, "", alias.asname or alias.name.partition(".")[0], top)
        elif isinstance(child, ast.ImportFrom):
            parts = package.split(".")
            base = parts[: len(parts) - child.level + 1] if child.level else []
            module = ".".join([*base, child.module] if child.module else base)
            for alias in child.names:
                yield Import(module, alias.name, alias.asname or alias.name, top)
        else:
            yield from _imports(child, package, top and not isinstance(child, Definition))


def _exports(tree: ast.Module) -> tuple[str, ...] | None:
    found: list[str] | None = None
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign) and is_export(node):
            if not isinstance(node.value, ast.List | ast.Tuple):
                return None  # computed: cannot be read
            found = (found or []) + [str(e.value) for e in node.value.elts if isinstance(e, ast.Constant)]
    return None if found is None else tuple(found)


def _bound(node: ast.AST) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Definition | ast.ClassDef):
            yield child.name
        elif isinstance(child, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name.partition(".")[0] for alias in child.names)
        elif isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
            yield child.id
        else:
            yield from _bound(child)


def read_symbols(files: Mapping[str, str], import_roots: Iterable[str]) -> Symbols:
    roots = tuple(import_roots)
    modules: dict[str, Module] = {}
    functions: dict[FunctionKey, Function] = {}
    trees: dict[str, ast.Module] = {}
    for path in sorted(files):
        if not path.endswith(".py"):
            continue
        try:
            tree = trees[path] = pycode.parse(files[path])
        except pycode.NO_PYTHON:
            continue
        modules[path] = read_module(path, tree, roots)
    # A name that its own `__all__` keeps back is public all the same where a package imports it for others.
    shown = {
        (imported.module, imported.name)
        for path, module in modules.items()
        if path.endswith("__init__.py")
        for imported in module.imports
        if imported.top
    }
    for path, tree in trees.items():
        module = modules[path]
        for function in _functions(path, tree, "", ""):
            first = function.key.name.partition(".")[0]
            is_shown = module.exports is None or first in module.exports or (module.name, first) in shown
            whole = _merged(functions.get(function.key), function)
            functions[function.key] = replace(whole, public=is_shown and is_public(function.key))
    resolver = Resolver(trees, modules)
    calls = resolver.all_calls()
    callers: dict[FunctionKey, list[FunctionKey]] = {key: [] for key in functions}
    for key in sorted(functions):
        for callee in calls[key].functions & functions.keys():
            callers[callee].append(key)
    return Symbols(functions, modules, {key: tuple(found) for key, found in callers.items()}, roots, calls, resolver)


def _functions(path: str, node: ast.AST, prefix: str, owner: str) -> Iterator[Function]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Definition):
            yield _function(FunctionKey(path, prefix + child.name), child, owner)
            yield from _functions(path, child, f"{prefix}{child.name}.<locals>.", "")
        elif isinstance(child, ast.ClassDef):
            yield from _functions(path, child, f"{prefix}{child.name}.", prefix + child.name)
        else:
            yield from _functions(path, child, prefix, owner)


def _function(key: FunctionKey, node: Definition, owner: str) -> Function:
    decorators = tuple(filter(None, map(rooted, node.decorator_list)))
    body = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
    if any(last(name) == "overload" for name in decorators):
        body = []
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    prefix = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    return Function(
        key,
        ((first, node.end_lineno or first),),
        f"{prefix} {node.name}({ast.unparse(node.args)}){returns}",
        ast.get_docstring(node) or "",
        False,
        owner,
        decorators,
        sum(map(_statements, body)),
        (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0,
    )


def is_public(key: FunctionKey) -> bool:
    """By its name alone."""
    parts = key.name.split(".")
    hidden = any(part.startswith("_") and not (part.startswith("__") and part.endswith("__")) for part in parts)
    return not hidden and "<locals>" not in parts


def _statements(node: ast.AST) -> int:
    own = isinstance(node, ast.stmt) and not isinstance(node, ast.Pass)
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        own = False  # a docstring or an ellipsis
    return own + sum(map(_statements, ast.iter_child_nodes(node)))


def _merged(before: Function | None, after: Function) -> Function:
    """Overloads come first, so the last definition with a body is the function; the first docstring is its own."""
    if before is None:
        return after
    speaker = after if after.statements or not before.statements else before
    if before.is_property and before.statements:
        speaker = before  # the getter, not the setter
    return replace(
        speaker,
        lines=before.lines + after.lines,
        docstring=speaker.docstring or before.docstring or after.docstring,
        decorators=before.decorators + after.decorators if after.statements else before.decorators,
        statements=before.statements + after.statements,
        body_lines=before.body_lines + after.body_lines,
    )


# --- names that are lost between two versions of the product


def lost_names(before: Mapping[str, str], after: Mapping[str, str], import_roots: tuple[str, ...]) -> set[str]:
    """Absolute dotted names, of modules too, that the first version binds and the second does not."""
    now = _names_of_modules(after, import_roots)
    lost = set()
    for module, names in _names_of_modules(before, import_roots).items():
        lost |= {f"{module}.{name}" for name in names - now.get(module, set())}
        lost |= set() if module in now else {module}
    return lost


def _names_of_modules(files: Mapping[str, str], import_roots: tuple[str, ...]) -> dict[str, set[str]]:
    """What the top level of each module binds; names of star imports included."""
    python = {path: text for path, text in files.items() if path.endswith(".py")}
    found = [module for path, text in python.items() if (module := module_of(path, text, import_roots))]
    modules = {module.name: module for module in found}

    def names(module: Module, seen: frozenset[str]) -> set[str]:
        own = set(module.names) - {"*"}
        for imported in module.imports:
            if imported.name == "*" and imported.module in modules.keys() - seen:
                own |= names(modules[imported.module], seen | {module.name})
        return own

    return {name: names(module, frozenset({name})) for name, module in modules.items()}


def lost_in(module: Module, read: Iterable[str], lost: set[str]) -> dict[str, str]:
    """Imported names of a file, and dotted names that it reads, which lead to what is lost -> its absolute name."""
    found = {}
    used = {*read}
    for imported in module.imports:
        if imported.name == "*":
            ways = {name: f"{imported.module}.{name}" for name in used}
        else:
            start = imported.whole
            ways = {imported.bound: imported.module if imported.module in lost else start}
            if not imported.name and imported.bound == start.partition(".")[0]:
                start = imported.bound  # import a.b binds a
            inside = (name for name in used if name.startswith(f"{imported.bound}."))
            ways |= {name: start + name.removeprefix(imported.bound) for name in inside}
        for name, absolute in ways.items():
            parts = absolute.split(".")
            starts = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
            if leads := next((one for one in starts if one in lost), ""):
                found[name] = leads
    return found


def read_in(tree: ast.AST) -> set[str]:
    """Dotted names that code reads, with all beginnings: a, a.b, a.b.c."""
    named = (node for node in ast.walk(tree) if isinstance(node, ast.Name | ast.Attribute))
    return {pycode.plain_dotted(node) for node in named if not isinstance(node.ctx, ast.Store)} - {""}
