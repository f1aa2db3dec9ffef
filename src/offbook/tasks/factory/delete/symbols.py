"""A static picture of a repository's product code: its modules, its functions, and who uses whom.

Read with `ast`, so nothing is run. A name leads through imports and re-exports to its definition. A method is found on
`self`, `super()` and a class; an attribute of anything else is kept by its bare name. Left out: types of values, names
built at run time.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate
from pathlib import PurePosixPath
from typing import TypeGuard

from offbook.core import pycode
from offbook.core.pycode import Function as Definition
from offbook.core.pycode import arguments_of, local_names, nodes, plain_dotted, rooted
from offbook.tasks.factory.types import FunctionKey, last

PROPERTIES = {"property", "cached_property", "setter", "getter", "deleter", "abstractproperty"}
STARS = 4  # star imports in a row
DEPTH = 8  # re-exports in a row
MAKERS = ("__init__", "__new__", "__post_init__")


@dataclass(frozen=True)
class Import:
    """One imported thing. `import a.b` has no name and binds `a`; a star is the name `*`."""

    module: str  # absolute and dotted
    name: str
    bound: str
    top: bool  # outside of functions

    @property
    def whole(self) -> str:
        """What is imported, absolute and dotted."""
        return f"{self.module}.{self.name}" if self.name else self.module

    @property
    def stands_for(self) -> str:
        """What the bound name means: `a` after `import a.b`."""
        return self.bound if self.whole.startswith(f"{self.bound}.") and not self.name else self.whole


@dataclass(frozen=True)
class Module:
    path: str
    name: str  # dotted
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
    owner: str  # qualified name of the class; empty for a function
    decorators: tuple[str, ...]
    statements: int  # of all bodies; docstrings, pass and ... do not count
    body_lines: int
    public: bool = False

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
        return self.simple.startswith("__") and self.simple.endswith("__")

    @property
    def is_property(self) -> bool:
        return any(last(name) in PROPERTIES for name in self.decorators)

    @property
    def is_declaration(self) -> bool:
        """There is no body to implement: an overload, or an abstract method without statements."""
        return self.statements == 0 or "abstractmethod" in map(last, self.decorators)


@dataclass
class Calls:
    """What the body of a function, of a class or of a module uses."""

    functions: set[FunctionKey] = field(default_factory=set)
    classes: set[FunctionKey] = field(default_factory=set)
    unknown: set[str] = field(default_factory=set)  # attributes of things of unknown class


@dataclass(frozen=True)
class Body:
    """Statements that run together, and what names mean in them."""

    key: FunctionKey  # of the function or class; a module has an empty name
    node: Definition | ast.ClassDef | ast.Module
    owner: FunctionKey | None  # the class around it
    local: frozenset[str] = frozenset()


class Symbols:
    """A product's modules, functions and classes, and who uses whom."""

    def __init__(self, files: Mapping[str, str], import_roots: Iterable[str]):
        self.import_roots = tuple(import_roots)
        self.modules: dict[str, Module] = {}  # by path
        self.functions: dict[FunctionKey, Function] = {}
        self.classes: dict[FunctionKey, ast.ClassDef] = {}
        self._bodies: list[Body] = []
        for path in sorted(files):
            if path.endswith(".py") and (tree := pycode.try_parse(files[path])):
                self.modules[path] = read_module(path, tree, self.import_roots)
                self._bodies.append(Body(FunctionKey(path, ""), tree, None))
                self._collect(tree, FunctionKey(path, ""), None, frozenset())
        self._paths = {module.name: path for path, module in self.modules.items()}
        # A name that its own `__all__` keeps back is public all the same where a package imports it for others.
        packages = [module for path, module in self.modules.items() if path.endswith("__init__.py")]
        shown = {imported.whole for package in packages for imported in package.imports if imported.top}
        for key, function in self.functions.items():
            module = self.modules[key.path]
            first = key.name.partition(".")[0]
            is_shown = module.exports is None or first in module.exports or f"{module.name}.{first}" in shown
            self.functions[key] = replace(function, public=is_shown and is_public(key))
        self.calls: dict[FunctionKey, Calls] = defaultdict(Calls)  # of functions, class bodies and modules
        for body in self._bodies:
            for part in _parts(body.node):
                self._add(part, body)
            self.calls[body.key].functions.discard(body.key)
        self.callers: dict[FunctionKey, tuple[FunctionKey, ...]] = dict.fromkeys(self.functions, ())
        for key in sorted(self.functions):
            for callee in self.calls[key].functions:
                self.callers[callee] += (key,)

    def _collect(self, node: ast.AST, around: FunctionKey, owner: FunctionKey | None, local: frozenset[str]) -> None:
        """`around` is the function or class around a node, with `.` or `.<locals>.` after its name."""
        for child in ast.iter_child_nodes(node):
            if isinstance(child, Definition | ast.ClassDef):
                key = FunctionKey(around.path, around.name + child.name)
                if isinstance(child, ast.ClassDef):
                    self.classes[key] = child
                    self._bodies.append(Body(key, child, key, local))
                    self._collect(child, FunctionKey(key.path, f"{key.name}."), key, local)
                    continue
                imported = {alias.asname or alias.name.partition(".")[0] for alias in nodes(child, ast.alias)}
                inside = local | (local_names(child) - imported)  # imported names mean what they mean to the module
                is_method = owner is not None and around.name == f"{owner.name}."
                function = _function(key, child, owner.name if owner and is_method else "")
                self.functions[key] = _merged(self.functions.get(key, function), function)
                self._bodies.append(Body(key, child, owner, inside))
                self._collect(child, FunctionKey(key.path, f"{key.name}.<locals>."), owner, inside)
            else:
                self._collect(child, around, owner, local)

    def path_of(self, module: str) -> str | None:
        return self._paths.get(module)

    # --- names

    def definition(self, path: str, name: str) -> FunctionKey | None:
        """The function or class that a dotted name stands for at the top level of a module."""
        first, *rest = name.split(".")
        found = self._top(path, first, DEPTH)
        for part in rest:
            found = self._member(found, part, DEPTH)
        return found if isinstance(found, FunctionKey) else None

    def _top(self, path: str, name: str, depth: int) -> str | FunctionKey | None:
        """A function or class, or the dotted name of a module."""
        key = FunctionKey(path, name)
        if key in self.functions or key in self.classes:
            return key
        module = self.modules.get(path)
        for imported in module.imports if module and depth else ():
            if imported.bound == name:
                return self._member(imported.module, imported.name, depth - 1) if imported.name else imported.stands_for
            inside = self._paths.get(imported.module) if imported.name == "*" else None
            if inside and (found := self._top(inside, name, depth - 1)):
                return found
        return None

    def _member(self, place: str | FunctionKey | None, name: str, depth: int) -> str | FunctionKey | None:
        if not isinstance(place, str):
            return place and self.method(place, name)
        path = self._paths.get(place)
        found = self._top(path, name, depth) if path else None
        module = f"{place}.{name}"
        return module if found is None and module in self._paths else found

    # --- classes

    def method(self, owner: FunctionKey, name: str, above: bool = False) -> FunctionKey | None:
        """A method or nested class, near bases first; `above` looks at the bases only, as super() does."""
        seen: list[FunctionKey] = []
        waiting: list[FunctionKey | None] = [owner]
        while waiting:
            one = waiting.pop(0)
            if one is None or one not in self.classes or one in seen:
                continue
            key = FunctionKey(one.path, f"{one.name}.{name}")
            if (seen or not above) and (key in self.functions or key in self.classes):
                return key
            seen.append(one)
            waiting += (self.definition(one.path, rooted(base)) for base in self.classes[one].bases)
        return None

    def is_override(self, key: FunctionKey) -> bool:
        owner = FunctionKey(key.path, self.functions[key].owner)
        return self.method(owner, key.simple, above=True) is not None

    def meaning(self, node: ast.Name | ast.Attribute, body: Body) -> FunctionKey | None:
        """The function or class that an expression names."""
        path = body.key.path
        if isinstance(node, ast.Name):
            around = body.key.name
            while around and isinstance(body.node, Definition):  # a function inside of this one or of one around it
                inside = FunctionKey(path, f"{around}.<locals>.{node.id}")
                if inside in self.functions:
                    return inside
                around = around.rpartition(".<locals>.")[0]
            member = FunctionKey(path, f"{body.key.name}.{node.id}")
            if isinstance(body.node, ast.ClassDef) and member in self.functions:
                return member
        elif body.owner and _is_own(node):
            return self.method(body.owner, node.attr, above=isinstance(node.value, ast.Call))
        name = plain_dotted(node)
        return None if name.partition(".")[0] in body.local else self.definition(path, name)

    # --- uses

    def _add(self, part: ast.Name | ast.Attribute, body: Body) -> None:
        calls = self.calls[body.key]
        meaning = self.meaning(part, body)
        if meaning in self.functions:
            calls.functions.add(meaning)
        elif meaning is not None:
            calls.classes.add(meaning)
            makers = {self.method(meaning, name) for name in MAKERS}
            calls.functions |= {maker for maker in makers if maker in self.functions}
        elif isinstance(part, ast.Attribute) and not (body.owner and _is_own(part)):
            calls.unknown.add(part.attr)


