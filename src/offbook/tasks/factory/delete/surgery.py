"""Surgery on one Python file with libcst: bodies out, definitions out, imports and exports out. Other bytes stay."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import libcst as cst
from libcst.helpers import get_full_name_for_node


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
        self.removed: dict[str, list[str]] = defaultdict(list)
        self._module = module
        self._orders = orders
        self._scope: list[str] = []
        self._in_exports = False

    def _qualified(self, name: str) -> str:
        return ".".join([*self._scope, name])

    def visit_ClassDef(self, node: cst.ClassDef) -> None:
        self._scope.append(node.name.value)

    def leave_ClassDef(self, original_node: cst.ClassDef, updated_node: cst.ClassDef) -> Any:
        self._scope.pop()
        name = self._qualified(original_node.name.value)
        return self._removed(name, original_node) if name in self._orders.remove else updated_node

    def visit_FunctionDef(self, node: cst.FunctionDef) -> bool:
        """Function bodies are most of a file: only those with a stub inside are visited."""
        self._scope += [node.name.value, "<locals>"]
        inside = self._qualified("")
        return any(name.startswith(inside) for name in self._orders.stub)

    def leave_FunctionDef(self, original_node: cst.FunctionDef, updated_node: cst.FunctionDef) -> Any:
        del self._scope[-2:]
        name = self._qualified(original_node.name.value)
        if name in self._orders.remove:
            return self._removed(name, original_node)
        docstring, body = _split(original_node)
        text = "".join(map(self._module.code_for_node, body)).strip("\n")
        # Bodies of nothing but pass and ... have nothing to give away.
        is_empty = {line.partition("#")[0].strip() for line in text.split("\n")} <= {"", "pass", "..."}
        if name not in self._orders.stub or (is_empty and not self._orders.body):
            return updated_node
        self.removed[name].append(text)
        statement = f'raise NotImplementedError("{name.replace(".<locals>", "")}")'
        if self._orders.body:
            statement = self._orders.body(original_node)
        line: Any = cst.parse_statement(statement, self._module.config_for_parsing)
        block = original_node.body
        if isinstance(block, cst.SimpleStatementSuite):  # def f(x): return x
            return updated_node.with_changes(body=cst.SimpleStatementSuite([*docstring, *line.body]))
        # Comments at the end of the body go too: they may give it away.
        return updated_node.with_changes(body=block.with_changes(body=[*docstring, line], footer=[]))

    def _removed(self, name: str, node: cst.FunctionDef | cst.ClassDef) -> cst.RemovalSentinel:
        self.removed[name].append(self._module.code_for_node(node).strip("\n"))
        return cst.RemoveFromParent()

    def leave_Import(self, original_node: Any, updated_node: Any) -> Any:
        names = updated_node.names
        if isinstance(names, cst.ImportStar) or "<locals>" in self._scope:
            return updated_node
        kept = self._kept(names, lambda alias: (alias.evaluated_alias or alias.evaluated_name).partition(".")[0])
        return updated_node.with_changes(names=kept) if kept else cst.RemoveFromParent()

    leave_ImportFrom = leave_Import

    def visit_SimpleStatementLine(self, node: cst.SimpleStatementLine) -> None:
        self._in_exports = any(map(_is_export, node.body))

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> Any:
        self._in_exports = False
        return updated_node if updated_node.body else cst.RemoveFromParent()

    def leave_List(self, original_node: Any, updated_node: Any) -> Any:
        if not self._in_exports:
            return updated_node
        return updated_node.with_changes(elements=self._kept(updated_node.elements, _text))

    leave_Tuple = leave_List

    def _kept(self, items: Sequence[Any], name_of: Callable[[Any], object]) -> list[Any]:
        """The items that are not lost. The last one takes over the comma of the last one there was, so brackets keep
        their look."""
        kept = [item for item in items if name_of(item) not in self._orders.lost]
        if kept and kept[-1] is not items[-1]:
            kept[-1] = kept[-1].with_changes(comma=items[-1].comma)
        return kept


def _text(element: cst.BaseElement) -> object:
    return element.value.evaluated_value if isinstance(element.value, cst.SimpleString) else None


def _is_export(statement: cst.BaseSmallStatement) -> bool:
    match statement:
        case cst.Assign():
            targets = [target.target for target in statement.targets]
        case cst.AnnAssign() | cst.AugAssign():
            targets = [statement.target]
        case _:
            return False
    return any(get_full_name_for_node(target) == "__all__" for target in targets)


def _split(function: cst.FunctionDef) -> tuple[list[Any], list[Any]]:
    """The docstring and the other statements of a body."""
    parts: list[Any] = [*function.body.body]
    if function.get_docstring(clean=False) is None:
        return [], parts
    first, *rest = parts
    if isinstance(first, cst.SimpleStatementLine) and len(first.body) > 1:  # "Doc."; x = 1
        rest.insert(0, first.with_changes(body=first.body[1:]))
        first = first.with_changes(body=[first.body[0].with_changes(semicolon=cst.MaybeSentinel.DEFAULT)])
    return [first], rest
