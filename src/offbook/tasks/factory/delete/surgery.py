"""Surgery on one Python file with libcst: bodies out, definitions out, imports and exports out. Other bytes stay."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeVar

import libcst as cst

Item = TypeVar("Item", cst.ImportAlias, cst.BaseElement)
Importing = TypeVar("Importing", cst.Import, cst.ImportFrom)
Elements = TypeVar("Elements", cst.List, cst.Tuple)


@dataclass(frozen=True)
class Orders:
    """What is to be done to one file. Names are qualified as Python has them."""

    stub: Collection[str] = ()
    body: Callable[[cst.FunctionDef], str] | None = None  # what a stub does; by default it raises
    remove: Collection[str] = ()  # functions and classes
    lost: Collection[str] = ()  # names whose imports and exports at the top go


@dataclass(slots=True)
class Operated:
    source: str
    removed: dict[str, str] = field(default_factory=dict)  # name -> text that is gone


@lru_cache(maxsize=256)
def parse(source: str) -> cst.Module:
    return cst.parse_module(source)


def operate(source: str, orders: Orders) -> Operated:
    module = parse(source)
    surgeon = _Surgeon(module, orders)
    after = module.visit(surgeon)
    return Operated(after.code, {name: "\n".join(texts) for name, texts in surgeon.removed.items()})


class _Surgeon(cst.CSTTransformer):
    def __init__(self, module: cst.Module, orders: Orders):
        super().__init__()
        self.scope: list[str] = []
        self.removed: dict[str, list[str]] = defaultdict(list)
        self._module = module
        self._orders = orders

    @property
    def in_function(self) -> bool:
        return "<locals>" in self.scope

    def qualified(self, name: str) -> str:
        return ".".join([*self.scope, name])

    def visit_ClassDef(self, node: cst.ClassDef) -> None:
        self.scope.append(node.name.value)

    def leave_ClassDef(self, original_node: cst.ClassDef, updated_node: cst.ClassDef) -> Any:
        self.scope.pop()
        name = self.qualified(original_node.name.value)
        return self._removed(name, original_node) if name in self._orders.remove else updated_node

    def visit_FunctionDef(self, node: cst.FunctionDef) -> bool:
        """Function bodies are most of a file: only those with a stub inside are visited."""
        self.scope += [node.name.value, "<locals>"]
        inside = self.qualified("")
        return any(name.startswith(inside) for name in self._orders.stub)

    def leave_FunctionDef(self, original_node: cst.FunctionDef, updated_node: cst.FunctionDef) -> Any:
        del self.scope[-2:]
        name = self.qualified(original_node.name.value)
        if name in self._orders.remove:
            return self._removed(name, original_node)
        if name not in self._orders.stub or not (self._orders.body or _is_stubbable(original_node)):
            return updated_node
        statements = [self._module.code_for_node(part) for part in _body_without_docstring(original_node)]
        self.removed[name].append("".join(statements).strip("\n"))
        raising = f'raise NotImplementedError("{name.replace(".<locals>", "")}")'
        return _stubbed(updated_node, self._orders.body(original_node) if self._orders.body else raising, self._module)

    def _removed(self, name: str, node: cst.FunctionDef | cst.ClassDef) -> cst.RemovalSentinel:
        self.removed[name].append(self._module.code_for_node(node).strip("\n"))
        return cst.RemoveFromParent()

    def leave_ImportFrom(self, original_node: cst.ImportFrom, updated_node: cst.ImportFrom) -> Any:
        names = original_node.names
        return updated_node if isinstance(names, cst.ImportStar) else self._fewer(updated_node, names)

    def leave_Import(self, original_node: cst.Import, updated_node: cst.Import) -> Any:
        return self._fewer(updated_node, original_node.names)

    def _fewer(self, node: Importing, aliases: Sequence[cst.ImportAlias]) -> Importing | cst.RemovalSentinel:
        def is_lost(alias: cst.ImportAlias) -> bool:
            bound = _dotted(alias.asname.name) if alias.asname else _dotted(alias.name)
            first = bound.partition(".")[0] if isinstance(node, cst.Import) else bound
            return first in self._orders.lost

        if self.in_function or not any(map(is_lost, aliases)):
            return node
        kept = _without(aliases, is_lost)
        return node.with_changes(names=kept) if kept else cst.RemoveFromParent()

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> Any:
        if not updated_node.body:
            return cst.RemoveFromParent()
        if not self._orders.lost or not any(map(_is_export, updated_node.body)):
            return updated_node
        return updated_node.visit(_Exports(self._orders.lost))


class _Exports(cst.CSTTransformer):
    """Drops strings from lists and tuples."""

    def __init__(self, lost: Collection[str]):
        super().__init__()
        self._lost = lost

    def _fewer(self, node: Elements) -> Elements:
        def is_lost(element: cst.BaseElement) -> bool:
            return isinstance(element.value, cst.SimpleString) and element.value.evaluated_value in self._lost

        return node.with_changes(elements=_without(node.elements, is_lost))

    def leave_List(self, original_node: cst.List, updated_node: cst.List) -> cst.List:
        return self._fewer(updated_node)

    def leave_Tuple(self, original_node: cst.Tuple, updated_node: cst.Tuple) -> cst.Tuple:
        return self._fewer(updated_node)


def _is_export(statement: cst.BaseSmallStatement) -> bool:
    match statement:
        case cst.Assign():
            return any(_dotted(target.target) == "__all__" for target in statement.targets)
        case cst.AnnAssign() | cst.AugAssign():
            return _dotted(statement.target) == "__all__"
    return False


def _dotted(node: cst.CSTNode) -> str:
    """`a.b.c` of a name or an attribute of names, else empty."""
    if isinstance(node, cst.Attribute):
        before = _dotted(node.value)
        return f"{before}.{node.attr.value}" if before else ""
    return node.value if isinstance(node, cst.Name) else ""


def _is_stubbable(function: cst.FunctionDef) -> bool:
    """Overloads and bodies of nothing but pass and ... have nothing to give away."""
    if any(_dotted(d.decorator).rpartition(".")[2] == "overload" for d in function.decorators):
        return False
    return any(not _is_nothing(part) for part in _body_without_docstring(function))


def _is_nothing(part: cst.CSTNode) -> bool:
    parts = part.body if isinstance(part, cst.SimpleStatementLine) else [part]
    return all(
        isinstance(p, cst.Pass) or (isinstance(p, cst.Expr) and isinstance(p.value, cst.Ellipsis)) for p in parts
    )


def _body_without_docstring(function: cst.FunctionDef) -> list[cst.CSTNode]:
    parts: list[cst.CSTNode] = list(function.body.body)
    if function.get_docstring(clean=False) is None:
        return parts
    first = parts[0]
    if isinstance(first, cst.SimpleStatementLine) and len(first.body) > 1:  # "Doc."; x = 1
        return [first.with_changes(body=first.body[1:]), *parts[1:]]
    return parts[1:]


def _stubbed(function: cst.FunctionDef, statement: str, module: cst.Module) -> cst.FunctionDef:
    """The function with `statement` for a body. Comments at the end of the body go too: they may give it away."""
    line = cst.ensure_type(cst.parse_statement(statement, module.config_for_parsing), cst.SimpleStatementLine)
    has_docstring = function.get_docstring(clean=False) is not None
    if isinstance(function.body, cst.SimpleStatementSuite):  # def f(x): return x
        docstring = function.body.body[:1] if has_docstring else ()
        return function.with_changes(body=cst.SimpleStatementSuite([*docstring, *line.body]))
    block = cst.ensure_type(function.body, cst.IndentedBlock)
    lines: list[cst.BaseStatement] = [line]
    if has_docstring:
        first = cst.ensure_type(block.body[0], cst.SimpleStatementLine)
        alone = first.body[0].with_changes(semicolon=cst.MaybeSentinel.DEFAULT)
        lines.insert(0, first if len(first.body) == 1 else first.with_changes(body=[alone]))
    return function.with_changes(body=block.with_changes(body=lines, footer=[]))


def _without(items: Sequence[Item], is_lost: Callable[[Item], bool]) -> list[Item]:
    """The items that stay. The last one takes over the comma of the last one there was, so brackets keep their look."""
    kept = [item for item in items if not is_lost(item)]
    if kept and kept[-1] is not items[-1]:
        kept[-1] = kept[-1].with_changes(comma=items[-1].comma)
    return kept