def _is_own(node: ast.Name | ast.Attribute) -> TypeGuard[ast.Attribute]:
    """An attribute of self, cls or super()."""
    own = node.value if isinstance(node, ast.Attribute) else None
    return isinstance(own, ast.Name | ast.Call) and rooted(own) in {"self", "cls", "super"}


def _parts(node: ast.AST) -> Iterator[ast.Name | ast.Attribute]:
    """Names and attributes of a body. Of definitions inside of it only what is read where they stand."""
    waiting: list[ast.AST] = [*node.body]  # type: ignore[attr-defined]
    while waiting:
        part = waiting.pop()
        match part:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                annotations = (argument.annotation for argument in arguments_of(part.args))
                read = [*part.args.defaults, *part.args.kw_defaults, *annotations, part.returns]
                waiting += [*part.decorator_list, *filter(None, read)]
                continue
            case ast.ClassDef():
                waiting += [*part.decorator_list, *part.bases, *part.keywords]
                continue
            case ast.Attribute() | ast.Name(ctx=ast.Load()):
                yield part
        waiting += ast.iter_child_nodes(part)


read_symbols = Symbols


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
    names = frozenset([*_bound(tree), *(imported.bound for imported in imports if imported.top)])
    return Module(path, name, _exports(tree), imports, names)


