"""Who uses whom, as far as it can be resolved without running anything.

A name leads through imports and re-exports to its definition; a method is found on `self`, on a class, on what a class
or an annotated function just returned, and on attributes that were set from those. An attribute of something unknown
is kept apart by its bare name: it may be anybody's.

Left out: values that pass through containers, arguments without annotations, names built at run time.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
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
    """What one function uses."""

    functions: frozenset[FunctionKey] = frozenset()
    classes: frozenset[FunctionKey] = frozenset()
    unknown: frozenset[str] = frozenset()  # attributes of things whose class is not known


@dataclass(frozen=True)
class ModulePlace:
    name: str  # dotted


Place = ModulePlace | FunctionKey  # what a name stands for: a module, or a function or class


class Resolver:
    """Of all modules of a product."""

    def __init__(self, trees: Mapping[str, ast.Module], modules: Mapping[str, Module]):
        self._modules = modules
        self._path_of = {module.name: path for path, module in modules.items()}
        self.functions: dict[FunctionKey, list[tuple[Definition, str]]] = defaultdict(list)  # with the class around it
        self._around: dict[int, frozenset[str]] = {}  # local names of the functions around one
        self.classes: dict[FunctionKey, ast.ClassDef] = {}
        for path, tree in trees.items():
            self._collect(path, tree.body, "", "")

    def _collect(self, path: str, body: Collection[ast.AST], prefix: str, owner: str) -> None:
        for node in body:
            if isinstance(node, Definition):
                self.functions[FunctionKey(path, prefix + node.name)].append((node, owner))
                mine = self._around.setdefault(id(node), frozenset()) | local_names(node)
                for inner in ast.walk(node):
                    if isinstance(inner, Definition) and inner is not node:
                        self._around[id(inner)] = mine
                self._collect(path, node.body, f"{prefix}{node.name}.<locals>.", owner)
            elif isinstance(node, ast.ClassDef):
                name = prefix + node.name
                self.classes[FunctionKey(path, name)] = node
                self._collect(path, node.body, f"{name}.", name)
            else:
                self._collect(path, [*ast.iter_child_nodes(node)], prefix, owner)

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
            elif imported.bound == name:
                if not imported.name:
                    whole = imported.module
                    known = whole if whole.partition(".")[0] != name or "." not in whole else name
                    return ModulePlace(known)
                return self._member(ModulePlace(imported.module), imported.name, depth - 1)
        return None

    def _member(self, place: Place | None, name: str, depth: int) -> Place | None:
        if isinstance(place, ModulePlace):
            path = self._path_of.get(place.name)
            found = self._top(path, name, depth) if path else None
            if found is None and f"{place.name}.{name}" in self._path_of:
                return ModulePlace(f"{place.name}.{name}")
            return found
        return self.method(place, name) if place in self.classes else None

    def bases(self, owner: FunctionKey) -> list[FunctionKey]:
        found = (self.place(owner.path, rooted(base)) for base in self.classes[owner].bases if rooted(base))
        return [base for base in found if isinstance(base, FunctionKey) and base in self.classes]

    def ancestry(self, owner: FunctionKey) -> list[FunctionKey]:
        """The class and its bases, near ones first."""
        found = []
        waiting = [owner]
        while waiting:
            one = waiting.pop(0)
            if one not in found:
                found.append(one)
                waiting += self.bases(one)
        return found

    @cached_property
    def errors(self) -> frozenset[FunctionKey]:
        """Classes that are raised."""
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

    def class_of_expression(self, node: ast.AST, scope: Scope) -> FunctionKey | None:
        """The class of a value, where it can be told."""
        if isinstance(node, ast.Name):
            return scope.types.get(node.id)
        if isinstance(node, ast.Await):
            return self.class_of_expression(node.value, scope)
        if isinstance(node, ast.Attribute):
            owner = self.class_of_expression(node.value, scope)
            return self.attributes.get(owner, {}).get(node.attr) if owner else None
        if not isinstance(node, ast.Call):
            return None
        place = self.meaning(node.func, scope)
        if place in self.classes:
            return place
        return self._returned(place) if place else None

    def _returned(self, function: FunctionKey) -> FunctionKey | None:
        for node, _ in self.functions.get(function, ()):
            if node.returns is not None and (found := self.annotated(function.path, node.returns)):
                return found
        return None

    def annotated(self, path: str, annotation: ast.expr) -> FunctionKey | None:
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
            name = annotation.value
        else:
            name = plain_dotted(annotation)
        place = self.place(path, name) if name.replace(".", "").isidentifier() else None
        return place if isinstance(place, FunctionKey) and place in self.classes else None

    def meaning(self, node: ast.AST, scope: Scope) -> FunctionKey | None:
        """The function or class that an expression names."""
        if isinstance(node, ast.Name):
            around = scope.name
            while around:  # a function inside of this one, or beside it in one around it
                inside = FunctionKey(scope.path, f"{around}.<locals>.{node.id}")
                if inside in self.functions:
                    return inside
                around = around.rpartition(".<locals>.")[0]
            place = None if node.id in scope.local else self.place(scope.path, node.id)
            return place if isinstance(place, FunctionKey) else None
        if not isinstance(node, ast.Attribute):
            return None
        value = node.value
        if isinstance(value, ast.Call) and rooted(value.func) == "super" and scope.owner:
            return self.method(scope.owner, node.attr, above=True)
        if owner := self.class_of_expression(value, scope):
            return self.method(owner, node.attr)
        name = plain_dotted(node)
        if not name or name.partition(".")[0] in scope.local:
            return None
        place = self.place(scope.path, name)
        return place if isinstance(place, FunctionKey) else None

    @cached_property
    def attributes(self) -> dict[FunctionKey, dict[str, FunctionKey]]:
        """Of instances: what `self.x = Class(...)` and annotations in the class say."""
        found: dict[FunctionKey, dict[str, FunctionKey]] = defaultdict(dict)
        self.__dict__["attributes"] = found  # what is known so far serves for the rest
        for owner, body in self.classes.items():
            for part in body.body:
                if isinstance(part, ast.AnnAssign) and (kind := self.annotated(owner.path, part.annotation)):
                    found[owner][rooted(part.target)] = kind
        for key, definitions in self.functions.items():
            for node, owner_name in definitions:
                if owner_name:
                    scope = self.scope(key, node, owner_name)
                    for name, kind in self._set_on_self(node, scope):
                        found[FunctionKey(key.path, owner_name)].setdefault(name, kind)
        return found

    def _set_on_self(self, node: Definition, scope: Scope) -> Iterator[tuple[str, FunctionKey]]:
        for part in ast.walk(node):
            if not isinstance(part, ast.Assign) or len(part.targets) != 1:
                continue
            target = part.targets[0]
            kind = self.class_of_expression(part.value, scope)
            if kind and isinstance(target, ast.Attribute) and rooted(target.value) == "self":
                yield target.attr, kind

    def scope(self, key: FunctionKey, node: Definition, owner_name: str) -> Scope:
        """Names and types that hold in a function. One that is set from two classes keeps the last."""
        owner = FunctionKey(key.path, owner_name) if owner_name else None
        imported = {
            alias.asname or alias.name.partition(".")[0]
            for part in ast.walk(node)
            if isinstance(part, ast.Import | ast.ImportFrom)
            for alias in part.names
        }  # local names that mean what they mean to the module
        scope = Scope(key.path, key.name, owner, (self._around[id(node)] | local_names(node)) - imported, {})
        if owner:
            scope.types.update({"self": owner, "cls": owner})
        for argument in arguments_of(node.args):
            if argument.annotation and (kind := self.annotated(key.path, argument.annotation)):
                scope.types[argument.arg] = kind
        for part in ast.walk(node):
            if isinstance(part, ast.Assign) and len(part.targets) == 1 and isinstance(part.targets[0], ast.Name):
                name = part.targets[0].id
                value = part.value
            elif isinstance(part, ast.withitem) and isinstance(part.optional_vars, ast.Name):
                name = part.optional_vars.id
                value = part.context_expr
            else:
                continue
            if kind := self.class_of_expression(value, scope):
                scope.types[name] = kind
        return scope

    def calls(self, key: FunctionKey) -> Calls:
        functions: set[FunctionKey] = set()
        classes: set[FunctionKey] = set()
        unknown: set[str] = set()
        for node, owner_name in self.functions[key]:
            scope = self.scope(key, node, owner_name)
            for part in _own_names(node):
                found = self.meaning(part, scope)
                if found in self.functions:
                    functions.add(found)
                    functions |= self._overriding(part, found, scope)
                elif found is not None:
                    classes.add(found)
                    functions |= self._made_by(found)
                elif isinstance(part, ast.Attribute) and not self.class_of_expression(part.value, scope):
                    unknown.add(part.attr)
        return Calls(frozenset(functions - {key}), frozenset(classes), frozenset(unknown))

    def _made_by(self, owner: FunctionKey) -> set[FunctionKey]:
        makers = (self.method(owner, name) for name in ("__init__", "__new__", "__post_init__"))
        return {maker for maker in makers if maker in self.functions}

    def _overriding(self, node: ast.AST, method: FunctionKey, scope: Scope) -> set[FunctionKey]:
        """On self the method of a subclass may be meant."""
        if not (isinstance(node, ast.Attribute) and rooted(node.value) in {"self", "cls"} and scope.owner):
            return set()
        own = (FunctionKey(heir.path, f"{heir.name}.{node.attr}") for heir in self.heirs.get(scope.owner, ()))
        return {key for key in own if key in self.functions}


def _own_names(node: Definition) -> Iterator[ast.Name | ast.Attribute]:
    """Of a body, without those of functions inside of it, where names may mean something else."""
    waiting: list[ast.AST] = [*node.body]
    while waiting:
        part = waiting.pop()
        if isinstance(part, ast.Name | ast.Attribute):
            yield part
        if isinstance(part, Definition):
            waiting += part.decorator_list
        else:
            waiting += ast.iter_child_nodes(part)


@dataclass(frozen=True)
class Scope:
    """What names mean inside of a function."""

    path: str
    name: str
    owner: FunctionKey | None
    local: frozenset[str]
    types: dict[str, FunctionKey]
