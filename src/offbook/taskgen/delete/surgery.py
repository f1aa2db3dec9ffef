"""Surgery on one Python file with libcst: bodies out, definitions out, and what named them. Every other byte stays."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TypeVar

import libcst as cst

from offbook.taskgen.delete.pieces import (
    DropElements,
    DropStrings,
    body_without_docstring,
    dotted,
    edited,
    is_export,
    is_stubbable,
    names_in,
    stubbed,
    without,
)
from offbook.taskgen.delete.symbols import absolute


@dataclass(frozen=True, slots=True)
class Orders:
    """What is to be done to one file. Names are qualified as Python has them."""

    stub: Collection[str] = ()
    body: Callable[[cst.FunctionDef], str] | None = None  # what a stub does; it raises where none is given
    remove: Collection[str] = ()  # functions and classes
    lost: Collection[str] = ()  # dotted names that mean nothing any more: imports and exports of them go
    statements: bool = False  # also top-level statements, and elements of displays there, that name what is lost
    modules: Collection[str] = ()  # absolute names of modules that are gone
    package: str = ""  # of this file, for relative imports
    edit_docstring: Callable[[str], str] | None = None


@dataclass(slots=True)
class Outcome:
    source: str
    removed: dict[str, str] = field(default_factory=dict)  # name -> text that is gone
    taken: dict[str, set[str]] = field(default_factory=dict)  # assigned name that went -> the lost names in its value


@lru_cache(maxsize=256)
def parse(source: str) -> cst.Module:
    return cst.parse_module(source)


def operate(source: str, orders: Orders) -> Outcome:
    module = parse(source)
    surgeon = _Surgeon(module, orders)
    after = module.visit(surgeon)
    removed = {name: "\n".join(texts) for name, texts in surgeon.removed.items()}
    return Outcome(after.code, removed, dict(surgeon.taken))


class Scoped(cst.CSTTransformer):
    """Knows the qualified name of the definition being visited.

    Function bodies are most of a file, and visiting them most of the time: only those are visited that `enters` wants.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scope: list[str] = []

    @property
    def in_function(self) -> bool:
        return "<locals>" in self.scope

    def qualified(self, name: str) -> str:
        return ".".join([*self.scope, name])

    def visit_ClassDef(self, node: cst.ClassDef) -> None:
        self.scope.append(node.name.value)

    def visit_FunctionDef(self, node: cst.FunctionDef) -> bool:
        entered = self.enters(node)
        self.scope += [node.name.value, "<locals>"]
        return entered

    def enters(self, node: cst.FunctionDef) -> bool:
        return False


