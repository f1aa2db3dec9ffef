"""Name resolution across a product's modules, without running anything: who uses whom.

A name leads through imports and re-exports to its definition. A method is found on `self`, `super()` and a class; an
attribute of anything else is kept by its bare name.

Left out: types of values, names built at run time.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from offbook.core.pycode import Function as Definition
from offbook.core.pycode import arguments_of, local_names, plain_dotted, rooted
from offbook.tasks.factory.types import FunctionKey

if TYPE_CHECKING:
    from offbook.tasks.factory.delete.symbols import Module

DEPTH = 8  # re-exports in a row


@dataclass(frozen=True)
class Calls:
    """What the body of a function, of a class or of a module uses."""

    functions: frozenset[FunctionKey] = frozenset()
    classes: frozenset[FunctionKey] = frozenset()
    unknown: frozenset[str] = frozenset()  # attributes of things of unknown class
    strings: frozenset[str] = frozenset()


@dataclass(frozen=True)
class ModulePlace:
    name: str  # dotted


Place = ModulePlace | FunctionKey  # what a name stands for: a module, or a function or class


@dataclass(frozen=True)
class Body:
    """Statements that run together, and what names mean in them."""

    key: FunctionKey  # of the function or class; a module has an empty name
    node: Definition | ast.ClassDef | ast.Module
    owner: FunctionKey | None  # the class around it
    local: frozenset[str] = frozenset()


class Resolver:
    """Resolves names in all modules of a product."""

    def __init__(self, trees: Mapping[str, ast.Module], modules: Mapping[str, Module]):
        self._modules = modules
        self._path_of = {module.name: path for path, module in modules.items()}
        self.functions: dict[FunctionKey, list[Body]] = defaultdict(list)
        self.classes: dict[FunctionKey, ast.ClassDef] = {}
        self._at_import: list[Body] = []
        for path, tree in trees.items():
            lambdas = (node for node in ast.walk(tree) if isinstance(node, ast.Lambda))
            arguments = frozenset(argument.arg for node in lambdas for argument in arguments_of(node.args))
            self._at_import.append(Body(FunctionKey(path, ""), tree, None, arguments - modules[path].names))
            self._collect(path, tree, "", None, frozenset())

    def _collect(self, path: str, node: ast.AST, prefix: str, owner: FunctionKey | None, local: frozenset[str]) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, Definition):
                key = FunctionKey(path, prefix + child.name)
                inside = local | (local_names(child) - _imported_in(child))
                self.functions[key].append(Body(key, child, owner, inside))
                self._collect(path, child, f"{key.name}.<locals>.", owner, inside)
            elif isinstance(child, ast.ClassDef):
                key = FunctionKey(path, prefix + child.name)
                self.classes[key] = child
                self._at_import.append(Body(key, child, key, local))
                self._collect(path, child, f"{key.name}.", key, local)
            else:
                self._collect(path, child, prefix, owner, local)

    # --- names

    def place(self, path: str, name: str, depth: int = DEPTH) -> Place | None:
        """What a dotted name means at the top level of a module."""
        first, *rest = name.split(".")
        found = self._top(path, first, depth)
        for part in rest:
            found = self._member(found, part, depth)
        return found

    def _top(self, path: str, name: str, depth: int) -> Place | None:
        key = FunctionKey(path, name)
        if key in self.functions or key in self.classes:
            return key
        if depth == 0 or path not in self._modules:
            return None
        for imported in self._modules[path].imports:
            if imported.name == "*":
                inside = self._path_of.get(imported.module)
                if inside and (found := self._top(inside, name, depth - 1)):
                    return found
            elif imported.bound == name and imported.name:
                return self._member(ModulePlace(imported.module), imported.name, depth - 1)
            elif imported.bound == name:
                binds_first = imported.module.partition(".")[0] == name  # import a.b binds a
                return ModulePlace(name if binds_first else imported.module)
        return None

    def _member(self, place: Place | None, name: str, depth: int) -> Place | None:
        if isinstance(place, ModulePlace):
            path = self._path_of.get(place.name)
            found = self._top(path, name, depth) if path else None
            if found is None and f"{place.name}.{name}" in self._path_of:
                return ModulePlace(f"{place.name}.{name}")
            return found
        return self.method(place, name) if place in self.classes else None

    def _definition(self, path: str, name: str) -> FunctionKey | None:
        place = self.place(path, name) if name else None
        return place if isinstance(place, FunctionKey) else None

    # --- classes

    def ancestry(self, owner: FunctionKey) -> list[FunctionKey]:
        """The class and its bases, near ones first."""
        found: list[FunctionKey] = []
        waiting = [owner]
        while waiting:
            one = waiting.pop(0)
            if one in self.classes and one not in found:
                found.append(one)
                bases = (self._definition(one.path, rooted(base)) for base in self.classes[one].bases)
                waiting += filter(None, bases)
        return found

    @cached_property
    def errors(self) -> frozenset[FunctionKey]:
        """Exception classes."""
        ends = ("Error", "Exception", "Warning")
        return frozenset(
            owner
            for owner in self.classes
            if any(rooted(base).endswith(ends) for one in self.ancestry(owner) for base in self.classes[one].bases)
        )

    @cached_property
    def heirs(self) -> dict[FunctionKey, list[FunctionKey]]:
        found: dict[FunctionKey, list[FunctionKey]] = defaultdict(list)
        for owner in self.classes:
            for base in self.ancestry(owner)[1:]:
                found[base].append(owner)
        return found

    def method(self, owner: FunctionKey, name: str, above: bool = False) -> FunctionKey | None:
        """A method or nested class; `above` looks at the bases only, as super() does."""
        for one in self.ancestry(owner)[above:]:
            key = FunctionKey(one.path, f"{one.name}.{name}")
            if key in self.functions or key in self.classes:
                return key
        return None

    def is_override(self, key: FunctionKey) -> bool:
        bodies = self.functions.get(key, [])
        return any(body.owner and self.method(body.owner, key.simple, above=True) for body in bodies)

    def meaning(self, node: ast.AST, body: Body) -> FunctionKey | None:
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
            return None if node.id in body.local else self._definition(path, node.id)
        if not isinstance(node, ast.Attribute):
            return None
        if body.owner and _is_own(node.value):
            return self.method(body.owner, node.attr, above=isinstance(node.value, ast.Call))
        name = plain_dotted(node)
        return None if name.partition(".")[0] in body.local else self._definition(path, name)

    # --- uses

    def all_calls(self) -> dict[FunctionKey, Calls]:
        """What every function, class body and module uses."""
        bodies = dict(self.functions)
        for body in self._at_import:
            bodies.setdefault(body.key, []).append(body)
        return {key: self._calls(key, several) for key, several in bodies.items()}

    def _calls(self, key: FunctionKey, bodies: Iterable[Body]) -> Calls:
        functions: set[FunctionKey] = set()
        classes: set[FunctionKey] = set()
        unknown: set[str] = set()
        strings: set[str] = set()
        for body in bodies:
            for part in _parts(body.node):
                if isinstance(part, ast.Constant):
                    strings.add(str(part.value))
                    continue
                found = self.meaning(part, body)
                if found in self.functions:
                    functions.add(found)
                    functions |= self._overriding(part, body)
                elif found is not None:
                    classes.add(found)
                    makers = (self.method(found, name) for name in ("__init__", "__new__", "__post_init__"))
                    functions |= {maker for maker in makers if maker in self.functions}
                elif isinstance(part, ast.Attribute) and not (body.owner and _is_own(part.value)):
                    unknown.add(part.attr)
        return Calls(frozenset(functions - {key}), frozenset(classes), frozenset(unknown), frozenset(strings))

    def _overriding(self, node: ast.AST, body: Body) -> set[FunctionKey]:
        """Methods of subclasses that a call on self may mean."""
        if not (isinstance(node, ast.Attribute) and _is_own(node.value) and body.owner):
            return set()
        own = (FunctionKey(heir.path, f"{heir.name}.{node.attr}") for heir in self.heirs.get(body.owner, ()))
        return {key for key in own if key in self.functions}


def _imported_in(function: Definition) -> frozenset[str]:
    """Local names that mean what they mean to the module."""
    imports = (part for part in ast.walk(function) if isinstance(part, ast.Import | ast.ImportFrom))
    return frozenset(alias.asname or alias.name.partition(".")[0] for part in imports for alias in part.names)


def _is_own(node: ast.AST) -> bool:
    """self, cls or super()."""
    return isinstance(node, ast.Name | ast.Call) and rooted(node) in {"self", "cls", "super"}


def _parts(node: ast.AST) -> Iterator[ast.Name | ast.Attribute | ast.Constant]:
    """Names, attributes and strings of a body. Of definitions inside of it only what is read where they stand."""
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
            case ast.Expr(value=ast.Constant()):  # a docstring names things without needing them
                continue
            case ast.Assign() | ast.AugAssign() | ast.AnnAssign() if is_export(part):
                continue
            case ast.Constant(value=str()) | ast.Attribute():
                yield part
            case ast.Name() if isinstance(part.ctx, ast.Load):
                yield part
        waiting += ast.iter_child_nodes(part)


def is_export(node: ast.Assign | ast.AugAssign | ast.AnnAssign) -> bool:
    """Whether it sets or extends `__all__`."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets)
