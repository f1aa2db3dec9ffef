"""A static picture of a repository's product code: its modules, its functions, who names whom (global names, attributes
and strings of a file), and how a loss spreads through imports.

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
from offbook.core.pycode import arguments_of, local_names, plain_dotted, rooted
from offbook.tasks.factory.delete.calls import Calls, Resolver
from offbook.tasks.factory.types import FunctionKey, last

PROPERTIES = {"property", "cached_property", "setter", "getter", "deleter", "abstractproperty"}


@dataclass(frozen=True)
class Import:
    """One imported thing. `import a.b` has no name and binds `a`; a star is the name `*`."""

    module: str  # absolute and dotted
    name: str
    bound: str
    top: bool  # outside of functions


@dataclass(frozen=True)
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
        return package_of(self.path, self.name)

    def imports_module(self, name: str) -> bool:
        return any(name in {imported.module, f"{imported.module}.{imported.name}"} for imported in self.imports)


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
    import_roots: tuple[str, ...] = (".",)
    calls: dict[FunctionKey, Calls] = field(default_factory=dict)
    errors: frozenset[FunctionKey] = frozenset()  # the classes that are raised

    def path_of(self, module: str) -> str | None:
        return next((path for path, known in self.modules.items() if known.name == module), None)


@lru_cache(maxsize=4096)
def module_of(path: str, source: str, import_roots: tuple[str, ...]) -> Module | None:
    """None for what is no Python."""
    try:
        return read_module(path, pycode.parse(source), import_roots)
    except (SyntaxError, ValueError):
        return None


@lru_cache(maxsize=1024)
def definitions(source: str) -> frozenset[str]:
    """Qualified names of all functions of a file."""
    return frozenset(function.key.name for function in _functions("", pycode.parse(source), None))


def read_module(path: str, tree: ast.Module, import_roots: tuple[str, ...]) -> Module:
    name = module_name(path, import_roots)
    bases = {
        node.name: tuple(last(rooted(base)) for base in node.bases)
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    return Module(
        path, name, ast.get_docstring(tree) or "", _exports(tree),
        tuple(_imports(tree, package_of(path, name), top=True)), frozenset(_bound(tree.body)), bases,
    )  # fmt: skip


def package_of(path: str, module: str) -> str:
    """What relative imports start from."""
    return module if path.endswith("__init__.py") else module.rpartition(".")[0]


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
        except (SyntaxError, ValueError, RecursionError):
            continue
        modules[path] = read_module(path, tree, roots)
        for function in _functions(path, tree, modules[path].exports):
            functions[function.key] = _merged(functions.get(function.key), function)
    resolver = Resolver(trees, modules)
    calls = {key: resolver.calls(key) for key in functions}
    # A name that its own `__all__` keeps back is public all the same where a package imports it for others.
    by_name = {module.name: path for path, module in modules.items()}
    shown = {
        (by_name[imported.module], imported.name)
        for path, module in modules.items()
        if path.endswith("__init__.py")
        for imported in module.imports
        if imported.module in by_name and imported.top
    }
    public = {
        key: replace(function, public=True)
        if (key.path, key.name.partition(".")[0]) in shown and _is_public(key.name, None)
        else function
        for key, function in functions.items()
    }
    return Symbols(public, modules, _callers(calls), roots, calls, resolver.errors)


def _functions(path: str, tree: ast.Module, exports: tuple[str, ...] | None) -> Iterator[Function]:
    def walk(body: Iterable[ast.AST], prefix: str, owner: str) -> Iterator[Function]:
        for node in body:
            if isinstance(node, Definition):
                yield _function(FunctionKey(path, prefix + node.name), node, owner, exports)
                yield from walk(node.body, f"{prefix}{node.name}.<locals>.", "")
            elif isinstance(node, ast.ClassDef):
                yield from walk(node.body, f"{prefix}{node.name}.", prefix + node.name)
            else:
                yield from walk(ast.iter_child_nodes(node), prefix, owner)

    yield from walk(tree.body, "", "")


def _function(key: FunctionKey, node: Definition, owner: str, exports: tuple[str, ...] | None) -> Function:
    decorators = tuple(filter(None, map(rooted, node.decorator_list)))
    body = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
    overload = any(last(name) == "overload" for name in decorators)
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    prefix = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    return Function(
        key,
        ((first, node.end_lineno or first),),
        f"{prefix} {node.name}({ast.unparse(node.args)}){returns}",
        ast.get_docstring(node) or "",
        _is_public(key.name, exports),
        owner,
        decorators,
        0 if overload else sum(map(_statements, body)),
        (body[-1].end_lineno or 0) - body[0].lineno + 1 if body and not overload else 0,
    )


def _is_public(name: str, exports: tuple[str, ...] | None) -> bool:
    parts = name.split(".")
    hidden = any(part.startswith("_") and not (part.startswith("__") and part.endswith("__")) for part in parts)
    return not hidden and "<locals>" not in parts and (exports is None or parts[0] in exports)


def _statements(node: ast.AST) -> int:
    own = isinstance(node, ast.stmt) and not isinstance(node, ast.Pass)
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        own = False  # a docstring or an ellipsis
    return own + sum(map(_statements, ast.iter_child_nodes(node)))


def _merged(before: Function | None, after: Function) -> Function:
    """Overloads come first, so the last definition with a body speaks for all; so does the first docstring there is."""
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


def _callers(calls: Mapping[FunctionKey, Calls]) -> dict[FunctionKey, tuple[FunctionKey, ...]]:
    users: dict[FunctionKey, list[FunctionKey]] = {key: [] for key in calls}
    for key, used in calls.items():
        for callee in used.functions & calls.keys():
            users[callee].append(key)
    return {key: tuple(sorted(found)) for key, found in users.items()}


Origins = frozenset[FunctionKey]  # the functions that a lost name stands for
Lost = dict[str, dict[str, Origins]]  # path -> name that is bound there no longer -> what it stood for

REFLECTION = ("attr", "caller", "import", "resolve", "lookup", "patch")


@dataclass(frozen=True)
class Uses:
    """What a file reads. Names that are local where they are read are left out."""

    names: frozenset[str]  # rooted, with all beginnings: a, a.b, a.b.c
    attributes: frozenset[tuple[str, str]]  # (class around it if on self, cls or super(), else empty; attribute)
    strings: frozenset[str]
    looked_up: frozenset[str]  # those among them that getattr and its like are given, or that are read at import


@lru_cache(maxsize=1024)
def uses(source: str) -> Uses:
    reader = _Reader()
    reader.visit(pycode.parse(source))
    return Uses(
        frozenset(reader.names), frozenset(reader.attributes), frozenset(reader.strings), frozenset(reader.looked_up)
    )


class _Reader(ast.NodeVisitor):
    def __init__(self) -> None:
        self.names: set[str] = set()
        self.attributes: set[tuple[str, str]] = set()
        self.strings: set[str] = set()
        self.looked_up: set[str] = set()
        self._locals: list[frozenset[str]] = []
        self._classes: list[str] = []
        self._in_class_body = False

    def visit_FunctionDef(self, node: Definition) -> None:
        for part in [*node.decorator_list, *_defaults(node)]:
            self.visit(part)
        self._locals.append(frozenset(local_names(node)))
        before = self._in_class_body
        self._in_class_body = False
        for statement in node.body:
            self.visit(statement)
        self._in_class_body = before
        self._locals.pop()

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self._locals.append(frozenset(argument.arg for argument in arguments_of(node.args)))
        self.generic_visit(node)
        self._locals.pop()

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for part in [*node.decorator_list, *node.bases, *node.keywords]:
            self.visit(part)
        self._classes.append(node.name)
        before = self._in_class_body
        self._in_class_body = True
        for statement in node.body:
            self.visit(statement)
        self._in_class_body = before
        self._classes.pop()

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Store):
            return
        if not any(node.id in names for names in self._locals):
            self.names.add(node.id)
        if self._in_class_body:
            self.names.add(".".join([*self._classes, node.id]))

    def visit_Attribute(self, node: ast.Attribute) -> None:
        name = plain_dotted(node)
        if name and not any(name.partition(".")[0] in names for names in self._locals):
            self.names.add(name)
        self.attributes.add((self._receiver(node.value), node.attr))
        self.visit(node.value)

    def _receiver(self, value: ast.AST) -> str:
        own = rooted(value) in {"self", "cls", "super", "type"} and isinstance(value, ast.Name | ast.Call)
        return ".".join(self._classes) if own else ""

    def visit_Call(self, node: ast.Call) -> None:
        name = rooted(node.func).rpartition(".")[2].lower()
        if any(word in name for word in REFLECTION):
            self.looked_up |= {a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)}
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):  # a docstring names things without needing them
            self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str):
            self.strings.add(node.value)
            if not self._locals:
                self.looked_up.add(node.value)


def _defaults(node: Definition) -> Iterator[ast.AST]:
    """What a definition reads in the scope around it: defaults and annotations."""
    yield from node.args.defaults
    yield from filter(None, node.args.kw_defaults)
    yield from (argument.annotation for argument in arguments_of(node.args) if argument.annotation)
    if node.returns:
        yield node.returns


def spread(symbols: Symbols, lost: Lost) -> Lost:
    """The losses and, for every module, the dotted names by which its imports reach them: chains of re-exports too."""
    reached = {path: dict(names) for path, names in lost.items()}
    changed = True
    while changed:
        changed = False
        for path, module in symbols.modules.items():
            for name, origins in lost_names(module, reached, symbols).items():
                known = reached.setdefault(path, {}).get(name, frozenset())
                if not origins <= known:
                    reached[path][name] = known | origins
                    changed = True
    return reached


def lost_names(module: Module, lost: Lost, symbols: Symbols) -> dict[str, Origins]:
    """The dotted names by which this module's imports reach what is lost."""
    gone = {symbols.modules[path].name: names for path, names in lost.items() if path in symbols.modules}
    found: dict[str, Origins] = {}
    for imported in module.imports:
        whole = f"{imported.module}.{imported.name}" if imported.name else imported.module
        if imported.name == "*":
            found |= {name: origins for name, origins in gone.get(imported.module, {}).items() if "." not in name}
            continue
        if imported.name and imported.name in gone.get(imported.module, {}):
            found[imported.bound] = gone[imported.module][imported.name]
        if not imported.name and "." in imported.module and imported.bound == imported.module.partition(".")[0]:
            whole = imported.bound  # import a.b binds a
        for name, names in gone.items():
            if name == whole or name.startswith(whole + "."):
                prefix = imported.bound + name[len(whole) :]
                found |= {f"{prefix}.{own}": origins for own, origins in names.items() if "." not in own}
    return found