class _Surgeon(Scoped):
    def __init__(self, module: cst.Module, orders: Orders):
        super().__init__()
        self.removed: dict[str, list[str]] = defaultdict(list)
        self.taken: dict[str, set[str]] = defaultdict(set)
        self._module = module
        self._orders = orders

    def enters(self, node: cst.FunctionDef) -> bool:
        inside = self.qualified(node.name.value) + ".<locals>."
        if any(name.startswith(inside) for name in self._orders.stub):
            return True
        docstring = node.get_docstring(clean=False) if self._orders.edit_docstring else None
        return docstring is not None and ">>>" in docstring

    # --- definitions

    def leave_FunctionDef(
        self, original_node: cst.FunctionDef, updated_node: cst.FunctionDef
    ) -> cst.FunctionDef | cst.RemovalSentinel:
        del self.scope[-2:]
        name = self.qualified(original_node.name.value)
        if name in self._orders.remove:
            self.removed[name].append(self._module.code_for_node(original_node).strip("\n"))
            return cst.RemoveFromParent()
        if updated_node.decorators:
            updated_node = updated_node.with_changes(decorators=self._cleaned_decorators(updated_node.decorators))
        if name not in self._orders.stub or not is_stubbable(original_node):
            return updated_node
        statements = [self._module.code_for_node(part) for part in body_without_docstring(original_node)]
        self.removed[name].append("".join(statements).strip("\n"))
        raising = f'raise NotImplementedError("{name.replace(".<locals>", "")}")'
        return stubbed(updated_node, self._orders.body(original_node) if self._orders.body else raising, self._module)

    def _cleaned_decorators(self, decorators: Sequence[cst.Decorator]) -> Sequence[cst.Decorator]:
        """Parametrized tests have functions in the arguments of their decorators."""
        lost = set(self._orders.lost)
        if not self._orders.statements or self.in_function or not any(names_in(d) & lost for d in decorators):
            return decorators
        cleaned = [decorator.visit(DropElements(lost)) for decorator in decorators]
        return [decorator for decorator in cleaned if isinstance(decorator, cst.Decorator)]

    def leave_ClassDef(
        self, original_node: cst.ClassDef, updated_node: cst.ClassDef
    ) -> cst.ClassDef | cst.RemovalSentinel:
        self.scope.pop()
        name = self.qualified(original_node.name.value)
        if name not in self._orders.remove:
            return updated_node
        self.removed[name].append(self._module.code_for_node(original_node).strip("\n"))
        return cst.RemoveFromParent()

    def leave_Expr(self, original_node: cst.Expr, updated_node: cst.Expr) -> cst.Expr:
        text = original_node.value
        if self._orders.edit_docstring is None or not isinstance(text, cst.SimpleString):
            return updated_node
        return updated_node.with_changes(value=text.with_changes(value=self._orders.edit_docstring(text.value)))

    # --- names: imports, exports, statements

    def leave_ImportFrom(
        self, original_node: cst.ImportFrom, updated_node: cst.ImportFrom
    ) -> cst.ImportFrom | cst.RemovalSentinel:
        if self.in_function:
            return updated_node
        written = dotted(original_node.module) if original_node.module else ""
        module = absolute(written, len(original_node.relative), self._orders.package)
        if module in self._orders.modules:
            return cst.RemoveFromParent()
        if isinstance(original_node.names, cst.ImportStar):
            return updated_node

        def gone(alias: cst.ImportAlias) -> bool:
            return bound_by(alias) in self._orders.lost or f"{module}.{dotted(alias.name)}" in self._orders.modules

        return _fewer(updated_node, original_node.names, gone)

    def leave_Import(self, original_node: cst.Import, updated_node: cst.Import) -> cst.Import | cst.RemovalSentinel:
        if self.in_function:
            return updated_node
        gone = {*self._orders.lost} | {*self._orders.modules}
        modules = self._orders.modules
        return _fewer(
            updated_node, original_node.names, lambda alias: dotted(alias.name) in modules or bound_by(alias) in gone
        )

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.SimpleStatementLine | cst.RemovalSentinel:
        if not updated_node.body:
            return cst.RemoveFromParent()
        if self.in_function or not self._orders.lost:
            return updated_node
        kept = [self._cleaned(statement) for statement in updated_node.body]
        if all(new is old for new, old in zip(kept, updated_node.body, strict=True)):
            return updated_node
        body = [statement for statement in kept if statement is not None]
        if not body:
            return cst.RemoveFromParent()
        body[-1] = body[-1].with_changes(semicolon=cst.MaybeSentinel.DEFAULT)
        return updated_node.with_changes(body=body)

    def _cleaned(self, statement: cst.BaseSmallStatement) -> cst.BaseSmallStatement | None:
        if is_export(statement):
            return edited(statement, DropStrings(self._orders.lost))
        if not self._orders.statements or isinstance(statement, cst.Import | cst.ImportFrom):
            return statement
        lost = set(self._orders.lost)
        if self.scope:  # in a class body its own names need no prefix
            prefix = ".".join(self.scope) + "."
            lost |= {name.removeprefix(prefix) for name in lost if name.startswith(prefix)}
        if not (names_in(statement) & lost):
            return statement
        shorter = edited(statement, DropElements(lost))
        left = names_in(shorter) & lost
        if not left:
            return shorter
        if isinstance(statement, cst.Assign):
            targets = [target.target for target in statement.targets]
        elif isinstance(statement, cst.AnnAssign | cst.AugAssign):
            targets = [statement.target]
        else:
            return None if isinstance(statement, cst.Expr | cst.Del) else statement
        if not all(isinstance(target, cst.Name | cst.Attribute) for target in targets):
            return statement
        for target in targets:
            self.taken[self.qualified(dotted(target))] |= {self._full(name) for name in left}
        return None

    def _full(self, name: str) -> str:
        return name if name in self._orders.lost else self.qualified(name)


Importing = TypeVar("Importing", cst.Import, cst.ImportFrom)


def _fewer(
    node: Importing, aliases: Sequence[cst.ImportAlias], gone: Callable[[cst.ImportAlias], bool]
) -> Importing | cst.RemovalSentinel:
    kept = without(aliases, gone)
    if len(kept) == len(aliases):
        return node
    return node.with_changes(names=kept) if kept else cst.RemoveFromParent()


def bound_by(alias: cst.ImportAlias) -> str:
    return dotted(alias.asname.name) if alias.asname else dotted(alias.name)
