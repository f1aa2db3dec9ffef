"""Cleaning a statement of names that mean nothing any more: elements of displays, entries of `__all__`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

import libcst as cst

from offbook.taskgen.delete.bodies import dotted

Item = TypeVar("Item", cst.ImportAlias, cst.BaseElement, cst.BaseDictElement)


def without(items: Sequence[Item], gone: Callable[[Item], bool]) -> list[Item]:
    """The items that stay. The last one takes over the comma of the last one there was, so brackets keep their look."""
    kept = [item for item in items if not gone(item)]
    if kept and kept[-1] is not items[-1]:
        kept[-1] = kept[-1].with_changes(comma=items[-1].comma)
    return kept


def edited(statement: cst.BaseSmallStatement, editor: cst.CSTTransformer) -> cst.BaseSmallStatement:
    edited = statement.visit(editor)
    assert isinstance(edited, cst.BaseSmallStatement)  # the editors only shorten displays
    return edited


def names_in(node: cst.CSTNode) -> set[str]:
    """Every dotted name that is read, with its beginnings: a, a.b and a.b.c of a.b.c."""
    reader = _Names()
    node.visit(reader)
    return reader.found


class _Names(cst.CSTVisitor):
    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def visit_AssignTarget(self, node: cst.AssignTarget) -> bool:
        return not isinstance(node.target, cst.Name)

    def visit_Name(self, node: cst.Name) -> None:
        self.found.add(node.value)

    def visit_Attribute(self, node: cst.Attribute) -> bool:
        self.found.add(dotted(node))
        node.value.visit(self)
        return False

    def visit_Arg(self, node: cst.Arg) -> bool:
        node.value.visit(self)  # and not its keyword
        return False


class DropStrings(cst.CSTTransformer):
    def __init__(self, names: Collection[str]):
        super().__init__()
        self._names = names

    def _gone(self, element: cst.BaseElement) -> bool:
        return isinstance(element.value, cst.SimpleString) and element.value.evaluated_value in self._names

    def leave_List(self, original_node: cst.List, updated_node: cst.List) -> cst.List:
        return updated_node.with_changes(elements=without(updated_node.elements, self._gone))

    def leave_Tuple(self, original_node: cst.Tuple, updated_node: cst.Tuple) -> cst.Tuple:
        return updated_node.with_changes(elements=without(updated_node.elements, self._gone))


class DropElements(cst.CSTTransformer):
    """Elements of lists, sets and dictionaries that are what is lost, or a tuple or a call with it."""

    def __init__(self, names: Collection[str]):
        super().__init__()
        self._names = names

    def _gone(self, element: cst.BaseElement | cst.BaseDictElement) -> bool:
        value = element.value
        parts = [value]
        if isinstance(value, cst.Tuple):
            parts = [part.value for part in value.elements]
        elif isinstance(value, cst.Call):  # pytest.param(f, 1), partial(f)
            parts = [value.func, *(argument.value for argument in value.args)]
        return any(dotted(part) in self._names for part in parts)

    def leave_List(self, original_node: cst.List, updated_node: cst.List) -> cst.List:
        return updated_node.with_changes(elements=without(original_node.elements, self._gone))

    def leave_Set(self, original_node: cst.Set, updated_node: cst.Set) -> cst.Set:
        kept = without(original_node.elements, self._gone)
        return updated_node.with_changes(elements=kept) if kept else original_node

    def leave_Dict(self, original_node: cst.Dict, updated_node: cst.Dict) -> cst.Dict:
        return updated_node.with_changes(elements=without(original_node.elements, self._gone))


def is_export(statement: cst.BaseSmallStatement) -> bool:
    if isinstance(statement, cst.Assign):
        return any(dotted(target.target) == "__all__" for target in statement.targets)
    if isinstance(statement, cst.AnnAssign | cst.AugAssign):
        return dotted(statement.target) == "__all__"
    return (
        isinstance(statement, cst.Expr)
        and isinstance(statement.value, cst.Call)
        and dotted(statement.value.func).startswith("__all__.")
    )