def module_name(path: str, import_roots: Iterable[str]) -> str:
    """`src/pkg/a.py` is `pkg.a` where `src` is an import root."""
    inside = PurePosixPath(path)
    roots = [root for root in import_roots if root and inside.is_relative_to(root)]
    parts = inside.relative_to(max(roots, key=len, default="")).with_suffix("").parts
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
    values = []
    for node in ast.walk(tree):
        targets = getattr(node, "targets", [getattr(node, "target", tree)])
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign) and "__all__" in map(rooted, targets):
            values.append(node.value)
    if not values or not all(isinstance(value, ast.List | ast.Tuple) for value in values):
        return None  # computed: cannot be read
    return tuple(text for value in values for text in pycode.strings_in(value))


def _bound(node: ast.AST) -> Iterator[str]:
    """Names that are given a value outside of functions and classes, imports left out."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Definition | ast.ClassDef):
            yield child.name
        elif isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
            yield child.id
        else:
            yield from _bound(child)


def _function(key: FunctionKey, node: Definition, owner: str) -> Function:
    decorators = tuple(filter(None, map(rooted, node.decorator_list)))
    body = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
    inside = [part for statement in body for part in nodes(statement, ast.stmt) if not isinstance(part, ast.Pass)]
    statements = sum(not (isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant)) for part in inside)
    first = min(part.lineno for part in (node, *node.decorator_list))
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    prefix = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    return Function(
        key=key,
        lines=((first, node.end_lineno or first),),
        signature=f"{prefix} {node.name}({ast.unparse(node.args)}){returns}",
        docstring=ast.get_docstring(node) or "",
        owner=owner,
        decorators=decorators,
        statements=statements,
        body_lines=(body[-1].end_lineno or 0) - body[0].lineno + 1 if statements else 0,
    )


def is_public(key: FunctionKey) -> bool:
    """By its name alone."""
    parts = key.name.split(".")
    hidden = any(part.startswith("_") and not part.endswith("__") for part in parts)
    return not hidden and "<locals>" not in parts


def _merged(before: Function, after: Function) -> Function:
    """Overloads come first, so the last definition with a body is the function; the first docstring is its own."""
    if before is after:
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
    return _names_in(before, import_roots) - _names_in(after, import_roots)


def _names_in(files: Mapping[str, str], import_roots: tuple[str, ...]) -> set[str]:
    """The modules and what the top level of each binds, names of star imports included."""
    python = (module_of(path, text, import_roots) for path, text in files.items() if path.endswith(".py"))
    modules = [module for module in python if module]
    names = {module.name: {*module.names} for module in modules}
    for _ in range(STARS):
        for module in modules:
            for imported in module.imports:
                if imported.name == "*":
                    names[module.name] |= names.get(imported.module, set())
    return {*names} | {f"{module}.{name}" for module, inside in names.items() for name in inside}


def lost_in(module: Module, read: Iterable[str], lost: set[str]) -> dict[str, str]:
    """Imported names of a file, and dotted names that it reads, which lead to what is lost -> its absolute name."""
    found = {}
    used = {*read}
    for imported in module.imports:
        ways = {imported.bound: imported.whole}
        for name in used:
            if imported.name == "*":
                ways[name] = f"{imported.module}.{name}"
            elif name.startswith(f"{imported.bound}."):
                ways[name] = imported.stands_for + name.removeprefix(imported.bound)
        for name, absolute in ways.items():
            starts = accumulate(absolute.split("."), "{}.{}".format)
            if leads := next((one for one in starts if one in lost), ""):
                found[name] = leads
    return found


def read_in(tree: ast.AST) -> set[str]:
    """Dotted names that code reads, with all beginnings: a, a.b, a.b.c."""
    named = (node for node in ast.walk(tree) if isinstance(node, ast.Name | ast.Attribute))
    return {plain_dotted(node) for node in named if not isinstance(node.ctx, ast.Store)} - {""}
